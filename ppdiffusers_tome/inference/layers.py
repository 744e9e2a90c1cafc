"""The layers that are traced: one around each of a pipeline's models, which takes its inputs by name."""

from collections.abc import Callable
from typing import Any

import paddle
from paddle import nn


class TextEncoder(nn.Layer):
    """Stable Diffusion's: the last hidden state [B, T, D], and the pooled one [B, D]."""

    def __init__(self, model: nn.Layer) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        out = self.model(input_ids, return_dict=True)
        return out[0], out[1]


class TextEncoderXL(TextEncoder):
    """SDXL's two: the last but one hidden state [B, T, D], and the pooled one, in the second projected, [B, D]."""

    def forward(self, input_ids: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        out = self.model(input_ids, output_hidden_states=True, return_dict=True)
        # Where there is no projection the first output is the last hidden state, and SDXL takes it for the pooled one.
        return out.hidden_states[-2], out[0]


class VaeEncoder(nn.Layer):
    """The mode of the latent distribution, [B, 4, h, w], and its log variance."""

    def __init__(self, model: nn.Layer) -> None:
        super().__init__()
        self.model = model

    def forward(self, sample: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        distribution = self.model.encode(sample).latent_dist
        return distribution.mode(), distribution.logvar


class VaeDecoder(nn.Layer):
    """A picture in -1 ... 1, [B, 3, H, W]."""

    def __init__(self, model: nn.Layer) -> None:
        super().__init__()
        self.model = model

    def forward(self, latent_sample: paddle.Tensor) -> paddle.Tensor:
        return self.model.decode(latent_sample, return_dict=False)[0]


class Fused(nn.Layer):
    """The UNet's prediction [B, C, h, w], with a ControlNet inside where there is one; and the same for SDXL.

    Each variant has a forward of its own, for `paddle.jit` exports no `*args`.
    """

    def __init__(self, unet: nn.Layer, controlnet: nn.Layer | None = None) -> None:
        super().__init__()
        self.unet = unet
        self.controlnet: Any = controlnet

    def record_directly(self) -> None:
        """Record what the models do without having Paddle translate their Python first: an export takes a tenth.

        Only where height and width are known: where they are not, ppdiffusers decides by shapes that it reads as -1.
        """
        for method in (self._predict, self._control):
            setattr(self, method.__name__, paddle.jit.not_to_static(_function(method)))

    def _predict(self, sample: Any, timestep: Any, text: Any, added: Any, **residuals: Any) -> paddle.Tensor:
        given = {"encoder_hidden_states": text, "added_cond_kwargs": added, "return_dict": False}
        return self.unet(sample, timestep, **given, **residuals)[0]

    def _control(self, sample: Any, timestep: Any, text: Any, added: Any, image: Any, scale: Any) -> paddle.Tensor:
        given = {"encoder_hidden_states": text, "added_cond_kwargs": added, "return_dict": False}
        down, mid = self.controlnet(sample, timestep, controlnet_cond=image, **given)
        # One scale for each residual, as ppdiffusers hands over.
        down = [residual * scale[i] for i, residual in enumerate(down)]
        residuals = {
            "down_block_additional_residuals": down,
            "mid_block_additional_residual": mid * scale[len(down)],
        }
        return self._predict(sample, timestep, text, added, **residuals)


class Denoiser(Fused):
    """Stable Diffusion's UNet."""

    def forward(
        self, sample: paddle.Tensor, timestep: paddle.Tensor, encoder_hidden_states: paddle.Tensor
    ) -> paddle.Tensor:
        return self._predict(sample, timestep, encoder_hidden_states, None)


class DenoiserXL(Fused):
    """SDXL's UNet."""

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
    """Stable Diffusion's UNet with a ControlNet."""

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
    """SDXL's UNet with a ControlNet."""

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


def _function(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method as a function, which takes the mark that Paddle puts on it."""
    return lambda *given, **more: method(*given, **more)
