"""Exported programs, cached in a folder for later rounds, the generation of images and a continued run."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..config import ToMeConfig
from ..errors import ToMeConfigError
from ..inference.tracing import Saved
from .environment import model_files, sources, versions
from .results import read_json, write_result

PATHS = ("program", "params", "onnx")  # fields of Saved, relative to the folder in a record


def folder_of_programs(root: Path, model: str) -> Path:
    """The folder in `root` for programs of a model as it is now, traced by these versions and sources."""
    return root / _digest([model_files(model), versions(), sources()])


def program_key(scope: str, size: int, arm: str, config: ToMeConfig | None, format: str) -> str:
    """The name of a program: what decides it, besides the model.

    Args:
        scope, arm: of a case, and of one of its arms.
        size: px, of a square image; the batch is dynamic.
        config: how tokens merge; None: they do not.
        format: of the program, one of `inference.manifest.FORMATS`.
    """
    return f"{arm}_{_digest([scope, size, arm, config and asdict(config), format])}"


def _digest(decisive: Any) -> str:
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class CachedPrograms:
    """Programs in a folder. A record in JSON is written after each: a program without one is not complete."""

    folder: Path

    def find(self, key: str) -> Saved | None:
        """The program that is cached under a key; None if there is none."""
        try:
            fields = read_json(self._record(key))
        except ToMeConfigError:
            return None
        saved = Saved(**{**fields, **{name: fields[name] and self.folder / fields[name] for name in PATHS}})
        files = (saved.program, saved.params) if saved.onnx is None else (saved.onnx,)
        return saved if all(file.is_file() for file in files) else None

    def store(self, key: str, saved: Saved) -> None:
        """Record a program whose files are complete; they are in the folder."""
        fields = asdict(saved)
        paths = {name: fields[name] and fields[name].relative_to(self.folder).as_posix() for name in PATHS}
        write_result(self._record(key), {**fields, **paths})

    def _record(self, key: str) -> Path:
        return self.folder / f"{key}.json"
