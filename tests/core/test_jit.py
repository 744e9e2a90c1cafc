"""Merging survives `paddle.jit`: the saved program equals eager."""

import copy

import numpy as np
import paddle
import pytest
from conftest import TEXT, inputs, make_unet, run
from paddle.static import InputSpec
from zoo.parts import ONE_LEVEL
from zoo.transformers import dit, sd3

from ppdiffusers_tome.export.tracing import forget_traces

pytestmark = [
    # Paddle 2.6 on Python 3.12: its translation of Python to programs reads syntax trees by names that go away.
    pytest.mark.filterwarnings(r"ignore:(.|\n)*(Attribute [ns] is|ast\.\w+ is) deprecated:DeprecationWarning"),
    # Paddle 2.6 deprecates what its own arange does in a static program.
    pytest.mark.filterwarnings(r"ignore:(.|\n)*The Attr\(force_cpu\):UserWarning"),
    # Paddle 3: it flattens the UNet's output, and its own zeros_like asks a static tensor for its place.
    pytest.mark.filterwarnings("ignore:Found 'dict' in given outputs:UserWarning"),
    pytest.mark.filterwarnings(r"ignore:(.|\n)*Tensor do not have 'place' interface:UserWarning"),
]


def export(unet, path, size=(16, 16)):
    spec = [InputSpec([None, 4, *size], "float32"), InputSpec([1], "int64"), InputSpec([None, TEXT, 24], "float32")]
    save(copy.deepcopy(unet), spec, path / "unet")


def save(layer, spec, path):
    """`paddle.jit.save`, as `export_pipeline` calls it."""
    try:
        paddle.jit.save(paddle.jit.to_static(layer, input_spec=spec, full_graph=True), str(path))
    finally:
        forget_traces()


@pytest.fixture(
    scope="module",
    params=[{}, {"method": "tomesd", "merge_crossattn": True}],
    ids=str,
)
def exported(request, tmp_path_factory):
    """A merging program with a dynamic batch, and the model it came from."""
    folder, unet = tmp_path_factory.mktemp("merging"), make_unet(**ONE_LEVEL)
    unet.apply_tome(**request.param)
    export(unet, folder)
    return folder, unet


@pytest.mark.parametrize(("batch", "timestep"), [(1, 10), (3, 700), (2, 900)])
def test_exported_program_equals_eager(exported, batch, timestep):
    folder, unet = exported
    program, arguments = paddle.jit.load(str(folder / "unet")), inputs(batch=batch, timestep=timestep)
    with paddle.no_grad():
        out = program(arguments["sample"], arguments["timestep"], arguments["encoder_hidden_states"])
    out = (out[0] if isinstance(out, (list, tuple)) else out).numpy()
    merged = run(unet, batch=batch, timestep=timestep)
    np.testing.assert_array_equal(out, merged)
    difference = np.abs(merged - run(make_unet(**ONE_LEVEL), batch=batch, timestep=timestep)).max()
    is_plain = timestep == 900 and unet.tome_summary(16, 16).plain is not None
    assert difference == 0 if is_plain else difference > 1e-3


class OfDiT(paddle.nn.Layer):
    """A DiT called as its pipeline does it, with the positional inputs that paddle.jit exports."""

    def __init__(self):
        super().__init__()
        self.transformer = dit()

    def forward(self, latents, timestep, labels):
        return self.transformer(latents, timestep=timestep, class_labels=labels, return_dict=False)[0]


class OfSD3(paddle.nn.Layer):
    """The same for Stable Diffusion 3, whose blocks are called by keyword too."""

    def __init__(self, transformer=None):
        super().__init__()
        self.transformer = transformer or sd3()

    def forward(self, latents, timestep, text, pooled):
        arguments = {"hidden_states": latents, "encoder_hidden_states": text, "pooled_projections": pooled}
        return self.transformer(**arguments, timestep=timestep, return_dict=False)[0]


@pytest.mark.skipif(paddle.__version__ >= "3", reason="Paddle 3 cannot trace ppdiffusers' UNet without fixed sizes")
@pytest.mark.filterwarnings("ignore")  # what Paddle warns of before the error
def test_dynamic_height_and_width_are_refused(tmp_path):
    with pytest.raises(Exception, match="fixed height and width"):
        export(make_unet(**ONE_LEVEL).apply_tome(), tmp_path, size=(None, None))


@pytest.mark.parametrize(("of", "shapes"), [(OfDiT, []), (OfSD3, [[2, 6, 64], [2, 64]])])
@paddle.no_grad()
def test_transformers_can_be_exported(of, shapes, tmp_path):
    model = of()
    model.eval()
    arguments = [paddle.randn([2, 4, 16, 16]), paddle.to_tensor([3, 3])]
    arguments += [paddle.randn(shape) for shape in shapes] or [paddle.to_tensor([1, 2])]
    plain = model(*arguments).numpy()
    model.transformer.apply_tome()
    merged = model(*arguments).numpy()
    spec = [InputSpec(tensor.shape, tensor.dtype) for tensor in arguments]
    save(model, spec, tmp_path / "model")
    loaded = paddle.jit.load(str(tmp_path / "model"))
    loaded.eval()
    assert np.abs(merged - plain).max() > 1e-2
    np.testing.assert_allclose(loaded(*arguments).numpy(), merged, atol=1e-5)
    arguments[1] = paddle.to_tensor([900, 900])  # a step that keeps all tokens
    np.testing.assert_allclose(loaded(*arguments).numpy(), model(*arguments).numpy(), atol=1e-5)
    model.transformer.remove_tome()
    np.testing.assert_allclose(loaded(*arguments).numpy(), model(*arguments).numpy(), atol=1e-5)
