"""Export a pipeline, with token merging, to a folder of ONNX or Paddle Inference programs."""

import filecmp
import inspect
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paddle
import ppdiffusers
from ppdiffusers import DiffusionPipeline
from typing_extensions import Unpack

from .._version import __version__
from ..families.pipelines import check_controlnet, text_tokens, vae_factor
from ..method_names import MergeSettings
from ..replacement import replacing
from ..run.defaults import DEFAULTS
from ..run.folder import ONNX_WEIGHTS, FileFacts, sha256
from ..run.manifest import Files, Format, Manifest, PlannedProgram, ProgramFile, other_models
from ..run.onnx_weights import SharedWeights
from ..run.paddle_runtime import PaddleRuntime
from ..run.pipeline import CONFIGS, CONTROLNET_CONFIG, COPIED
from ..run.sizes import Size
from . import programs
from .conversion import Converter
from .diffusers_layout import check_loadable, write_layout
from .exportable import (
    READERS,
    applied_merging,
    check_merging,
    check_pipeline,
    controlnet_of,
    is_xl,
    library_of,
    needs_encoder,
    sizes_for,
    text_encoders,
)
from .image_check import compare_images
from .layouts import DiffusersLayout, Layout, choose_layout
from .programs import Traceable, count_residuals
from .request import PLAIN, DenoiserMerging, ExportRequest, list_merging, list_sizes, make_configs
from .tracing import TracedProgram, compare_in_onnx_runtime, convert

if TYPE_CHECKING:
    from .onnx_merging import Edit

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
    image_check: bool = True,
    **settings: Unpack[MergeSettings],
) -> Manifest:
    """Write a pipeline's models, with token merging, as programs; the pipeline is not changed.

    With Paddle programs, the folder has the layout that ppdiffusers' `PaddleInfer…Pipeline` classes read (they use the
    first size and ratio). `tome.json` describes it. Batch and text length are dynamic. Each program is loaded, and
    compared with eager on random inputs and two batch sizes; then images of two steps are compared with those of the
    pipeline. Random dst are chosen once, by `seed`, and are part of the program: the same as in eager with that seed.

    After any error the folder is unchanged. After a kill the earlier or the new folder is complete, or the error of
    the next reader says where the earlier folder is: see `replacement.replacing`.

    Args:
        pipe: StableDiffusion, Img2Img, Inpaint or ControlNet pipeline, or StableDiffusionXL or its Img2Img.
        folder: must be new or empty, unless overwrite.
        ratios: a ratio or several, 0 for a plain program; the first is the default. A UNet program is written for
            each; all share one file of weights. None: the config that is applied to the pipeline now.
        sizes: (height, width) in pixels, a UNet program for each; a number for a square. None: the UNet's default
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
        overwrite: replace an earlier export in folder, once the new export is complete.
        progress: print a line to stderr before each program is written, which takes seconds to minutes.
        image_check: whether to compare images of two steps with those of the pipeline in eager mode, which takes as
            long as the pipeline needs for them. Not in the layout "diffusers", whose folder another library loads.
        settings: as in `apply_tome`: `method`, and the settings of that method.

    Returns:
        The manifest that was written to `tome.json`. With layout="diffusers" it describes the programs that the folder
        was made from, and lists no files.

    Raises:
        ToMeConfigError: an argument is not allowed.
        NoMergeableLayerError: there is nothing to merge with these settings.
        ToMeExportError: this pipeline or this Paddle cannot be exported, a program differs from the model by more
            than 1e-5 of its largest output, or an image from the pipeline's by more than 0.02 of 1.
        OSError: the files cannot be written, or another process has written the folder in the meantime.

    Example:
        >>> export_pipeline(pipe, "build/emoji", ratios=(0.5, 0), sizes=[(128, 128), (192, 128)])
    """
    request = ExportRequest(
        folder=Path(folder),
        merging=list_merging(make_configs(ratios, settings), controlnet),
        sizes=list_sizes(sizes),
        layout=choose_layout(layout, format, runtime),
        image_to_image=image_to_image,
        overwrite=overwrite,
        progress=progress,
        image_check=image_check,
    )
    check_controlnet(pipe, controlnet)
    return write_export(pipe, request)


def write_export(pipe: DiffusionPipeline, request: ExportRequest) -> Manifest:
    """Write the export that is requested of a pipeline: see `export_pipeline`, which has the same errors."""
    check_pipeline(pipe, request.image_to_image)
    layout = request.layout
    if isinstance(layout, DiffusersLayout):
        check_loadable(pipe, layout)
    merging = request.merging or (applied_merging(pipe),)
    check_merging(pipe, merging)
    sizes = sizes_for(pipe, request.sizes)
    image_to_image = needs_encoder(pipe, request.image_to_image)
    models = other_models(text_encoders(pipe), image_to_image)
    with replacing(request.folder, request.overwrite) as partial, Converter() as converter:
        export = partial / "export" if isinstance(layout, DiffusersLayout) else partial
        writer = _Writer(pipe, merging, sizes, models, export, layout, converter, request.progress)
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
            write_layout(layout, export, manifest, pipe, partial)
            shutil.rmtree(export)
        else:
            manifest.save(partial)
            if request.image_check:
                _check_images(pipe, partial, manifest, merging, request.progress)
    return manifest


