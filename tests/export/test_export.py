"""Exporting: what is written, what is rejected, and that errors leave nothing behind."""

import copy
import dataclasses
import gc
import json
import re
import shutil
import traceback
import weakref
from pathlib import Path
from typing import get_args

import numpy as np
import paddle
import pytest
from conftest import refiner_pipeline, tiny_pipeline, traces
from exporting import MIN_THREADS, export_linked, programs_of, unmerged_programs, write_program
from ppdiffusers import (
    DiffusionPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionPipeline,
)
from ppdiffusers.pipelines.controlnet import MultiControlNetModel
from zoo.parts import ONE_LEVEL, controlnet, stable_diffusion, unet

from ppdiffusers_tome import NoMergeableLayerError, ToMeConfig, ToMeConfigError, ToMeExportError, replacement
from ppdiffusers_tome.attach.attach import attach
from ppdiffusers_tome.cli import main
from ppdiffusers_tome.export import export as export_module
from ppdiffusers_tome.export import loading, programs, tracing
from ppdiffusers_tome.export.comparison import TOLERANCE, relative_difference
from ppdiffusers_tome.export.exportable import READERS
from ppdiffusers_tome.export.layouts import PpdiffusersLayout
from ppdiffusers_tome.export.loading import load_eager_pipeline, require_model_folder
from ppdiffusers_tome.export.request import DenoiserMerging, ExportRequest, list_merging, list_sizes
from ppdiffusers_tome.inference import (
    PaddleRuntime,
    Size,
    export_pipeline,
    load_pipeline,
    parse_size,
    read_manifest,
)
from ppdiffusers_tome.run.manifest import PipelineName, PlannedProgram, ProgramMerging
from ppdiffusers_tome.run.ratios import find_ratio, ratio_name
from ppdiffusers_tome.run.runtime import Program
from ppdiffusers_tome.serving.engine import load_engine
from ppdiffusers_tome.wording import method_in_words

PADDLE2 = paddle.__version__.startswith("2.")


export = export_linked


# Contents of the folder


