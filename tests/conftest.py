"""Shared by the tests: tiny random models, pipelines over the bundled one, and tools to inspect passes.

What exports has a module of its own, `exporting`, which is imported where it is used.
"""

import gc
import sys
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import absl.logging
import cuda_attention  # noqa: F401 - before ppdiffusers, which looks for a GPU when it is imported
import numpy as np
import paddle
import ppdiffusers
import pytest
from paddlenlp.utils.log import logger
from ppdiffusers import (
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
)
from ppdiffusers.models.attention_processor import AttnProcessor
from zoo.parts import ONE_LEVEL, SDXL, sdxl_refiner, stable_diffusion
from zoo.parts import controlnet as controlnet_of_zoo
from zoo.parts import unet as unet_of_zoo

import ppdiffusers_tome  # noqa: F401
from ppdiffusers_tome.attach.block import BlockWrap

# OpenVINO imports absl, whose handler closes its stream when uvicorn configures logging: then it must not be pytest's.
absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__

EMOJI_SD = Path(__file__).parents[1] / "examples" / "emoji_sd"
TEXT = 7  # text tokens of the tiny models' inputs


@pytest.fixture(autouse=True)
def _logging():
    """Changes of loggers and progress bars by commands are undone."""
    level = logger.logger.level
    yield
    logger.logger.setLevel(level)
    ppdiffusers.utils.logging.enable_progress_bar()


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_stays():
    """The package's `gc.collect()` for each program looks at what this module made, not at all that is imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed():
    paddle.seed(0)


THREE_LEVELS = {name: SDXL[name] for name in ("block_out_channels", "down_block_types", "up_block_types")}


def make_unet(**changes):
    """A UNet with attention at levels 1 and 2 (also its middle); 0.6 M random parameters."""
    paddle.seed(0)
    return unet_of_zoo(**{"cross_attention_dim": 24, **changes})


@pytest.fixture
def unet():
    return make_unet()


def make_controlnet():
    """A ControlNet for `make_unet`."""
    paddle.seed(1)
    return controlnet_of_zoo(cross_attention_dim=24)


@pytest.fixture
def controlnet():
    return make_controlnet()


def inputs(batch=2, h=16, w=16, seed=0, timestep=10):
    """sample, timestep and encoder_hidden_states of the tiny models, by keyword."""
    rng = np.random.RandomState(seed)
    return {
        "sample": paddle.to_tensor(rng.standard_normal((batch, 4, h, w)).astype("float32")),
        "timestep": paddle.to_tensor([timestep]),
        "encoder_hidden_states": paddle.to_tensor(rng.standard_normal((batch, TEXT, 24)).astype("float32")),
    }


@paddle.no_grad()
def run(model, **changes):
    """One forward pass, as a NumPy array."""
    arguments = inputs(**changes)
    out = model(arguments["sample"], arguments["timestep"], encoder_hidden_states=arguments["encoder_hidden_states"])
    return out.sample.numpy()


def program_of(layer, arguments):
    """A layer as `paddle.jit` traces it, for the shapes and types of these arguments."""
    spec = [paddle.static.InputSpec(x.shape, str(x.dtype).rpartition(".")[2]) for x in arguments]
    return paddle.jit.to_static(layer, input_spec=spec, full_graph=True)


def traces(model):
    """Everything that merging could leave behind on a model: classes, attributes, hooks, parameters."""
    layers = {}
    for path, layer in model.named_sublayers(include_self=True):
        attributes = {key for key in layer.__dict__ if key not in ("_forward_pre_hooks", "_forward_post_hooks")}
        all_hooks = [*layer._forward_pre_hooks.values(), *layer._forward_post_hooks.values()]
        layers[path] = (type(layer), attributes, all_hooks)
    return layers, list(model.state_dict())


def widths(model):
    """A dict that the next pass fills with the number of tokens [B, N, C] that each layer returns, by path."""
    seen = {}

    def record(layer, arguments, output, path):
        if getattr(output, "ndim", 0) == 3:
            seen[path] = output.shape[1]

    # All models share the activations of ppdiffusers, which are layers: no hook may stay on them.
    hooks = [layer.register_forward_post_hook(partial(record, path=path)) for path, layer in model.named_sublayers()]

    def remove(_layer, _arguments, _output):
        for hook in hooks:
            hook.remove()

    model.register_forward_post_hook(remove)
    return seen


class Recorder(AttnProcessor):
    """Records what reaches the attention kernel: token counts of queries and context, None for self-attention.

    `of_self` has those of queries and keys in self-attention, whose keys may have merged further.
    """

    def __init__(self):
        self.lengths, self.of_self = [], []
        self.all_contiguous = True

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, **kwargs):
        context = None if encoder_hidden_states is None else encoder_hidden_states.shape[1]
        self.lengths.append((hidden_states.shape[1], context))
        self.all_contiguous &= hidden_states.is_contiguous()
        keys = []
        handle = attn.to_k.register_forward_post_hook(lambda layer, inputs, out: keys.append(out.shape[1]))
        out = super().__call__(attn, hidden_states, encoder_hidden_states, **kwargs)
        handle.remove()
        if context is None:
            self.of_self.append((hidden_states.shape[1], *keys))
        return out


@pytest.fixture
def empty_plots(monkeypatch):
    """Plots are written without what they show, which would take most of the time of a page."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    monkeypatch.setattr(FigureCanvasAgg, "draw", FigureCanvasAgg.get_renderer)


