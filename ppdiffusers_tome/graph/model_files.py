"""Merge in the UNet of a model that another tool has exported: read its files, and write them to a new folder."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx.inliner import inline_local_functions

from ..errors import FolderError, ParameterError, ToMeConfigError, ToMeExportError
from ..methods import ToMeConfig
from ..methods.interlace import PARTS
from ..replacement import check_replaceable, replacing
from ..run.onnx_weights import external_places
from .indices import InterlacedKeys, KeysByTable
from .keys import BlockKeys, is_merged, leave_out_keys
from .output_check import Differences, compare_outputs
from .unet import UNetMerging, plan_merging

# The program in a folder: as Optimum and the hub have it, or its UNet alone
PROGRAMS = (Path("unet/model.onnx"), Path("model.onnx"))
LINKED_BYTES = 1 << 20  # larger files, which are weights, are linked where the file system allows it


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model.

    Args:
        root: the folder that is copied.
        program: the `.onnx` file of the UNet, inside it.
        companions: all remaining files that belong to the model, inside it.
    """

    root: Path
    program: Path
    companions: tuple[Path, ...]


@dataclass(frozen=True)
class MergedModel:
    """What `merge_model` has written.

    Args:
        program: the `.onnx` file of the UNet.
        merging: how it merges.
        differences: of its outputs from those of the input model; None: they were not compared.
    """

    program: Path
    merging: UNetMerging
    differences: Differences | None


def merge_model(
    model: Path, output: Path, config: ToMeConfig, overwrite: bool = False, check: bool = True
) -> MergedModel:
    """Write a folder with a model whose UNet merges, as ONNX; Paddle is not needed.

    Files above 1 MB are linked to those of the model (hard links), or copied where that is not possible; smaller files
    are copied. After any error or a kill the folder is what it was: see `replacement.replacing`.

    Args:
        model: a folder with unet/model.onnx, as Optimum writes it, or with model.onnx, or an `.onnx` file.
        output: the folder to write; it must be new or empty, unless overwrite.
        config: how to merge: by a method that leaves out keys. At free sizes only by interlace.
        overwrite: replace an earlier result in `output`, once the new result is complete.
        check: run the model, the merged model with all keys, and the merged model in ONNX Runtime on random inputs.

    Raises:
        ToMeConfigError: an argument is not allowed.
        ToMeExportError: the model cannot be read or merged, or its outputs are wrong.
        OSError: files cannot be read or written.
    """
    if config.merges_queries:
        rule = "it merges queries, which only an export from ppdiffusers can. Leave the method out"
        raise ParameterError("method", config.method, rule)
    if not config.effective_ratio:
        raise ParameterError("ratio", config.ratio, "it leaves out nothing: pass a ratio above 0, such as 0.75")
    source = find_program(model)
    _check_output(model, output, overwrite)
    program = read_program(source)
    files = _files_of(model, source, program)
    merging = plan_merging(program, config)
    with replacing(output, overwrite) as partial:
        for path in files.companions:
            _link_or_copy(files.root / path, partial / path)
        target = partial / files.program
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(program, merging.merging, target)
        differences = _check(source, program, target, merging) if check else None
    return MergedModel(output / files.program, merging, differences)


def find_program(model: Path) -> Path:
    """The `.onnx` file of the UNet of a model.

    Raises:
        ToMeConfigError: the model is neither a folder with a UNet nor an `.onnx` file.
    """
    if model.is_file() and model.suffix == ".onnx":
        return model
    program = next((model / path for path in PROGRAMS if (model / path).is_file()), None)
    if program is None:
        listed = " or ".join(map(str, PROGRAMS))
        raise ToMeConfigError(
            f"{model} is not a model as ONNX: pass a folder with {listed}, as Optimum writes it and the hub has it, "
            "or an .onnx file."
        )
    return program


def _files_of(model: Path, source: Path, program: onnx.ModelProto) -> ModelFiles:
    """The files of a model, of which `source` has this program."""
    if source == model:
        weights = tuple(Path(name) for name in _weight_names(program))
        return ModelFiles(model.parent, Path(model.name), weights)
    paths = [path.relative_to(model) for path in sorted(model.rglob("*")) if path.is_file()]
    visible = [path for path in paths if not any(part.startswith(".") for part in path.parts)]
    own = source.relative_to(model)
    return ModelFiles(model, own, tuple(path for path in visible if path != own))


def read_program(path: Path) -> onnx.ModelProto:
    """The program of an `.onnx` file; weights in other files stay there.

    Raises:
        ToMeExportError: it cannot be read, or a file of its weights is missing.
    """
    try:
        program = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # of protobuf
        raise ToMeExportError(f"{path} cannot be read as ONNX ({error}): download or export it again.") from error
    missing = [name for name in _weight_names(program) if not (path.parent / name).is_file()]
    if missing:
        raise ToMeExportError(
            f"{path} has its weights in {', '.join(missing[:3])}, which is missing: download it too."
        )
    if program.functions:
        program = inline_local_functions(program)
    return program


def _weight_names(program: onnx.ModelProto) -> list[str]:
    """The names of the files beside a program that have its weights."""
    return sorted({places["location"] for t in program.graph.initializer if (places := external_places(t))})


def _check_output(model: Path, output: Path, overwrite: bool) -> None:
    """Raise unless the folder can be written."""
    target, source = Path(os.path.realpath(output)), Path(os.path.realpath(model))
    if target == source or source in target.parents or target in source.parents:
        raise ParameterError("output", str(output), "it contains the model, or is inside it: pass another folder")
    try:
        check_replaceable(output, overwrite)
    except OSError as error:
        raise FolderError(f"{output} cannot be written ({error.strerror or error}): pass another.") from error
    if output.exists() and not output.is_dir():
        raise FolderError(f"{output} is a file: pass a folder to write to.")
    if output.is_dir() and any(output.iterdir()):
        is_earlier = any(is_merged(read_program(path)) for path in output.rglob("*.onnx"))
        if not (overwrite and is_earlier):
            remedy = "pass --overwrite" if is_earlier else "pass another folder"
            raise FolderError(f"{output} exists and is not empty: {remedy}.")


def _link_or_copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    real = Path(os.path.realpath(source))  # a file of a hub's cache is a link
    if real.stat().st_size >= LINKED_BYTES:
        try:
            os.link(real, target)
            return
        except OSError:  # a different file system, or a file system without links
            pass
    shutil.copy2(real, target)


def _write(program: onnx.ModelProto, blocks: Sequence[BlockKeys], target: Path) -> None:
    merged = onnx.ModelProto()
    merged.CopyFrom(program)
    leave_out_keys(merged, blocks)
    onnx.save(merged, str(target))


def _check(source: Path, program: onnx.ModelProto, target: Path, merging: UNetMerging) -> Differences:
    """Compare the outputs of the merged program with those of the model; an error if they are wrong."""
    every = target.with_name(f".all_keys_{target.name}")
    try:
        _write(program, [replace(block, keys=_all(block)) for block in merging.merging], every)
        return compare_outputs(source, every, target)
    finally:
        every.unlink(missing_ok=True)


def _all(block: BlockKeys) -> KeysByTable | InterlacedKeys:
    """All keys of a block, by the same nodes."""
    keys = block.keys
    if isinstance(keys, InterlacedKeys):
        return replace(keys, parts=PARTS, plain=None)
    assert isinstance(keys, KeysByTable)
    return KeysByTable(np.arange(keys.tokens)[None], keys.tokens, None)
