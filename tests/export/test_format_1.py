"""`tome.json` of release 3.0.0, whose format is 1: `tome_3_0_0.json` is one that it wrote."""

import json
import os
from pathlib import Path

import pytest

from ppdiffusers_tome import ToMeConfig, ToMeExportError
from ppdiffusers_tome.inference import Size, read_manifest
from ppdiffusers_tome.run.manifest import Files

WRITTEN = Path(__file__).with_name("tome_3_0_0.json")
BATCHES = ("batch 1", "batch 2")


def folder_of(content, folder):
    """A folder with this `tome.json`, whose files have their sizes, and no content."""
    for name, facts in content["files"].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
        os.truncate(folder / name, facts["bytes"])
    (folder / "tome.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def content():
    return json.loads(WRITTEN.read_text())


def test_all_that_a_manifest_has_is_read(content, tmp_path):
    """It is of a UNet at 0.5 and plain, with a ControlNet at 0.75, in both formats."""
    manifest = read_manifest(folder_of(content, tmp_path))
    assert (manifest.format, manifest.name, manifest.residuals) == (2, "emoji_sd", 7)
    assert manifest.ratios == (0.5, 0.0) and manifest.sizes == (Size(64, 64),)
    assert manifest.formats == ("paddle", "onnx") and manifest.versions["ppdiffusers_tome"] == "3.0.0"
    assert [file.label for file in manifest.programs] == [
        *("unet 64x64, ratio 0.5", "unet 64x64, ratio 0", "text_encoder", "vae_decoder"),
    ]
    for file, old in zip(manifest.programs, content["programs"], strict=True):
        assert file.files == {
            "paddle": Files(old["program"], old["params"], old["parity"]),
            "onnx": Files(old["onnx"], f"onnx/{file.model}.weights", old["onnx_parity"]),
        }
        assert {*file.files["onnx"].parity} == {*BATCHES}


def test_programs_of_3_0_0_merge_in_all_steps_and_say_so(content, tmp_path):
    """It had no `merge_steps`, and wrote settings that a method did not have."""
    of_unet, _ = content["merging"]["0.5"]
    of_unet |= {"min_tokens": 64}
    merging, plain = read_manifest(folder_of(content, tmp_path)).merging
    words = "interlace, min_tokens=64, merge_steps='all'; ControlNet at ratio 0.75: interlace, merge_steps='all'"
    assert (merging.words, plain.words, plain.settings) == (words, "", None)
    assert ToMeConfig(**merging.settings) == ToMeConfig(0.5, min_tokens=64, merge_steps="all")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "todo", "sx": 4}, "todo, sx=4"),
        ({"method": "tomesd", "merge_mlp": True}, "tomesd, merge_mlp=True"),
        ({"method": "interlace", "merge_steps": "middle"}, "interlace"),  # of builds after it
    ],
)
def test_each_method_is_described_as_it_was_exported(content, tmp_path, settings, words):
    content["merging"]["0.5"] = [content["merging"]["0.5"][0] | settings, None]
    merging = read_manifest(folder_of(content, tmp_path)).merging[0]
    assert merging.words == words and merging.settings["method"] == settings["method"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["merging"].clear(), "merging is unknown or inconsistent"),
        (lambda data: data["merging"]["0.5"][0].pop("ratio"), "merging.0.5.0.ratio: "),
        (lambda data: data["merging"]["0.5"][0].update(method=None), "merging.0.5.0.method: "),
        (lambda data: data["programs"][0].pop("onnx"), "programs.0.onnx: "),
        (lambda data: data["programs"][0].update(program=None, onnx=None), "programs.0.files: "),
        (lambda data: data["programs"][0].update(params=None), "programs.0.files.paddle.weights: "),
        (lambda data: data.update(schedule=None), "schedule: "),
        (lambda data: data.pop("residuals"), "residuals: "),
    ],
)
def test_a_wrong_field_is_named(content, tmp_path, change, message):
    change(content)
    with pytest.raises(ToMeExportError, match=rf"tome\.json is damaged.*{message}.*export the model again"):
        read_manifest(folder_of(content, tmp_path))
