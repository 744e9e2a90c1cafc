"""What is timed: a whole UNet, one of its top-level blocks, or a pipeline from prompt to picture; and its inputs."""

import copy
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import paddle
from paddle import nn
from ppdiffusers import DiffusionPipeline, UNet2DConditionModel

from ...config import ToMeConfig
from ...inference.programs import Input, Traceable, denoiser
from ...macs import count_macs, saved_macs
from ...models import block_grid, find_blocks
from ...patch import chosen_blocks
from ...positions import Grid, count_dst, count_removed
from ...published.architectures import ARCHITECTURES
from .cases import Case
from .memory import weights_bytes

PROMPT = "a 3d render of fox"
PARITY_STEPS = 2  # of a pipeline: in many steps a rounding grows into another picture


class Subject(ABC):
    """A model with its inputs. `denoiser` is what merging is put on, `latent` the grid that it works on."""

    def __init__(self, case: Case, model: nn.Layer, latent: Grid, text: int) -> None:
        self.case, self.denoiser, self.latent, self._text = case, model, latent, text
        self.inputs: dict[str, paddle.Tensor] = {}
        self.take(0)

    @abstractmethod
    def take(self, seed: int) -> None:
        """Draw the inputs of the passes to come."""

    @abstractmethod
    def run(self) -> paddle.Tensor | np.ndarray:
        """What is timed: one pass, or pictures from the prompt."""

    @abstractmethod
    def traceable(self) -> Traceable:
        """A copy of the model as `inference.tracing.save` takes it, on which hooks may be put."""

    @property
    def dims(self) -> dict[str, int]:
        """The named dimensions of `traceable`'s inputs."""
        return {"latent_height": self.latent.h, "latent_width": self.latent.w, "tokens": self._text}

    def output(self) -> np.ndarray:
        """What one run computes, in float32, to be compared; of a pipeline in few steps."""
        return as_array(self.run())

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return weights_bytes(self.denoiser)

    def macs(self, config: ToMeConfig | None, matching: bool = True) -> int:
        """Multiply-accumulates of one pass of the UNet or block for the whole batch; None merges nothing.

        Args:
            config: how tokens merge.
            matching: whether the matching's own product counts.
        """
        total = count_macs(self.denoiser, self.latent, self._text)
        if config is None:
            return total * self._rows
        for found in chosen_blocks(self.denoiser, config):
            total -= saved_macs(found, config, self.latent, self._text)
            grid = block_grid(found, self.latent)
            if not matching and count_removed(grid, config):
                dst = count_dst(grid, config.sx, config.sy)
                total -= (grid.tokens - dst) * dst * found.block.attn1.to_q.weight.shape[0]
        return total * self._rows

    @property
    def _rows(self) -> int:
        return self.case.batch

    def _draw(self, inputs: tuple[Input, ...], seed: int) -> dict[str, paddle.Tensor]:
        stream = np.random.RandomState(seed)
        dims = {**self.dims, "batch": self.case.batch}
        drawn = {each.name: each.random(stream, dims) for each in inputs}
        return {name: x.cast(self.case.dtype) if name != "timestep" else x for name, x in drawn.items()}


class UNetSubject(Subject):
    """One pass of a UNet."""

    def take(self, seed: int) -> None:
        self.inputs = self._draw(unet_inputs(self.denoiser), seed)

    @paddle.no_grad()
    def run(self) -> paddle.Tensor:
        given = dict(self.inputs)
        positional = [given.pop(name) for name in ("sample", "timestep", "encoder_hidden_states")]
        return self.denoiser(*positional, added_cond_kwargs=given or None, return_dict=False)[0]

    def traceable(self) -> Traceable:
        return denoiser(self.denoiser, None, is_size_known=True)


class OneBlock(nn.Layer):
    """A transformer with one block, standing for a UNet whose only level it is: [B, C, h, w] to the same."""

    def __init__(self, transformer: nn.Layer) -> None:
        super().__init__()
        stage = nn.Layer()
        transformer.transformer_blocks = nn.LayerList([transformer.transformer_blocks[0]])
        stage.attentions, stage.downsamplers = nn.LayerList([transformer]), None
        self.down_blocks = nn.LayerList([stage])

    def forward(self, sample: paddle.Tensor, encoder_hidden_states: paddle.Tensor) -> paddle.Tensor:
        """The transformer, called as its UNet does."""
        transformer = self.down_blocks[0].attentions[0]
        return transformer(sample, encoder_hidden_states=encoder_hidden_states, return_dict=False)[0]


