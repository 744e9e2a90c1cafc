"""Exports as ONNX: they convert, and compute in ONNX Runtime and OpenVINO what eager computes."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bench
import numpy as np
import onnx
import paddle
import pytest
from conftest import EMOJI_SD, tiny_pipeline
from exporting import ONNX_SETTINGS, write_program
from paddle import nn
from PIL import Image
from ppdiffusers import StableDiffusionImg2ImgPipeline
from zoo.parts import ONE_DEPTH, ONE_LEVEL, SDXL, controlnet, image, unet

from ppdiffusers_tome import ToMeConfig, ToMeConfigError, ToMeExportError, match_tokens, merge, unmerge
from ppdiffusers_tome.attach.attach import attach
from ppdiffusers_tome.cli import main
from ppdiffusers_tome.export import comparison, onnx_fixes, programs
from ppdiffusers_tome.export.conversion import DONE, SCRIPT, Converter
from ppdiffusers_tome.grid import Grid
from ppdiffusers_tome.inference import (
    OnnxRuntime,
    OpenVinoRuntime,
    PaddleRuntime,
    Size,
    choose_runtime,
    export_pipeline,
    load_pipeline,
    read_manifest,
)
from ppdiffusers_tome.run import onnx_graph, openvino_runtime
from ppdiffusers_tome.run.folder import ExportedFolder
from ppdiffusers_tome.run.manifest import Files, PlannedProgram, ProgramMerging
from ppdiffusers_tome.run.onnx_cpu import fused
from ppdiffusers_tome.run.onnx_gpu import gpu_program, half_in_memory, half_program
from ppdiffusers_tome.run.onnx_runtime import OnnxProgram
from ppdiffusers_tome.run.onnx_weights import OPTIMIZED, WEIGHTS_FOLDER, external_places
from ppdiffusers_tome.run.runtime import FUSED_TOLERANCE, load_module
from ppdiffusers_tome.serving.engine import load_engine
from ppdiffusers_tome.serving.jobs import Job

PADDLE2 = paddle.__version__.startswith("2.")
RUNTIMES = {"onnxruntime": OnnxRuntime(threads=1), "openvino": OpenVinoRuntime(threads=1)}
TEXT = 7  # tokens


@pytest.fixture(scope="module")
def converter():
    with Converter() as converter:
        yield converter


def load(folder, runtime, **settings):
    return load_pipeline(folder, runtime=runtime, threads=1, **settings)


def load_file(runtime, path):
    return runtime.load(ExportedFolder(path.parent), Files(path.name, "unet.weights"))


def save(traceable, folder, converter, dims=None, **planned):
    return write_program(traceable, PlannedProgram("layer", **planned), folder, "program", dims, converter).files


def images_of(pipe, **settings):
    pipe.set_progress_bar_config(disable=True)
    paddle.seed(0)
    return pipe("a fox", num_inference_steps=2, output_type="np", **settings).images


def operators_of(program):
    return [node.op_type for node in onnx.load_model_from_string(program).graph.node]


def image_of(pipe, height=32, width=40):
    return images_of(pipe, height=height, width=width)[0]


# Pipelines


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_images_equal_those_of_eager(onnx_folder, tiny, runtime):
    pipe, images = load(onnx_folder, runtime), {}
    for ratio in (0.5, 0):
        pipe.unet.ratio = ratio
        images[ratio] = image_of(pipe)
        with tiny.tome(ratio=ratio, **ONNX_SETTINGS):
            np.testing.assert_allclose(images[ratio], image_of(tiny), atol=2e-5)
    assert np.abs(images[0.5] - images[0]).max() > 1e-3


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_image_to_image_and_batches(onnx_folder, tiny, runtime):
    pipe = StableDiffusionImg2ImgPipeline(**load(onnx_folder, runtime).components, requires_safety_checker=False)
    eager = StableDiffusionImg2ImgPipeline(**tiny.components, requires_safety_checker=False)
    settings = {"image": [image(40).resize((40, 32))] * 3, "strength": 0.8, "num_images_per_prompt": 3}
    actual = images_of(pipe, **settings)
    with eager.tome(ratio=0.5, **ONNX_SETTINGS):
        expected = images_of(eager, **settings)
    assert len(actual) == 3
    np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_commands_use_the_runtime(onnx_folder, tmp_path, capsys):
    prompts, images = tmp_path / "prompts.txt", {}
    prompts.write_text("a fox\n", encoding="utf-8")
    command = ["generate", "--model", str(onnx_folder), "--prompts", str(prompts), "--steps", "2", "--threads", "1"]
    for runtime in RUNTIMES:
        assert not main([*command, "--runtime", runtime, "--output", str(tmp_path / runtime)])
        (path,) = (tmp_path / runtime).glob("*.png")
        with Image.open(path) as written:
            images[runtime] = np.asarray(written).astype(int)
    engine = load_engine(onnx_folder, runtime="onnxruntime", threads=1)
    job = Job("a fox", Size(32, 40), 0.5, seed=0, steps=2, guidance_scale=7.5)
    expected = np.asarray(engine.generate([job])[0]).astype(int)
    for actual in images.values():
        assert np.abs(actual - expected).max() <= 1
    assert main([*command, "--runtime", "paddle", "--output", str(tmp_path / "paddle")])
    assert "no Paddle programs" in capsys.readouterr().err


# The folder


def test_programs_are_compared_and_share_weights(onnx_folder, tiny):
    manifest = read_manifest(onnx_folder, verify=True)
    assert manifest.formats == ("onnx",)
    for file in manifest.programs:
        (files,) = file.files.values()
        assert {*files.parity} == {"batch 1", "batch 2"} and max(files.parity.values()) <= FUSED_TOLERANCE
    folder = onnx_folder / "onnx"
    assert {path.name for path in folder.glob("*.weights")} == {
        f"{model}.weights" for model in ("unet", "text_encoder", "vae_encoder", "vae_decoder")
    }
    weights = sum(int(parameter.size) * 4 for parameter in tiny.unet.parameters())
    assert weights < (folder / "unet.weights").stat().st_size < 1.5 * weights
    assert all(path.stat().st_size < weights for path in folder.glob("unet_*.onnx"))
    assert not list(onnx_folder.rglob("*.pdiparams")) and not list(onnx_folder.rglob("inference.*"))


def test_the_other_format_is_an_error_with_a_remedy(onnx_folder, exported_folder):
    with pytest.raises(ToMeExportError, match=r"no Paddle programs.*--format both"):
        load(onnx_folder, "paddle")
    with pytest.raises(ToMeExportError, match=r"no ONNX programs.*runtime paddle"):
        load(exported_folder, "openvino")


def test_command_writes_both_formats(tmp_path, capsys):
    model, folder = tmp_path / "model", tmp_path / "export"
    tiny_pipeline().save_pretrained(str(model))
    command = ["export", "--model", str(model), "--output", str(folder), "--ratio", "0.5", "--merging", "min_tokens=9"]
    assert main([*command, "--size", "32x32", "--format", "both"]) == 0
    manifest = read_manifest(folder, verify=True)
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert written == {*manifest.files, "tome.json"}, "the check of images, which ran programs, leaves no file"
    assert manifest.formats == ("paddle", "onnx") and manifest.sizes == (Size(32, 32),)
    settings = ToMeConfig(0.5, min_tokens=9).settings()
    assert manifest.merging == (ProgramMerging(0.5, "interlace, min_tokens=9", settings),)
    assert not manifest.image_to_image
    printed, progress = capsys.readouterr()
    assert [line for line in progress.splitlines() if line.startswith("exporting")] == [
        "exporting unet 32x32, ratio 0.5 (1 of 3) …",
        "exporting text_encoder (2 of 3) …",
        "exporting vae_decoder (3 of 3) …",
    ]
    assert re.search(r"^comparing images of two steps .*\nthey differ by .*e-0[5-9] of 1 at most$", progress, re.M)
    header = next(line for line in printed.splitlines() if line.startswith("program"))
    assert header.split()[1:4] == ["Paddle", "oneDNN", "ONNX"]
    assert "unet/inference." in printed and "sizes 32x32, ratios 0.5" in printed
    assert f"\nmerging: {manifest.methods[0.5]}\n" in printed
    assert f"\nNext:\n  python -m ppdiffusers_tome serve --model {folder} --open\n" in printed
    assert main(command) == 2  # the folder exists
    assert "--overwrite" in capsys.readouterr().err
    images = {runtime: image_of(load(folder, runtime), width=32) for runtime in ("paddle", *RUNTIMES, None)}
    for other in images.values():
        np.testing.assert_allclose(other, images["paddle"], atol=2e-5)
    np.testing.assert_array_equal(images[None], images["onnxruntime"])  # the default
    assert (images[None] != images["paddle"]).any()


# Every method, and every kind of denoiser


def check(traceable, tmp_path, converter, **dims):
    """Convert a layer, and compare it in both runtimes at three batch sizes, with another text length."""
    fixed = {"height": 2 * dims["latent_height"], "width": 2 * dims["latent_width"], **dims}
    size = Size(fixed["height"], fixed["width"])
    saved = save(traceable, tmp_path, converter, {**fixed, "tokens": TEXT}, size=size)
    operators = operators_of(fused(tmp_path / saved["onnx"].program, 1))
    assert "MultiHeadAttention" in operators and "Softmax" not in operators
    folder, random = ExportedFolder(tmp_path), np.random.RandomState(1)
    native = PaddleRuntime(threads=1, onednn=False).load(folder, saved["paddle"])
    loaded = [runtime.load(folder, saved["onnx"]) for runtime in RUNTIMES.values()]
    for batch, tokens in ((1, TEXT), (2, TEXT + 4), (3, TEXT)):
        now = {**fixed, "batch": batch, "tokens": tokens}
        tries = [{one.name: one.random(random, now) for one in traceable.inputs} for _ in range(comparison.TRIES)]
        for program in loaded:
            smallest = np.full(batch, np.inf)
            for one in tries:  # each image needs one in which the same pairs merge
                outputs = ([output.numpy() for output in run(**one)] for run in (program, native))
                smallest = np.minimum(smallest, comparison.image_differences(*outputs, batch))
                if smallest.max() <= FUSED_TOLERANCE:
                    break
            assert smallest.max() <= FUSED_TOLERANCE


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ({}, {}),
        ({}, {"method": "tomesd"}),
        ({}, {"method": "todo", "ratio": 0.5}),
        ({}, {"method": "tomesd", "use_rand": False, "merge_mlp": True, "merge_crossattn": True, "sx": 3}),
        ({**SDXL, **ONE_DEPTH}, {}),
    ],
)
def test_methods_and_denoisers_convert(architecture, settings, tmp_path, converter):
    traceable = programs.denoiser(unet(**{**architecture, **ONE_LEVEL}), None)
    attach(traceable.layer.unet, ToMeConfig(**settings), None)
    check(traceable, tmp_path, converter, latent_height=6, latent_width=10)


def test_controlnet_converts(tmp_path, converter):
    traceable = programs.denoiser(unet(**ONE_LEVEL), controlnet(**ONE_LEVEL))
    config = ToMeConfig(0.5)
    attach(traceable.layer.unet, config, None)
    attach(traceable.layer.controlnet, config, config)
    check(traceable, tmp_path, converter, latent_height=8, latent_width=8)


class Matching(nn.Layer):
    """Restored tokens, and the token whose place each has; a weight, because each program needs one.

    The order of merged tokens is that of their similarities, which differ between runtimes by rounding.
    """

    def __init__(self, grid, kept):
        super().__init__()
        self.grid, self.kept = grid, kept
        self.one = self.create_parameter([1], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, tokens):
        plan = match_tokens(tokens, self.grid, self.kept, random_key=(0, 1))
        owners = unmerge(plan.choice.positions.cast("float32").unsqueeze(-1), plan).squeeze(-1)
        return unmerge(merge(tokens * self.one, plan), plan), owners


def save_matching(tokens, folder, converter):
    """A program that keeps half of the tokens [B, side·side, C], and what eager computes."""
    side = round(tokens.shape[1] ** 0.5)
    shape = programs.Input("tokens", ("batch", *tokens.shape[1:]))
    traceable = programs.Traceable(Matching(Grid(side, side), side**2 // 2), (shape,))
    expected = [output.numpy() for output in traceable.layer(tokens)]
    return save(traceable, folder, converter), expected


def test_choice_of_96_by_96_tokens(tmp_path, converter):
    """OpenVINO computes int64 in int32. A third of the tokens are equal, so many pairs are equally similar."""
    random = np.random.RandomState(0)
    tokens = random.standard_normal([2, 96 * 96, 8]).astype("float32")
    tokens[:, random.permutation(96 * 96)[::3]] = tokens[:, :1]
    tokens = paddle.to_tensor(tokens)
    saved, expected = save_matching(tokens, tmp_path, converter)
    for runtime in RUNTIMES.values():
        restored, owners = (
            output.numpy() for output in runtime.load(ExportedFolder(tmp_path), saved["onnx"])(tokens=tokens)
        )
        assert (owners != expected[1]).mean() < 1e-3  # sums round differently, so that another dst may be as similar
        assert np.abs(restored.sum() - expected[0].sum()) < 1e-3 * np.abs(expected[0]).sum()


def test_merged_tokens_are_complete_with_several_threads(tmp_path, converter):
    """ONNX Runtime's ScatterND loses rows that several threads add to the same one."""
    tokens = paddle.to_tensor(np.random.RandomState(0).standard_normal([2, 64 * 64, 64]).astype("float32"))
    saved, expected = save_matching(tokens, tmp_path, converter)
    operators = operators_of((tmp_path / saved["onnx"].program).read_bytes())
    assert "ScatterElements" in operators and "ScatterND" not in operators
    for threads, runs in ((1, 1), (2, 8)):
        program = OnnxRuntime(threads=threads).load(ExportedFolder(tmp_path), saved["onnx"])
        for _ in range(runs):
            restored, owners = (output.numpy() for output in program(tokens=tokens))
            np.testing.assert_array_equal(owners, expected[1])
            np.testing.assert_allclose(restored, expected[0], atol=1e-5)
        assert ("ScatterND" in operators_of(fused(tmp_path / saved["onnx"].program, threads))) == (threads == 1)


