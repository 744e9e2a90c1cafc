"""Write files as a whole."""

import os
from pathlib import Path

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
