"""Exports of tiny pipelines, for the tests of what exports, runs and serves."""

import inspect
import os
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
from filelock import FileLock

from ppdiffusers_tome.export import export as export_module
from ppdiffusers_tome.export import tracing
from ppdiffusers_tome.export.layouts import EXPORT_FORMATS
from ppdiffusers_tome.inference import export_pipeline, read_manifest

# With more threads than cores, the threads of a compared program wait for each other: only `export_once` has as many
# as users have.
MIN_THREADS, tracing.MIN_THREADS = tracing.MIN_THREADS, 1

# Where Paddle looks for the lines of Python that an operator comes from: half of an export's time with Paddle 2.6.
ORIGINS = {
    "paddle.base.framework.traceback": SimpleNamespace(extract_stack=list),
    "paddle.base.layers.math_op_patch.inspect": SimpleNamespace(stack=partial(inspect.stack, 0)),
    "paddle.jit.dy2static.program_translator.create_and_update_origin_info_map": lambda *_, **__: None,
}
_patch = pytest.MonkeyPatch()  # for the rest of the process
for _name, _without in ORIGINS.items():
    _patch.setattr(_name, _without)

ONNX_SETTINGS = {"method": "tomesd"}  # of the fixture `onnx_folder`


def export_once(tmp_path_factory, name, pipe, ratios, sizes, **settings):
    """The folder of an export that all processes of a run share.

    Args:
        pipe: makes the pipeline.
    """
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder = shared / "exported" / name
    with FileLock(shared / f"{name}.lock"):
        if not folder.exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tracing, "MIN_THREADS", MIN_THREADS)
                options = {"image_to_image": True, "progress": False, **settings}
                export_pipeline(pipe(), folder, ratios, sizes, **options)
    return folder


@contextmanager
def linking(linked, formats):
    """In this context, exports in these formats take the programs of others in place of tracing them.

    Args:
        linked: (folder, program) of exports, such as `unmerged_programs`. Those without all formats are left out.
    """
    earlier = {file.place: (root, file) for root, file in linked if file.formats == formats}

    def save(traceable, planned, folder, target, *others, **options):
        if planned.place not in earlier:
            return tracing.save(traceable, planned, folder, target, *others, **options)
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
        yield


def export_linked(pipe, folder, ratios=None, sizes=None, *, linked=(), format="paddle", image_check=False, **options):
    """`export_pipeline`, `linking` programs of others; by default for Paddle Inference, and no images are compared."""
    formats = EXPORT_FORMATS.get(format, EXPORT_FORMATS["onnx"])  # OpenVINO's files are made from ONNX programs
    options |= {"format": format, "image_check": image_check, "progress": False}
    with linking(linked, formats):
        return export_pipeline(pipe, folder, ratios, sizes, **options)


def programs_of(folder):
    """The programs of an export, for `linking`."""
    return [(folder, file) for file in read_manifest(folder).programs]


def unmerged_programs(folder):
    """Those that do not depend on sizes and ratios: of text encoder and VAE."""
    return [(root, file) for root, file in programs_of(folder) if file.size is None]
