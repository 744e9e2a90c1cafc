"""PPDIFFUSERS_SOURCE=DIR: run the tests on the ppdiffusers in DIR. cuda_attention.py imports this first."""

import os
import sys
from pathlib import Path

import pytest

VARIABLE = "PPDIFFUSERS_SOURCE"

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
            f"ppdiffusers {ppdiffusers.__version__} has no {name}: run make test-newer STACK=paddle3 SOURCE=DIR, "
            "where DIR has the source of a newer ppdiffusers"
        )
    return getattr(ppdiffusers, name)
