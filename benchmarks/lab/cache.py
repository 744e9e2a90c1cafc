"""On-disk cache of measurements and exported programs, keyed by a hash of what determines them."""

import hashlib
import json
import warnings
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ppdiffusers_tome.comparison.environment import model_files, versions
from ppdiffusers_tome.comparison.environment import sources as package_sources
from ppdiffusers_tome.config import ToMeConfig
from ppdiffusers_tome.files import write_file
from ppdiffusers_tome.inference import ProgramFile
from ppdiffusers_tome.inference.folder import sha256

LAB = Path(__file__).parent


@dataclass(frozen=True)
class Cache:
    """Values in a folder, which is created on the first store: a JSON file each, written completely or not at all."""

    folder: Path

    def load(self, *key_parts: Any) -> Any:
        """The value that is stored under a key; None if there is none, or if its file is damaged, which warns."""
        path = self._path(key_parts)
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            warn_of_damage(path, error)
            return None

    def store(self, value: Any, *key_parts: Any) -> None:
        """Store a value under a key; both are ready for JSON."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_file(self._path(key_parts), json.dumps(value))

    def load_program(self, key: str) -> ProgramFile | None:
        """The program of a key; None if it is not stored, a file of it is missing, or its record is damaged."""
        fields = self.load(key)
        if fields is None:
            return None
        try:
            file = TypeAdapter(ProgramFile).validate_json(json.dumps(fields))
        except ValueError as error:
            warn_of_damage(self._path((key,)), error)
            return None
        return file if all((self.folder / path).is_file() for path in file.paths) else None

    def store_program(self, file: ProgramFile, key: str) -> None:
        """Store a program whose files are complete, and in the folder."""
        self.store(asdict(file), key)

    def _path(self, key_parts: Any) -> Path:
        return self.folder / f"{digest(key_parts)}.json"


def warn_of_damage(path: Path, error: Exception) -> None:
    """Warn that a cached file cannot be used, so that its content is measured or exported again."""
    warnings.warn(
        f"The cached file {path} is damaged ({error}). What it held is measured or exported again.",
        RuntimeWarning,
        stacklevel=3,
    )


@cache
def sources() -> str:
    """Hash of the code that may affect results: the package's, and that of this folder.

    Only the code that began a result continues it or uses it again.
    """
    files = [file for kind in ("py", "json", "onnx") for file in sorted(LAB.rglob(f"*.{kind}"))]
    return digest([package_sources(), *((file.relative_to(LAB).as_posix(), sha256(file)) for file in files)])


def digest(key_parts: Any) -> str:
    """A short hash of a key, which must be ready for JSON."""
    return hashlib.sha256(json.dumps(key_parts, sort_keys=True).encode()).hexdigest()[:16]


def programs_of(root: Path, model: str) -> Cache:
    """The cache in `root` of the programs of a model as it is now, traced by these versions and sources."""
    return Cache(root / digest([model_files(model), versions(), sources()]))


def program_key(size: int, arm: str, config: ToMeConfig | None, format: str) -> str:
    """The key of a program within the cache of its model. `size` is that of a square image in px.

    `config` is None where nothing merges; `format` is one of `inference.manifest.FORMATS`. The batch is dynamic.
    """
    return f"{arm}_{digest([size, arm, config and asdict(config), format])}"
