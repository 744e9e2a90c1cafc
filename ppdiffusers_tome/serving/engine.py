"""From jobs to pictures: one pipeline call for jobs that agree in size, steps, guidance and ratio. No HTTP."""

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import paddle
from PIL import Image
from ppdiffusers import StableDiffusionImg2ImgPipeline as FromImage
from ppdiffusers import StableDiffusionPipeline as FromText
from ppdiffusers import StableDiffusionXLImg2ImgPipeline as FromImageXL
from ppdiffusers import StableDiffusionXLPipeline as FromTextXL
from ppdiffusers.image_processor import VaeImageProcessor

from ..errors import ToMeConfigError
from ..inference import load_pipeline, read_manifest
from .errors import AbandonedError, DrawingError
from .jobs import Job

# Schedulers whose steps draw no noise. What the others draw comes from one generator for the whole batch, so that a
# picture would depend on its neighbours: with those, jobs are drawn one by one.
DETERMINISTIC = {
    "DDIMScheduler": "DDIM",
    "DEISMultistepScheduler": "DEIS",
    "DPMSolverMultistepScheduler": "DPM++ 2M",
    "DPMSolverSinglestepScheduler": "DPM++ 2S",
    "EulerDiscreteScheduler": "Euler",
    "HeunDiscreteScheduler": "Heun",
    "LMSDiscreteScheduler": "LMS",
    "PNDMScheduler": "PLMS",
    "UniPCMultistepScheduler": "UniPC",
}


