"""Merging survives `paddle.jit`: the saved program equals eager."""

import copy

import numpy as np
import paddle
import pytest
from conftest import TEXT, inputs, make_unet, run
from paddle.inference import Config, create_predictor
from paddle.static import InputSpec
from program_reader import read_program
from program_rules import broken_rules
from zoo.parts import ONE_LEVEL
from zoo.transformers import dit, sd3

from ppdiffusers_tome import ToMeConfig, ToMePassError, match_tokens, merge, unmerge
from ppdiffusers_tome.hooks import GridHook
from ppdiffusers_tome.inference.tracing import without_origins
from ppdiffusers_tome.models import find_blocks, token_grid
from ppdiffusers_tome.positions import Grid, count_removed

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
    spec = [
        InputSpec([None, 4, *size], "float32"),
        InputSpec([1], "int64"),
        InputSpec([None, TEXT, 24], "float32"),
    ]
    save(copy.deepcopy(unet), spec, path / "unet")


def save(layer, spec, path):
    """`paddle.jit.save`, as `export_pipeline` calls it."""
    with without_origins():
        paddle.jit.save(paddle.jit.to_static(layer, input_spec=spec, full_graph=True), str(path))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A merging program with a dynamic batch, and the model it came from."""
    folder, unet = tmp_path_factory.mktemp("merging"), make_unet(**ONE_LEVEL)
    unet.apply_tome(ratio=0.5, merge_crossattn=True, window=4)
    export(unet, folder)
    return folder, unet


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_exported_program_equals_eager(exported, batch):
    folder, unet = exported
    program, arguments = paddle.jit.load(str(folder / "unet")), inputs(batch=batch)
    with paddle.no_grad():
        out = program(arguments["sample"], arguments["timestep"], arguments["encoder_hidden_states"])
    out = (out[0] if isinstance(out, (list, tuple)) else out).numpy()
    merged = run(unet, batch=batch)
    np.testing.assert_array_equal(out, merged)
    assert np.abs(merged - run(make_unet(**ONE_LEVEL), batch=batch)).max() > 1e-3


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
        arguments = {"hidden_states": latents, "encoder_hidden_states": text, "pooled_projections": pooled}
        return self.transformer(**arguments, timestep=timestep, return_dict=False)[0]


class MergeAtAnySize(paddle.nn.Layer):
    """What the hooks do, without a UNet: merge a feature map's tokens and put them back."""

    def __init__(self, config, transformer):
        super().__init__()
        self.config, self.transformer = config, transformer
        self.tokens = paddle.nn.Identity()
        self.tokens.register_forward_post_hook(self.merge)

    def merge(self, layer, inputs, x):
        grid = token_grid(self.transformer, x)
        removed = count_removed(grid, self.config)
        assert grid.is_dynamic
        tokens = x.flatten(2).transpose([0, 2, 1])
        plan = match_tokens(tokens, grid, removed, self.config.sx, self.config.sy)
        merged = merge(tokens, plan)
        return merged, unmerge(merged, plan)

    def forward(self, x):
        return self.tokens(x)


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.7, 0.75])
def test_one_program_merges_at_every_size(ratio):
    """In float32 ⌊10·0.7⌋ would be 6. At the largest ratio no src token stays of 8×8; 1×6 and 2×1 have no cell."""
    config = ToMeConfig(ratio=ratio, use_rand=False)
    layer = MergeAtAnySize(config, find_blocks(make_unet(**ONE_LEVEL))[0].grid_layer)
    spec = [InputSpec([None, 3, None, None], "float32")]
    program = paddle.jit.to_static(layer, input_spec=spec, full_graph=True)
    for batch, h, w in [(1, 2, 5), (2, 8, 8), (3, 5, 4), (1, 7, 9), (2, 6, 4), (2, 1, 6), (1, 2, 1)]:
        x, grid = paddle.randn([batch, 3, h, w]), Grid(h, w)
        tokens = x.flatten(2).transpose([0, 2, 1])
        plan = match_tokens(tokens, grid, count_removed(grid, config))
        merged, back = program(x)
        assert merged.shape == [batch, plan.kept, 3], (h, w)
        np.testing.assert_array_equal(back.numpy(), unmerge(merge(tokens, plan), plan).numpy())


