"""The base classes of runtimes, which load the programs of an exported folder for one device, and of programs."""

import ctypes
import gc
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import paddle

from ..cores import usable_cores
from ..errors import ParameterError, ToMeExportError, install_command
from ..signals import signals_held_back
from .folder import ExportedFolder
from .manifest import Files, ProgramFile

MAX_THREADS = 1024  # for one program
# Largest relative difference from eager, in fp32, of a program whose runtime fuses operators. Fused operators round
# differently, by about 5e-6.
FUSED_TOLERANCE = 1e-4


class Program(ABC):
    """A loaded program. Thread-safe."""

    inputs: list[str]  # names

    @abstractmethod
    def __call__(self, **inputs: paddle.Tensor) -> list[paddle.Tensor]:
        """Run the program on inputs by name, and ignore inputs that it lacks; returns its outputs in order."""


Load = Callable[[ProgramFile], Program]


@dataclass(frozen=True, kw_only=True)
class Runtime(ABC):
    """Base class of runtimes.

    Args:
        device: its names depend on the runtime.
        threads: CPU threads of one program, 1 to 1024; None: the number of available cores.
        precision: "fp32"; which further precisions there are depends on the runtime and the device.

    Raises:
        ToMeConfigError: a value is not allowed, or not on this machine.
    """

    device: str = "cpu"
    threads: int | None = None
    precision: str = "fp32"

    def __post_init__(self) -> None:
        is_count = isinstance(self.threads, int) and not isinstance(self.threads, bool)
        if self.threads is not None and not (is_count and 1 <= self.threads <= MAX_THREADS):
            raise ParameterError("threads", self.threads, f"it must be 1 to {MAX_THREADS}")

    @abstractmethod
    def load(self, folder: ExportedFolder, files: Files) -> Program:
        """Load one program of a folder, whose files are those in this runtime's format.

        Whatever reads a file of the program, now or in a call, does so in `folder.reading`.

        Raises:
            ToMeExportError: this version cannot load it.
            ExportChangedError: a file is not the file that was exported.
        """

    def cores(self) -> int:
        """Number of CPU threads of a program."""
        return self.threads or usable_cores()


def return_memory() -> None:
    """Return the memory that is free in this process to the system.

    glibc keeps it: after one program of Stable Diffusion 1.5's UNet was written, several gigabytes.
    """
    gc.collect()
    with suppress(OSError, AttributeError):  # a different C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def is_accurate(parity: Mapping[str, float]) -> bool:
    """Whether all relative differences, by batch size, are within the tolerance of fused operators."""
    return bool(parity) and max(parity.values()) <= FUSED_TOLERANCE


def error_summary(error: Exception) -> str:
    """The most informative line of a long error message, as Paddle's are."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    informative = [line for line in lines if "Error" in line or "not " in line] or lines or [type(error).__name__]
    return informative[-1][:300]


def load_error(module: ModuleType, path: Path, error: Exception) -> ToMeExportError:
    """An error for a program that a package cannot load."""
    return ToMeExportError(f"{module.__name__} {module.__version__} cannot load {path}: {error_summary(error)}")


def load_module(name: str) -> ModuleType:
    """Import ONNX Runtime or OpenVINO.

    Raises:
        ToMeExportError: it is not installed.
    """
    try:
        with signals_held_back(f"{name} is imported"):
            return importlib.import_module(name)
    except ImportError as error:
        raise ToMeExportError(f"{error}. The runtime {name} needs: {install_command('onnx')}") from error