class FiniteImageProcessor(VaeImageProcessor):
    """ppdiffusers' own, except that it raises DrawingError on NaN and infinity, which are black and white as uint8."""

    def postprocess(self, image: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not paddle.isfinite(image.cast("float32")).all():
            raise DrawingError("an image has values that are not finite: the weights are damaged, or overflow")
        return super().postprocess(image, *args, **kwargs)


class Engine:
    """Draws pictures with one text-to-image pipeline and, where it is given, one image-to-image pipeline.

    Use it from one thread: Paddle's random generator and current device belong to the whole process.

    Args:
        text_to_image: a pipeline whose UNet has the attribute `ratio`, as `inference.load_pipeline` makes them.
        image_to_image: one over the same models; None where the VAE's encoder was not exported.
        name: what clients call the model.
    """

    def __init__(self, text_to_image: Any, image_to_image: Any | None = None, name: str = "model") -> None:
        self.name = name
        self._text_to_image = text_to_image
        self._image_to_image = image_to_image
        for pipe in (text_to_image, image_to_image):
            if pipe is not None:
                pipe.set_progress_bar_config(disable=True)
                pipe.image_processor = FiniteImageProcessor.from_config(pipe.image_processor.config)

    def batch_key(self, job: Job) -> Hashable | None:
        """Jobs of equal keys may be drawn in one call; None: this job must be drawn alone.

        ppdiffusers' image-to-image pipelines draw their noise inside, for the whole batch at once, so those jobs are
        drawn alone. So is every job where the scheduler's steps draw noise.
        """
        if job.image is not None or not self._is_deterministic():
            return None
        return job.height, job.width, job.steps, job.guidance_scale, job.ratio

    def generate(self, jobs: Sequence[Job], should_stop: Callable[..., bool] | None = None) -> list[Image.Image]:
        """Draw the jobs in one pipeline call.

        Args:
            jobs: one, or several of equal `batch_key`.
            should_stop: called before the first step, and after each with the number of steps that are done and of
                all steps; where it returns True, drawing ends.

        Returns:
            RGB pictures, in the order of the jobs. Each is the picture that `paddle.seed(seed); pipe(prompt)` draws,
            up to rounding: every job's noise comes from its own seed.

        Raises:
            AbandonedError: should_stop returned True.
            DrawingError: an image is not finite.
            ToMeConfigError: jobs that cannot be drawn together, an image without an image-to-image pipeline, one that
                is not RGB or not of the job's size, or a size or ratio that was not exported.
        """
        first = jobs[0]
        key = self.batch_key(first)
        if len(jobs) > 1 and (key is None or any(self.batch_key(job) != key for job in jobs[1:])):
            raise ToMeConfigError(f"{len(jobs)} jobs cannot be drawn in one call: their batch_key is None or differs")
        if should_stop is not None and should_stop():
            raise AbandonedError("drawing stopped before its first step")
        common = {
            "prompt": [job.prompt for job in jobs],
            "negative_prompt": [job.negative_prompt for job in jobs],
            "num_inference_steps": first.steps,
            "guidance_scale": first.guidance_scale,
            "callback_on_step_end": None if should_stop is None else _stopper(should_stop),
        }
        if first.image is not None:
            return self._from_image(first, common)
        self._text_to_image.unet.ratio = first.ratio
        noise = paddle.concat([self._noise(job) for job in jobs])
        return list(self._text_to_image(**common, height=first.height, width=first.width, latents=noise).images)

    def _from_image(self, job: Job, common: dict[str, Any]) -> list[Image.Image]:
        if self._image_to_image is None or job.image is None:
            raise ToMeConfigError(f"{self.name} has no image-to-image pipeline: export it with --img2img")
        if job.image.mode != "RGB" or job.image.size != (job.width, job.height):
            size = f"{job.image.width}x{job.image.height}"
            raise ToMeConfigError(
                f"a {job.image.mode} image of {size} is not allowed: it must be RGB, {job.width}x{job.height}"
            )
        self._image_to_image.unet.ratio = job.ratio
        paddle.seed(job.seed)
        return list(self._image_to_image(**common, image=job.image, strength=job.strength).images)

    def _noise(self, job: Job) -> paddle.Tensor:
        """[1, C, height / f, width / f]: the noise that the pipeline itself would draw after paddle.seed(seed)."""
        factor = self._text_to_image.vae_scale_factor
        channels = self._text_to_image.unet.config.in_channels
        paddle.seed(job.seed)
        return paddle.randn([1, channels, job.height // factor, job.width // factor])

    def _is_deterministic(self) -> bool:
        scheduler = self._text_to_image.scheduler
        is_stochastic = str(scheduler.config.get("algorithm_type", "")).startswith("sde")
        return type(scheduler).__name__ in DETERMINISTIC and not is_stochastic

    @property
    def sampler(self) -> str:
        """The scheduler's name in the words of Stable Diffusion's user interfaces, "DDIM" for DDIMScheduler."""
        name = type(self._text_to_image.scheduler).__name__
        return DETERMINISTIC.get(name, name.removesuffix("Scheduler"))


def load_engine(folder: Path, device: str = "cpu", threads: int | None = None, verify: bool = True) -> Engine:
    """Load an exported folder, image to image too where it was exported.

    Args:
        folder: what `export_pipeline` wrote.
        device, threads: as for `inference.load_pipeline`.
        verify: compare the weights with their hashes, which takes seconds for each GB.

    Raises:
        ToMeError: the folder is no export or is damaged (from `inference`), or is one of a ControlNet or an
            inpainting model.
    """
    manifest = read_manifest(folder)
    if manifest.controlnet:
        raise ToMeConfigError(f"{folder} has a ControlNet, which wants a picture in every step: it cannot be served")
    is_xl = manifest.pipeline.startswith("StableDiffusionXL")
    pipe = load_pipeline(folder, FromTextXL if is_xl else FromText, device=device, threads=threads, verify=verify)
    if pipe.unet.config.in_channels != pipe.vae.config.latent_channels:
        raise ToMeConfigError(f"{folder} is a model for inpainting, which cannot be served")
    other = None
    if manifest.image_to_image:
        safety = {} if is_xl else {"requires_safety_checker": False}
        other = (FromImageXL if is_xl else FromImage)(**pipe.components, **safety)
    return Engine(pipe, other, manifest.name)


def _stopper(should_stop: Callable[..., bool]) -> Callable[..., dict[str, Any]]:
    def after_step(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if should_stop(step + 1, pipe.num_timesteps):
            raise AbandonedError(f"drawing stopped after step {step + 1}")
        return tensors

    return after_step
