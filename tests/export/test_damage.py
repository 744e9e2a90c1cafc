"""Damaged exports: loading raises one clear error, or the damage has no effect."""

import hashlib
import json
import os
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ppdiffusers_tome import ToMeExportError
from ppdiffusers_tome.inference import load_pipeline, read_manifest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "tools"))
import fuzz_files


@pytest.fixture
def copy(exported_folder, tmp_path):
    """A copy of the export that a test may damage."""
    return Path(shutil.copytree(exported_folder, tmp_path / "copy"))


def edit(path, change):
    """Modify a JSON file; `change` may return a new value for it."""
    data = json.loads(path.read_text())
    path.write_text(json.dumps(change(data) or data))


def set_to(*keys_and_value):
    """A function that sets data[key][key]… to a value."""
    *keys, last, value = keys_and_value

    def change(data):
        for key in keys:
            data = data[key]
        data[last] = value

    return change


def replace_content(folder, name, content):
    """Write a file and its hash, as if an export and its tome.json had been edited by hand."""
    data = content.encode(errors="surrogateescape")
    (folder / name).write_bytes(data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit(folder / "tome.json", set_to("files", name, entry))


def relevant_fields(manifest):
    """The fields that determine which programs are loaded, and how they are called."""
    programs = [replace(file, parity={}, onednn_parity={}, onnx_parity={}) for file in manifest.programs]
    return programs, manifest.sizes, manifest.ratios, manifest.pipeline, manifest.vae_factor, manifest.residuals


def test_random_damage_of_tome_json(exported_folder, tmp_path):
    """Either reading raises, or the relevant fields are unchanged."""
    expected = relevant_fields(read_manifest(exported_folder))
    folder = tmp_path / "copy"
    shutil.copytree(exported_folder, folder, copy_function=os.link)
    rejected = 0
    for number, path, kind, damaged in fuzz_files.damages(exported_folder, 160, seed=0):
        if path.name != "tome.json":
            continue
        (folder / path).unlink(missing_ok=True)
        if damaged is not None:
            (folder / path).write_bytes(damaged)
        try:
            assert relevant_fields(read_manifest(folder, verify=True)) == expected, f"damage {number}, {kind}"
        except ToMeExportError as error:
            assert str(folder) in str(error) and len(str(error)) < 2000 and "\n" not in str(error)
            rejected += 1
    assert rejected > 48, "of 80"


def test_random_damage_of_the_other_files(exported_folder, tmp_path):
    paths = set()
    for number, path, kind, damaged in fuzz_files.damages(exported_folder, 60, seed=1):
        if path.name != "tome.json":
            fuzz_files.write_damaged(exported_folder, path, damaged, tmp_path / "case")
            assert fuzz_files.load(tmp_path / "case") == "refused", f"damage {number}, {kind} of {path}"
            shutil.rmtree(tmp_path / "case")
            paths.add(path)
    assert len(paths) > 15


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_to("format", 2), "format: .*not 2"),
        (set_to("unknown", 1), "unknown: "),
        (lambda data: data.pop("vae_factor") and None, "vae_factor: "),
        (set_to("image_to_image", "yes"), "image_to_image: .*not 'yes'"),
        (set_to("ratios", 0, float("nan")), "ratios.0: .*not nan"),
        (set_to("ratios", 0, 1.5), "ratios.0: .*not 1.5"),
        (set_to("ratios", []), "ratios: "),
        (set_to("sizes", 0, [32]), "sizes.0.width: "),
        (set_to("sizes", 0, 0, 10**30), "sizes.0.0: .*99999"),
        (set_to("programs", 0, "size", [32, 48]), "programs is unknown or inconsistent"),
        (set_to("programs", 0, "ratio", 0.25), "programs is unknown or inconsistent"),
        (set_to("programs", 0, "program", "unet/no.pdmodel"), "files is unknown or inconsistent"),
        (set_to("programs", 0, "program", "../unet/inference.pdmodel"), "programs.0.program: "),
        (set_to("programs", 0, "parity", "batch 1", float("nan")), "programs.0.parity.batch 1: "),
        (set_to("files", {}), "lists no files"),
        (set_to("merging", {}), "merging is unknown or inconsistent"),
        (set_to("merging", "0.5", 0, "ratio", "half"), "merging is unknown or inconsistent"),
        (set_to("merging", "0.5", 0, "method", None), "merging is unknown or inconsistent"),
        (set_to("merging", "0.5", 0, "default"), "merging.0.5.0: .*not 'default'"),
        (set_to("pipeline", "Popen"), "pipeline is unknown or inconsistent"),
        (set_to("residuals", 13), "residuals is unknown or inconsistent"),
        (set_to("vae_factor", 5), "vae_factor is unknown or inconsistent"),
        (set_to("files", "unet/config.json", {"bytes": 1}), "files.unet/config.json.sha256: "),
        (set_to("files", "../x", {"bytes": 1, "sha256": "0" * 64}), "files.../x"),
        (set_to("files", "/etc/passwd", {"bytes": 1, "sha256": "0" * 64}), "files./etc/passwd"),
        (set_to("files", "unet/.", {"bytes": 1, "sha256": "0" * 64}), "files.unet/."),
        (lambda data: [data], "a dictionary|an object"),
    ],
)
def test_invalid_field_of_tome_json_is_named(copy, change, message):
    edit(copy / "tome.json", change)
    with pytest.raises(ToMeExportError, match=message):
        read_manifest(copy)