def test_manifest_describes_the_folder(exported_folder):
    manifest = read_manifest(exported_folder, verify=True)
    assert manifest.sizes == (Size(32, 32), Size(32, 48))
    assert manifest.ratios == (0.5, 0.0)
    assert manifest.pipeline == "StableDiffusionPipeline"
    assert manifest.image_to_image and not manifest.controlnet
    assert manifest.merging == (
        ProgramMerging(0.5, "interlace", ToMeConfig(0.5).settings()),
        ProgramMerging(0.0, "", None),
    )
    assert manifest.versions["paddle"] == paddle.__version__
    assert [file.files["paddle"].program.split("/")[0] for file in manifest.programs_of("unet")] == [
        "unet",
        "unet_32x32_0",
        "unet_48x32_0.5",
        "unet_48x32_0",
    ]
    written = {path.relative_to(exported_folder).as_posix() for path in exported_folder.rglob("*") if path.is_file()}
    assert written == {*manifest.files, "tome.json"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        manifest.ratios = ()


def test_pipelines_that_can_be_exported_are_those_that_a_manifest_may_name():
    assert {*READERS} == {*get_args(PipelineName)}


def test_half_precision_weights_are_exported_in_float32(exported_folder, tmp_path):
    pipe, linked = tiny_pipeline(), unmerged_programs(exported_folder)
    pipe.unet.to(dtype="float16")
    (unet, *_) = export(pipe, tmp_path / "export", 0.5, linked=linked).programs
    assert unet.ratio == 0.5 and max(unet.files["paddle"].parity.values()) < 1e-5


@pytest.mark.parametrize(
    ("ratio", "settings"),
    [(0.75, {"method": "todo"}), (0.7, {"method": "tomesd", "use_rand": False, "merge_crossattn": True})],
)
def test_other_methods_are_exported_and_described(tiny, exported_folder, tmp_path, ratio, settings):
    """Each program is compared with eager while it is written."""
    linked = [(root, file) for root, file in programs_of(exported_folder) if not file.ratio]
    manifest = export(tiny, tmp_path / "out", (ratio, 0), [(32, 32)], linked=linked, **settings)
    read = read_manifest(tmp_path / "out", verify=True)
    config = ToMeConfig(ratio=ratio, **settings)
    assert read == manifest and read.merging[0] == ProgramMerging(ratio, method_in_words(config), config.settings())
    assert read.methods == {ratio: method_in_words(config), 0.0: ""}
    assert all(value < TOLERANCE for value in manifest.programs[0].files["paddle"].parity.values())


def test_every_program_was_compared_with_eager(exported_folder):
    for file in read_manifest(exported_folder).programs:
        files = file.files["paddle"]
        assert set(files.parity) == {"batch 1", "batch 2"}
        assert max(files.parity.values()) <= TOLERANCE
        assert bool(files.onednn_parity) == PADDLE2


def test_a_program_holds_no_paths_of_this_machine(tmp_path, monkeypatch):
    """Paddle stores the call stack of each operator. exporting's ORIGINS empties it, and this test brings it back."""
    monkeypatch.setattr("paddle.base.framework.traceback", traceback)
    traceable = programs.Traceable(paddle.nn.Linear(4, 4), (programs.Input("input", ("batch", 4)),))
    file = write_program(traceable, PlannedProgram("layer"), tmp_path, "x")
    content = (tmp_path / file.files["paddle"].program).read_bytes()
    package = Path(export_module.__file__).parents[1].name
    assert content and not any(text in content for text in (b".py", b"site-packages", package.encode()))


def test_programs_of_one_model_share_its_weights(exported_folder):
    weights = {file.files["paddle"].weights for file in read_manifest(exported_folder).programs_of("unet")}
    assert weights == {"unet/inference.pdiparams"}
    assert len(list(exported_folder.rglob("*.pdiparams"))) == 4  # unet, text encoder, VAE encoder and decoder


def test_defaults_of_a_model_are_in_its_export(exported_folder, tiny, tmp_path):
    """`defaults.json` in the folder that the pipeline comes from, for `serve`."""
    model, folder = tmp_path / "fox_sd", tmp_path / "export"
    model.mkdir()
    (model / "defaults.json").write_text('{"steps": 9, "prompts": ["a fox"]}')
    pipe = copy.copy(tiny)
    pipe.register_to_config(_name_or_path=str(model))
    linked = programs_of(exported_folder)
    manifest = export(pipe, folder, 0, [(32, 32)], image_to_image=True, linked=linked)
    assert (folder / "defaults.json").read_text() == (model / "defaults.json").read_text()
    assert "defaults.json" in manifest.files and manifest.name == "fox_sd"
    assert read_manifest(folder, verify=True) == manifest and not (exported_folder / "defaults.json").exists()


def test_defaults_of_the_current_folder_are_not_exported(exported_folder, tiny, tmp_path, monkeypatch):
    """A pipeline that was made in Python comes from no folder."""
    (tmp_path / "defaults.json").write_text('{"steps": 9}')
    monkeypatch.chdir(tmp_path)
    pipe = copy.copy(tiny)
    pipe.register_to_config(_name_or_path=None)
    linked = programs_of(exported_folder)
    manifest = export(pipe, "out", 0, [(32, 32)], image_to_image=True, linked=linked)
    assert "defaults.json" not in manifest.files and manifest.name == "StableDiffusionPipeline"


def test_model_index_is_what_ppdiffusers_reads(exported_folder):
    index = json.loads((exported_folder / "model_index.json").read_text())
    runtime = ["ppdiffusers", "PaddleInferRuntimeModel"]
    assert index["_class_name"] == "PaddleInferStableDiffusionMegaPipeline"
    assert all(index[name] == runtime for name in ("unet", "text_encoder", "vae_encoder", "vae_decoder"))
    assert index["scheduler"] == ["ppdiffusers", "DDIMScheduler"]
    assert index["safety_checker"] == [None, None]


def test_pipeline_is_unchanged_and_its_own_merging_is_exported(tiny, exported_folder, tmp_path):
    tiny.apply_tome(ratio=0.25, min_tokens=64)
    try:
        before = traces(tiny.unet), traces(tiny.vae), traces(tiny.text_encoder), str(tiny.tome_summary())
        with paddle.no_grad():
            latents = paddle.randn([1, 4, 16, 16])
            before_export = tiny("fox", latents=latents, num_inference_steps=1, output_type="np").images
            manifest = export(tiny, tmp_path / "out", linked=unmerged_programs(exported_folder))
            after_export = tiny("fox", latents=latents, num_inference_steps=1, output_type="np").images
        assert before == (traces(tiny.unet), traces(tiny.vae), traces(tiny.text_encoder), str(tiny.tome_summary()))
        np.testing.assert_array_equal(before_export, after_export)
        assert manifest.ratios == (0.25,)
        assert manifest.merging[0].settings == ToMeConfig(0.25, min_tokens=64).settings()
    finally:
        tiny.remove_tome()


def test_a_grid_of_one_row_is_known(tmp_path):
    """Paddle loses a side of 1 behind the first transformer: the next one seemed to have a grid of no fixed size."""
    dims = {"latent_height": 1, "latent_width": 8}
    traceable = programs.denoiser(unet(**ONE_LEVEL), None)
    attach(traceable.layer.unet, ToMeConfig(0.5, "tomesd", sy=1), None)
    planned = PlannedProgram("unet", size=Size(1, 8))
    saved = write_program(traceable, planned, tmp_path, "program", {**dims, "tokens": 7})
    assert max(saved.files["paddle"].parity.values()) <= TOLERANCE


def test_ratios_that_are_equal_to_six_digits_are_one(exported_folder):
    assert load_pipeline(exported_folder, ratio=0.50000001).unet.ratio == 0.5
    assert load_pipeline(exported_folder, ratio=-0.0).unet.ratio == 0
    with pytest.raises(ToMeConfigError, match=r"ratio=0\.50001 .*only 0\.5, 0\."):
        load_pipeline(exported_folder, ratio=0.50001)
    configs = [ToMeConfig(ratio, "todo", sx=3) for ratio in (0.833333, -0.0)]
    ratios = [merging.ratio for merging in list_merging(configs, controlnet=True)]
    assert ratios == [1 - 1 / 6, 0.0] and find_ratio(0.833333, ratios) == 1 - 1 / 6
    assert ratio_name(ratios[1]) == "0"


def test_a_controlnet_cannot_merge_alone(tmp_path):
    """The programs would be those of ratio 0, which is plain."""
    pipe = StableDiffusionControlNetPipeline(**stable_diffusion(controlnet=controlnet()))
    pipe.controlnet.apply_tome(0.5)
    for unet_ratio in (None, 0):
        if unet_ratio is not None:
            pipe.unet.apply_tome(unet_ratio)
        with pytest.raises(ToMeConfigError, match=r"ControlNet .*0\.5"):
            export(pipe, tmp_path / "out")
    with pytest.raises(ToMeConfigError, match=r"controlnet=0\.3 .*UNet"):
        export(pipe, tmp_path / "out", 0, controlnet=0.3)
    assert list_merging([ToMeConfig(0)], controlnet=True) == (DenoiserMerging(None, None),)
    assert not any(tmp_path.iterdir())


# Pipelines without some components


def test_the_refiner_of_sdxl(refiner_folder):
    pipe = refiner_pipeline()
    models = [file.model for file in read_manifest(refiner_folder, verify=True).programs]
    assert models == ["unet", "text_encoder_2", "vae_decoder", "vae_encoder"]
    loaded, images = load_pipeline(refiner_folder), []
    assert loaded.text_encoder is None and loaded.config.requires_aesthetics_score is True
    pipe.apply_tome(0.5)
    for one in (pipe, loaded):
        paddle.seed(0)
        image = paddle.linspace(0, 1, 3 * 32 * 32).reshape([1, 3, 32, 32])
        settings = {"num_inference_steps": 2, "strength": 0.5, "output_type": "np"}
        images.append(one("a fox", image=image, generator=paddle.Generator().manual_seed(0), **settings).images)
    np.testing.assert_allclose(*images, atol=1e-4)
    with pytest.raises(ToMeConfigError, match=r"refiner.*needs an image"):
        load_engine(refiner_folder)


@pytest.mark.parametrize("layout", ["ppdiffusers", "diffusers"])
@pytest.mark.parametrize("name", ["unet", "vae", "scheduler", "text_encoder", "tokenizer"])
def test_components_that_are_none(tiny, tmp_path, layout, name):
    pipe = StableDiffusionPipeline(**tiny.components, requires_safety_checker=False)
    pipe.register_modules(**{name: None})
    with pytest.raises(ToMeExportError, match=f"{name} is None"):
        export_pipeline(pipe, tmp_path / "out", 0.5, [(32, 32)], layout=layout, progress=False)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["text_encoder_2", "tokenizer_2"])
