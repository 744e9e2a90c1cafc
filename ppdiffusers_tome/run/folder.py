"""The files of an exported folder: what is read from them later is what they were when the folder was loaded."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from ..errors import ExportChangedError, ToMeExportError

ONNX_WEIGHTS = ".weights"  # suffix of the file beside `.onnx` files that has their weights
WEIGHTS = (".pdiparams", ONNX_WEIGHTS)


class FileFacts(TypedDict):
    """Size and hash of a file."""

    bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class ExportedFolder:
    """A folder whose files are read when they are needed, which may be long after it was loaded.

    A file that has a different inode, size or time than when it was last compared is compared again by its hash. So a
    folder that was replaced, or whose files were overwritten, is an error, and a folder that was only copied is not.

    Args:
        path: the folder. A relative path and links are resolved now.
        files: the size and hash of its files, by path inside it. Other files are not compared.
        verify: True compares the SHA-256 of all files now, False of all except the weights, None only sizes.

    Raises:
        ToMeExportError: a file is not that of the export.
        OSError: a file cannot be read.
    """

    def __init__(self, path: str | Path, files: Mapping[str, FileFacts] | None = None, verify: bool | None = True):
        self.path = Path(os.path.realpath(path))
        self.verify = verify
        self._files = files or {}
        self.states: dict[Path, tuple[int, ...]] = {}  # `file_state` of files when they were last compared
        self._hashed: set[Path] = set()  # those that were compared by their hash
        for name in self._files:
            self._compare(name, bool(verify) if name.endswith(WEIGHTS) else verify is not None)

    @contextmanager
    def reading(self, names: Iterable[str]) -> Iterator[None]:
        """In this context files are those that were loaded; afterwards that is checked again.

        Raises:
            ExportChangedError: a file is not.
        """
        names = [*names]
        self.check(names)
        try:
            yield
        finally:
            self.check(names)

    def check(self, names: Iterable[str] | None = None, by_hash: bool = False) -> None:
        """Raise unless files are those that were loaded.

        Args:
            names: paths inside the folder; None: all files.
            by_hash: also compare the hashes of those weights that `verify` has left out.

        Raises:
            ExportChangedError: a file has changed since the folder was loaded.
            ToMeExportError: a file was not that of the export from the beginning.
        """
        for name in self._files if names is None else [name for name in names if name in self._files]:
            path = self.path / name
            has_changed = True
            try:
                has_changed = self.states[path] != file_state(path)
                if has_changed or (by_hash and path not in self._hashed):
                    self._compare(name, is_hashed=True)
            except (ToMeExportError, OSError) as error:
                if not has_changed:
                    raise
                raise ExportChangedError(
                    f"{path} has changed since the pipeline was loaded: call load_pipeline again, or restart the "
                    "server. To use a folder while another export is written, write that to another folder."
                ) from error

    def sha256(self, path: Path) -> str:
        """The hash of a file: that of the manifest if it was exported."""
        facts = self._files.get(path.relative_to(self.path).as_posix())
        return sha256(path) if facts is None else facts["sha256"]

    def _compare(self, name: str, is_hashed: bool) -> None:
        """Raise ToMeExportError unless a file is that of the export, by its hash or only by its size."""
        path, expected = self.path / name, self._files[name]
        real = Path(os.path.realpath(path, strict=True))
        if not real.is_relative_to(self.path):  # ONNX Runtime and OpenVINO refuse such links too
            raise ToMeExportError(
                f"{path} is a link to a file outside of {self.path}: replace it by the file. From a hub, download the "
                "folder with snapshot_download(…, local_dir=DIR); its cache has only links."
            )
        state = file_state(path)  # before its content is read
        if real.stat().st_size != expected["bytes"]:
            raise ToMeExportError(f"{path} does not have its exported size: export or copy the folder again.")
        if is_hashed:
            if sha256(real) != expected["sha256"]:
                raise ToMeExportError(f"{path} differs from the exported file: export or copy the folder again.")
            self._hashed.add(path)
        self.states[path] = state


def file_state(path: Path) -> tuple[int, ...]:
    """What changes when a different file takes the place of a file, or when its content changes."""
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