class Scatter(nn.Layer):
    """Adds updates to a table, as a user's model may."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.one = self.create_parameter([1], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, tokens):  # [B, 8, 4]
        tokens = tokens * self.one
        if self.kind == "numbers":
            rows = paddle.argsort(tokens[0, :, :1], 0) // 2
            return paddle.scatter_nd_add(paddle.ones([8]), rows, tokens[0, :, 0])
        if self.kind == "two columns":
            places = paddle.stack([paddle.argsort(tokens[0, :, 0]) // 2, paddle.argsort(tokens[0, :, 1]) // 3], 1)
            return paddle.scatter_nd_add(paddle.ones([8, 4]), places, tokens[0, :, 2])
        if self.kind == "matrices":
            rows = paddle.argsort(tokens[0, :, :1], 0) // 2
            return paddle.scatter_nd_add(paddle.ones([8, 2, 2]), rows, tokens[0].reshape([8, 2, 2]))
        if self.kind == "rows":
            rows = paddle.argsort(tokens[0, :, :1], 0) // 2
            return paddle.scatter_nd_add(paddle.ones([8, 4]), rows, tokens[0])
        index = (paddle.argsort(tokens[0, :, :1], 0) // 2).expand([8, 4])
        return paddle.put_along_axis(paddle.ones([8, 4]), index, tokens[0], 0, reduce="add")


@pytest.mark.parametrize(
    "kind",
    [
        *("rows", "numbers", "two columns", "matrices"),
        pytest.param("elements", marks=pytest.mark.skipif(PADDLE2, reason="paddle2onnx 1.2 has no put_along_axis")),
    ],
)
def test_sums_of_a_model_of_any_rank_convert(kind, tmp_path, converter):
    tokens = paddle.to_tensor(np.random.RandomState(0).standard_normal([1, 8, 4]).astype("float32"))
    layer = Scatter(kind)
    expected = layer(tokens).numpy()
    traceable = programs.Traceable(layer, (programs.Input("tokens", ("batch", 8, 4)),))
    saved = save(traceable, tmp_path, converter)
    for threads in (1, 2):
        (actual,) = OnnxRuntime(threads=threads).load(ExportedFolder(tmp_path), saved["onnx"])(tokens=tokens)
        np.testing.assert_allclose(actual.numpy(), expected, atol=1e-5)


def scatter_into_wrong_ranks(model):
    """As fixes did before they looked at ranks: ONNX Runtime refuses the program when it runs."""
    (node,) = (node for node in model.graph.node if node.op_type == "ScatterND")
    node.op_type, node.name = "ScatterElements", "the sums"


def fail_at_a_node(model):
    def change(node):
        raise KeyError("an attribute")

    onnx_graph.rewrite(model, change)


@pytest.mark.parametrize(
    ("fix", "message"),
    [
        (scatter_into_wrong_ranks, r"the layer was converted to ONNX, but ONNX Runtime cannot run it: .*the sums"),
        (fail_at_a_node, r"the ONNX node \S+ \(\w+\) cannot be rewritten: KeyError: 'an attribute'"),
        (lambda model: model.missing, "the layer cannot be converted to ONNX: missing"),
    ],
)
def test_a_conversion_that_fails_is_an_export_error_that_names_the_node(
    fix, message, tmp_path, converter, monkeypatch
):
    monkeypatch.setattr(onnx_fixes, "fix_paddle2onnx", fix)
    traceable = programs.Traceable(Scatter("numbers"), (programs.Input("tokens", ("batch", 8, 4)),))
    with pytest.raises(ToMeExportError, match=message):
        save(traceable, tmp_path, converter)


# Optimized programs of ONNX Runtime


@pytest.fixture
def own_folder(onnx_folder, tmp_path):
    """A copy of the export that has no optimized programs yet."""
    shutil.copytree(onnx_folder, tmp_path / "own", ignore=shutil.ignore_patterns(OPTIMIZED))
    return tmp_path / "own" / "onnx"


def outputs_of(program):
    """The outputs of a UNet's program, or of a file as the folder has it, for inputs that are always the same."""
    if isinstance(program, Path):
        program = OnnxProgram(program, RUNTIMES["onnxruntime"])
    random = np.random.RandomState(0)
    shapes = {"sample": (2, 4, 16, 20), "timestep": (1,), "encoder_hidden_states": (2, TEXT, 32)}
    inputs = {name: random.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
    return [output.numpy() for output in program(**{name: paddle.to_tensor(x) for name, x in inputs.items()})]


def unets_of(folder):
    return sorted(folder.glob("unet*.onnx"))


def test_optimized_programs_equal_the_others_and_share_their_weights(own_folder):
    runtime, sizes = RUNTIMES["onnxruntime"], []
    for path in unets_of(own_folder):
        expected = outputs_of(OnnxProgram(path, runtime))
        for _ in range(2):  # written, then read
            np.testing.assert_array_equal(outputs_of(load_file(runtime, path)), expected)
            (weights,) = (own_folder / OPTIMIZED).glob("*/weights-*")
            sizes.append(weights.stat().st_size)
    assert sizes[0] == sizes[1] and sizes[2] == sizes[3] < 1.1 * sizes[0]


def test_optimized_programs_follow_their_program(own_folder):
    """Weights of the same size in place of the earlier ones, as after another training."""
    runtime, (path, _) = RUNTIMES["onnxruntime"], unets_of(own_folder)
    earlier = outputs_of(load_file(runtime, path))
    tensors = onnx.load(path, load_external_data=False).graph.initializer
    tensor = next(t for t in tensors if t.external_data and t.data_type == onnx.TensorProto.FLOAT)
    place = {entry.key: entry.value for entry in tensor.external_data}
    weights = np.fromfile(own_folder / place["location"], "uint8")
    part = weights[int(place["offset"]) :][: int(place["length"])].view("float32")
    part *= 2
    weights.tofile(own_folder / place["location"])
    assert np.abs(outputs_of(load_file(runtime, path))[0] - earlier[0]).max() > 1e-3


def on_cpu(program, folder):
    """The outputs of a program for a GPU, computed on the CPU."""
    onnxruntime, options = load_module("onnxruntime"), load_module("onnxruntime").SessionOptions()
    options.add_session_config_entry(WEIGHTS_FOLDER, str(folder))
    session = onnxruntime.InferenceSession(program, options, providers=["CPUExecutionProvider"])
    return outputs_of(
        lambda **inputs: map(paddle.to_tensor, session.run(None, {k: x.numpy() for k, x in inputs.items()}))
    )


def test_programs_on_a_gpu_compute_the_same(own_folder):
    for path in unets_of(own_folder):
        expected = outputs_of(path)
        program = gpu_program(path)
        np.testing.assert_allclose(on_cpu(program, path.parent), expected, atol=1e-5)
        assert "MultiHeadAttention" in operators_of(program)


def test_float16_is_refused_for_programs_that_merge_the_most_similar_tokens(own_folder):
    merged, plain = unets_of(own_folder)
    with pytest.raises(ToMeConfigError, match=rf"precision='fp16' .*{merged.name} merges .*'fp32'.*interlace"):
        half_program(ExportedFolder(own_folder), merged)
    with pytest.raises(ToMeConfigError, match=merged.name):
        half_in_memory(merged)
    assert half_program(ExportedFolder(own_folder), plain).is_file()


def test_devices_choose_their_programs(own_folder, monkeypatch):
    """CUDA's provider is not in the tests' build, so the session is the CPU's."""
    onnxruntime = load_module("onnxruntime")
    session, made = onnxruntime.InferenceSession, []

    def on_the_cpu(program, options, providers):
        if providers != ["CPUExecutionProvider"]:  # of attention that is compared before it is fused
            made.append((program, providers))
        own = session(program, options, providers=["CPUExecutionProvider"])
        own.get_providers = lambda: ["CUDAExecutionProvider"]
        return own

    path = unets_of(own_folder)[1]
    expected = outputs_of(path)[0]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "InferenceSession", on_the_cpu)
    for precision, tolerance in (("fp32", 1e-5), ("fp16", 0.05)):
        runtime = choose_runtime("onnxruntime", device="cuda:1", precision=precision)
        (output,) = outputs_of(load_file(runtime, path))
        assert abs(output - expected).mean() < tolerance * abs(expected).mean()
    settings = [{"device_id": 1}, {"device_id": 1, "prefer_nhwc": "1"}]
    assert [providers for _, providers in made] == [[("CUDAExecutionProvider", own)] for own in settings]
    assert isinstance(made[0][0], bytes) and "float16" in made[1][0]


