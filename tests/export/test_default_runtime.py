"""The runtime and the format that are chosen by default: by the device, by the export, and by Paddle's build."""

import argparse
from types import SimpleNamespace

import paddle
import pytest

from ppdiffusers_tome import ToMeConfigError
from ppdiffusers_tome.cli import main
from ppdiffusers_tome.commands.image_options import add_runtime_options, runtime_settings
from ppdiffusers_tome.export import export as export_module
from ppdiffusers_tome.export.layouts import EXPORT_FORMATS, default_format
from ppdiffusers_tome.inference import (
    OnnxRuntime,
    PaddleRuntime,
    choose_runtime,
    export_pipeline,
    load_pipeline,
    read_manifest,
)
from ppdiffusers_tome.run.formats import default_runtime
from ppdiffusers_tome.serving.engine import load_engine

BOTH = ("paddle", "onnx")


@pytest.fixture
def loaded_in(monkeypatch):
    """The classes of the runtimes that load programs; the set grows."""
    classes = set()
    for cls in (OnnxRuntime, PaddleRuntime):

        def record(self, folder, file, load=cls.load):
            classes.add(type(self))
            return load(self, folder, file)

        monkeypatch.setattr(cls, "load", record)
    return classes


@pytest.mark.parametrize(
    ("device", "formats", "name"),
    [
        ("cpu", BOTH, "onnxruntime"),
        ("cpu", ("onnx",), "onnxruntime"),
        ("cpu", ("paddle",), "paddle"),
        ("gpu", BOTH, "paddle"),
        ("gpu:1", BOTH, "paddle"),
        ("gpu", ("paddle",), "paddle"),
        ("gpu", ("onnx",), "onnxruntime"),  # which then says that its device is "cuda"
        ("cuda", BOTH, "onnxruntime"),
        ("cuda:1", BOTH, "onnxruntime"),
    ],
)
def test_runtime_by_device_and_formats(device, formats, name):
    manifest, parser = SimpleNamespace(formats=formats), argparse.ArgumentParser()
    assert default_runtime(manifest, device) == name
    add_runtime_options(parser)
    for options, runtime in ([], name), (["--runtime", "openvino"], "openvino"):
        settings = runtime_settings(manifest, parser.parse_args(["--device", device, *options]))
        assert (settings["runtime"], settings["device"]) == (runtime, device)


@pytest.mark.parametrize(("source", "cls"), [("exported_folder", PaddleRuntime), ("onnx_folder", OnnxRuntime)])
def test_an_export_with_one_format_runs_without_an_option(source, cls, request, loaded_in, tmp_path):
    folder = request.getfixturevalue(source)
    loaded_in.clear()  # an export loads its programs to compare them
    size = read_manifest(folder).sizes[0]
    load_pipeline(folder, threads=1)("a fox", num_inference_steps=1, height=size.height, width=size.width)
    load_engine(folder, [(size, 0.5)], threads=1).load_next()
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a fox\n")
    command = ["generate", "--model", str(folder), "--prompts", str(prompts), "--steps", "1", "--threads", "1"]
    assert main([*command, "--output", str(tmp_path / "images")]) == 0
    assert loaded_in == {cls}


def test_a_gpu_device_of_the_other_runtime_is_an_error(exported_folder, onnx_folder):
    with pytest.raises(ToMeConfigError, match=r"device='gpu'.*cuda"):
        load_pipeline(onnx_folder, device="gpu")
    with pytest.raises(ToMeConfigError, match=r"""device='cuda'.*"gpu\""""):
        load_pipeline(exported_folder, device="cuda")


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"onednn": False}, "pass runtime='paddle', or leave it out"),
        ({"speed": 3}, "only the settings device, threads, precision; leave it out"),
    ],
)
def test_a_setting_of_another_runtime_is_an_error_that_names_it(onnx_folder, settings, remedy):
    with pytest.raises(ToMeConfigError, match=remedy):
        load_pipeline(onnx_folder, **settings)
    with pytest.raises(ToMeConfigError, match=remedy):
        choose_runtime("onnxruntime", **settings)


@pytest.mark.parametrize(("is_gpu_build", "name"), [(False, "onnx"), (True, "paddle")])
def test_format_by_the_build_of_paddle(is_gpu_build, name, monkeypatch):
    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: is_gpu_build)
    assert default_format() == name


def test_export_writes_the_default_format(tiny, tmp_path, monkeypatch):
    requested = []
    monkeypatch.setattr(export_module, "write_export", lambda pipe, request: requested.append(request) or exit())
    tiny.save_pretrained(str(tmp_path / "model"))
    command = ["export", "--model", str(tmp_path / "model"), "--output", str(tmp_path / "command"), "--ratio", "0"]
    for start in (lambda: export_pipeline(tiny, tmp_path / "python", 0, [(32, 32)]), lambda: main(command)):
        with pytest.raises(SystemExit):
            start()
    assert [request.layout.formats for request in requested] == 2 * [EXPORT_FORMATS[default_format()]]