def test_wrong_vae_factor_is_rejected_on_loading(copy):
    edit(copy / "tome.json", set_to("vae_factor", 4))
    with pytest.raises(ToMeExportError, match="vae_factor is not 2"):
        load_pipeline(copy)


def test_links_out_of_the_folder_and_circular_links_are_rejected(copy, tmp_path):
    path = copy / "unet" / "config.json"
    outside = path.replace(tmp_path / "config.json")
    path.symlink_to(outside)
    with pytest.raises(ToMeExportError, match=r"unet/config.json is a link"):
        read_manifest(copy)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(ToMeExportError, match="Too many levels of symbolic links"):
        read_manifest(copy)
    path.unlink()
    outside.replace(copy / "kept.json")
    path.symlink_to(copy / "kept.json")
    assert read_manifest(copy, verify=True) == read_manifest(copy)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", ["vae_decoder/config.json", "tokenizer/merges.txt"])
def test_all_files_except_weights_are_always_verified(copy, verify, name):
    path = copy / name
    path.write_bytes(fuzz_files.flip(path.read_bytes(), fuzz_files.Random(0)))
    assert read_manifest(copy), "only compares sizes"
    with pytest.raises(ToMeExportError, match=rf"{path.name} differs"):
        load_pipeline(copy, verify=verify)


@pytest.mark.parametrize(
    ("source", "runtime", "name"),
    [("exported_folder", "paddle", "unet/inference.pdiparams"), ("onnx_folder", "onnxruntime", "onnx/unet.weights")],
)
def test_weights_are_verified_unless_switched_off_and_programs_always(source, runtime, name, request, tmp_path):
    folder = Path(shutil.copytree(request.getfixturevalue(source), tmp_path / "copy"))
    load = partial(load_pipeline, folder, runtime=runtime)
    weights, program = folder / name, folder / read_manifest(folder).programs[0].paths[0]
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with pytest.raises(ToMeExportError, match=rf"{name} differs"):
        load()
    load(verify=False)
    program.write_bytes(fuzz_files.flip(program.read_bytes(), fuzz_files.Random(0)))
    with pytest.raises(ToMeExportError, match=rf"{program.name} differs"):
        load(verify=False)
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ToMeExportError, match=rf"{name} .*size"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model_index.json", "[]", "TypeError"),
        ("model_index.json", "{}", "KeyError: 'tokenizer'"),
        ("model_index.json", "\udcff", "UnicodeDecodeError"),
        ("unet/config.json", "[" * 100_000, "RecursionError"),
        ("vae_decoder/config.json", "{", "JSONDecodeError"),
        ("text_encoder/config.json", "null", "TypeError"),
        ("tokenizer/tokenizer_config.json", "[", "JSONDecodeError"),
        ("scheduler/scheduler_config.json", '{"num_train_timesteps": "many"}', "TypeError|ValueError"),
    ],
)
def test_invalid_content_with_a_valid_hash_is_rejected(copy, name, content, message):
    replace_content(copy, name, content)
    with pytest.raises(ToMeExportError, match=rf"copy .*\(({message})"):
        load_pipeline(copy)


def test_classes_outside_of_ppdiffusers_are_rejected(copy):
    index = json.loads((copy / "model_index.json").read_text())
    replace_content(copy, "model_index.json", json.dumps({**index, "tokenizer": ["subprocess", "Popen"]}))
    with pytest.raises(ToMeExportError, match=r"model_index\.json.* tokenizer .*subprocess"):
        load_pipeline(copy)
