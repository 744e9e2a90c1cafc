"""The machine, versions and sources behind a result, which every result file names."""

import hashlib
import json
import os
import platform
import subprocess
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import paddle

from .._version import __version__
from ..cores import usable_cores
from ..inference.folder import sha256

PACKAGE = Path(__file__).parents[1]
NOT_HASHED = ("_version.py", "cli.py", "commands", "serving")  # in PACKAGE: they do not affect results


def describe_environment() -> dict[str, Any]:
    """Machine, memory, device, threads and versions, ready for JSON. "cores" are the machine's."""
    return {
        "machine": _processor(),
        "cores": os.cpu_count(),
        "usable cores": usable_cores(),
        "memory_gb": _memory_gb(),
        "threads": os.environ.get("OMP_NUM_THREADS", "1 (OMP_NUM_THREADS is not set)"),
        "device": _device(),
        "ppdiffusers_tome": __version__,
        **versions(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute."""
    packages = ("paddlepaddle", "paddlepaddle-gpu", "ppdiffusers", "numpy", "onnxruntime", "openvino")
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


@cache
def sources() -> str:
    """Hash of the code that may affect results: the package without NOT_HASHED.

    Only the code that began a result continues it or uses it again.
    """
    files = {file.relative_to(PACKAGE): file for kind in ("py", "json", "onnx") for file in PACKAGE.rglob(f"*.{kind}")}
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        if name.parts[0] not in NOT_HASHED:
            digest.update(f"{name.as_posix()} {sha256(file)}\n".encode())
    return digest.hexdigest()[:16]


def model_files(model: str) -> str:
    """Hash of the files in a pipeline's folder that `model_index.json` names; the model itself if it is no folder."""
    folder = Path(model)
    if not folder.is_dir():
        return model
    try:
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        index = {"unet": []}  # all that `bench` needs
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


def commit() -> str:
    """The checkout's commit, with "+" if tracked files of the package differ from it; "none" without a checkout."""

    def git(arguments: str) -> str:
        process = subprocess.run(["git", *arguments.split()], cwd=PACKAGE, capture_output=True, text=True, check=True)
        return process.stdout.strip()

    try:
        return git("rev-parse --short HEAD") + ("+" if git("status --porcelain -uno -- .") else "")
    except (OSError, subprocess.CalledProcessError):
        return "none"


def _device() -> str:
    """Paddle's name of the device, and the GPU's model."""
    device = paddle.get_device()
    return device if device == "cpu" else f"{device}: {paddle.device.cuda.get_device_name()}"


def _memory_gb() -> float | None:
    """The machine's memory in 10⁹ bytes; None if the system does not report it."""
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