def test_what_the_refiner_needs(tmp_path, name):
    pipe = refiner_pipeline()
    pipe.register_modules(**{name: None})
    with pytest.raises(ToMeExportError, match=f"{name} is None"):
        export(pipe, tmp_path / "out", 0.5, [(32, 32)])


# Errors leave nothing behind


def test_the_earlier_export_is_there_after_a_kill(exported_folder, tiny, tmp_path, monkeypatch):
    """Between two renames it has another name, which readers and requests report; what writes renames it back."""
    shutil.copytree(exported_folder, tmp_path / ".out.replaced")
    for read in (read_manifest, load_pipeline):
        with pytest.raises(ToMeExportError, match=r"/\.out\.replaced.* rename .*/out"):
            read(tmp_path / "out")
    with pytest.raises(ToMeExportError, match=r"/\.out\.replaced: rename it, or .*--overwrite"):
        export(tiny, tmp_path / "out", 0.5)
    ExportRequest(tmp_path / "out", None, None, PpdiffusersLayout("paddle"), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == [".out.replaced"]
    monkeypatch.setattr(export_module._Writer, "write", lambda _: pytest.fail("it writes"))
    with pytest.raises(pytest.fail.Exception):
        export(tiny, tmp_path / "out", 0.5, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and read_manifest(tmp_path / "out")


def test_program_that_differs_is_an_error(tiny, tmp_path):
    """A hook that counts its calls in Python: the program repeats the traced call, eager does not."""
    calls = []
    hook = tiny.unet.conv_out.register_forward_post_hook(lambda *_: _[-1] + 1e-3 * (calls.append(0) or len(calls)))
    try:
        with pytest.raises(ToMeExportError, match=r"unet 32x32, ratio 0.5 .*batch 1"):
            export(tiny, tmp_path / "out", 0.5)
    finally:
        hook.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("starts_late", [True, False])
def test_two_exports_into_one_new_folder(exported_folder, tiny, tmp_path, monkeypatch, starts_late):
    """One is written and the other an error: at once, or at its end where both have started at the same time."""
    linked = programs_of(exported_folder)
    copy_parts, folder, written = export_module.copy_parts, tmp_path / "out", []

    def write(ratio):
        settings = {"image_to_image": True, "linked": linked}
        written.append(export(tiny, folder, ratio, [(32, 32)], **settings))

    def write_another_first(*arguments):
        monkeypatch.setattr(export_module, "copy_parts", copy_parts)
        copy_parts(*arguments)
        if starts_late:
            with pytest.raises(ToMeExportError, match=r"out .*another process"):
                write(0)
        else:
            monkeypatch.setattr(replacement, "_is_in_use", lambda _: False)
            write(0)

    monkeypatch.setattr(export_module, "copy_parts", write_another_first)
    if starts_late:
        write(0.5)
    else:
        with pytest.raises(FileExistsError, match=r"out .*another process"):
            write(0.5)
    assert [read_manifest(folder, verify=True)] == written and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_failing_overwrite_keeps_the_earlier_export(exported_folder, tiny, tmp_path, monkeypatch):
    def failing_copy(pipe, folder, image_to_image):
        (folder / "model_index.json").write_text("half of i")
        raise OSError("No space left on device")

    folder = tmp_path / "out"
    shutil.copytree(exported_folder, folder)
    monkeypatch.setattr(export_module._Writer, "write", lambda _: ())
    monkeypatch.setattr(export_module, "copy_parts", failing_copy)
    with pytest.raises(OSError, match="No space left"):
        export(tiny, folder, 0.5, overwrite=True)
    assert read_manifest(folder, verify=True) == read_manifest(exported_folder)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_relative_difference():
    one = [np.array([1.0, -4.0]), np.array([2.0])]
    assert relative_difference(one, one) == 0
    assert relative_difference([one[0] + [0, 0.4], one[1]], one) == pytest.approx(0.1)
    assert relative_difference([one[0], one[1] * 1.5], one) == pytest.approx(0.5)
    assert np.isnan(relative_difference([one[0] * np.nan, one[1]], one))


class Disturbed(Program):
    """A program that adds errors to the images of its calls with a batch of two, by the number of the call."""

    def __init__(self, program, errors):
        self.program, self.errors, self.inputs = program, list(errors), program.inputs

    def __call__(self, **inputs):
        (output,) = self.program(**inputs)
        if output.shape[0] == 2 and self.errors:
            output = output + paddle.to_tensor(self.errors.pop(0)).reshape([2, 1])
        return [output]


RIGHT, FIRST, SECOND, NEITHER = (0.0, 0.0), (0.0, 0.5), (0.5, 0.0), (0.5, 0.5)


@pytest.mark.parametrize(
    ("errors", "is_accepted"),
    [
        ([], True),
        ([FIRST, SECOND], True),  # then the second run of the second try, and all others are right
        ([FIRST, NEITHER, FIRST, SECOND], True),
        (9 * [FIRST], False),
        (9 * [(float("nan"), 0.0)], False),
        ([RIGHT, FIRST], False),  # the second run differs: a race between threads
        ([NEITHER, FIRST, SECOND, NEITHER], False),
    ],
)
def test_each_image_needs_one_try_that_agrees_in_two_runs(tmp_path, monkeypatch, errors, is_accepted):
    """Near-equal tokens may merge differently; a program that is wrong in an image is so in every try."""
    load = PaddleRuntime.load

    def load_disturbed(self, folder, file):
        program = load(self, folder, file)
        assert self.threads == 2, "with one there is no race"
        return Disturbed(program, errors) if self.optimize and not self.onednn else program

    monkeypatch.setattr(PaddleRuntime, "load", load_disturbed)
    monkeypatch.setattr(tracing, "MIN_THREADS", MIN_THREADS)
    traceable = programs.Traceable(paddle.nn.Linear(4, 4), (programs.Input("input", ("batch", 4)),))
    traced = tracing.TracedProgram(traceable, PlannedProgram("layer"), tmp_path, "x", {}, 1)
    if is_accepted:
        assert max(traced.compare_in_paddle()[0].values()) <= TOLERANCE
    else:
        with pytest.raises(ToMeExportError, match=r"layer .*batch 2"):
            traced.compare_in_paddle()


class Untraceable(paddle.nn.Linear):
    """A layer whose trace fails after its parameters were used."""

    def forward(self, input):
        output = paddle.nn.functional.linear(input, self.weight, self.bias)
        if not paddle.in_dynamic_mode():
            raise ValueError("not in a program")
        return output


def test_an_export_after_one_that_failed(tmp_path):
    """Paddle 3 crashed here; Paddle 2.6 kept the parameters, and gave them to a program of later."""
    inputs = (programs.Input("input", ("batch", 4)),)
    for number in range(2):
        layer = Untraceable(4, 4)
        weight = weakref.ref(layer.weight)
        with pytest.raises(ToMeExportError, match=r"the layer.*not in a program"):
            write_program(programs.Traceable(layer, inputs), PlannedProgram("layer"), tmp_path, f"{number}")
        del layer
        gc.collect()
        assert weight() is None
        traceable = programs.Traceable(paddle.nn.Linear(4, 4), inputs)
        assert write_program(traceable, PlannedProgram("layer"), tmp_path, f"{number}").files["paddle"].parity


# Errors before anything is written


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratios": 0.95}, "ratio=0.95"),
        ({"ratios": 0.6, "method": "todo"}, r"ratio=0.6 .* 0\.5, 0\.75 or 0"),
        ({"ratios": 0.75, "seeds": 3}, "'seeds' .*mean seed"),
        ({"ratios": []}, "ratios is empty"),
        ({"ratios": None, "windows": 8}, "'windows' .*use ratio, method"),
        ({"ratios": (0.5, 0.5000001)}, r"ratios 0\.5 and 0\.5000001 are the same"),
        ({"ratios": ({1.0: 0.5, 0.5: 0.3}, 0.5)}, r"ratio=\{1\.0: 0\.5, 0\.5: 0\.3\} .*a number"),
        ({"sizes": [(32, 33)]}, "size='33x32'"),
        ({"sizes": [(132, 100)]}, "size='100x132' .* 8 px.* 96x128 and 104x136"),
        ({"sizes": [(32, 32), (12, 4)]}, "size='4x12' .* 8x8 and 8x16"),
        ({"sizes": [(0, 32)]}, "size='32x0'"),
        ({"sizes": []}, "sizes is empty"),
        ({"sizes": (256, 256)}, r"sizes=\(256, 256\) .*\[\(512, 768\)\], or one number"),
        ({"sizes": "256"}, "sizes='256' .*a list"),
        ({"sizes": [(32, 32, 32)]}, "a list"),
        ({"sizes": 32.0}, r"sizes=32\.0 "),
        ({"ratios": "0.5"}, "ratio='0.5' .*a number"),
        ({"ratios": np.float32(0.95)}, r"ratio=.*0\.9[45]"),
        ({"format": "tflite"}, "format='tflite'.*'both'"),
        ({"ratios": None, "min_tokens": 9}, "min_tokens .*ratios"),
        ({"ratios": None, "method": "todo", "seed": 8}, "seed=8 .*method='todo'"),
    ],
)
def test_invalid_arguments_are_rejected(tiny, tmp_path, settings, message):
    with pytest.raises(ToMeConfigError, match=message):
        export(tiny, tmp_path / "out", **{"ratios": 0.5, **settings})
    assert list(tmp_path.iterdir()) == []


