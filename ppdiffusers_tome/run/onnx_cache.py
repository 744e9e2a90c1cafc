"""Other forms of ONNX programs, written once to a folder beside them, and checked whenever they are used."""

import fcntl
import hashlib
import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from secrets import token_hex
from typing import Annotated

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from ..files import write_file
from .folder import ExportedFolder, file_state, sha256
from .onnx_weights import OPTIMIZED, SharedWeights, weight_files
from .validation import STRICT

FORMAT = 4  # increase it when `onnx_attention.fuse_attention`, `onnx_gpu.halve` or the files change
INDEX, LOCK = "index.json", "lock"


@dataclass(frozen=True, config=STRICT)
class Index:
    """The files of a folder of converted programs.

    A file of weights only grows, because other processes have mapped it into memory: when it is damaged, the folder is
    begun again with a file of a different name.
    """

    weights: Annotated[str, Field(pattern="^weights-[0-9a-f]{8}$")]  # the name of the file
    places: dict[str, tuple[int, int]]  # by SHA-256: offset and length in it, in bytes
    programs: dict[str, str]  # SHA-256 of the programs by name

    def files(self) -> set[str]:
        """The names of all files of the folder."""
        return {INDEX, LOCK, self.weights, *self.programs}


def cached(folder: ExportedFolder, path: Path, form: str, write: Callable[[Path, SharedWeights], None]) -> Path:
    """A file with a converted form of a program, which the first call writes for later calls and other processes.

    It is in a folder beside the program, whose name depends on the version of ONNX Runtime and the processor. The
    file's name depends on the content of the program and of its weights. A damaged file is written again. With
    `folder.verify` off, damage to the weights is not noticed unless they are shorter.

    Args:
        folder: the program's.
        path: the program's `.onnx` file.
        form: part of the file's name.
        write: writes the file, and its weights to a file that all programs of the folder share.

    Raises:
        OSError: the folder cannot be written.
        ToMeExportError: the program's own files are not those of the export.
    """
    beside = path.parent / OPTIMIZED / _machine()
    name = f"{path.stem}-{form}-{_key(folder, path)}.onnx"
    if _has(_read_index(folder, beside), beside, name):
        return beside / name
    beside.mkdir(parents=True, exist_ok=True)
    with (beside / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        index = _read_index(folder, beside)
        if not _has(index, beside, name):  # no other process was faster
            folder.check(_names(folder, path), by_hash=True)
            _add(folder, beside, name, index or Index(f"weights-{token_hex(4)}", {}, {}), write)
    return beside / name


def _read_index(folder: ExportedFolder, beside: Path) -> Index | None:
    """The index of the folder, if its weights are intact; None if a file is missing, damaged or cannot be read."""
    try:
        index = TypeAdapter(Index).validate_json((beside / INDEX).read_bytes())
        weights = beside / index.weights
        if weights.stat().st_size < _end(index):
            return None
        state = file_state(weights)  # before its content is read
        if folder.verify and folder.states.get(weights) != state:
            if not _are_intact(weights, index):
                return None
            folder.states[weights] = state
        return index
    except (OSError, ValueError):  # pydantic's errors are ValueErrors
        return None


def _end(index: Index) -> int:
    return max((offset + length for offset, length in index.places.values()), default=0)


def _are_intact(weights: Path, index: Index) -> bool:
    with weights.open("rb") as file:
        for digest, (offset, length) in index.places.items():
            file.seek(offset)
            if hashlib.sha256(file.read(length)).hexdigest() != digest:
                return False
    return True


def _has(index: Index | None, beside: Path, name: str) -> bool:
    """Whether the folder has an intact program of this name."""
    with suppress(OSError):
        return index is not None and name in index.programs and sha256(beside / name) == index.programs[name]
    return False


def _add(
    folder: ExportedFolder, beside: Path, name: str, index: Index, write: Callable[[Path, SharedWeights], None]
) -> None:
    """Write a program; if that fails, the folder takes no more room than before."""
    path, end = beside / index.weights, _end(index)
    try:
        with tempfile.TemporaryDirectory(dir=beside) as temporary:
            weights = SharedWeights(path, {**index.places})
            os.truncate(path, end)  # without what a process that was killed has added
            program = Path(temporary) / "program.onnx"
            write(program, weights)
            index = Index(index.weights, weights.places, {**index.programs, name: sha256(program)})
            program.replace(beside / name)
        write_file(beside / INDEX, json.dumps(asdict(index)))
    except BaseException:
        with suppress(OSError):
            os.truncate(path, end)
            if not end:
                path.unlink()
        raise
    folder.states[path] = file_state(path)
    for path in beside.iterdir():
        if path.name not in index.files():  # of a damaged folder, or of a process that was killed
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _names(folder: ExportedFolder, path: Path) -> list[str]:
    """An `.onnx` file and the files of its weights, by their paths inside the folder."""
    paths = [path, *(path.parent / name for name in weight_files(path))]
    return [path.relative_to(folder.path).as_posix() for path in paths]


def _key(folder: ExportedFolder, path: Path) -> str:
    """Cache key of a program: the hashes of its files."""
    return _digest(*(folder.sha256(folder.path / name) for name in _names(folder, path)))


@lru_cache(maxsize=1)
def _machine() -> str:
    """Cache key of this machine: the format of this code, the version of ONNX Runtime and the processor."""
    version = importlib.import_module("onnxruntime").__version__
    lines = set()
    with suppress(OSError):
        lines = {*Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()}
    processor = sorted(line for line in lines if line.startswith(("model name", "flags", "CPU part", "Features")))
    return _digest(str(FORMAT), version, *processor)


def _digest(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in map(str.encode, parts):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]
