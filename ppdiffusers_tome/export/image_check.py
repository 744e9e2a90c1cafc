"""Compare whole images of an exported folder with those of its pipeline.

`comparison.py` compares each program with its layer, in the call that was traced. What a pipeline does besides,
because of the class or the config of a component, shows in an image only.
"""

import copy
import inspect
from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import nn
from PIL import Image
from ppdiffusers import DiffusionPipeline

from ..errors import ToMeExportError
from ..families.kernels import attention_in_slices
from ..families.schedules import timesteps_of
from ..run.manifest import Manifest
from ..run.onnx_weights import OPTIMIZED
from ..run.pipeline import FROM_IMAGE, from_image, load_pipeline
from ..run.runtime import error_summary, return_memory
from ..run.sizes import Size
from .programs import merge_by, working_copy
from .request import DenoiserMerging
from .tracing import on_cpu

PROMPT = "a photo of a fox"
GUIDANCE = 2.0  # so that a negative prompt matters
STEPS = 2  # that run; more where the scheduler has no schedule of so few
MOST_STEPS = 10
STRENGTH = 0.5  # of what starts from an image: noise and image have about the same weight
# Largest difference of images from 0 to 1: five of 255 levels. Rounding makes 1e-5. `tomesd` pairs tokens by their
# similarity, so rounding changes some pairs, which makes up to 5e-3. A component that behaves differently makes 0.1
# and more.
TOLERANCE = 0.02


class ImageCase(NamedTuple):
    """How one of the images is generated.

    Args:
        merging: which program of the UNet runs, and how the pipeline merges.
        starts_from_image: by the image-to-image pipeline over the models of a pipeline for text-to-image.
    """

    merging: DenoiserMerging
    starts_from_image: bool


@on_cpu()
def compare_images(
    pipe: DiffusionPipeline, folder: Path, manifest: Manifest, merging: Sequence[DenoiserMerging]
) -> float:
    """Generate images with a pipeline in eager mode and with its export, in the first exported size.

    Args:
        pipe: the pipeline that was exported; it is not changed.
        folder, manifest: the export and its `tome.json`.
        merging: how its programs merge.

    Returns:
        The largest difference of an image, whose values are from 0 to 1.

    Raises:
        ToMeExportError: it exceeds TOLERANCE, or an image cannot be generated.
    """
    cases = image_cases(manifest, merging)
    states = paddle.get_rng_state(), paddle.get_cuda_rng_state()
    try:
        expected = _eager_images(pipe, cases, manifest.sizes[0])
        return_memory()
        actual = _exported_images(folder, cases, manifest.sizes[0])
    finally:
        paddle.set_rng_state(states[0])
        paddle.set_cuda_rng_state(states[1])
    differences = [float(np.abs(image - wanted).max()) for image, wanted in zip(actual, expected, strict=True)]
    for case, difference in zip(cases, differences, strict=True):
        if not difference <= TOLERANCE:
            kind = "an image from another image" if case.starts_from_image else "an image"
            raise ToMeExportError(
                f"{kind} of the export, at ratio {case.merging.ratio:g}, differs from the pipeline's by "
                f"{difference:.2g} of 1, more than the allowed {TOLERANCE:g}, although each program computes what its "
                "model does: the pipeline does something that an export does not, so nothing was written. Please "
                "report it with the classes and configs of the pipeline's components. To export it all the same, "
                "leave out the check of images: image_check=False (--no-image-check)."
            )
    return max(differences)


def image_cases(manifest: Manifest, merging: Sequence[DenoiserMerging]) -> list[ImageCase]:
    """The images to compare: as few as use the first program that merges, a plain program, and each pipeline once."""
    merged, plain = ([way for way in merging if bool(way.ratio) == merges][:1] for merges in (True, False))
    programs = [*merged, *plain]
    has_both = manifest.image_to_image and manifest.pipeline in FROM_IMAGE
    starts = [False, True] if has_both else [False]
    count = max(len(programs), len(starts))
    return [ImageCase(programs[i % len(programs)], starts[i % len(starts)]) for i in range(count)]


def _eager_images(pipe: DiffusionPipeline, cases: Sequence[ImageCase], size: Size) -> list[np.ndarray]:
    eager = copy.copy(pipe)
    models = {name: model for name, model in vars(pipe).items() if isinstance(model, nn.Layer)}
    copies = {name: working_copy(model) for name, model in models.items()}  # as those that are traced
    scheduler = copy.deepcopy(pipe.scheduler)
    tensors = {name: value.cpu() for name, value in vars(scheduler).items() if paddle.is_tensor(value)}
    vars(scheduler).update(tensors)
    vars(eager).update(copies, scheduler=scheduler)
    images = []
    with attention_in_slices(*copies.values()):
        for case in cases:
            merge_by(eager, *case.merging.configs)
            try:
                images.append(_generate(eager, case, size))
            except Exception as error:  # of ppdiffusers, Paddle or the user's model
                raise ToMeExportError(
                    f"the pipeline itself cannot generate an image of {size} ({error_summary(error)}), so nothing was "
                    "written. To export it all the same, leave out the check of images: image_check=False "
                    "(--no-image-check)."
                ) from error
    return images


def _exported_images(folder: Path, cases: Sequence[ImageCase], size: Size) -> list[np.ndarray]:
    images = []
    try:
        pipe = load_pipeline(folder, verify=False, max_programs=1)
        for case in cases:
            pipe.unet.ratio = case.merging.ratio
            images.append(_generate(pipe, case, size))
    except Exception as error:
        raise ToMeExportError(
            f"the export cannot generate an image of {size}, which the pipeline can ({error_summary(error)}), so "
            "nothing was written. Please report it with the classes and configs of the pipeline's components."
        ) from error
    rmtree(folder / "onnx" / OPTIMIZED, ignore_errors=True)  # that ONNX Runtime has written for this machine
    return images


def _generate(pipe: DiffusionPipeline, case: ImageCase, size: Size) -> np.ndarray:
    """Images from 0 to 1, [1, height, width, 3]."""
    pipe = from_image(pipe) if case.starts_from_image else pipe
    pipe.set_progress_bar_config(disable=True)
    steps = next((n for n in range(STEPS, MOST_STEPS) if timesteps_of(pipe.scheduler, n) is not None), STEPS)
    pixels = np.random.RandomState(0).randint(0, 256, (*size, 3), dtype="uint8")
    mask = np.zeros(size, "uint8")
    mask[:, size.width // 2 :] = 255
    possible = {
        "height": size.height,
        "width": size.width,
        "image": Image.fromarray(pixels),
        "mask_image": Image.fromarray(mask),
        "strength": STRENGTH,
    }
    parameters = inspect.signature(type(pipe).__call__).parameters
    arguments: dict[str, Any] = {name: value for name, value in possible.items() if name in parameters}
    if "strength" in arguments:
        steps = round(steps / STRENGTH)
    paddle.seed(0)
    output = pipe(PROMPT, num_inference_steps=steps, guidance_scale=GUIDANCE, output_type="np", **arguments)
    return np.asarray(output.images)