def _check_images(
    pipe: DiffusionPipeline,
    folder: Path,
    manifest: Manifest,
    merging: Sequence[DenoiserMerging],
    progress: bool,
) -> None:
    _report(progress, "comparing images of two steps with the pipeline's …")
    difference = compare_images(pipe, folder, manifest, merging)
    _report(progress, f"they differ by {difference:.2g} of 1 at most")


def _report(progress: bool, line: str) -> None:
    if progress:
        print(line, file=sys.stderr, flush=True)


def _describe_pipeline(pipe: DiffusionPipeline, merging: Sequence[DenoiserMerging]) -> dict[str, Any]:
    """The fields of a manifest that follow from the pipeline, its merging and the versions in use."""
    controlnet = controlnet_of(pipe)
    return {
        "format": 2,
        "name": Path(pipe.config.get("_name_or_path") or type(pipe).__name__).name,
        "pipeline": type(pipe).__name__,
        "residuals": 0 if controlnet is None else count_residuals(controlnet),
        "vae_factor": vae_factor(pipe),
        "merging": tuple(of_program.in_manifest(controlnet is not None) for of_program in merging),
        "versions": {
            "ppdiffusers_tome": __version__,
            "paddle": paddle.__version__,
            "ppdiffusers": ppdiffusers.__version__,
        },
    }