def test_float16_in_a_folder_that_cannot_be_written_is_a_warning(own_folder, monkeypatch, caplog):
    """The weights are in memory then. CUDA's provider is not in the tests' build, so the session is the CPU's."""
    onnxruntime, path = load_module("onnxruntime"), unets_of(own_folder)[1]
    expected, session = outputs_of(path)[0], onnxruntime.InferenceSession
    written = half_program(ExportedFolder(own_folder), path)
    (from_file,) = on_cpu(str(written), written.parent)
    shutil.rmtree(own_folder / OPTIMIZED)
    (own_folder / OPTIMIZED).write_text("a file in the way", encoding="utf-8")

    def on_the_cpu(program, options, providers):
        own = session(program, options, providers=["CPUExecutionProvider"])
        own.get_providers = lambda: ["CUDAExecutionProvider"]
        return own

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "InferenceSession", on_the_cpu)
    runtime = choose_runtime("onnxruntime", device="cuda", precision="fp16")
    (output,) = outputs_of(load_file(runtime, path))
    np.testing.assert_array_equal(output, from_file)
    assert abs(output - expected).mean() < 0.05 * abs(expected).mean()
    assert "optimized cannot be written" in caplog.text and "make the folder writable" in caplog.text


def test_a_folder_that_cannot_be_written_is_a_warning(own_folder, caplog):
    (own_folder / OPTIMIZED).write_text("a file in the way", encoding="utf-8")
    runtime, path = RUNTIMES["onnxruntime"], unets_of(own_folder)[0]
    expected = outputs_of(OnnxProgram(path, runtime))
    np.testing.assert_array_equal(outputs_of(load_file(runtime, path)), expected)
    assert "make the folder writable" in caplog.text