on_paddle_2 = pytest.mark.skipif(
    paddle.__version__ >= "3", reason="Paddle 3 cannot export ppdiffusers' UNet with dynamic height and width"
)


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory):
    """A merging program with dynamic batch, height and width, and the model that it came from."""
    folder, unet = tmp_path_factory.mktemp("dynamic"), make_unet(**ONE_LEVEL)
    unet.apply_tome(ratio=0.5, use_rand=False, window=None)
    export(unet, folder, size=(None, None))
    return folder, unet


SIZES = [(2, 16, 16), (1, 16, 24), (3, 24, 16), (2, 15, 17), (1, 5, 3), (1, 1, 6)]


@on_paddle_2
def test_one_program_equals_eager_at_every_size(dynamic):
    folder, unet = dynamic
    program, plain = paddle.jit.load(str(folder / "unet")), make_unet(**ONE_LEVEL)
    for batch, h, w in SIZES:
        arguments = inputs(batch=batch, h=h, w=w)
        with paddle.no_grad():
            out = program(arguments["sample"], arguments["timestep"], arguments["encoder_hidden_states"]).numpy()
        np.testing.assert_allclose(out, run(unet, batch=batch, h=h, w=w), rtol=0, atol=1e-5)
        different = np.abs(out - run(plain, batch=batch, h=h, w=w)).max()
        assert different > 1e-2 if min(h, w) > 1 else different < 1e-5  # one row of tokens has no 2×2 cell


@on_paddle_2
def test_one_predictor_equals_eager_at_every_size(dynamic):
    folder, unet = dynamic
    config = Config(str(folder / "unet.pdmodel"), str(folder / "unet.pdiparams"))
    config.disable_glog_info()
    config.enable_mkldnn()
    predictor = create_predictor(config)
    for batch, h, w in SIZES:
        arguments = inputs(batch=batch, h=h, w=w)
        for name in predictor.get_input_names():
            predictor.get_input_handle(name).copy_from_cpu(arguments[name].numpy())
        predictor.run()
        out = predictor.get_output_handle(predictor.get_output_names()[0]).copy_to_cpu()
        np.testing.assert_allclose(out, run(unet, batch=batch, h=h, w=w), rtol=0, atol=1e-5)


@on_paddle_2
def test_dynamic_program_keeps_the_rules(dynamic):
    program = read_program(dynamic[0] / "unet.pdmodel")
    assert any(op.name == "scatter_nd_add" for op in program)
    assert list(map(str, broken_rules(program, channels=32))) == []


@on_paddle_2
def test_random_dst_with_dynamic_sizes_is_rejected(tmp_path):
    with pytest.raises(ToMePassError, match="export a fixed height and width, or merge with use_rand=False"):
        export(make_unet(**ONE_LEVEL).apply_tome(window=None), tmp_path, size=(None, None))


def test_grid_of_an_earlier_export_is_not_used():
    unet, stem = make_unet(**ONE_LEVEL), paddle.nn.Identity()
    hook, transformer = GridHook(ToMeConfig(use_rand=False)), find_blocks(unet)[0].grid_layer
    stem.register_forward_pre_hook(lambda layer, arguments: hook(transformer, arguments))
    spec = [InputSpec([None, 3, None, None], "float32")]
    program = paddle.jit.to_static(paddle.nn.Sequential(stem), input_spec=spec, full_graph=True)
    program(paddle.zeros([1, 3, 4, 6]))
    assert hook.grid(-1).is_dynamic
    with pytest.raises(ToMePassError, match="a block got 24 tokens but no feature map was seen"):
        hook.grid(24)


@pytest.mark.parametrize(("of", "shapes"), [(OfDiT, []), (OfSD3, [[2, 6, 64], [2, 64]])])
@paddle.no_grad()
def test_transformers_can_be_exported(of, shapes, tmp_path):
    model = of()
    model.eval()
    arguments = [paddle.randn([2, 4, 16, 16]), paddle.to_tensor([3, 3])]
    arguments += [paddle.randn(shape) for shape in shapes] or [paddle.to_tensor([1, 2])]
    plain = model(*arguments).numpy()
    model.transformer.apply_tome(ratio=0.5)
    merged = model(*arguments).numpy()
    spec = [InputSpec(tensor.shape, tensor.dtype) for tensor in arguments]
    save(model, spec, tmp_path / "model")
    loaded = paddle.jit.load(str(tmp_path / "model"))
    loaded.eval()
    assert np.abs(merged - plain).max() > 1e-2
    np.testing.assert_allclose(loaded(*arguments).numpy(), merged, atol=1e-5)
