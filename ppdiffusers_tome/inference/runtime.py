"""What a runtime is: it loads the programs of an exported folder, each for one device with the same settings."""

import ctypes
import gc
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import paddle

from ..cores import usable_cores
from ..errors import ParameterError, ToMeExportError, install_command
from .manifest import Manifest, ProgramFile

MAX_THREADS = 1024  # of one program
# Largest relative difference to eager, in fp32, of a program whose runtime fuses operators. They round differently, by
# about 5e-6.
FUSED_TOLERANCE = 1e-4


class Program(ABC):
    """A loaded program. Thread-safe."""

    inputs: list[str]  # names

    @abstractmethod
    def __call__(self, **inputs: paddle.Tensor) -> list[paddle.Tensor]:
        """Run the program on inputs by name, others are ignored; returns its outputs in order."""


Load = Callable[[ProgramFile], Program]


@dataclass(frozen=True, kw_only=True)
class Runtime(ABC):
    """What all runtimes have in common.

    Args:
        device: its names depend on the runtime.
        threads: CPU threads of one program, 1 to 1024; None: the number of available cores.
        precision: "fp32"; others depend on the runtime and the device.

    Raises:
        ToMeConfigError: a value is not allowed, or not on this machine.
    """

    format: ClassVar[str]  # of the programs that it runs, one of `manifest.FORMATS`
    device: str = "cpu"
    threads: int | None = None
    precision: str = "fp32"

    def __post_init__(self) -> None:
        is_count = isinstance(self.threads, int) and not isinstance(self.threads, bool)
        if self.threads is not None and not (is_count and 1 <= self.threads <= MAX_THREADS):
            raise ParameterError("threads", self.threads, f"it must be 1 to {MAX_THREADS}")

    @abstractmethod
    def load(self, folder: Path, file: ProgramFile) -> Program:
        """Load one program of a folder, which has it in this runtime's format.

        Raises:
            ToMeExportError: this version cannot load it.
        """

    def loader(self, folder: Path, manifest: Manifest) -> Load:
        """What loads the programs of an exported folder, each when it first runs."""
        return partial(self.load, folder)

    def cores(self) -> int:
        """Number of CPU threads of a program."""
        return self.threads or usable_cores()


def return_memory() -> None:
    """Return the memory that is free in this process to the system.

    glibc keeps it: after one program of Stable Diffusion 1.5's UNet was written, several gigabytes.
    """
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def is_accurate(parity: Mapping[str, float]) -> bool:
    """Whether a runtime with fused operators runs a program correctly, by relative differences at all batch sizes."""
    return bool(parity) and max(parity.values()) <= FUSED_TOLERANCE


def error_summary(error: Exception) -> str:
    """The most informative line of a long error message, as Paddle's are."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    informative = [line for line in lines if "Error" in line or "not " in line] or lines or [type(error).__name__]
    return informative[-1][:300]


@contextmanager
def _no_telemetry() -> Iterator[None]:
    """OpenVINO reports its import to its makers over the network, unless the package that does so is missing."""
    name = "openvino_telemetry"
    is_imported = name in sys.modules
    if not is_imported:
        sys.modules[name] = None  # type: ignore[assignment] # Python's way to say that it cannot be imported
    try:
        yield
    finally:
        if not is_imported:
            del sys.modules[name]


def load_error(module: ModuleType, path: Path, error: Exception) -> ToMeExportError:
    """The error that a package cannot load a program."""
    return ToMeExportError(f"{module.__name__} {module.__version__} cannot load {path}: {error_summary(error)}")


def load_module(name: str) -> ModuleType:
    """ONNX Runtime or OpenVINO.

    Raises:
        ToMeExportError: it is not installed.
    """
    try:
        with _no_telemetry():
            return importlib.import_module(name)
    except ImportError as error:
        raise ToMeExportError(f"{error}. runtime={name!r} needs: {install_command('onnx')}") from error