def test_processes_that_start_at_once_share_one_file(own_folder):
    script = f"""
from ppdiffusers_tome.inference import OnnxRuntime
from ppdiffusers_tome.run.folder import ExportedFolder
from ppdiffusers_tome.run.manifest import Files
for name in {[path.name for path in unets_of(own_folder)]}:
    OnnxRuntime(threads=1).load(ExportedFolder({str(own_folder)!r}), Files(name, "unet.weights"))
"""
    processes = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(2)]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    (weights,) = own_folder.rglob("*/weights-*")
    alone = len(weights.read_bytes())
    for path in unets_of(own_folder):
        expected = outputs_of(path)
        np.testing.assert_array_equal(outputs_of(load_file(RUNTIMES["onnxruntime"], path)), expected)
    assert len(weights.read_bytes()) == alone and len([*weights.parent.glob("*.onnx")]) == 2


@pytest.mark.skipif(PADDLE2, reason="paddle2onnx writes large weights of .pdmodel programs to a file of their own")
def test_weights_stay_out_of_the_conversion(tmp_path, converter):
    """paddle2onnx fails on more than 2 GB of weights of a Paddle 3 program, as Stable Diffusion 1.5's UNet has."""
    layer = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    weights = {name: value.numpy() for name, value in layer.state_dict().items() if value.ndim == 2}
    traceable = programs.Traceable(layer, (programs.Input("input", ("batch", 4)),))
    path = tmp_path / save(traceable, tmp_path, converter)["onnx"].program
    graph = onnx.load(str(path), load_external_data=False).graph
    assert [value.name for value in graph.input] == ["input"]
    external = {
        tensor.name: external_places(tensor)["location"] for tensor in graph.initializer if tensor.external_data
    }
    assert [*external.values()] == ["inference.pdiparams"] * len(weights)
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(str(path)).graph.initializer}
    shapes = {value.shape: value for value in weights.values()}
    for name in external:
        np.testing.assert_array_equal(stored[name], shapes[stored[name].shape])


