"""What options and configs show to be impossible is refused before an export writes its first program."""

import json
import re

import pytest
from conftest import refiner_pipeline, tiny_pipeline
from ppdiffusers import DDIMScheduler, StableDiffusionControlNetPipeline
from zoo.parts import ONE_LEVEL, controlnet, scheduler, stable_diffusion, tokenizer, unet

from ppdiffusers_tome import ToMeConfigError, ToMeExportError
from ppdiffusers_tome.cli import main
from ppdiffusers_tome.cores import usable_cores
from ppdiffusers_tome.export import export as export_module
from ppdiffusers_tome.export import loading
from ppdiffusers_tome.inference import export_pipeline

KEEPS_ALL = "every block would keep all of its keys"


class OwnScheduler(DDIMScheduler):
    """A scheduler of a user."""


@pytest.fixture(autouse=True)
def writes_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(export_module, "replacing", lambda *_: pytest.fail("the export begins to write"))
    yield
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def with_controlnet():
    """A pipeline with four blocks in its UNet and two in its ControlNet."""
    parts = stable_diffusion(unet=unet(**ONE_LEVEL), controlnet=controlnet(**ONE_LEVEL))
    return StableDiffusionControlNetPipeline(**parts)


def test_a_ratio_at_which_the_unet_keeps_all_keys(tiny, tmp_path):
    with pytest.raises(ToMeConfigError, match=rf"^ratio=0\.02 is not allowed: {KEEPS_ALL}"):
        export_pipeline(tiny, tmp_path / "out", (0.5, 0.02), 32)


def test_a_ratio_for_a_controlnet_that_is_absent(tiny, tmp_path):
    """Left out without a word, a wrong pipeline would seem to merge as it was asked to."""
    words = r"^controlnet=0\.3 is not allowed: .* StableDiffusionPipeline has none"
    with pytest.raises(ToMeConfigError, match=words):
        tiny.apply_tome(0.5, controlnet=0.3)
    with pytest.raises(ToMeConfigError, match=words):
        export_pipeline(tiny, tmp_path / "out", 0.5, 32, controlnet=0.3)
    tiny.apply_tome(0.5, controlnet=0.0).remove_tome()  # as False


@pytest.mark.parametrize("value", [False, 0.3])
def test_the_ratio_of_a_controlnet_beside_what_is_applied(value, with_controlnet, tmp_path):
    with pytest.raises(ToMeConfigError, match=f"^controlnet={value} is not allowed: .*without ratios"):
        export_pipeline(with_controlnet, tmp_path / "out", controlnet=value)


@pytest.mark.parametrize(
    ("ratios", "of_controlnet", "name"),
    [
        ((0.5, 0.75), 0.02, "controlnet=0.02"),  # its own ratio
        ((0.5, 0.03), True, "ratio=0.03"),  # that of the UNet, which has a block that keeps more, and others less
    ],
)
def test_a_ratio_at_which_the_controlnet_keeps_all_keys(ratios, of_controlnet, name, with_controlnet, tmp_path):
    with_controlnet.unet.apply_tome(ratios[-1]).remove_tome()
    words = f"^{re.escape(name)} is not allowed: in the ControlNet {KEEPS_ALL}"
    with pytest.raises(ToMeConfigError, match=words):
        export_pipeline(with_controlnet, tmp_path / "out", ratios, 32, controlnet=of_controlnet)
    with pytest.raises(ToMeConfigError, match=words):
        with_controlnet.apply_tome(ratios[-1], controlnet=of_controlnet)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--ratio", "0.5", "0.02"], "--ratio 0.02 "),
        (["--ratio", "0.5", "--controlnet-ratio", "0.02"], "--controlnet-ratio 0.02 "),
    ],
)
def test_the_command_names_the_option_of_the_ratio(options, name, with_controlnet, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loading, "load_eager_pipeline", lambda *_, **__: with_controlnet)
    assert main(["export", "--model", "x/y", "--size", "32", "--output", str(tmp_path / "out"), *options]) == 2
    assert capsys.readouterr().err.startswith(f"error: {name}is not allowed: ")


