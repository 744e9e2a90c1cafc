"""The engine of this process: a pipeline over an exported folder, which generates the images of jobs. No HTTP."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import paddle
from PIL import Image
from ppdiffusers import StableDiffusionPipeline as FromText
from ppdiffusers import StableDiffusionXLPipeline as FromTextXL
from ppdiffusers.image_processor import VaeImageProcessor

from ..errors import ExportChangedError, ToMeConfigError
from ..run.manifest import Manifest, is_refiner, read_manifest
from ..run.models import ExportedUNet
from ..run.pipeline import from_image, load_pipeline
from ..run.sizes import Size
from .image_engine import DETERMINISTIC, sampler_of
from .jobs import AbandonedError, GenerationError, Job, JobError
from .limits import Limits

TRIAL_STEPS = 10  # more than the order of any scheduler, from which on its steps do all that they can


class FiniteImageProcessor(VaeImageProcessor):
    """ppdiffusers' image processor, which raises GenerationError on NaN and infinity instead of casting them."""

    def postprocess(self, image: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not paddle.isfinite(image.cast("float32")).all():
            reason = "the weights are damaged, or activations overflow"
            raise GenerationError(f"an image has values that are not finite: {reason}")
        return super().postprocess(image, *args, **kwargs)


class Engine:
    """An `ImageEngine` with a text-to-image pipeline and, optionally, an image-to-image pipeline.

    An image equals the image of `paddle.seed(seed); pipe(prompt)` up to rounding, because every job's noise comes from
    its own seed. Use the engine from one thread: Paddle's random generator and current device are shared by the whole
    process.

    Args:
        text_to_image: a pipeline whose UNet has the method `select`, as from `inference.load_pipeline`.
        image_to_image: a pipeline over the same models; None if the VAE's encoder was not exported.
        name: the model's name for clients.
        methods: how tokens merge, in words, by ratio; for the images' metadata.
        programs: sizes and ratios of the UNet's programs that `load_next` loads, in this order.
    """

    def __init__(
        self,
        text_to_image: Any,
        image_to_image: Any | None = None,
        name: str = "model",
        methods: Mapping[float, str] | None = None,
        programs: Sequence[tuple[Size, float]] = (),
    ) -> None:
        self.name, self.methods = name, methods or {}
        self._programs = [*programs]
        self._text_to_image = text_to_image
        self._image_to_image = image_to_image
        for pipe in (text_to_image, image_to_image):
            if pipe is not None:
                pipe.set_progress_bar_config(disable=True)
                pipe.image_processor = FiniteImageProcessor.from_config(pipe.image_processor.config)

    def load_next(self) -> bool:
        """See `ImageEngine.load_next`."""
        if self._programs:
            self._text_to_image.unet.load(*self._programs.pop(0))
        return bool(self._programs)

    @property
    def program_loads(self) -> int:
        """How often a program of the UNet was loaded. It exceeds the number of programs if not all fit in memory."""
        unet = self._text_to_image.unet
        return unet.loads if isinstance(unet, ExportedUNet) else 0

    def count_tokens(self, prompt: str) -> tuple[int, int, str]:
        """See `ImageEngine.count_tokens`."""
        tokenizer = self._text_to_image.tokenizer
        limit, tokens = tokenizer.model_max_length, tokenizer(prompt, verbose=False).input_ids
        cut = tokenizer.decode(tokens[limit - 1 : -1]) if len(tokens) > limit else ""
        return len(tokens), limit, cut

    @property
    def can_batch(self) -> bool:
        """See `ImageEngine.can_batch`: not if the scheduler's steps sample noise, for the whole batch at once."""
        scheduler = self._text_to_image.scheduler
        is_stochastic = str(scheduler.config.get("algorithm_type", "")).startswith("sde")
        return type(scheduler).__name__ in DETERMINISTIC and not is_stochastic

    def generate(
        self, jobs: Sequence[Job], should_stop: Callable[[int, int], bool] | None = None
    ) -> list[Image.Image]:
        """See `ImageEngine.generate`; should_stop is called before the first step and after each.

        Raises:
            ToMeConfigError: a job starts from an image and there is no image-to-image pipeline, or its size was not
                exported.
        """
        first = jobs[0]
        self._check_steps("steps", first.steps, first.strength)
        if first.second_pass is not None:
            self._check_steps("second_pass.steps", first.second_pass.scheduled_steps, first.second_pass.strength)
        if should_stop is not None and should_stop(0, first.steps_to_run):
            raise AbandonedError("stopped before the first step")
        finished = count(1)

        def after_step(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            done = next(finished)
            steps = max(first.steps_to_run, pipe.num_timesteps, done)  # some schedulers take more than they are asked
            if should_stop is not None and should_stop(done, steps):
                raise AbandonedError(f"stopped after step {done}")
            return tensors

        return self._images(jobs, after_step)

    def _images(self, jobs: Sequence[Job], after_step: Callable[..., Any]) -> list[Image.Image]:
        first = jobs[0]
        if first.image is not None:
            return self._from_image(first, first.image, after_step)
        self._text_to_image.unet.select(first.ratio)
        noise = paddle.concat([self._noise(job) for job in jobs])
        size = first.size._asdict()
        images = list(self._text_to_image(**_settings(jobs, after_step), **size, latents=noise).images)
        if (second := first.second_pass) is None:
            return images
        enlarged = images[0].resize((second.size.width, second.size.height), Image.Resampling.LANCZOS)
        job = replace(first, size=second.size, ratio=second.ratio, strength=second.strength, second_pass=None)
        return self._from_image(replace(job, steps=second.scheduled_steps), enlarged, after_step)

    def _from_image(self, job: Job, image: Image.Image, after_step: Callable[..., Any]) -> list[Image.Image]:
        if self._image_to_image is None:
            raise ToMeConfigError(f"{self.name} has no image-to-image pipeline: export it with --img2img")
        self._image_to_image.unet.select(job.ratio)
        paddle.seed(job.seed)
        settings = {**_settings([job], after_step), "image": image, "strength": job.strength}
        return list(self._image_to_image(**settings).images)

    @property
    def fewest_steps(self) -> int:
        """The smallest number of steps, from 2, that the scheduler has: PNDM with Runge-Kutta steps needs 4."""
        return next((steps for steps in range(2, TRIAL_STEPS) if self._has_steps(steps)), 2)

    def _has_steps(self, steps: int, strength: float | None = None) -> bool:
        """Whether the scheduler supports the number of steps, within the timesteps of training."""
        scheduler = self._text_to_image.scheduler
        skipped = 0 if strength is None else steps - int(steps * strength)
        try:
            scheduler.set_timesteps(steps)
            first = float(scheduler.timesteps[skipped * scheduler.order :].max())
        except (ValueError, IndexError):  # more steps than trained timesteps; some schedulers need two or four
            return False
        return first < scheduler.config.num_train_timesteps  # else an index out of range in the scheduler's tables

    def _check_steps(self, field: str, steps: int, strength: float | None) -> None:
        """Raise JobError unless the scheduler supports the number of steps."""
        if not self._has_steps(steps, strength):
            message = f"the exported scheduler, {self.sampler}, has no schedule of {steps} steps"
            raise JobError(field, f"{message}: choose another number, such as 20")

    def _noise(self, job: Job) -> paddle.Tensor:
        """[1, C, height / f, width / f]: the noise that the pipeline itself would sample after paddle.seed(seed)."""
        factor = self._text_to_image.vae_scale_factor
        channels = self._text_to_image.unet.config.in_channels
        paddle.seed(job.seed)
        return paddle.randn([1, channels, job.size.height // factor, job.size.width // factor])

    @property
    def sampler(self) -> str:
        """See `ImageSource.sampler`."""
        return sampler_of(type(self._text_to_image.scheduler).__name__)


def load_engine(
    folder: Path,
    programs: Sequence[tuple[Size, float]] = (),
    expected: Manifest | None = None,
    **settings: Any,
) -> Engine:
    """Load an exported folder, with image-to-image if it was exported.

    Args:
        folder: the output of `export_pipeline`.
        programs: see `Engine`.
        expected: the manifest that the jobs were made for, which is read again only to compare it with the files that
            were loaded; None: any.
        settings: of `inference.load_pipeline`, such as runtime, device, threads and verify.

    Raises:
        ExportChangedError: the folder is not the expected export.
        ToMeError: the folder is not an export or is damaged (from `inference`), has a ControlNet, an inpainting
            model or SDXL's refiner, or a scheduler whose steps fail in this version of Paddle.
    """
    manifest = expected or read_manifest(folder)
    if manifest.controlnet:
        raise ToMeConfigError(f"{folder} has a ControlNet, which needs an image in every step: it cannot be served")
    if is_refiner(manifest):
        raise ToMeConfigError(f"{folder} is SDXL's refiner, which needs an image in every call: it cannot be served")
    is_xl = manifest.pipeline.startswith("StableDiffusionXL")
    pipe = load_pipeline(folder, FromTextXL if is_xl else FromText, **settings)
    manifest = pipe.unet.manifest  # the folder may have been replaced
    if expected is not None and manifest.files != expected.files:
        raise ExportChangedError(f"{folder} has been replaced by another export since it was read: start again.")
    if pipe.unet.config.in_channels != pipe.vae.config.latent_channels:
        raise ToMeConfigError(f"{folder} is an inpainting model, which cannot be served")
    if reason := scheduler_failure(pipe.scheduler):
        raise ToMeConfigError(
            f"{folder} has a scheduler, {type(pipe.scheduler).__name__}, that fails in Paddle {paddle.__version__} "
            f"({reason}): use another version of Paddle, or export the model with another scheduler, such as "
            "pipe.scheduler = DPMSolverMultistepScheduler.from_config(pipe.scheduler.config)"
        )
    image_to_image = from_image(pipe) if manifest.image_to_image else None
    return Engine(pipe, image_to_image, manifest.name, manifest.methods, programs)


def load_warm_engine(
    folder: Path, limits: Limits, guidance_scale: float, settings: dict[str, Any], threads: int | None
) -> Engine:
    """Load an engine with its default program, and warm it up. The pool loads the rest while no image waits.

    Paddle's programs are all loaded here: while it creates a predictor it holds Python's global lock, for over a
    second, and the server could not answer.
    """
    programs = [(size, ratio) for size in limits.sizes for ratio in limits.ratios]
    engine = load_engine(folder, programs, threads=threads, **settings)
    for job in warm_up_jobs(limits, guidance_scale, engine.fewest_steps):
        engine.generate([job])
    while settings["runtime"] == "paddle" and engine.load_next():
        pass
    return engine


def warm_up_jobs(limits: Limits, guidance_scale: float, steps: int = 2) -> list[Job]:
    """A small job with the defaults, and a job from an image, to run before the server is ready.

    They load the models beside the UNet, whose predictors are created at their first use.
    """
    size = limits.sizes[0]
    job = Job("", size, limits.ratios[0], seed=0, steps=steps, guidance_scale=guidance_scale)
    if not limits.image_to_image:
        return [job]
    return [job, replace(job, image=Image.new("RGB", (size.width, size.height)), strength=1.0)]


def scheduler_failure(scheduler: Any) -> str | None:
    """Why the steps of a scheduler fail in this version of Paddle, as UniPC's do in Paddle 3; None if they run."""
    trial, sample = type(scheduler).from_config(scheduler.config), paddle.zeros([1, 4, 8, 8])
    try:
        trial.set_timesteps(TRIAL_STEPS)
    except (ValueError, IndexError):  # it has no schedule of so many steps, which is no failure
        return None
    try:
        for timestep in trial.timesteps:
            sample = trial.step(trial.scale_model_input(sample, timestep), timestep, sample).prev_sample
    except Exception as error:  # anything from Paddle
        first_line = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {first_line:.200}"
    return None


def _settings(jobs: Sequence[Job], after_step: Callable[..., Any]) -> dict[str, Any]:
    """Arguments of the pipeline calls that both pipelines take.

    Jobs of one call have all a negative prompt or all none. SDXL's pipelines compute with zeros where there is none,
    which is not the embedding of an empty text.
    """
    negative = [job.negative_prompt for job in jobs]
    return {
        "prompt": [job.prompt for job in jobs],
        "negative_prompt": negative if any(negative) else None,
        "num_inference_steps": jobs[0].steps,
        "guidance_scale": jobs[0].guidance_scale,
        "callback_on_step_end": after_step,
    }
