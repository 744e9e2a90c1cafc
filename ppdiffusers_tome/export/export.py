"""Export a pipeline, with token merging, to a folder of ONNX or Paddle Inference programs."""

import filecmp
import inspect
import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paddle
import ppdiffusers
from ppdiffusers import DiffusionPipeline

from .._version import __version__
from ..attach.attach import attach, detach
from ..config import ToMeConfig
from ..families.models import text_tokens, vae_factor
from ..replacement import replacing
from ..run.defaults import DEFAULTS
from ..run.folder import ONNX_WEIGHTS, FileFacts, sha256
from ..run.manifest import (
    CONFIGS,
    CONTROLNET_CONFIG,
    COPIED,
    READERS,
    Manifest,
    PlannedProgram,
    ProgramFile,
    Size,
    list_programs,
    ratio_name,
)
from ..run.onnx_weights import SharedWeights
from ..run.paddle_runtime import PaddleRuntime
from . import programs
from .comparison import Comparison
from .conversion import Converter
from .diffusers_layout import check_loadable, write_layout
from .exportable import (
    applied_merging,
    check_merging,
    check_pipeline,
    controlnet_of,
    is_xl,
    sizes_for,
    text_encoders,
)
from .layouts import DiffusersLayout, Layout, choose_layout
from .programs import Traceable, count_residuals
from .request import DenoiserMerging, ExportRequest, list_merging, list_sizes, make_configs
from .tracing import compare_in_onnx_runtime, convert, on_cpu, save

if TYPE_CHECKING:
    from .onnx_merging import MergingBlock

RUNTIME_MODEL = ["ppdiffusers", "PaddleInferRuntimeModel"]  # the class that ppdiffusers loads a program with


