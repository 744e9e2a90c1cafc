"""Files in torch.save's first format, written here without PyTorch, come back as they were; nothing in them is run."""

import os
import pickle
import sys
import types
from collections import OrderedDict

import numpy as np
import pytest

from ppdiffusers_tome import ToMeError
from ppdiffusers_tome.evaluation.quality.torch_files import (
    MAGIC,
    PROTOCOL,
    STORAGES,
    MissingWeightsError,
    NotTheseWeightsError,
    read_state_dict,
    weights_of,
)

MACHINE = {"protocol_version": PROTOCOL, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


class Tensor:
    """What a pickle says of a tensor: a call of torch._utils._rebuild_tensor_v2."""

    def __init__(self, key, kind, length, offset, shape, strides):
        self.storage = Storage(key, kind, length)
        self.place = (offset, shape, strides, False, OrderedDict())

    def __reduce__(self):
        return sys.modules["torch._utils"]._rebuild_tensor_v2, (self.storage, *self.place)


class Storage:
    def __init__(self, key, kind, length):
        self.id = ("storage", getattr(sys.modules["torch"], kind), key, "cuda:0", length, None)


class Pickler(pickle.Pickler):
    def persistent_id(self, obj):
        return obj.id if isinstance(obj, Storage) else None


@pytest.fixture
def torch_names(monkeypatch):
    """Modules of PyTorch's names, so that pickle writes these names; what is read must not need them."""

    def _rebuild_tensor_v2(*_):
        raise AssertionError("the file's own function was called")

    _rebuild_tensor_v2.__module__, _rebuild_tensor_v2.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    torch, inner = types.ModuleType("torch"), types.ModuleType("torch._utils")
    inner._rebuild_tensor_v2 = _rebuild_tensor_v2
    for kind in STORAGES:
        setattr(torch, kind, type(kind, (), {"__module__": "torch"}))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._utils", inner)


def write(path, state, storages, magic=MAGIC, protocol=PROTOCOL, machine=MACHINE):
    with open(path, "wb") as file:
        for each in (magic, protocol, machine):
            pickle.dump(each, file, protocol=2)
        Pickler(file, protocol=2).dump(state)
        pickle.dump(list(storages), file, protocol=2)
        for storage in storages.values():
            file.write(len(storage).to_bytes(8, "little") + storage.tobytes())
    return path


def small(path, kind="FloatStorage", dtype="<f4", **changes):
    """A file of one tensor [2, 3] in a storage of 6."""
    state = OrderedDict(a=Tensor("0", kind, 6, 0, (2, 3), (3, 1)))
    return write(path, state, {"0": np.arange(6).astype(dtype)}, **changes)


@pytest.mark.parametrize(("kind", "dtype"), STORAGES.items())
def test_every_kind_of_storage(tmp_path, torch_names, kind, dtype):
    read = read_state_dict(small(tmp_path / "w.pth", kind, dtype))
    np.testing.assert_array_equal(read["a"], np.arange(6).astype(dtype).reshape(2, 3))
    assert read["a"].dtype == np.dtype(dtype)


def test_names_shapes_and_strides(tmp_path, torch_names):
    state = OrderedDict(
        transposed=Tensor("7", "FloatStorage", 12, 0, (3, 2), (1, 3)),
        behind=Tensor("7", "FloatStorage", 12, 6, (2, 3), (3, 1)),
        scalar=Tensor("5", "LongStorage", 1, 0, (), ()),
        empty=Tensor("7", "FloatStorage", 12, 12, (0, 4), (4, 1)),
    )
    state._metadata = OrderedDict({"": {"version": 1}})  # as a module's state dict has it
    numbers = np.arange(12, dtype="f4")
    read = read_state_dict(write(tmp_path / "w.pth", state, {"5": np.array([9]), "7": numbers}))
    assert list(read) == ["transposed", "behind", "scalar", "empty"]
    np.testing.assert_array_equal(read["transposed"], numbers[:6].reshape(2, 3).T)
    np.testing.assert_array_equal(read["behind"], numbers[6:].reshape(2, 3))
    assert read["scalar"].shape == () and read["scalar"] == 9
    assert read["empty"].shape == (0, 4)


def test_nothing_is_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    with pytest.raises(NotTheseWeightsError, match=r"asks for \w+\.mkdir"):
        read_state_dict(write(tmp_path / "w.pth", OrderedDict(a=Evil()), {}))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": 5}, "begins with 5"),
        ({"protocol": 1002}, "protocol 1002"),
        ({"machine": {**MACHINE, "little_endian": False}}, "big-endian"),
    ],
)
def test_other_formats_are_named(tmp_path, torch_names, changes, message):
    with pytest.raises(NotTheseWeightsError, match=message):
        read_state_dict(small(tmp_path / "w.pth", **changes))