# Errors


@pytest.mark.skipif(PADDLE2, reason="its converter reads both files itself")
def test_weights_of_another_program_are_an_error(tmp_path, converter):
    folders = []
    for size in (2, 3):
        traceable = programs.Traceable(nn.Linear(4, size), (programs.Input("input", ("batch", 4)),))
        folder = tmp_path / f"{size}"
        folders.append((folder / save(traceable, folder, converter)["paddle"].program).parent)
    with pytest.raises(ToMeExportError, match=r"2 tensors.*2 parameters"):
        converter.convert(folders[0] / "inference.json", folders[1] / "inference.pdiparams", "layer")


class Unknown(nn.Layer):
    """A layer with an operator that paddle2onnx does not know."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return paddle.erfinv(paddle.tanh(self.linear(x)))


def test_unknown_operators_are_one_clear_error(tmp_path, converter):
    traceable = programs.Traceable(Unknown(), (programs.Input("x", ("batch", 4)),))
    with pytest.raises(ToMeExportError, match=r"the layer.* ONNX.*" + "erfinv" * PADDLE2):
        save(traceable, tmp_path, converter)
    assert not list(tmp_path.rglob("*.onnx"))


def test_the_converter_works_again_after_it_was_aborted(tmp_path):
    """paddle2onnx aborts its process on some programs; one that ends here takes its place."""
    converter = Converter()
    files = [tmp_path / name for name in ("inference.pdmodel", "inference.pdiparams")]
    for file in files:
        file.write_bytes(b"not a program")
    with pytest.raises(ToMeExportError, match=r"the UNet .*ONNX"):
        converter.convert(*files, "UNet")
    traceable = programs.Traceable(nn.Linear(4, 4), (programs.Input("input", ("batch", 4)),))
    with converter:
        assert (tmp_path / save(traceable, tmp_path, converter)["onnx"].program).is_file()
        process = converter._process
    assert process.poll() == 0


def test_the_converter_is_heard_after_output_without_a_newline(tmp_path, monkeypatch):
    """Otherwise both processes would wait for each other. Here its input ends, so that it does too."""
    (tmp_path / "paddle2onnx.py").write_text("import os\nexport = lambda *_, **__: os.write(1, b'[Paddle2ONNX] done')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    files = json.dumps(["inference.json", "inference.pdiparams", "inference.onnx"])
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, input=2 * f"{files}\n", capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == 2 * ["[Paddle2ONNX] done", DONE]


def test_precision_needs_hardware(monkeypatch, tmp_path, capsys):
    """Also as a backend of benchmarks/bench.py, before anything is exported."""

    class Core:
        available_devices = ("CPU",)

        def get_property(self, device, name):
            return ["FP32", "INT8"]

    monkeypatch.setattr(openvino_runtime, "core", Core)
    with pytest.raises(ToMeConfigError, match=r"precision='bf16' .*cpu"):
        choose_runtime("openvino", precision="bf16")
    output = tmp_path / "result.json"
    options = ["--model", str(EMOJI_SD), "--size", "64", "--backend", "openvino-bf16", "--output", str(output)]
    assert bench.main(["--arms", "plain", *options]) == 2
    assert "precision='bf16' is not allowed: the device cpu does not have it" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_missing_packages_are_named(runtime, monkeypatch, tiny, tmp_path):
    monkeypatch.setitem(sys.modules, runtime, None)
    monkeypatch.setattr(openvino_runtime, "core", openvino_runtime.core.__wrapped__)  # this process has made one
    with pytest.raises(ToMeExportError, match=r"pip install .*/requirements/onnx\.txt"):
        choose_runtime(runtime)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ToMeExportError, match="paddle2onnx, onnx, onnxruntime"):
        export_pipeline(tiny, tmp_path / "export", 0.5, [(32, 32)], format="onnx")
    assert not list(tmp_path.iterdir())


def test_openvino_runs_without_its_telemetry_which_no_requirements_install():
    """In a new process, because this one has imported it."""
    root = Path(__file__).parents[2]
    for file in (root / "requirements.txt", *root.rglob("requirements/*.txt")):
        assert "openvino-telemetry" not in file.read_text(), file
    script = """