class BlockSubject(Subject):
    """One pass of the first top-level transformer block, with the norm and projections around it."""

    def take(self, seed: int) -> None:
        self.inputs = self._draw(self._inputs(), seed)

    @paddle.no_grad()
    def run(self) -> paddle.Tensor:
        return self.denoiser(self.inputs["sample"], self.inputs["encoder_hidden_states"])

    def traceable(self) -> Traceable:
        return Traceable(copy.deepcopy(self.denoiser), self._inputs())

    def _inputs(self) -> tuple[Input, ...]:
        transformer = _transformer(self.denoiser)
        width = transformer.transformer_blocks[0].attn2.to_k.weight.shape[0]
        return (
            Input("sample", ("batch", transformer.in_channels, "latent_height", "latent_width")),
            Input("encoder_hidden_states", ("batch", "tokens", width)),
        )


class PipelineSubject(Subject):
    """Pictures from a prompt, with a pipeline's own scheduler and VAE."""

    def __init__(self, case: Case, pipe: DiffusionPipeline) -> None:
        self.pipe = pipe
        pipe.set_progress_bar_config(disable=True)
        super().__init__(case, pipe.unet, case.architecture.latent(case.size), case.architecture.text)

    def take(self, seed: int) -> None:
        shape = (self.case.batch, self.denoiser.config.in_channels, self.latent.h, self.latent.w)
        noise = np.random.RandomState(seed).standard_normal(shape)
        self.inputs = {"latents": paddle.to_tensor(noise, dtype=self.case.dtype)}

    def run(self) -> np.ndarray:
        return self.draw(self.pipe, self.steps)

    def output(self) -> np.ndarray:
        return self.draw(self.pipe, PARITY_STEPS)

    @property
    def steps(self) -> int:
        """Of what is timed."""
        return self.case.steps or PARITY_STEPS

    def draw(self, pipe: DiffusionPipeline, steps: int) -> np.ndarray:
        """Pictures [B, H, W, 3] in 0 … 1, by this or another pipeline over the same weights."""
        paddle.seed(0)
        return pipe(
            [PROMPT] * self.case.batch,
            height=self.case.size,
            width=self.case.size,
            num_inference_steps=steps,
            guidance_scale=self.case.guidance,
            latents=self.inputs["latents"],
            output_type="np",
        ).images

    def traceable(self) -> Traceable:
        raise NotImplementedError("a pipeline is exported whole, by inference.export_pipeline")

    @property
    def weights(self) -> int:
        return sum(weights_bytes(part) for part in self.pipe.components.values() if isinstance(part, nn.Layer))

    @property
    def _rows(self) -> int:
        return self.case.batch * (2 if (self.case.guidance or 0) > 1 else 1)


def open_subject(case: Case) -> Subject:
    """Build or load a case's model, in its dtype and in evaluation mode.

    Raises:
        ToMeConfigError: the folder's configs are not there.
    """
    paddle.seed(0)
    architecture = case.architecture
    latent = architecture.latent(case.size)
    if case.scope == "pipeline":
        return PipelineSubject(case, DiffusionPipeline.from_pretrained(case.model, paddle_dtype=_dtype(case)))
    is_folder = case.model not in ARCHITECTURES
    if is_folder:
        unet = UNet2DConditionModel.from_pretrained(case.model, subfolder="unet")
    else:
        unet = architecture.build() if case.scope == "unet" else architecture.build_one_level()
    if case.scope == "unet":
        return UNetSubject(case, _ready(unet, case), latent, architecture.text)
    first = min(find_blocks(unet), key=lambda found: found.level)
    block = _ready(OneBlock(first.grid_layer), case)
    return BlockSubject(case, block, architecture.first_grid(case.size), architecture.text)


def unet_inputs(unet: nn.Layer) -> tuple[Input, ...]:
    """What a UNet takes, SDXL's time ids and text embeddings with it."""
    config, batch = unet.config, "batch"
    found = [
        Input("sample", (batch, config.in_channels, "latent_height", "latent_width")),
        Input("timestep", (1,), lambda stream, shape: np.full(shape, 500)),
        Input("encoder_hidden_states", (batch, "tokens", config.cross_attention_dim)),
    ]
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        found += [
            Input("text_embeds", (batch, pooled)),
            Input("time_ids", (batch, 6), lambda stream, shape: stream.randint(0, 1024, shape)),
        ]
    return tuple(found)


def as_array(value: paddle.Tensor | np.ndarray) -> np.ndarray:
    """A tensor as NumPy's float32; bfloat16 too, which NumPy does not know."""
    return value if isinstance(value, np.ndarray) else value.cast("float32").numpy()


def _transformer(block: nn.Layer) -> nn.Layer:
    return block.down_blocks[0].attentions[0]


def _ready(model: nn.Layer, case: Case) -> nn.Layer:
    model.eval()
    return model if case.dtype == "float32" else model.to(dtype=case.dtype)


def _dtype(case: Case) -> Any:
    return getattr(paddle, case.dtype)
