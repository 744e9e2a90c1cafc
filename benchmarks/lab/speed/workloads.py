"""Workloads: a UNet, or a pipeline from prompt to image, with their inputs."""

from abc import ABC, abstractmethod

import numpy as np
import paddle
from paddle import nn
from ppdiffusers import DiffusionPipeline, UNet2DConditionModel

from ppdiffusers_tome.attach.placement import placements
from ppdiffusers_tome.config import ToMeConfig
from ppdiffusers_tome.grid import Grid
from ppdiffusers_tome.inference.programs import Input, Traceable, denoiser, unet_inputs
from ppdiffusers_tome.macs import count_macs, saved_macs

from .architectures import ARCHITECTURES
from .cases import Case
from .memory import weights_bytes

PROMPT = "a 3d render of fox"
SHORT_STEPS = 2  # steps of a pipeline for parity and memory: with many, rounding errors grow into another image


class Workload(ABC):
    """A model with its inputs, in the case's dtype and in evaluation mode."""

    def __init__(self, case: Case, denoiser: nn.Layer, latent: Grid, inputs: tuple[Input, ...]) -> None:
        self.case, self.denoiser, self.latent, self.specs = case, denoiser, latent, inputs
        denoiser.eval()
        if case.dtype != "float32":
            denoiser.to(dtype=case.dtype)
        self.weights = weights_bytes(denoiser)  # bytes
        self.rows = case.batch  # the batch that reaches the denoiser
        self.set_inputs(0)

    @abstractmethod
    def run(self, is_short: bool = False) -> paddle.Tensor | np.ndarray:
        """One pass, or images from the prompt (in few steps if `is_short`)."""

    def traceable(self) -> Traceable:
        """A copy of the denoiser for `inference.tracing.save`; it may be changed."""
        return denoiser(self.denoiser, None)

    def set_inputs(self, seed: int) -> None:
        """Generate the inputs of the next passes."""
        stream = np.random.RandomState(seed)
        dims = {**self.dims, "batch": self.case.batch}
        self.inputs: dict[str, paddle.Tensor] = {}
        for spec in self.specs:
            dtype = "float32" if spec.name == "timestep" else self.case.dtype
            self.inputs[spec.name] = spec.random(stream, dims).cast(dtype)

    @property
    def dims(self) -> dict[str, int]:
        """The named dimensions of the inputs, except the batch."""
        text = self.case.architecture.text
        return {"latent_height": self.latent.h, "latent_width": self.latent.w, "tokens": text}

    def macs(self, config: ToMeConfig | None) -> int:
        """Multiply-accumulates of one pass of the UNet or block, for the whole batch."""
        text = self.case.architecture.text
        total = count_macs(self.denoiser, self.latent, text)
        if config is not None:
            for block, placement in placements(self.denoiser, config):
                total -= saved_macs(block, placement, self.latent, text)
        return total * self.rows


class UNetWorkload(Workload):
    """One pass of a UNet."""

    def __init__(self, case: Case) -> None:
        unet = load_unet(case)
        super().__init__(case, unet, case.architecture.latent(case.size), unet_inputs(unet))

    @paddle.no_grad()
    def run(self, is_short: bool = False) -> paddle.Tensor:
        others = dict(self.inputs)
        positional = [others.pop(name) for name in ("sample", "timestep", "encoder_hidden_states")]
        return self.denoiser(*positional, added_cond_kwargs=others or None, return_dict=False)[0]


class PipelineWorkload(Workload):
    """Images from a prompt, with the scheduler and VAE of the pipeline in the case's folder."""

    def __init__(self, case: Case) -> None:
        dtype = getattr(paddle, case.dtype)
        self.pipe = pipe = DiffusionPipeline.from_pretrained(case.model, paddle_dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        dims = ("batch", pipe.unet.config.in_channels, "latent_height", "latent_width")
        super().__init__(case, pipe.unet, case.architecture.latent(case.size), (Input("latents", dims),))
        self.weights = sum(weights_bytes(part) for part in pipe.components.values() if isinstance(part, nn.Layer))
        self.rows = case.batch * (2 if (case.guidance_scale or 0) > 1 else 1)

    def run(self, is_short: bool = False, pipe: DiffusionPipeline | None = None) -> np.ndarray:
        """Images [B, H, W, 3] in 0 … 1, also by another pipeline over the same weights."""
        paddle.seed(0)
        return (pipe or self.pipe)(
            [PROMPT] * self.case.batch,
            height=self.case.size,
            width=self.case.size,
            num_inference_steps=SHORT_STEPS if is_short else self.case.steps,
            guidance_scale=self.case.guidance_scale,
            latents=self.inputs["latents"],
            output_type="np",
        ).images


def load_unet(case: Case) -> nn.Layer:
    """The UNet of a case: of a published architecture with random weights, or of a folder."""
    if case.model in ARCHITECTURES:
        return case.architecture.build()
    return UNet2DConditionModel.from_pretrained(case.model, subfolder="unet")


def as_array(value: paddle.Tensor | np.ndarray) -> np.ndarray:
    """A tensor as float32 in NumPy, also from bfloat16, which NumPy lacks."""
    return value if isinstance(value, np.ndarray) else value.cast("float32").numpy()