import sys
sys.modules["openvino_telemetry"] = None  # as if it were not installed
from ppdiffusers_tome.inference import OpenVinoRuntime
OpenVinoRuntime()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_wrong_files_are_an_error(tmp_path):
    path = tmp_path / "wrong.onnx"
    path.write_bytes(b"wrong")
    for name, runtime in RUNTIMES.items():
        with pytest.raises(ToMeExportError, match=f"{name}.* load"):
            load_file(runtime, path)


def test_indices_are_not_computed_as_floats(onnx_folder):
    """Floats that are rounded to bf16 lead to rows that do not exist: OpenVINO returned empty images, or crashed."""
    nodes = onnx.load(next((onnx_folder / "onnx").glob("unet_*_0.5.onnx")), load_external_data=False).graph.node
    makers = {name: node for node in nodes for name in node.output}
    casts = [node for node in nodes if node.op_type == "Cast" and node.attribute[0].i == onnx.TensorProto.INT64]
    assert casts and not {makers[node.input[0]].op_type for node in casts} & {"Add", "Mul", "Sub", "Div"}


def test_openvino_compiles_for_the_first_shapes_and_once_for_all_others(onnx_folder):
    """Also if threads call it at once."""
    path = onnx_folder / "onnx" / "vae_decoder.onnx"
    first, other = (load_file(RUNTIMES[name], path) for name in ("openvino", "onnxruntime"))
    latents = {batch: paddle.randn([batch, 4, 16, 20]) for batch in (2, 1, 3)}
    name = first.inputs[0]
    with ThreadPoolExecutor(4) as threads:
        calls = [(batch, threads.submit(first, **{name: latents[batch]})) for batch in (2, 1, 3, 2, 1)]
        for batch, call in calls:
            outputs = (comparison.arrays(result) for result in (call.result(), other(**{name: latents[batch]})))
            assert comparison.relative_difference(*outputs) < 1e-4
    assert len(first._compiled) == 2 and None in first._compiled


