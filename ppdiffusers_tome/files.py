"""Write files as a whole."""

import os
import tempfile
from pathlib import Path

from .errors import ParameterError

UNFINISHED = ".unfinished-"  # start of the names of files that are being written, or whose process was killed


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file, text in UTF-8. Until it is complete on the disk, the earlier one stays, whatever ends the process.

    Raises:
        OSError: the file cannot be written.
    """
    unfinished = path.with_name(UNFINISHED + path.name)
    with unfinished.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def check_writable(folder: Path, name: str) -> None:
    """Check that files can be written into a folder, or that it can be made, without leaving anything behind.

    Args:
        folder: it may not exist yet.
        name: the parameter that names it.

    Raises:
        ParameterError: it is no folder, or nothing can be written there.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        rule = f"no file can be written to {existing} ({error.strerror}): name a folder in which that is possible"
        raise ParameterError(name, str(folder), rule) from error
