"""Merging survives `paddle.jit`: the saved program equals eager, and holds no operation that would break it."""

import copy
import json

import numpy as np
import paddle
import pytest
from conftest import TEXT, inputs, make_unet, run
from paddle.static import InputSpec
from zoo.transformers import dit, sd3

pytestmark = [
    # Paddle 2.6 on Python 3.12: its translation of Python to programs reads syntax trees by names that go away.
    pytest.mark.filterwarnings(r"ignore:(.|\n)*(Attribute [ns] is|ast\.\w+ is) deprecated:DeprecationWarning"),
    # Paddle 2.6 deprecates what its own arange does in a static program.
    pytest.mark.filterwarnings(r"ignore:(.|\n)*The Attr\(force_cpu\):UserWarning"),
    # Paddle 3: it flattens the UNet's output, and its own zeros_like asks a static tensor for its place.
    pytest.mark.filterwarnings("ignore:Found 'dict' in given outputs:UserWarning"),
    pytest.mark.filterwarnings(r"ignore:(.|\n)*Tensor do not have 'place' interface:UserWarning"),
]

# In place, data-dependent in shape, or an index expanded over channels: see docs/architecture.md.
FORBIDDEN = (
    "put_along_axis",
    "scatter_",
    "set_value",
    "nonzero",
    "where_index",
    "masked_select",
    "while",
)
MERGING = ("scatter_nd_add", "argsort", "gather")


SMALL = {  # one level: a program with every kind of operation, traced in seconds
    "block_out_channels": (32,),
    "down_block_types": ("CrossAttnDownBlock2D",),
    "up_block_types": ("CrossAttnUpBlock2D",),
}


def export(unet, path):
    spec = [
        InputSpec([None, 4, 16, 16], "float32"),
        InputSpec([1], "int64"),
        InputSpec([None, TEXT, 24], "float32"),
    ]
    paddle.jit.save(paddle.jit.to_static(copy.deepcopy(unet), input_spec=spec, full_graph=True), str(path / "unet"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A plain and a merging program with a dynamic batch, and the merging model they came from."""
    plain, merging = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("merging")
    unet = make_unet(**SMALL)
    export(unet, plain)
    export(unet.apply_tome(ratio=0.5, merge_crossattn=True), merging)
    return plain, merging, unet


def operations(folder):
    """The names of all operations in a saved program, whichever format this Paddle writes."""
    if (folder / "unet.json").exists():
        names, pending = [], [json.loads((folder / "unet.json").read_text())]
        while pending:
            node = pending.pop()
            if isinstance(node, dict):
                names += [node["#"].split(".")[-1]] if isinstance(node.get("#"), str) else []
                pending += node.values()
            elif isinstance(node, list):
                pending += node
        return names
    from paddle.base.proto import framework_pb2  # Paddle 2 alone has and needs it

    program = framework_pb2.ProgramDesc.FromString((folder / "unet.pdmodel").read_bytes())
    return [op.type for block in program.blocks for op in block.ops]


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_exported_program_equals_eager(exported, batch):
    _, folder, unet = exported
    program, given = paddle.jit.load(str(folder / "unet")), inputs(batch=batch)
    with paddle.no_grad():
        out = program(given["sample"], given["timestep"], given["encoder_hidden_states"])
    out = (out[0] if isinstance(out, (list, tuple)) else out).numpy()
    merged = run(unet, batch=batch)
    np.testing.assert_array_equal(out, merged)
    assert np.abs(merged - run(make_unet(**SMALL), batch=batch)).max() > 1e-3


def test_merging_adds_no_forbidden_operation(exported):
    plain, merging = (operations(folder) for folder in exported[:2])
    added = {name for name in merging if merging.count(name) > plain.count(name)}
    assert all(any(wanted in name for name in added) for wanted in MERGING)
    assert [name for name in added if any(bad in name for bad in FORBIDDEN) and "scatter_nd_add" not in name] == []


class OfDiT(paddle.nn.Layer):
    """A DiT called as its pipeline does it, with the positional inputs that paddle.jit exports."""

    def __init__(self):
        super().__init__()
        self.transformer = dit()

    def forward(self, latents, timestep, labels):
        return self.transformer(latents, timestep=timestep, class_labels=labels, return_dict=False)[0]


class OfSD3(paddle.nn.Layer):
    """The same for Stable Diffusion 3, whose blocks are called by keyword too."""

    def __init__(self):
        super().__init__()
        self.transformer = sd3()

    def forward(self, latents, timestep, text, pooled):
        given = {"hidden_states": latents, "encoder_hidden_states": text, "pooled_projections": pooled}
        return self.transformer(**given, timestep=timestep, return_dict=False)[0]


@pytest.mark.parametrize(("of", "shapes"), [(OfDiT, []), (OfSD3, [[2, 6, 64], [2, 64]])])
@paddle.no_grad()
def test_transformers_survive_too(of, shapes, tmp_path):
    model = of()
    model.eval()
    given = [paddle.randn([2, 4, 16, 16]), paddle.to_tensor([3, 3])]
    given += [paddle.randn(shape) for shape in shapes] or [paddle.to_tensor([1, 2])]
    plain = model(*given).numpy()
    model.transformer.apply_tome(ratio=0.5)
    merged = model(*given).numpy()
    spec = [InputSpec(each.shape, each.dtype) for each in given]
    paddle.jit.save(paddle.jit.to_static(model, input_spec=spec, full_graph=True), str(tmp_path / "model"))
    loaded = paddle.jit.load(str(tmp_path / "model"))
    loaded.eval()
    assert np.abs(merged - plain).max() > 1e-2
    np.testing.assert_allclose(loaded(*given).numpy(), merged, atol=1e-5)