def export_pipeline(
    pipe: DiffusionPipeline,
    folder: str | Path,
    ratios: Iterable[float] | float | None = None,
    sizes: Iterable[tuple[int, int]] | int | None = None,
    *,
    image_to_image: bool = False,
    controlnet: bool | float = True,
    format: str | None = None,
    layout: str = "ppdiffusers",
    runtime: str | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Manifest:
    """Write a pipeline's models, with token merging, as programs; the pipeline is not changed.

    With Paddle programs, the folder has the layout that ppdiffusers' `PaddleInfer…Pipeline` classes read (they use the
    first size and ratio). `tome.json` describes it. Batch and text length are dynamic. Each program is loaded, and
    compared with eager on random inputs and two batch sizes. Random dst are chosen once, by `seed`, and are part of
    the program: the same as in eager with that seed.

    After any error the folder is unchanged. After a kill it is complete, the earlier or the new one, or the error of
    the next reader says where the earlier one is: see `replacement.replacing`.

    Args:
        pipe: StableDiffusion, Img2Img, Inpaint or ControlNet pipeline, or StableDiffusionXL or its Img2Img.
        folder: must be new or empty, unless overwrite.
        ratios: one or several ratios, 0 for a plain program; the first is the default. A UNet program is written for
            each; all share one file of weights. None: the config that is applied to the pipeline now.
        sizes: (height, width) in pixels, a UNet program for each; one number for a square. None: the UNet's default
            size.
        image_to_image: also write the VAE's encoder, for image-to-image and inpainting.
        controlnet: whether, or at what ratio, a ControlNet merges; as in `apply_tome`.
        format: "onnx" for ONNX Runtime and OpenVINO, "paddle" for Paddle Inference, or "both". ppdiffusers' own
            classes only read Paddle programs. With layout="diffusers": "onnx", or "openvino" for OpenVINO GenAI. None:
            "onnx", or "paddle" where Paddle is a build for GPUs.
        layout: "ppdiffusers", or "diffusers" for a folder that Optimum and OpenVINO GenAI load without this package:
            one size and one ratio, without `tome.json`.
        runtime: with layout="diffusers", which runtime the ONNX models suit: "openvino" (the default; ONNX Runtime
            runs them too) or "onnxruntime" (faster there; OpenVINO cannot load them).
        overwrite: replace an earlier export in folder, once the new one is complete.
        progress: print a line to stderr before each program is written, which takes seconds to minutes.
        settings: as in `apply_tome`: method, max_downsample, sx, sy, use_rand, seed, merge_attn, merge_crossattn,
            merge_mlp, min_tokens, merge_steps.

    Returns:
        The manifest that was written to `tome.json`. With layout="diffusers" it describes the programs that the folder
        was made from, and lists no files.

    Raises:
        ToMeConfigError: an argument is not allowed.
        NoMergeableLayerError: there is nothing to merge with these settings.
        ToMeExportError: this pipeline or this Paddle cannot be exported, or a program differs from the model by more
            than 1e-5 of its largest output.
        OSError: the files cannot be written, or another process has written the folder in the meantime.

    Example:
        >>> export_pipeline(pipe, "build/emoji", ratios=(0.5, 0), sizes=[(128, 128), (192, 128)])
    """
    configs = make_configs(ratios, settings)
    request = ExportRequest(
        folder=Path(folder),
        merging=None if configs is None else list_merging(configs, controlnet),
        sizes=list_sizes(sizes),
        layout=choose_layout(layout, format, runtime),
        image_to_image=image_to_image,
        overwrite=overwrite,
        progress=progress,
    )
    return write_export(pipe, request)


def write_export(pipe: DiffusionPipeline, request: ExportRequest) -> Manifest:
    """Write the export that is requested of a pipeline: see `export_pipeline`, which has the same errors."""
    check_pipeline(pipe)
    layout = request.layout
    if isinstance(layout, DiffusersLayout):
        check_loadable(pipe, layout)
    merging = request.merging or (applied_merging(pipe),)
    check_merging(pipe, merging)
    sizes = sizes_for(pipe, request.sizes)
    image_to_image = request.image_to_image or READERS[type(pipe).__name__][0] is None
    planned = list_programs(sizes, [one.ratio for one in merging], text_encoders(pipe), image_to_image)
    with replacing(request.folder, request.overwrite) as partial, Converter() as converter:
        export = partial / "export" if isinstance(layout, DiffusersLayout) else partial
        writer = _Writer(pipe, merging, planned, sizes[0], export, layout, converter, request.progress)
        written = writer.write()
        copy_parts(pipe, export, image_to_image)
        manifest = Manifest(
            **_describe_pipeline(pipe, merging),
            sizes=sizes,
            image_to_image=image_to_image,
            programs=written,
            files={} if isinstance(layout, DiffusersLayout) else _list_files(export),
        )
        if isinstance(layout, DiffusersLayout):
            write_layout(layout, export, manifest.programs, merging[0], sizes[0], pipe, partial)
            shutil.rmtree(export)
        else:
            manifest.save(partial)
    return manifest


def _describe_pipeline(pipe: DiffusionPipeline, merging: Sequence[DenoiserMerging]) -> dict[str, Any]:
    """The fields of a manifest that follow from the pipeline, its merging and the versions in use."""
    controlnet = controlnet_of(pipe)
    return {
        "format": 1,
        "name": Path(pipe.config.get("_name_or_path") or type(pipe).__name__).name,
        "pipeline": type(pipe).__name__,
        "ratios": tuple(one.ratio for one in merging),
        "residuals": 0 if controlnet is None else count_residuals(controlnet),
        "vae_factor": vae_factor(pipe),
        "merging": {ratio_name(one.ratio): one.settings() for one in merging},
        "versions": {
            "ppdiffusers_tome": __version__,
            "paddle": paddle.__version__,
            "ppdiffusers": ppdiffusers.__version__,
        },
    }


class _Writer:
    """Writes the programs of an export, one after another; one copy of one model is in memory.

    Args:
        merging: how the UNet's programs merge.
        planned: all programs, by the folders to write them to in Paddle's format.
        size: image size of the comparison with eager, for programs of any size.
        folder: the folder to write to.
        layout: it has the formats to write. For "diffusers", SDXL's text encoders return the states of all layers.
        progress: print a line to stderr about each program.
    """

    def __init__(
        self,
        pipe: DiffusionPipeline,
        merging: Sequence[DenoiserMerging],
        planned: Mapping[str, PlannedProgram],
        size: Size,
        folder: Path,
        layout: Layout,
        converter: Converter,
        progress: bool,
    ) -> None:
        self._pipe, self._size, self._folder, self._progress = pipe, size, folder, progress
        self._merging = {one.ratio: one for one in merging}
        self._planned = planned
        self._targets = {program.place: target for target, program in planned.items()}
        self._formats, self._all_states = layout.formats, isinstance(layout, DiffusersLayout)
        self._converter = converter if "onnx" in layout.formats else None
        self._weights: dict[str, SharedWeights] = {}  # of ONNX programs, by model
        self._written: dict[PlannedProgram, ProgramFile] = {}
        self._edits: dict[tuple[Size | None, float | None], _Edit] = {}  # by size and ratio

    def write(self) -> tuple[ProgramFile, ...]:
        """Write all programs."""
        for number, planned in enumerate(self._planned.values(), 1):
            self._report(f"exporting {planned.label} ({number} of {len(self._planned)}) …")
            is_edit = self._is_edit(planned)
            if not is_edit or "paddle" in self._formats:
                self._trace(planned)
            if is_edit:
                self._trace(replace(planned, ratio=0.0))
                self._edit(planned)
        for planned in self._written.keys() - set(self._planned.values()):
            (self._folder / self._written[planned].onnx_files[0]).unlink()  # plain, and only others were made from it
        return tuple(self._written[planned] for planned in self._planned.values())

    def _report(self, line: str) -> None:
        if self._progress:
            print(line, file=sys.stderr, flush=True)

    def _is_edit(self, planned: PlannedProgram) -> bool:
        """Whether the ONNX program is made from the plain one: keys are left out, and nothing else merges."""
        configs = [config for config in self._configs(planned) if config is not None]
        return "onnx" in self._formats and bool(configs) and not any(one.merges_queries for one in configs)

    def _configs(self, planned: PlannedProgram) -> tuple[ToMeConfig | None, ToMeConfig | None]:
        """The configs of UNet and ControlNet in a program."""
        merging = self._merging.get(planned.ratio) if planned.ratio else None
        return (None, None) if merging is None else (merging.unet, merging.controlnet)

    def _trace(self, planned: PlannedProgram) -> None:
        """Trace a program, and write it in the formats that are not edits of another, unless it is written."""
        if planned in self._written:
            return
        is_edit = self._is_edit(planned)
        target = self._targets.get(planned.place, planned.name)
        traceable, dims = self._traceable(planned), self._dims(planned)
        if planned.ratio == 0 and isinstance(traceable.layer, programs.Denoiser):
            self._prepare_edits(planned.size, traceable, dims)
        has_paddle = "paddle" in self._formats and planned.place in self._targets
        converter = None if is_edit else self._converter
        if planned.place not in self._targets and converter is not None:
            file = convert(traceable, planned, self._folder, target, dims, converter)
        else:
            cores = PaddleRuntime().cores()
            file = save(traceable, planned, self._folder, target, dims, cores, converter, in_paddle=has_paddle)
        if converter is not None:
            file = self._move_onnx(file)
        if has_paddle:
            file = self._share_params(file)
        else:
            shutil.rmtree(self._folder / target, ignore_errors=True)
            file = replace(file, program=None, params=None)
        self._written[planned] = file

    def _prepare_edits(self, size: Size | None, traceable: Traceable, dims: Mapping[str, int]) -> None:
        """Run a denoiser in eager mode as each of the programs merges that are edits of its plain one."""
        for planned in self._planned.values():
            if planned.size == size and self._is_edit(planned):
                from .onnx_merging import merging_blocks  # here, because onnx is optional

                _attach(traceable.layer, *self._configs(planned))
                with on_cpu():
                    comparison = Comparison(traceable, dims)
                self._edits[size, planned.ratio] = _Edit(comparison, merging_blocks(traceable.layer))
        detach(traceable.layer)

    def _edit(self, planned: PlannedProgram) -> None:
        """Write an ONNX program that merges, from the plain one of its size."""
        import onnx

        from ..graph.keys import leave_out_keys
        from .onnx_merging import find_projections

        edit, plain = self._edits[planned.size, planned.ratio], self._written[replace(planned, ratio=0.0)]
        model = onnx.load(str(self._folder / plain.onnx_files[0]), load_external_data=False)
        leave_out_keys(model, find_projections(model, edit.blocks))
        place = _onnx_path(planned)
        path = self._folder / place
        self._weights[planned.model].write(model, path)
        differences = edit.comparison.first_differences
        parity = compare_in_onnx_runtime(path, planned.label, PaddleRuntime().cores(), lambda run, _: differences(run))
        self._report("merging in " + ", ".join(block.name for block in edit.blocks))
        file = self._written.get(planned) or ProgramFile(planned.model, planned.size, planned.ratio, onnx=place)
        self._written[planned] = replace(file, onnx=place, onnx_parity=parity)

    def _dims(self, planned: PlannedProgram) -> dict[str, int]:
        size, factor = planned.size or self._size, vae_factor(self._pipe)
        dims = {"height": size.height, "width": size.width, "tokens": text_tokens(self._pipe)}
        return dims | {"latent_height": size.height // factor, "latent_width": size.width // factor}

    def _traceable(self, planned: PlannedProgram) -> Traceable:
        """The layer to trace for a planned program, with its merging."""
        pipe, model = self._pipe, planned.model
        if model == "vae_encoder":
            return programs.vae_encoder(pipe.vae)
        if model == "vae_decoder":
            return programs.vae_decoder(pipe.vae)
        if planned.ratio is None:
            return programs.text_encoder(getattr(pipe, model), is_xl(pipe), self._all_states)
        time_ids = 5 if pipe.config.get("requires_aesthetics_score") else 6  # of SDXL, which then has no target size
        traceable = programs.denoiser(pipe.unet, controlnet_of(pipe), time_ids)
        detach(traceable.layer)  # the wraps of the originals, which were copied too
        _attach(traceable.layer, *self._configs(planned))
        return traceable

    def _share_params(self, file: ProgramFile) -> ProgramFile:
        """The program with the weights of an earlier one of its model, if they are equal."""
        own = self._folder / file.paddle_files[1]
        others = [
            self._folder / other.params
            for other in self._written.values()
            if other.model == file.model and other.params is not None
        ]
        return replace(file, params=share_weights(own, others).relative_to(self._folder).as_posix())

    def _move_onnx(self, file: ProgramFile) -> ProgramFile:
        """Move a program beside the weights of its model."""
        if file.model not in self._weights:
            self._weights[file.model] = SharedWeights(self._folder / f"onnx/{file.model}{ONNX_WEIGHTS}")
        path = _onnx_path(file)
        self._weights[file.model].move(self._folder / file.onnx_files[0], self._folder / path)
        return replace(file, onnx=path)


@dataclass(frozen=True)
class _Edit:
    """What makes a program that merges of the plain one."""

    comparison: Comparison
    blocks: "list[MergingBlock]"


def _attach(denoiser: Any, unet: ToMeConfig | None, controlnet: ToMeConfig | None) -> None:
    """Let a `programs.Denoiser` merge by the configs of its models; None: plain, or there is no ControlNet."""
    if unet is not None:
        attach(denoiser.unet, unet, None)
    if controlnet is not None and denoiser.controlnet is not None:
        attach(denoiser.controlnet, controlnet, controlnet)


def _onnx_path(planned: PlannedProgram) -> str:
    """The place of a program as ONNX in the folder."""
    return f"onnx/{planned.name}.onnx"


def share_weights(params: Path, others: list[Path]) -> Path:
    """The file to read weights from: one of `others` that equals `params`, which is then deleted, or `params`."""
    for other in dict.fromkeys(others):
        if filecmp.cmp(other, params, shallow=False):
            params.unlink()
            return other
    return params


def copy_parts(pipe: DiffusionPipeline, folder: Path, image_to_image: bool) -> None:
    """Write tokenizers and scheduler, the models' configs, `model_index.json`, and `defaults.json` if there is one."""
    model = pipe.config.get("_name_or_path")  # None of a pipeline that was made in Python
    if model and (Path(model) / DEFAULTS).is_file():
        (folder / DEFAULTS).write_bytes((Path(model) / DEFAULTS).read_bytes())
    for name in COPIED:
        component = vars(pipe).get(name)
        if component is not None:
            component.save_pretrained(str(folder / name))
    for name, subfolder in CONFIGS.items():
        if vars(pipe).get(name) is not None:
            _write_json(folder / subfolder / "config.json", _config(getattr(pipe, name)))
    if controlnet_of(pipe) is not None:
        _write_json(folder / CONTROLNET_CONFIG / "config.json", _config(controlnet_of(pipe)))
    reader = READERS[type(pipe).__name__][image_to_image]
    assert reader is not None  # image_to_image is True for pipelines without a text-to-image reader
    _write_json(folder / "model_index.json", _model_index(pipe, folder, reader))


def _model_index(pipe: DiffusionPipeline, folder: Path, reader: str) -> dict[str, Any]:
    """The contents of `model_index.json` for ppdiffusers' class `reader`: the class of each component."""
    index = {"_class_name": reader, "_ppdiffusers_version": ppdiffusers.__version__}
    for name, parameter in inspect.signature(getattr(ppdiffusers, reader)).parameters.items():
        if name in COPIED and vars(pipe).get(name) is not None:
            index[name] = list(pipe.config[name])
        elif name == "requires_safety_checker":
            index[name] = False
        elif isinstance(parameter.default, bool):
            index[name] = pipe.config.get(name, parameter.default)
        else:
            index[name] = RUNTIME_MODEL if (folder / name).is_dir() else [None, None]
    return index


def _list_files(folder: Path) -> dict[str, FileFacts]:
    """Size and hash of all files of a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): FileFacts(bytes=path.stat().st_size, sha256=sha256(path))
        for path in paths
    }


def _config(model: Any) -> dict[str, Any]:
    config = model.config
    return dict(config) if isinstance(config, dict) else config.to_dict()


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
