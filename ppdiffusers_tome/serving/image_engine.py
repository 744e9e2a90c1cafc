"""What an engine is, in this process or its own, and what is known of its model before it is loaded."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from PIL import Image

from ..errors import ToMeExportError
from ..run.manifest import Manifest
from .jobs import Job
from .limits import Limits

# Schedulers whose steps sample no noise, with their names in Stable Diffusion's user interfaces. Others sample it from
# one generator for the whole batch, so an image would depend on the rest of its batch: with them, jobs run one by one.
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


def sampler_of(scheduler: str) -> str:
    """The name of a scheduler's class in Stable Diffusion's user interfaces: "DDIM" for DDIMScheduler."""
    return DETERMINISTIC.get(scheduler, scheduler.removesuffix("Scheduler"))


class ImageSource(Protocol):
    """The model that generates an image, as the image's metadata describe it: a `ServedModel` or an engine."""

    @property
    def name(self) -> str:
        """The model's name for clients."""

    @property
    def sampler(self) -> str:
        """The scheduler's name in Stable Diffusion's user interfaces."""

    @property
    def methods(self) -> Mapping[float, str]:
        """How tokens merge, in words, by ratio."""


class ImageEngine(ImageSource, Protocol):
    """Generates images. One thread calls `generate` and `load_next`; any thread may call the remaining methods."""

    @property
    def can_batch(self) -> bool:
        """Whether jobs with equal `batch_key` may share a pipeline call."""

    @property
    def program_loads(self) -> int:
        """How often a program of the UNet was loaded, as far as this process knows."""

    def load_next(self) -> bool:
        """Load the next program that may be needed, if it is not loaded; returns whether there are more.

        Raises:
            EngineLostError: the engine's process has ended.
        """

    def generate(
        self, jobs: Sequence[Job], should_stop: Callable[[int, int], bool] | None = None
    ) -> list[Image.Image]:
        """Generate the images of the jobs in one pipeline call.

        Args:
            jobs: a single job, or several with equal `batch_key`, which is not None, if `can_batch`.
            should_stop: called with the number of finished steps and of all steps, of both passes if there are two,
                before the first step and after some or all steps. If it returns True, the call ends.

        Returns:
            The images, in the order of the jobs.

        Raises:
            AbandonedError: should_stop returned True.
            EngineLostError: the engine's process has ended. The engine must not be used afterwards.
            GenerationError: an image has values that are not finite.
            JobError: the scheduler does not support the number of steps.
        """

    def count_tokens(self, prompt: str) -> tuple[int, int, str]:
        """Count the tokens of a prompt.

        Returns:
            The number of tokens with the two around them, how many the text encoder reads, and the text beyond them.

        Raises:
            EngineLostError: the engine's process has ended.
        """


# Makes an engine. Its argument returns True when no engine is wanted any more: then an engine in its own process ends.
LoadEngine: TypeAlias = Callable[[Callable[[], bool]], ImageEngine]


@dataclass(frozen=True)
class ServedModel:
    """What clients see of a model, known before an engine has loaded it.

    Args:
        name, sampler, methods: see `ImageSource`.
        limits: the jobs that are allowed.
    """

    name: str
    sampler: str
    methods: Mapping[float, str]
    limits: Limits


def served_model(folder: Path, manifest: Manifest, limits: Limits) -> ServedModel:
    """The model in an exported folder.

    Args:
        folder, manifest: the folder and its `tome.json`.
        limits: see `ServedModel`.

    Raises:
        ToMeExportError: the folder's `model_index.json` is damaged.
    """
    path = folder / "model_index.json"
    try:
        _, scheduler = json.loads(path.read_text(encoding="utf-8"))["scheduler"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ToMeExportError(
            f"{path} names no scheduler ({error!r:.100}): export or copy the model again."
        ) from error
    return ServedModel(manifest.name, sampler_of(scheduler), manifest.methods, limits)