@pytest.mark.parametrize("cut", [1, 20, 25, 60, 200])
def test_a_truncated_file(tmp_path, torch_names, cut):
    whole = small(tmp_path / "whole.pth").read_bytes()
    (tmp_path / "w.pth").write_bytes(whole[:-cut])
    with pytest.raises(NotTheseWeightsError, match=r"w\.pth: "):
        read_state_dict(tmp_path / "w.pth")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"no pickle", b"\x80\x02]."])
def test_something_else(tmp_path, content):
    (tmp_path / "w.pth").write_bytes(content)
    with pytest.raises(NotTheseWeightsError, match=r"w\.pth: "):
        read_state_dict(tmp_path / "w.pth")


def test_a_view_stays_inside_its_storage(tmp_path, torch_names):
    for offset, shape, strides in [(1, (2, 3), (3, 1)), (0, (2, 3), (4, 1)), (-1, (2,), (1,)), (5, (2,), (-1,))]:
        state = OrderedDict(a=Tensor("0", "FloatStorage", 6, offset, shape, strides))
        with pytest.raises(NotTheseWeightsError, match="beyond its storage"):
            read_state_dict(write(tmp_path / "w.pth", state, {"0": np.zeros(6, "f4")}))


def test_a_storage_is_not_larger_than_its_file(tmp_path, torch_names):
    state = OrderedDict(a=Tensor("0", "FloatStorage", 10**15, 0, (10**15,), (1,)))
    with pytest.raises(NotTheseWeightsError, match="more than the file has bytes for"):
        read_state_dict(write(tmp_path / "w.pth", state, {}))


def test_only_a_flat_dict_of_tensors(tmp_path, torch_names):
    for state in ([1, 2], OrderedDict(epoch=3), OrderedDict(a=OrderedDict())):
        with pytest.raises(NotTheseWeightsError, match="flat dict of tensors"):
            read_state_dict(write(tmp_path / "w.pth", state, {}))


def test_where_a_package_keeps_its_weights(tmp_path, monkeypatch):
    package = tmp_path / "carries_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "w.pth").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert weights_of("carries_weights", "w.pth") == package / "w.pth"
    with pytest.raises(MissingWeightsError, match=r"no other\.pth: .*pip install --no-deps stlpips-pytorch"):
        weights_of("carries_weights", "other.pth")
    with pytest.raises(ToMeError, match=r"carries_no_weights is not installed.*\[eval\]"):
        weights_of("carries_no_weights", "w.pth")


def test_live_torch_writes_what_is_read(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    state = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 5), torch.nn.BatchNorm2d(3)).state_dict()
    torch.save(state, tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    read = read_state_dict(tmp_path / "w.pth")
    assert list(read) == list(state)
    for name, value in state.items():
        np.testing.assert_array_equal(read[name], value.numpy())
    torch.save(state, tmp_path / "zip.pth")
    with pytest.raises(NotTheseWeightsError, match="zip format"):
        read_state_dict(tmp_path / "zip.pth")
