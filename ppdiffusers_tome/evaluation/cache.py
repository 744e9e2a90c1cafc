"""What takes time is measured or exported once: a folder of values and programs, each named by what decides it."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ..config import ToMeConfig
from ..files import write_file
from ..inference import ProgramFile
from .environment import model_files, sources, versions


@dataclass(frozen=True)
class Cache:
    """Values in a folder, which is made with the first: a JSON file for each, written completely or not at all."""

    folder: Path

    def load(self, *decisive: Any) -> Any:
        """The value that is stored for what decides it; None if there is none, or its file is damaged."""
        try:
            return json.loads(self._path(decisive).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def store(self, value: Any, *decisive: Any) -> None:
        """Store a value for what decides it; both are ready for JSON."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_file(self._path(decisive), json.dumps(value))

    def load_program(self, key: str) -> ProgramFile | None:
        """The program of a key; None if it is not stored, or a file is missing."""
        if (fields := self.load(key)) is None:
            return None
        file = TypeAdapter(ProgramFile).validate_json(json.dumps(fields))
        return file if all((self.folder / path).is_file() for path in file.paths) else None

    def store_program(self, file: ProgramFile, key: str) -> None:
        """Store a program whose files are complete, and in the folder."""
        self.store(asdict(file), key)

    def _path(self, decisive: Any) -> Path:
        return self.folder / f"{digest(decisive)}.json"


def digest(decisive: Any) -> str:
    """A short hash of what decides something, ready for JSON."""
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def programs_of(root: Path, model: str) -> Cache:
    """The cache in `root` of the programs of a model as it is now, traced by these versions and sources."""
    return Cache(root / digest([model_files(model), versions(), sources()]))


def program_key(scope: str, size: int, arm: str, config: ToMeConfig | None, format: str) -> str:
    """The name of a program: what decides it, besides the model. `size` is that of a square image in px.

    `config` is None where nothing merges; `format` is one of `inference.manifest.FORMATS`. The batch is dynamic.
    """
    return f"{arm}_{digest([scope, size, arm, config and asdict(config), format])}"
