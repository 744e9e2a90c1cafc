"""Who draws: exported programs, the pipeline itself in eager mode, or a UNet in PyTorch that tomesd merges in."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from PIL import Image
from ppdiffusers import DiffusionPipeline, StableDiffusionPipeline
from ppdiffusers.models.unet_2d_condition import UNet2DConditionOutput

from ...config import ToMeConfig
from ...errors import ToMeConfigError
from ...inference import load_pipeline
from ...inference.loading import load_for_export
from ...serving.engine import Engine
from ...serving.jobs import Job
from ..torch_arm import TorchArm


class EagerEngine(Engine):
    """Draws with the pipeline's own models, merging each job by its ratio and the rest of `config`."""

    def __init__(self, pipe: DiffusionPipeline, config: ToMeConfig, name: str = "model") -> None:
        super().__init__(pipe, name=name)
        self._pipe = pipe
        self._settings = {key: value for key, value in asdict(config).items() if key != "ratio"}

    def generate(self, jobs: Sequence[Job], should_stop: Callable[[], bool] | None = None) -> list[Image.Image]:
        """See `Engine.generate`; the pipeline is left as it was."""
        ratio = jobs[0].ratio
        merging: AbstractContextManager[Any] = (
            self._pipe.tome(ratio=ratio, **self._settings) if ratio else nullcontext()
        )
        with merging:
            return super().generate(jobs, should_stop)


def load_eager(model: str, config: ToMeConfig) -> EagerEngine:
    """Load a pipeline from a folder or the hub, in float32.

    Raises:
        ToMeExportError: it cannot be loaded.
    """
    return EagerEngine(load_for_export(model, safety_checker=False), config, model)


class TorchUNet:
    """Stands for a UNet in a pipeline of ppdiffusers and asks PyTorch.

    Args:
        unet: the model, for its config.
        arm: PyTorch's process, which has the same model.
        merging: what tomesd is told, without the ratio; with `ratio` 0 it is not asked.
    """

    dtype = paddle.float32

    def __init__(self, unet: Any, arm: TorchArm, merging: Mapping[str, Any]) -> None:
        self.config = unet.config
        self.ratio = 0.0
        self._arm = arm
        self._merging = merging

    def __call__(
        self,
        sample: paddle.Tensor,  # [B, C, h, w]
        timestep: Any,
        encoder_hidden_states: paddle.Tensor,  # [B, T, D]
        return_dict: bool = True,
        **others: Any,
    ) -> Any:
        if given := [name for name, value in others.items() if value is not None]:
            raise ToMeConfigError(f"PyTorch's UNet is not given {', '.join(given)}: leave it out.")
        at = np.array([float(timestep)], dtype="float32")
        text = encoder_hidden_states.numpy()
        self._arm.take({"sample": sample.numpy(), "timestep": at, "encoder_hidden_states": text})
        merging = {**self._merging, "ratio": self.ratio} if self.ratio else None
        prediction = paddle.to_tensor(self._arm.output(merging))
        return UNet2DConditionOutput(sample=prediction) if return_dict else (prediction,)


class TorchEngine(Engine):
    """A pipeline of ppdiffusers whose UNet's work is done in another interpreter's process, in PyTorch.

    Everything else, the noise included, is the same as in the other engines, so pictures differ by the merging alone.

    Args:
        python: interpreter that has torch, diffusers and tomesd.
        model: folder of a StableDiffusionPipeline.
        config: what tomesd is told; it has no seed, and draws its random dst anew in every pass.
        threads: that PyTorch computes with.
        exported: a folder exported from `model`, whose programs do the rest; None: the models themselves.

    Raises:
        ToMeError: PyTorch's process fails.
        ToMeConfigError: the pipeline is not a StableDiffusionPipeline.
    """

    def __init__(
        self, python: str, model: str, config: ToMeConfig, threads: int, exported: Path | None = None
    ) -> None:
        pipe = load_for_export(model, safety_checker=False)
        if type(pipe) is not StableDiffusionPipeline:
            raise ToMeConfigError(
                f"{model} is a {type(pipe).__name__}: tomesd is compared on StableDiffusionPipeline."
            )
        self._folder = tempfile.TemporaryDirectory(prefix="torch_engine_")
        self._arm = TorchArm(python, Path(self._folder.name), pipe.unet, threads)
        self.about = self._arm.about
        merging = {key: value for key, value in asdict(config).items() if key not in ("ratio", "seed")}
        merging["max_downsample"] = config.max_downsample or 1
        stand_in = TorchUNet(pipe.unet, self._arm, merging)
        rest = pipe if exported is None else load_pipeline(exported, threads=threads)
        others = {name: part for name, part in rest.components.items() if name != "unet"}
        torch_pipe = StableDiffusionPipeline(unet=stand_in, **others, requires_safety_checker=False)
        super().__init__(torch_pipe, name=f"{model} in PyTorch")

    def close(self) -> None:
        """End PyTorch's process."""
        self._arm.close()
        self._folder.cleanup()


def without_ratio(config: ToMeConfig) -> ToMeConfig:
    """What an engine is made for: it draws at several ratios. The default one stands for them."""
    return replace(config, ratio=ToMeConfig().ratio)
