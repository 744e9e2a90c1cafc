"""The machine, versions and commit behind a result, which every result file names."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import paddle

from .._version import __version__
from ..cores import usable_cores

PACKAGE = Path(__file__).parents[1]


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
        "paddlenlp": _version("paddlenlp"),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute."""
    packages = ("paddlepaddle", "paddlepaddle-gpu", "ppdiffusers", "numpy", "onnxruntime", "openvino")
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def commit() -> str:
    """The checkout's commit, with "+" if tracked files of the package differ from it; "none" without a checkout.

    Only a repository that contains the package at its top counts, not a repository in which it is installed: an
    environment in a folder of a project (.venv), or a copy among a project's own files.
    """
    # In a hook, git's variables name the repository of the hook.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=PACKAGE, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if git("rev-parse", "--show-prefix") != f"{PACKAGE.name}/":
            return "none"
        git("ls-files", "--error-unmatch", "__init__.py")  # fails for an untracked file
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return "none"


def _device() -> str:
    """Paddle's name of the device, and of a GPU its model, its memory in 10⁹ bytes and Paddle's CUDA."""
    device = paddle.get_device()
    if device == "cpu":
        return device
    gpu = paddle.device.cuda.get_device_properties()
    return f"{device}: {gpu.name}, {gpu.total_memory / 1e9:.1f} GB, CUDA {paddle.version.cuda()}"


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