def test_a_number_is_a_square_and_numbers_may_be_of_numpy(tiny, exported_folder, tmp_path):
    linked = programs_of(exported_folder)
    settings = {"image_to_image": True, "linked": linked}
    assert export(tiny, tmp_path / "a", np.float32(0.5), 32, **settings).sizes == (Size(32, 32),)
    manifest = export(tiny, tmp_path / "b", np.array([0.5, 0]), [np.array([32, 48]).tolist()], **settings)
    assert manifest.ratios == (0.5, 0) and manifest.sizes == (Size(32, 48),)
    assert list_sizes([[np.int64(32), 48]]) == (Size(32, 48),) and list_sizes(np.int64(32)) == (Size(32, 32),)


def test_settings_that_merge_nothing_are_an_error(tmp_path):
    level_2 = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D")}
    level_2["up_block_types"] = ("CrossAttnUpBlock2D", "UpBlock2D")
    pipe = StableDiffusionPipeline(**stable_diffusion(unet=unet(**level_2)))
    with pytest.raises(NoMergeableLayerError, match="level 2"):
        export(pipe, tmp_path / "out", 0.5, max_downsample=1)
    assert list(tmp_path.iterdir()) == []


def test_pipelines_that_cannot_be_exported(exported_folder, tmp_path):
    multi = MultiControlNetModel([controlnet(), controlnet()])
    with_checker = tiny_pipeline()
    with_checker.safety_checker = paddle.nn.Identity()
    for pipe, message in (
        (DiffusionPipeline(), "DiffusionPipeline cannot be exported"),
        (load_pipeline(exported_folder), "already an export: pass the pipeline of the model"),
        (StableDiffusionPipeline(**stable_diffusion(unet=unet(time_cond_proj_dim=8))), "time_cond_proj_dim"),
        (
            StableDiffusionControlNetPipeline(**stable_diffusion(controlnet=multi)),
            "MultiControlNetModel, .*stand for ControlNetModel: load",
        ),
        (with_checker, "--no-safety-checker"),
    ):
        with pytest.raises(ToMeExportError, match=message):
            export(pipe, tmp_path / "out", 0.5)


