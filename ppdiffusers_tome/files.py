"""Write files as a whole."""

import os
import stat
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

from .errors import ParameterError

UNFINISHED = ".unfinished-"  # start of the names of files that are being written, or whose process was killed


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file, text in UTF-8. Until it is complete on the disk, the earlier file stays, also after a kill.

    Several threads and processes may write the same file: readers see the whole content of one of them. An earlier
    file keeps its mode, and a link still names the file that is written. What is no regular file, such as /dev/stdout
    or a named pipe, is written in place.

    Raises:
        OSError: the file, which the error names, cannot be written. The earlier file stays.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        mode = path.stat().st_mode  # not of the real path: that of /dev/stdout may name no file
    except FileNotFoundError:
        mode = None
    if mode is not None and not stat.S_ISREG(mode):
        with path.open("wb") as file:
            file.write(data)
        return
    target = Path(os.path.realpath(path))
    # Not by `tempfile`, which makes private files: the mode of a new file is up to the umask, which only `open` knows.
    unfinished = target.with_name(f"{UNFINISHED}{uuid.uuid4().hex}{target.suffix}")
    try:
        with unfinished.open("xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink()
        if isinstance(error, OSError) and error.filename is not None:  # the unfinished file's
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    folder = os.open(target.parent, os.O_RDONLY)
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
