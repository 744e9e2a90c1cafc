"""Exported programs, cached in a folder for later rounds, the generation of images and a continued run."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ..config import ToMeConfig
from ..inference import ProgramFile
from .environment import model_files, sources, versions
from .results import write_result


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

    def find(self, key: str) -> ProgramFile | None:
        """The program that is cached under a key; None if there is none."""
        try:
            file = TypeAdapter(ProgramFile).validate_json(self._record(key).read_bytes())
        except (OSError, ValueError):
            return None
        return file if all((self.folder / path).is_file() for path in file.paths) else None

    def store(self, key: str, file: ProgramFile) -> None:
        """Record a program whose files are complete."""
        write_result(self._record(key), asdict(file))

    def _record(self, key: str) -> Path:
        return self.folder / f"{key}.json"