def test_folders_with_other_content_are_rejected(tiny, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("mine")
    with pytest.raises(ToMeExportError, match="is a file"):
        export(tiny, tmp_path / "file", 0.5)
    with pytest.raises(ToMeExportError, match="not empty"):
        export(tiny, tmp_path / "folder", 0.5, overwrite=True)
    assert (tmp_path / "folder" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("text", ["", "32x", "x32", "axb", "0x32", "-8x32", "32x32x32", "32.5x32"])
def test_invalid_sizes_are_rejected(text):
    with pytest.raises(ToMeConfigError, match="WIDTHxHEIGHT"):
        parse_size(text)


def test_size_is_width_before_height():
    assert parse_size("48x32") == Size(height=32, width=48)
    assert parse_size("32") == Size(height=32, width=32)
    assert str(Size(height=32, width=48)) == "48x32"


# The command


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ratio", "0.95"], "--ratio 0.95 .* 0.9375"),
        (["--ratio", "0.6", "--merging", "method=todo"], "--ratio 0.6 .*method='todo'"),
        (["--merging", "ratio=0.95"], "error: ratio=0.95 "),  # as it was written
        (["--ratio", "0.5", "0.5000001"], "ratios 0.5 and 0.5000001 "),
        (["--controlnet-ratio", "2"], "--controlnet-ratio 2.0 "),
        (["--size", "132"], "--size 132x132 "),
        (["--size", "32x"], "--size 32x .*WIDTHxHEIGHT"),
        (["--for", "openvino"], "--for openvino .*'diffusers'"),
        (["--format", "openvino"], "--format openvino .*'diffusers'"),
        (["--output", "/proc/x"], "/proc/x .*No such file"),
        (["--output", "/proc"], "/proc .*mount point"),
        (["--output", f"{__file__}/out"], "Not a directory"),
        (["--output", "x" * 300], "File name too long"),
    ],
)
def test_command_checks_its_options_before_it_loads_the_model(options, message, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(loading, "load_eager_pipeline", lambda *_: pytest.fail("the model was loaded"))
    assert main(["export", "--model", "x/y", "--output", str(tmp_path / "new" / "out"), *options]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["export", "compare", "generate", "serve"])
def test_a_missing_folder_is_not_a_name_of_a_hub(command, tmp_path, monkeypatch, capsys):
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path)
    arguments = {"export": ["--output", "out"], "compare": [], "serve": []}
    arguments["generate"] = ["--prompts", "prompts.txt", "--output", "out"]
    (tmp_path / "prompts.txt").write_text("a fox")
    assert main([command, "--model", "examples/nope_sd", *arguments[command]]) == 2
    error = capsys.readouterr().err
    assert "examples/nope_sd does not exist. It is not taken for a hub name" in error or "is not a folder" in error
    require_model_folder("owner/name", hub_names=True)
    controlled = ["export", "--model", "owner/name", "--controlnet", "examples/nope_sd", "--output", "out"]
    assert main(controlled) == 2
    assert "examples/nope_sd does not exist" in capsys.readouterr().err


