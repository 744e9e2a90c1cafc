"""The layers that are traced: one wrapper for each of a pipeline's models, with named inputs."""

from typing import Any

import paddle
from paddle import nn

from ..errors import ToMeExportError
from ..matching import MergePlan
from ..models import find_blocks
from ..wraps import current_plan


class TextEncoder(nn.Layer):
    """Text encoder of Stable Diffusion: the last hidden state [B, T, D] and the pooled one [B, D]."""

    def __init__(self, model: nn.Layer) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        out = self.model(input_ids, return_dict=True)
        return out[0], out[1]


class TextEncoderXL(TextEncoder):
    """Text encoders of SDXL: the penultimate hidden state [B, T, D] and the pooled (second: projected) one [B, D]."""

    def forward(self, input_ids: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        out = self.model(input_ids, output_hidden_states=True, return_dict=True)
        # Without a projection the first output is the last hidden state, which SDXL reads as the pooled one.
        return out.hidden_states[-2], out[0]


class VaeEncoder(nn.Layer):
    """VAE encoder: the mode of the latent distribution, [B, 4, h, w], and its log variance."""

    def __init__(self, model: nn.Layer) -> None:
        super().__init__()
        self.model = model

    def forward(self, sample: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        distribution = self.model.encode(sample).latent_dist
        return distribution.mode(), distribution.logvar


class VaeDecoder(nn.Layer):
    """VAE decoder: an image [B, 3, H, W], from -1 to 1."""

    def __init__(self, model: nn.Layer) -> None:
        super().__init__()
        self.model = model

    def forward(self, latent_sample: paddle.Tensor) -> paddle.Tensor:
        return self.model.decode(latent_sample, return_dict=False)[0]


class Fused(nn.Layer):
    """UNet, fused with a ControlNet if there is one: the prediction [B, C, h, w].

    Each subclass has its own forward because `paddle.jit` cannot export `*args`.
    """

    def __init__(self, unet: nn.Layer, controlnet: nn.Layer | None = None) -> None:
        super().__init__()
        self.unet = unet
        self.controlnet: Any = controlnet

    # Traced without a translation of the models' Python code, which would take nine tenths of an export.

    @paddle.jit.not_to_static
    def _predict(self, sample: Any, timestep: Any, text: Any, added: Any, **residuals: Any) -> paddle.Tensor:
        arguments = {"encoder_hidden_states": text, "added_cond_kwargs": added, "return_dict": False}
        return self.unet(sample, timestep, **arguments, **residuals)[0]

    @paddle.jit.not_to_static
    def _control(self, sample: Any, timestep: Any, text: Any, added: Any, image: Any, scale: Any) -> paddle.Tensor:
        arguments = {"encoder_hidden_states": text, "added_cond_kwargs": added, "return_dict": False}
        down, mid = self.controlnet(sample, timestep, controlnet_cond=image, **arguments)
        # One scale for each residual, as ppdiffusers passes them.
        down = [residual * scale[i] for i, residual in enumerate(down)]
        residuals = {
            "down_block_additional_residuals": down,
            "mid_block_additional_residual": mid * scale[len(down)],
        }
        return self._predict(sample, timestep, text, added, **residuals)


class Denoiser(Fused):
    """UNet of Stable Diffusion."""

    def forward(
        self, sample: paddle.Tensor, timestep: paddle.Tensor, encoder_hidden_states: paddle.Tensor
    ) -> paddle.Tensor:
        return self._predict(sample, timestep, encoder_hidden_states, None)


class DenoiserXL(Fused):
    """UNet of SDXL."""

    def forward(
        self,
        sample: paddle.Tensor,
        timestep: paddle.Tensor,
        encoder_hidden_states: paddle.Tensor,
        text_embeds: paddle.Tensor,
        time_ids: paddle.Tensor,
    ) -> paddle.Tensor:
        added = {"text_embeds": text_embeds, "time_ids": time_ids}
        return self._predict(sample, timestep, encoder_hidden_states, added)


class ControlledDenoiser(Fused):
    """UNet of Stable Diffusion with a ControlNet."""

    def forward(
        self,
        sample: paddle.Tensor,
        timestep: paddle.Tensor,
        encoder_hidden_states: paddle.Tensor,
        controlnet_cond: paddle.Tensor,
        controlnet_conditioning_scale: paddle.Tensor,
    ) -> paddle.Tensor:
        text, scale = encoder_hidden_states, controlnet_conditioning_scale
        return self._control(sample, timestep, text, None, controlnet_cond, scale)


class ControlledDenoiserXL(Fused):
    """UNet of SDXL with a ControlNet."""

    def forward(
        self,
        sample: paddle.Tensor,
        timestep: paddle.Tensor,
        encoder_hidden_states: paddle.Tensor,
        text_embeds: paddle.Tensor,
        time_ids: paddle.Tensor,
        controlnet_cond: paddle.Tensor,
        controlnet_conditioning_scale: paddle.Tensor,
    ) -> paddle.Tensor:
        added = {"text_embeds": text_embeds, "time_ids": time_ids}
        text, scale = encoder_hidden_states, controlnet_conditioning_scale
        return self._control(sample, timestep, text, added, controlnet_cond, scale)


class _Planned(Exception):
    """Ends a pass of a UNet in its first block that merges."""

    def __init__(self, plan: MergePlan) -> None:
        super().__init__()
        self.plan = plan


class MergeMap(nn.Layer):
    """The first merging block of a UNet: the group of each token, [B, N] int64, equal for tokens that merge."""

    def __init__(self, unet: nn.Layer) -> None:
        super().__init__()
        self.unet = unet
        for block in find_blocks(unet):
            block.block.norm1.register_forward_pre_hook(_end_with_plan)  # it runs inside the block, before attention

    def forward(self, sample: paddle.Tensor, timestep: paddle.Tensor) -> paddle.Tensor:
        return self._groups(sample, timestep)

    @paddle.jit.not_to_static
    def _groups(self, sample: Any, timestep: Any) -> paddle.Tensor:
        try:
            self.unet(sample, timestep, encoder_hidden_states=None)
        except _Planned as end:
            return end.plan.source_rows.reshape([-1, end.plan.tokens])
        raise ToMeExportError("no block merges before the text is read, so there is no merge map: leave it out")


def _end_with_plan(layer: nn.Layer, inputs: Any) -> None:
    if (plan := current_plan()) is not None:
        raise _Planned(plan)
