"""What is timed: a pass of a UNet."""

import numpy as np
import paddle
from paddle import nn
from ppdiffusers import UNet2DConditionModel

from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.attach.placement import placements
from ppdiffusers_tome.export.programs import Traceable, denoiser, unet_inputs
from ppdiffusers_tome.macs import count_macs, saved_macs

from .architectures import ARCHITECTURES
from .cases import Case
from .memory import weights_bytes


class Workload:
    """The UNet of a case with its inputs, in evaluation mode."""

    def __init__(self, case: Case) -> None:
        paddle.seed(0)
        self.case, self.denoiser, self.latent = case, load_unet(case), case.architecture.latent(case.size)
        self.denoiser.eval()
        self._specs = unet_inputs(self.denoiser)
        self.weights = weights_bytes(self.denoiser)
        self.set_inputs(0)

    @paddle.no_grad()
    def run(self) -> paddle.Tensor:
        """One pass."""
        others = dict(self.inputs)
        positional = [others.pop(name) for name in ("sample", "timestep", "encoder_hidden_states")]
        return self.denoiser(*positional, added_cond_kwargs=others or None, return_dict=False)[0]

    def traceable(self) -> Traceable:
        """A copy of the denoiser for `export.tracing.save`; it may be changed."""
        return denoiser(self.denoiser, None)

    def set_inputs(self, seed: int) -> None:
        """Generate the inputs of the next passes."""
        stream = np.random.RandomState(seed)
        dims = {**self.dims, "batch": self.case.batch}
        self.inputs: dict[str, paddle.Tensor] = {spec.name: spec.random(stream, dims) for spec in self._specs}

    @property
    def dims(self) -> dict[str, int]:
        """The named dimensions of the inputs, except the batch."""
        text = self.case.architecture.text
        return {"latent_height": self.latent.h, "latent_width": self.latent.w, "tokens": text}

    def macs(self, config: ToMeConfig | None) -> int:
        """Multiply-accumulates of one pass of the UNet, for the whole batch."""
        text = self.case.architecture.text
        total = count_macs(self.denoiser, self.latent, text)
        if config is not None:
            for block, placement in placements(self.denoiser, config):
                total -= saved_macs(block, placement, self.latent, text)
        return total * self.case.batch


def load_unet(case: Case) -> nn.Layer:
    """The UNet of a case: of a published architecture with random weights, or of a folder."""
    if case.model in ARCHITECTURES:
        return case.architecture.build()
    return UNet2DConditionModel.from_pretrained(case.model, subfolder="unet")
