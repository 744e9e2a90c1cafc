"""What the package does where Paddle says that tensors are on a GPU, tried on a CPU."""

import numpy as np
import paddle
import pytest
from conftest import inputs, make_unet, program_of, run, tiny_pipeline
from cuda_attention import available
from paddle import nn
from paddle.base import core
from paddle.base.framework import EagerParamBase
from ppdiffusers.models.attention_processor import XFormersAttnProcessor
from zoo.parts import text_encoder

from ppdiffusers_tome.attach.passes import gpu_form, is_for_gpu
from ppdiffusers_tome.export import programs
from ppdiffusers_tome.inference import export_pipeline


class OnGpu(core.Place):
    """The place of a tensor on the CPU that says that it is on a GPU."""

    def __init__(self):
        super().__init__()
        self.set_place(paddle.CPUPlace())

    def is_gpu_place(self):
        return True

    def is_cpu_place(self):
        return False

    def _equals(self, other):
        return isinstance(other, OnGpu)


@pytest.fixture
def gpu(monkeypatch):
    """The name of the current device in a list: a GPU, on which all tensors seem to be while it is there."""
    device, place_of = ["gpu:0"], paddle.Tensor.place
    place = property(lambda tensor: place_of.__get__(tensor) if device[0] == "cpu" else OnGpu())
    monkeypatch.setattr(paddle.Tensor, "place", place)
    monkeypatch.setattr(paddle, "get_device", lambda: device[0])
    monkeypatch.setattr(paddle, "set_device", lambda name: device.__setitem__(0, name))
    monkeypatch.setattr(core, "gpu_memory_available", lambda: 1e12, raising=False)
    return device


class InOrder(nn.Layer):
    """A UNet whose arguments come in order and whose result is a tensor."""

    def __init__(self, unet):
        super().__init__()
        self.unet = unet

    def forward(self, sample, timestep, text):
        return self.unet(sample, timestep, text, return_dict=False)[0]


def kinds(plans):
    return {type(plan.keys).__name__ for plan in plans}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings(
    r"ignore:(.|\n)*(The Attr\(force_cpu\)|'place' interface|assign doesn't support):UserWarning"
)
def test_a_traced_model_merges_as_eager_does_on_the_current_device(gpu, plans):
    """`paddle.jit` outside of an export."""
    model = make_unet().apply_tome(0.5, method="default", window=8)
    arguments = [*inputs().values()]
    for device, kind in (("gpu:0", "WindowPlan"), ("cpu", "PairPlan")):
        gpu[0] = device
        with paddle.no_grad():
            expected = model(*arguments, return_dict=False)[0].numpy()
            assert kinds(plans) == {kind}
            plans.clear()
            actual = program_of(InOrder(model), arguments)(*arguments).numpy()
        assert kinds(plans) == {kind}
        plans.clear()
        np.testing.assert_allclose(actual, expected, atol=1e-4)


@pytest.mark.parametrize("for_gpu", [False, True])
def test_an_export_equals_the_model(gpu, plans, tmp_path, for_gpu):
    """With the merging that was asked for. Each program is compared with eager mode on the CPU."""
    options = {"format": "paddle", "for_gpu": for_gpu, "method": "default", "window": 8, "progress": False}
    manifest = export_pipeline(tiny_pipeline(), tmp_path / "out", 0.5, [(32, 32)], **options)
    assert kinds(plans) == {"WindowPlan" if for_gpu else "PairPlan"}
    assert max(manifest.programs[0].parity.values()) < 1e-5
    assert gpu == ["gpu:0"]


def test_an_export_has_no_attention_that_only_a_gpu_computes(gpu, tmp_path, monkeypatch):
    """ppdiffusers' default on a machine with a GPU is memory-efficient attention, whose kernel a CPU lacks."""
    monkeypatch.delenv("FLAGS_sdpa_select_math")
    with available():
        pipe = tiny_pipeline()
    before = pipe.unet.attn_processors
    assert {type(processor) for processor in before.values()} == {XFormersAttnProcessor}
    export_pipeline(pipe, tmp_path / "out", (0.5, 0), [(32, 32)], format="paddle", progress=False)
    assert pipe.unet.attn_processors == before


def test_weights_on_a_gpu_are_copied_to_the_cpu(gpu, monkeypatch):
    moved = []
    for cls in (paddle.Tensor, EagerParamBase):

        def record(tensor, place, blocking, copy_to=cls._copy_to):
            moved.append(tensor.name)
            return copy_to(tensor, place, blocking)

        monkeypatch.setattr(cls, "_copy_to", record)
    model = text_encoder()
    copied = programs.text_encoder(model, is_xl=False).layer.model
    tensors = [*copied.parameters(), *copied.buffers()]  # with integers, the positions
    assert {tensor.name for tensor in tensors} == {*moved}
    assert not {id(tensor) for tensor in tensors} & {id(tensor) for tensor in (*model.parameters(), *model.buffers())}


def test_contexts_within_each_other(gpu, plans):
    model = make_unet().apply_tome(0.5, method="default", window=8)
    with gpu_form(True):
        with gpu_form(True):
            pass
        assert is_for_gpu()
    with gpu_form(False):
        with gpu_form(True):
            assert is_for_gpu()
        run(model)
        assert not is_for_gpu() and kinds(plans) == {"PairPlan"}
    plans.clear()
    run(model)
    assert not is_for_gpu() and kinds(plans) == {"WindowPlan"}
