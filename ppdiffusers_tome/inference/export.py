"""Export a pipeline, with token merging, to a folder of Paddle Inference or ONNX programs."""

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppdiffusers import DiffusionPipeline
from tqdm.auto import tqdm

from ..config import Schedule
from ..errors import ToMeConfigError
from ..models import text_tokens, vae_factor
from ..patch import attach, detach
from . import programs
from .conversion import Converter
from .layout import copy_parts, describe_export, share_weights
from .manifest import ONNX_WEIGHTS, Manifest, ProgramFile, Size, list_programs, ratio_name, read_manifest
from .onnx_programs import SharedWeights
from .paddle_runtime import PaddleRuntime
from .programs import Traceable
from .replacement import replacing
from .request import Request, check_request
from .tracing import Saved, save


def export_pipeline(
    pipe: DiffusionPipeline,
    folder: str | Path,
    ratios: Iterable[float] | float | Mapping[float, float] | Schedule | None = None,
    sizes: Iterable[tuple[int, int]] | None = None,
    *,
    image_to_image: bool = False,
    merge_map: bool = False,
    controlnet: bool | float | Mapping[float, float] | Schedule = True,
    format: str = "paddle",
    overwrite: bool = False,
    others: str | Path | None = None,
    unets: Mapping[tuple[Size, float], Saved] | None = None,
    progress: bool = True,
    **settings: Any,
) -> Manifest:
    """Write a pipeline's models, with token merging, as Paddle Inference programs; the pipeline is not changed.

    The folder has the layout that ppdiffusers' `PaddleInfer…Pipeline` classes read (they use the first size and
    ratio), plus `tome.json`. Batch and text length are dynamic. Each program is loaded in a predictor and compared
    with eager on random inputs and two batch sizes. Random dst are drawn once, from `seed`, and are part of the
    program: the same as in eager with that seed.

    After any error the folder is unchanged. After a kill it is complete, the earlier or the new one, at the latest
    when it is next read or written: see `replacement.replacing`.

    Args:
        pipe: StableDiffusion, Img2Img, Inpaint or ControlNet pipeline, or StableDiffusionXL or its Img2Img.
        folder: must be new or empty, unless overwrite.
        ratios: one or several ratios, 0 for a plain program; the first is the default. A UNet program is written for
            each; all share one file of weights. A schedule, as in `apply_tome`, writes a program for each of its
            ratios and is the default of `load_pipeline`. None: the config that is applied to the pipeline now.
        sizes: (height, width) in pixels, a UNet program for each. None: the UNet's default size.
        image_to_image: also write the VAE's encoder, for image-to-image and inpainting.
        merge_map: also write a small program for each size and ratio that returns which tokens the UNet's first
            merging block merges; for Stable Diffusion without a ControlNet.
        controlnet: whether, or at what ratio, a ControlNet merges; as in `apply_tome`.
        format: "paddle" for Paddle Inference, "onnx" for ONNX Runtime and OpenVINO, or "both". ppdiffusers' own
            classes only read Paddle programs.
        overwrite: replace an earlier export in folder, once the new one is complete.
        others: an earlier export of the same pipeline, on the same file system. Its programs of models that do not
            merge, such as text encoder and VAE, are linked instead of written again.
        unets: programs of the UNet, by size and ratio, which `tracing.save` wrote with the same settings and format to
            the same file system: they are linked instead of traced again.
        progress: show a progress bar.
        settings: as in `apply_tome`: max_downsample, sx, sy, use_rand, seed, window, proportional, match, blend,
            merge_attn, merge_crossattn, merge_mlp, min_tokens.

    Returns:
        The manifest that was written to `tome.json`.

    Raises:
        ToMeConfigError: an argument is not allowed.
        NoMergeableLayerError: there is nothing to merge with these settings.
        ToMeExportError: this pipeline or this Paddle cannot be exported, or a program differs from the model by more
            than 1e-5 of its largest output.
        OSError: the files cannot be written.

    Example:
        >>> export_pipeline(pipe, "build/emoji", ratios=(0.5, 0), sizes=[(128, 128), (192, 128)])
    """
    request = check_request(pipe, folder, ratios, sizes, image_to_image, overwrite, controlnet, format, settings)
    if merge_map and (request.is_xl or request.controlnet is not None):
        raise ToMeConfigError(
            f"merge_map=True is not allowed for {type(pipe).__name__}: only Stable Diffusion without a ControlNet has "
            "such a program. Leave it out."
        )
    if merge_map and not any(request.configs):
        raise ToMeConfigError("merge_map=True is not allowed without a ratio above 0: nothing merges. Leave it out.")
    earlier = () if others is None else read_manifest(others).programs
    linked = {file.model: file for file in earlier if file.ratio is None and file.formats == request.formats}
    with replacing(request.folder) as partial, Converter() as converter:
        written: list[ProgramFile] = []
        weights: dict[str, SharedWeights] = {}  # of ONNX programs, by model
        programs_to_write = list_programs(
            request.sizes, request.configs, request.is_xl, request.image_to_image, merge_map
        )
        for model, size, ratio in tqdm(programs_to_write, desc="export", unit="program", disable=not progress):
            if others is not None and model in linked:
                written.append(_link(linked[model], Path(others), partial))
                continue
            cached = unets.get((size, ratio)) if unets and model == "unet" and size and ratio is not None else None
            written.append(_write(request, model, size, ratio, partial, written, weights, converter, cached))
        copy_parts(request, partial)
        manifest = describe_export(request, partial, written)
        manifest.save(partial)
    return manifest


