"""Exports of tiny pipelines, for the tests of what exports, runs and serves."""

import inspect
import os
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
from filelock import FileLock

from ppdiffusers_tome.export import export as export_module
from ppdiffusers_tome.export import tracing
from ppdiffusers_tome.export.layouts import EXPORT_FORMATS
from ppdiffusers_tome.inference import ProgramFile, export_pipeline, read_manifest
from ppdiffusers_tome.run.manifest import Files

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


def _trace(*arguments, trace=tracing.write_program):
    """Paddle 3.3 asks `traceback` itself for these lines, a seventh of an export's time, and others ask it too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("traceback.extract_stack", lambda: [])
        return trace(*arguments)


_patch.setattr(tracing, "write_program", _trace)

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


class LinkedProgram:
    """A program of another export, in place of a `TracedProgram`."""

    def __init__(self, root, file, folder, target):
        self._root, self._file, self._target = root, file, folder / target
        self._target.mkdir(parents=True)
        if paddle := file.files.get("paddle"):
            for path in paddle.paths:
                os.link(root / path, self._target / Path(path).name)
            self.files = Files(*(f"{target}/{Path(path).name}" for path in paddle.paths))

    def compare_in_paddle(self):
        paddle = self._file.files["paddle"]
        return paddle.parity, paddle.onednn_parity

    def convert(self, converter):
        source = self._root / self._file.files["onnx"].program
        onnx.save(onnx.load(str(source)), str(self._target / source.name))  # with its weights
        return self._target / source.name

    def compare_in_onnx_runtime(self, path):
        return self._file.files["onnx"].parity


@contextmanager
def linking(linked, formats):
    """In this context, exports in these formats take the programs of others in place of tracing them.

    Args:
        linked: (folder, program) of exports, such as `unmerged_programs`. Those without all formats are left out.
    """
    earlier = {file.place: (root, file) for root, file in linked if {*file.files} == {*formats}}

    def trace(traceable, planned, folder, target, *others):
        if planned.place in earlier:
            return LinkedProgram(*earlier[planned.place], folder, target)
        return tracing.TracedProgram(traceable, planned, folder, target, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_module, "TracedProgram", trace)
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


def write_program(traceable, planned, root, folder, dims=None, converter=None):
    """The program of a layer in Paddle's format and, with a converter, as ONNX beside it; both are compared."""
    traced = tracing.TracedProgram(traceable, planned, root, folder, dims or {}, 1)
    files = {"paddle": Files(*traced.files.paths, *traced.compare_in_paddle())}
    if converter is not None:
        path = traced.convert(converter)
        parity = traced.compare_in_onnx_runtime(path)
        files["onnx"] = Files(path.relative_to(root).as_posix(), traced.files.weights, parity)
    return ProgramFile(planned.model, planned.size, planned.ratio, files=files)