def test_bf16_is_near_fp32(onnx_folder):
    if "BF16" not in openvino_runtime.core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this CPU has no bf16")
    path = unets_of(onnx_folder / "onnx")[0]
    runtimes = (OpenVinoRuntime(threads=1, precision=name) for name in ("fp32", "bf16"))
    exact, rounded = (outputs_of(load_file(runtime, path))[0] for runtime in runtimes)
    assert 0 < abs(rounded - exact).mean() < 0.05 * abs(exact).mean()


def test_ctrl_c_after_a_program_of_openvino_has_ended_is_no_crash(onnx_folder):
    """In a process of its own, where no other core has been."""
    script = """
import gc, os, signal, sys
from ppdiffusers_tome.inference import load_pipeline
for _ in range(2):
    pipe = load_pipeline(sys.argv[1], runtime="openvino", threads=1)
    pipe("a fox", height=32, width=40, num_inference_steps=1)
    del pipe
    gc.collect()
try:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
except KeyboardInterrupt:
    print("ended as it should")
"""
    done = subprocess.run([sys.executable, "-c", script, str(onnx_folder)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("ended as it should\n"), done.stderr


def test_state_that_paddle_leaves_behind_is_not_exported(tiny, tmp_path, converter, monkeypatch):
    """After `auto_cast` in a static program ppdiffusers' VAE checks for infinity, which does not convert."""
    monkeypatch.setattr(importlib.import_module("paddle.amp.auto_cast"), "_g_amp_state_", {"enable": False})
    decoder = programs.vae_decoder(tiny.vae)
    dims = {"latent_height": 4, "latent_width": 4}
    assert (tmp_path / save(decoder, tmp_path, converter, dims)["onnx"].program).is_file()
