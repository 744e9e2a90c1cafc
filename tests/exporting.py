"""Exports of tiny pipelines, for the tests of what exports, runs and serves."""

import inspect
import os
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from conftest import tiny_pipeline
from filelock import FileLock

from ppdiffusers_tome.export import export as export_module
from ppdiffusers_tome.export import tracing
from ppdiffusers_tome.export.arguments import list_sizes, make_configs
from ppdiffusers_tome.export.choices import EXPORT_FORMATS
from ppdiffusers_tome.export.export import write_export
from ppdiffusers_tome.inference import export_pipeline, read_manifest

# With more threads than cores, the threads of a compared program wait for each other: only `export_once` has as many
# as users have.
MIN_THREADS, tracing.MIN_THREADS = tracing.MIN_THREADS, 1

ONNX_SETTINGS = {"method": "tomesd"}  # of the fixture `onnx_folder`


def export_once(tmp_path_factory, name, sizes, **settings):
    """The folder of an export that all processes of a run share."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder = shared / "exported" / name
    with FileLock(shared / f"{name}.lock"):
        if not folder.exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tracing, "MIN_THREADS", MIN_THREADS)
                options = {"image_to_image": True, "progress": False, **settings}
                export_pipeline(tiny_pipeline(), folder, (0.5, 0), sizes, **options)
    return folder


def export_linked(pipe, folder, ratios=None, sizes=None, *, linked=(), **options):
    """`export_pipeline` for Paddle Inference that takes the programs of `linked` in place of tracing them.

    They are (folder, program) of exports with all formats of this one, such as `unmerged_programs`.
    """
    options = {"format": "paddle", **options}
    names = inspect.signature(write_export).parameters
    settings = {name: options.pop(name) for name in [*options] if name not in names}
    earlier = {file.place: (root, file) for root, file in linked if file.formats == EXPORT_FORMATS[options["format"]]}

    def save(traceable, planned, folder, target, *others):
        if planned.place not in earlier:
            return tracing.save(traceable, planned, folder, target, *others)
        (root, file), paths = earlier[planned.place], {}
        (folder / target).mkdir(parents=True)
        for name in ("program", "params", "onnx"):
            if path := getattr(file, name):
                paths[name] = f"{target}/{Path(path).name}"
                if name == "onnx":  # with its weights
                    onnx.save(onnx.load(str(root / path)), str(folder / paths[name]))
                else:
                    os.link(root / path, folder / paths[name])
        return replace(file, **paths)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_module, "save", save)
        return write_export(
            pipe, Path(folder), make_configs(ratios, settings), list_sizes(sizes), progress=False, **options
        )


def unmerged_programs(folder):
    """The programs of an export that do not depend on its sizes and ratios: text encoder and VAE."""
    return [(folder, file) for file in read_manifest(folder).programs if file.size is None]