def test_a_model_folder_is_required(exported_folder, tmp_path):
    (tmp_path / "model" / "scheduler").mkdir(parents=True)
    (tmp_path / "model" / "model_index.json").write_text("{}")
    require_model_folder(tmp_path / "model")
    require_model_folder("owner/name", hub_names=True)
    for folder, reason in {
        "owner/name": "is not a folder",
        tmp_path / "none": "is not a folder",
        tmp_path / "model" / "scheduler": r"has no model_index\.json.* save_pretrained",
        exported_folder: "is already an export .*: pass the folder of the model",
    }.items():
        with pytest.raises(ToMeConfigError, match=f"^{folder} {reason}"):
            require_model_folder(folder)


def test_only_a_pipeline_that_can_have_a_safety_checker_is_loaded_without_one(monkeypatch):
    """The others would log that they ignore the argument."""
    asked = {}

    def record(model, **arguments):
        asked[Path(model).name] = {name for name in arguments if "safety_checker" in name}

    monkeypatch.setattr(loading.DiffusionPipeline, "from_pretrained", record)
    examples = Path(__file__).parents[2] / "examples"
    for model in ("tiny/sdxl", "emoji_sd"):
        load_eager_pipeline(str(examples / model), safety_checker=False)
    assert asked == {"sdxl": set(), "emoji_sd": {"safety_checker", "requires_safety_checker"}}