class _Writer:
    """Writes the programs of an export in turn; a copy of a single model is in memory.

    Args:
        merging: how the UNet's programs merge.
        sizes: of the UNet's programs. The first is also that of the comparison with eager, for programs of any size.
        models: all models but the UNet.
        folder: the folder to write to.
        layout: it has the formats to write. For "diffusers", SDXL's text encoders return the states of all layers.
        progress: print a line to stderr about each program.
    """

    def __init__(
        self,
        pipe: DiffusionPipeline,
        merging: Sequence[DenoiserMerging],
        sizes: Sequence[Size],
        models: Sequence[str],
        folder: Path,
        layout: Layout,
        converter: Converter,
        progress: bool,
    ) -> None:
        self._pipe, self._merging, self._sizes, self._models = pipe, merging, sizes, models
        self._folder, self._converter, self._progress = folder, converter, progress
        self._formats, self._all_states = layout.formats, isinstance(layout, DiffusersLayout)
        self._first = PlannedProgram("unet", sizes[0], merging[0].ratio)
        self._params: dict[str, list[Path]] = {}  # the files of weights in Paddle's format, by model
        self._weights: dict[str, SharedWeights] = {}  # those of ONNX programs
        self._begun = 0  # number of programs

    def write(self) -> tuple[ProgramFile, ...]:
        """Write all programs."""
        unets = [file for size in self._sizes for file in self._write_unets(size)]
        return (*unets, *map(self._write_model, self._models))

    def _begin(self, planned: PlannedProgram) -> None:
        self._begun += 1
        total = len(self._sizes) * len(self._merging) + len(self._models)
        _report(self._progress, f"exporting {planned.label} ({self._begun} of {total}) …")

    def _write_unets(self, size: Size) -> list[ProgramFile]:
        """Write the UNet's programs of a size. As ONNX, the plain program becomes those that only leave out keys."""
        plain = PlannedProgram("unet", size, 0.0)
        edited = [merging for merging in self._merging if "onnx" in self._formats and merging.only_leaves_out_keys]
        write_plain = cache(partial(self._write_plain, plain, edited))
        written = []
        for merging in self._merging:
            planned = PlannedProgram("unet", size, merging.ratio)
            self._begin(planned)
            if not merging.ratio:
                files, _ = write_plain()
            else:
                traced = [name for name in self._formats if name != "onnx" or merging not in edited]
                files = self._write(planned, self._denoiser(merging), traced) if traced else {}
            if merging in edited:
                _, edits = write_plain()
                files["onnx"] = self._write_edit(planned, plain, edits[merging])
            written.append(ProgramFile("unet", size, merging.ratio, files=files))
        if edited and not self._has_plain:
            (self._folder / _onnx_place(plain)).unlink()
        return written

    @property
    def _has_plain(self) -> bool:
        """Whether the export has plain UNets."""
        return not all(merging.ratio for merging in self._merging)

    def _write_plain(
        self, planned: PlannedProgram, edited: Sequence[DenoiserMerging]
    ) -> "tuple[dict[Format, Files], dict[DenoiserMerging, Edit]]":
        """Write a plain UNet; returns its files, and the edits that make the programs that merge of it.

        If the export has no plain UNets, it is written as ONNX for the edits only, and is not compared.
        """
        traceable, edits = self._denoiser(PLAIN), {}
        if edited:
            from .onnx_merging import prepare_edits  # here, because onnx is optional

            edits = prepare_edits(traceable, self._dims(planned), edited)
        if self._has_plain:
            return self._write(planned, traceable, self._formats), edits
        converted = convert(traceable, planned, self._folder / planned.name, self._dims(planned), self._converter)
        self._move_onnx(planned, converted)
        shutil.rmtree(converted.parent)
        return {}, edits

    def _write_edit(self, planned: PlannedProgram, plain: PlannedProgram, edit: "Edit") -> Files:
        """Write an ONNX program that merges, from the plain one of its size."""
        path, weights = self._folder / _onnx_place(planned), self._weights_of(planned.model)
        edit.write(self._folder / _onnx_place(plain), path, weights)
        differences = edit.comparison.first_differences
        parity = compare_in_onnx_runtime(path, planned.label, PaddleRuntime().cores(), lambda run, _: differences(run))
        _report(self._progress, "merging in " + ", ".join(block.name for block in edit.blocks))
        return Files(_onnx_place(planned), self._place(weights.path), parity)

    def _write_model(self, model: str) -> ProgramFile:
        """Write the program of a model that is not the UNet."""
        planned = PlannedProgram(model)
        self._begin(planned)
        return ProgramFile(model, files=self._write(planned, self._traceable(model), self._formats))

    def _write(self, planned: PlannedProgram, traceable: Traceable, formats: Sequence[Format]) -> dict[Format, Files]:
        """Trace a program and write it in some formats, of which it returns the files."""
        folder = planned.model if planned == self._first else planned.name
        cores = PaddleRuntime().cores()
        traced = TracedProgram(traceable, planned, self._folder, folder, self._dims(planned), cores)
        files: dict[Format, Files] = {}
        parities = traced.compare_in_paddle() if "paddle" in formats else None
        if "onnx" in formats:
            path = self._move_onnx(planned, traced.convert(self._converter))
            weights = self._place(self._weights_of(planned.model).path)
            files["onnx"] = Files(self._place(path), weights, traced.compare_in_onnx_runtime(path))
        if parities is None:
            shutil.rmtree(self._folder / folder)
        else:
            params = self._share_params(planned.model, self._folder / traced.files.weights)
            files["paddle"] = Files(traced.files.program, self._place(params), *parities)
        return {name: files[name] for name in formats}

    def _dims(self, planned: PlannedProgram) -> dict[str, int]:
        size, factor = planned.size or self._sizes[0], vae_factor(self._pipe)
        dims = {"height": size.height, "width": size.width, "tokens": text_tokens(self._pipe)}
        return dims | {"latent_height": size.height // factor, "latent_width": size.width // factor}

    def _traceable(self, model: str) -> Traceable:
        """The layer to trace for a model that is not the UNet."""
        pipe = self._pipe
        if model == "vae_encoder":
            return programs.vae_encoder(pipe.vae)
        if model == "vae_decoder":
            return programs.vae_decoder(pipe.vae)
        return programs.text_encoder(getattr(pipe, model), is_xl(pipe), self._all_states)

    def _denoiser(self, merging: DenoiserMerging) -> Traceable:
        """The UNet, with the ControlNet, to trace with its merging."""
        pipe = self._pipe
        time_ids = 5 if pipe.config.get("requires_aesthetics_score") else 6  # of SDXL, which then has no target size
        traceable = programs.denoiser(pipe.unet, controlnet_of(pipe), time_ids)
        programs.merge_by(traceable.layer, *merging.configs)  # in place of what merges in the originals
        return traceable

    def _share_params(self, model: str, params: Path) -> Path:
        """The file to read a program's weights from: that of an earlier program of the model, if they are equal."""
        earlier = self._params.setdefault(model, [])
        shared = share_weights(params, earlier)
        if shared not in earlier:
            earlier.append(shared)
        return shared

    def _move_onnx(self, planned: PlannedProgram, converted: Path) -> Path:
        """Move an `.onnx` file beside the weights of its model."""
        target = self._folder / _onnx_place(planned)
        self._weights_of(planned.model).move(converted, target)
        return target

    def _weights_of(self, model: str) -> SharedWeights:
        """The weights of a model's ONNX programs."""
        if model not in self._weights:
            self._weights[model] = SharedWeights(self._folder / f"onnx/{model}{ONNX_WEIGHTS}")
        return self._weights[model]

    def _place(self, path: Path) -> str:
        """The path of a file in the folder."""
        return path.relative_to(self._folder).as_posix()


def _onnx_place(planned: PlannedProgram) -> str:
    """The path of a program as ONNX in the folder."""
    return f"onnx/{planned.name}.onnx"


def share_weights(params: Path, written: list[Path]) -> Path:
    """The file to read weights from: one of `others` that equals `params`, which is then deleted, or `params`."""
    for earlier in dict.fromkeys(written):
        if filecmp.cmp(earlier, params, shallow=False):
            params.unlink()
            return earlier
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
            index[name] = [library_of(name, getattr(pipe, name)), type(getattr(pipe, name)).__name__]
        elif name == "requires_safety_checker":
            index[name] = False
        elif isinstance(parameter.default, bool):
            index[name] = pipe.config.get(name, parameter.default)
        else:
            index[name] = RUNTIME_MODEL if (folder / name).is_dir() else [None, None]
    if vars(pipe).get("watermark", True) is None:  # SDXL's pipelines add one by default where the package is installed
        index["add_watermarker"] = False
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
