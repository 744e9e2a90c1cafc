"""PPDIFFUSERS_SOURCE=DIR: run the tests on the ppdiffusers in DIR. cuda_attention.py imports this first."""

import os
import sys
from pathlib import Path

import pytest

VARIABLE = "PPDIFFUSERS_SOURCE"
CPUINFO = Path("/proc/cpuinfo")

if source := os.environ.get(VARIABLE):
    if not (Path(source) / "ppdiffusers" / "__init__.py").is_file():
        raise pytest.UsageError(f"{VARIABLE}={source}: it must be the folder that contains the package ppdiffusers.")
    sys.path.insert(0, source)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))  # of subprocesses


def newer_class(name: str) -> type:
    """A class of ppdiffusers that 0.29.0 does not have; where it is missing, the test is skipped."""
    import ppdiffusers

    if not hasattr(ppdiffusers, name):
        pytest.skip(
            f"ppdiffusers {ppdiffusers.__version__} has no {name}: run make test-newer SOURCE=DIR, "
            "where DIR has the source of a newer ppdiffusers"
        )
    return getattr(ppdiffusers, name)


def runnable(model):
    """A model, unless it would end the process on this CPU: then the test is skipped."""
    is_fused = any(type(layer).__name__ == "RMSNorm" for layer in model.sublayers())
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), None)
    if is_fused and flags is not None and "avx512f" not in flags:
        pytest.skip(
            f"{type(model).__name__} has norms by Paddle's fused_rms_norm, which needs AVX-512 on a CPU: without it "
            "the process ends by SIGILL, plain or merged"
        )
    return model