@pytest.mark.parametrize("part", [{}, {"controlnet": [None, None]}])
def test_a_ratio_of_a_controlnet_that_the_model_lacks(part, tmp_path, monkeypatch, capsys):
    """Before the model is loaded; with --controlnet, and for a model with a ControlNet, the option is allowed."""
    loaded = []
    monkeypatch.setattr(loading, "_load", lambda cls, model, *_, **__: loaded.append(model) or tiny_pipeline())
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()

    def export(parts, *options):
        (model / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline", **parts}))
        ratios = ["--ratio", "0.02", "--controlnet-ratio", "0.5"]
        assert main(["export", "--model", str(model), "--size", "32", "--output", str(out), *ratios, *options]) == 2
        return capsys.readouterr().err

    error = export(part)
    assert error.startswith(f"error: --controlnet-ratio needs a ControlNet, and {model} has none: pass --controlnet ")
    assert loaded == []
    assert KEEPS_ALL in export(part, "--controlnet", str(tmp_path)) and len(loaded) == 2
    assert KEEPS_ALL in export({"controlnet": ["ppdiffusers", "ControlNetModel"]}) and len(loaded) == 3


def test_feed_forward_layers_in_chunks(tmp_path):
    pipe = tiny_pipeline()
    for layer in pipe.unet.sublayers():
        if hasattr(layer, "set_chunk_feed_forward"):
            layer.set_chunk_feed_forward(1, dim=1)
    with pytest.raises(ToMeConfigError, match="merge_mlp"):
        export_pipeline(pipe, tmp_path / "out", 0.5, 32, method="tomesd", merge_mlp=True)


def test_recommended_settings_that_cannot_be_read(tmp_path, monkeypatch, capsys):
    pipe, model = tiny_pipeline(), tmp_path / "model"
    model.mkdir()
    (model / "model_index.json").write_text("{}")
    (model / "defaults.json").write_text('{"steps": "20"}')
    pipe.register_to_config(_name_or_path=str(model))
    message = rf"{model}/defaults\.json: steps: .*, not '20'"
    with pytest.raises(ToMeConfigError, match=message):
        export_pipeline(pipe, tmp_path / "out", 0.5, 32)
    monkeypatch.setattr(loading.DiffusionPipeline, "from_pretrained", lambda *_, **__: pytest.fail("it is loaded"))
    for command in ("export", "compare"):
        assert main([command, "--model", str(model), "--output", str(tmp_path / "out")]) == 2
        assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("layout", ["ppdiffusers", "diffusers"])
def test_a_scheduler_of_ones_own(layout, tmp_path):
    pipe = tiny_pipeline(scheduler=scheduler(OwnScheduler))
    with pytest.raises(ToMeExportError, match=r"test_refusals\.OwnScheduler, but an export is loaded"):
        export_pipeline(pipe, tmp_path / "out", 0.5, 32, layout=layout)


@pytest.mark.parametrize("make", [tiny_pipeline, refiner_pipeline])
def test_more_tokens_than_positions(make, tmp_path):
    pipe = make()
    name = "tokenizer" if pipe.tokenizer is not None else "tokenizer_2"
    setattr(pipe, name, tokenizer())
    getattr(pipe, name).model_max_length = 77
    with pytest.raises(ToMeExportError, match=r"77 tokens, but the text_encoder\w* has 24 positions: set "):
        export_pipeline(pipe, tmp_path / "out", 0.5, 32)


@pytest.mark.parametrize(("options", "threads"), [([], usable_cores()), (["--threads", "3"], 3)])
def test_the_command_compares_on_all_cores(options, threads, with_controlnet, tmp_path, monkeypatch):
    """Paddle has one thread by default."""
    monkeypatch.setattr(loading, "load_eager_pipeline", lambda *_, **__: with_controlnet)
    used = []
    monkeypatch.setattr("paddle.base.core.set_num_threads", used.append)
    arguments = ["--model", "x/y", "--size", "32", "--ratio", "0.02"]  # which is refused before the first program
    assert main(["export", *arguments, *options, "--output", str(tmp_path / "out")]) == 2
    assert used == [threads]


def test_threads_out_of_range(tmp_path, capsys):
    assert main(["export", "--model", "x/y", "--threads", "0", "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "error: --threads 0 is not allowed: it must be 1 to 1024\n"
