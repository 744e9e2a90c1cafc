"""On-disk cache of measurements and exported programs, keyed by a hash of what determines them."""

import hashlib
import json
import warnings
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.comparison.environment import PACKAGE, versions
from ppdiffusers_tome.files import write_file
from ppdiffusers_tome.inference import ProgramFile
from ppdiffusers_tome.run.folder import sha256

LAB = Path(__file__).parent
NOT_HASHED = ("_version.py", "cli.py", "commands")  # in PACKAGE: they do not affect results


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
    """Hash of the code that may affect results: the package without NOT_HASHED, and this folder.

    Only the code that began a result continues it or uses it again.
    """
    hashes = []
    for root in (PACKAGE, LAB):
        files = sorted(file for kind in ("py", "json", "onnx") for file in root.rglob(f"*.{kind}"))
        names = {file: file.relative_to(root) for file in files}
        hashes += [(name.as_posix(), sha256(file)) for file, name in names.items() if name.parts[0] not in NOT_HASHED]
    return digest(hashes)


def model_files(model: str) -> str:
    """Hash of the files in a pipeline's folder that `model_index.json` names; the model itself if it is no folder."""
    folder = Path(model)
    if not folder.is_dir():
        return model
    try:
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        index = {"unet": []}  # all that bench.py needs
    parts = [name for name, part in index.items() if isinstance(part, list)]
    digest = hashlib.sha256()
    for file in sorted(file for part in parts for file in (folder / part).rglob("*") if file.is_file()):
        status = file.stat()
        content = _content(file, status.st_size, status.st_mtime_ns)
        digest.update(f"{file.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=256)
def _content(file: Path, size: int, modified: int) -> str:
    """SHA-256 of a file, which is read again if its size or the time of its last change differs."""
    return sha256(file)


def digest(key_parts: Any) -> str:
    """A short hash of a key, which must be ready for JSON."""
    return hashlib.sha256(json.dumps(key_parts, sort_keys=True).encode()).hexdigest()[:16]


def programs_of(root: Path, model: str) -> Cache:
    """The cache in `root` of the programs of a model as it is now, traced by these versions and sources."""
    return Cache(root / digest([model_files(model), versions(), sources()]))


def program_key(size: int, by: str, config: ToMeConfig | None, format: str) -> str:
    """The key of a program within the cache of its model. `size` is that of a square image in px.

    `by` is what merges by `config`, which is None where nothing does; `format` is one of `run.manifest.FORMATS`.
    The batch is dynamic.
    """
    return f"{by}_{digest([size, by, config and config.settings(), format])}"