def _link(file: ProgramFile, source: Path, folder: Path) -> ProgramFile:
    weights = [] if file.onnx is None else [_onnx_weights(file.model)]
    for name in (*file.paths, *weights):
        (folder / name).parent.mkdir(exist_ok=True)
        os.link(source / name, folder / name)
    return file


def _link_saved(saved: Saved, target: Path) -> Saved:
    if saved.onnx is not None:
        return saved
    target.mkdir(parents=True, exist_ok=True)
    program, params = (target / path.name for path in (saved.program, saved.params))
    os.link(saved.program, program)
    os.link(saved.params, params)
    return replace(saved, program=program, params=params)


def _onnx_weights(model: str) -> str:
    """The file of weights of a model's ONNX programs."""
    return f"onnx/{model}{ONNX_WEIGHTS}"


def _write(
    request: Request,
    model: str,
    size: Size | None,
    ratio: float | None,
    folder: Path,
    written: list[ProgramFile],
    weights: dict[str, SharedWeights],
    converter: Converter,
    cached: Saved | None,
) -> ProgramFile:
    """Save one program, or link a cached one; one copy of one model is in memory. Those of a UNet have a size."""
    factor = vae_factor(request.pipe)
    example = size or request.sizes[0]
    fixed = {"height": example.height, "width": example.width}
    fixed |= {"latent_height": example.height // factor, "latent_width": example.width // factor}
    dims = {**fixed, "tokens": text_tokens(request.pipe)}
    label = f"{model} at {size}" if size else model
    # ppdiffusers reads "unet"; only this package reads the others.
    name = "_".join([model, *([str(size)] if size else []), *([] if ratio is None else [ratio_name(ratio)])])
    target = folder / (name if written else "unet")
    to_onnx = converter if "onnx" in request.formats else None
    if cached is None:
        traceable = _traceable(request, model, ratio)
        saved = save(traceable, target, fixed if size else {}, dims, label, PaddleRuntime().cores(), to_onnx)
    else:
        saved = _link_saved(cached, target)
    file = ProgramFile(model, None, None, size, ratio, saved.parity, saved.onednn_parity)
    if saved.onnx is not None:
        if model not in weights:
            weights[model] = SharedWeights(folder / _onnx_weights(model))
        (weights[model].move if cached is None else weights[model].copy)(saved.onnx, folder / "onnx" / f"{name}.onnx")
        file = replace(file, onnx=f"onnx/{name}.onnx", onnx_parity=saved.onnx_parity)
    if "paddle" not in request.formats:
        shutil.rmtree(target, ignore_errors=True)
        return file
    params = share_weights(saved.params, [folder / str(other.params) for other in written if other.model == model])
    program, params = (path.relative_to(folder) for path in (saved.program, params))
    return replace(file, program=program.as_posix(), params=params.as_posix())


def _traceable(request: Request, model: str, ratio: float | None) -> Traceable:
    pipe = request.pipe
    if model == "vae_encoder":
        return programs.vae_encoder(pipe.vae)
    if model == "vae_decoder":
        return programs.vae_decoder(pipe.vae)
    if ratio is None:
        return programs.text_encoder(getattr(pipe, model), request.is_xl)
    is_map = model == "merge_map"
    traceable = programs.merge_map(pipe.unet) if is_map else programs.denoiser(pipe.unet, request.controlnet)
    config, controlnet_config = request.configs[ratio]
    detach(traceable.layer)  # the wraps of the originals, which were copied too
    if config is not None:
        attach(traceable.layer.unet, config, None)
    if controlnet_config is not None and request.controlnet is not None:
        attach(traceable.layer.controlnet, controlnet_config, controlnet_config)
    return traceable