def record_plans(monkeypatch, record):
    """Call `record` with each plan that a block makes."""
    make = BlockWrap._plan

    def recording(*args):
        plan = make(*args)
        if plan is not None:
            record(plan)
        return plan

    monkeypatch.setattr(BlockWrap, "_plan", recording)


@pytest.fixture
def plans(monkeypatch):
    """The plans of all passes, in the order of the blocks that run."""
    recorded = []
    record_plans(monkeypatch, recorded.append)
    return recorded


def in_threads(functions):
    """Call each function four times in a thread of its own, all at once; the results by function."""
    barrier, results = threading.Barrier(len(functions)), [[] for _ in functions]

    def work(function, into):
        barrier.wait()
        into.extend(function() for _ in range(4))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(functions, results, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture
def device_is_restored(monkeypatch):
    """Paddle 2.6's arange, in ppdiffusers' time embedding, switches a device that all threads share."""
    monkeypatch.setattr(paddle.base.framework, "_current_device", None, raising=False)


def groups(plan, batch):
    """[B, N]: for each token the original position whose merged row it gets."""
    if not plan.merges:  # nothing merges
        return np.tile(np.arange(plan.tokens), (batch, 1))
    return np.take_along_axis(plan.choice.positions.numpy(), plan.choice.merging.sources.numpy(), axis=1)


@contextmanager
def keys_of(attention, tokens):
    """Let an attention layer compute keys and values from these tokens."""
    layers = attention.to_k, attention.to_v
    handles = [layer.register_forward_pre_hook(lambda layer, args: (tokens, *args[1:])) for layer in layers]
    yield
    for handle in handles:
        handle.remove()


def load_bundled(cls=StableDiffusionPipeline):
    pipe = cls.from_pretrained(str(EMOJI_SD), paddle_dtype=paddle.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="session")
def _bundled():
    return load_bundled()


@pytest.fixture
def pipe(_bundled):
    """The bundled text-to-image pipeline, with merging off before and after."""
    _bundled.remove_tome()
    yield _bundled
    _bundled.remove_tome()


@pytest.fixture
def image_pipe(pipe):
    """An image-to-image pipeline over the same models."""
    other = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    other.set_progress_bar_config(disable=True)
    return other


def draw(pipe, prompt="a 3d render of fox", size=64, steps=2, seed=0, **settings):
    """One small image as a float array [H, W, 3], from fixed noise."""
    latents = np.random.RandomState(seed).standard_normal((1, 4, size // 4, size // 4)).astype("float32")
    out = pipe(
        prompt,
        height=size,
        width=size,
        num_inference_steps=steps,
        guidance_scale=2.0,
        latents=paddle.to_tensor(latents),
        output_type="np",
        **settings,
    )
    return out.images[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a tiny pipeline with two prompts, which no test changes."""
    folder = tmp_path_factory.mktemp("model")
    tiny_pipeline().save_pretrained(str(folder))
    (folder / "prompts.txt").write_text("a fox\nan owl\n")
    return folder


@pytest.fixture(scope="session")
def exported_folder(tmp_path_factory):
    """A tiny pipeline, exported: 32×32 and 48×32 px (width × height), ratios 0.5 and 0, with the VAE's encoder.

    Its programs are for Paddle Inference alone. Tests that modify it must work on a copy, because all processes of a
    run share it.
    """
    from exporting import export_once

    return export_once(tmp_path_factory, "tiny", tiny_pipeline, (0.5, 0), [(32, 32), (32, 48)], format="paddle")


@pytest.fixture(scope="session")
def onnx_folder(tmp_path_factory):
    """The same as ONNX alone, of 40×32 px, with `exporting.ONNX_SETTINGS`."""
    from exporting import ONNX_SETTINGS, export_once

    return export_once(tmp_path_factory, "onnx", tiny_pipeline, (0.5, 0), [(32, 40)], format="onnx", **ONNX_SETTINGS)


@pytest.fixture(scope="session")
def refiner_folder(tmp_path_factory):
    """`refiner_pipeline` as ONNX alone, at ratio 0.5 for 32×32 px."""
    from exporting import export_once

    return export_once(tmp_path_factory, "refiner", refiner_pipeline, 0.5, [(32, 32)], format="onnx")


def refiner_pipeline():
    """A tiny pipeline of the classes of stable-diffusion-xl-refiner-1.0, always with the same weights."""
    paddle.seed(0)
    return StableDiffusionXLImg2ImgPipeline(**sdxl_refiner())


def tiny_pipeline(**changes):
    """A text-to-image pipeline with one level, 32 px and random weights: it exports in seconds."""
    paddle.seed(0)
    return StableDiffusionPipeline(**stable_diffusion(**{"unet": unet_of_zoo(**ONE_LEVEL), **changes}))


@pytest.fixture(scope="module")
def tiny():
    """`tiny_pipeline`, for the tests of one module."""
    return tiny_pipeline()
