"""Where and with what a figure was measured: what every committed result file names."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import paddle

from .._version import __version__


def describe_environment() -> dict[str, Any]:
    """Machine, device, threads and versions, ready for JSON."""
    return {
        "machine": _processor(),
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS", "1 (OMP_NUM_THREADS is not set)"),
        "device": paddle.get_device(),
        "python": platform.python_version(),
        "ppdiffusers_tome": __version__,
        **{name: _version(name) for name in ("paddlepaddle", "paddlepaddle-gpu", "ppdiffusers", "numpy")},
    }


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
