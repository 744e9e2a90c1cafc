"""Cached programs: under what they are, and for what they must not be used."""

import os
from pathlib import Path

import pytest

from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.evaluation import cached_programs
from ppdiffusers_tome.evaluation.cached_programs import CachedPrograms, folder_of_programs, program_key
from ppdiffusers_tome.evaluation.environment import model_files
from ppdiffusers_tome.inference import ProgramFile, Size


@pytest.fixture
def pipeline(tmp_path):
    """A folder that is like a pipeline's."""
    folder = tmp_path / "pipeline"
    for name, text in {"unet/model.bin": "weights", "vae/model.bin": "others", "prompts.txt": "a fox"}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "model_index.json").write_text('{"_class_name": "Pipeline", "unet": ["a", "b"], "vae": ["a", "b"]}')
    return folder


def test_the_content_of_a_model_decides(pipeline):
    before = model_files(str(pipeline))
    (pipeline / "prompts.txt").write_text("an owl")  # no part of the model
    os.utime(pipeline / "unet" / "model.bin", (0, 0))
    assert model_files(str(pipeline)) == before
    for name in ("unet/model.bin", "vae/model.bin"):
        path = pipeline / name
        text = path.read_text()
        path.write_text(text[::-1])  # of the same size
        assert model_files(str(pipeline)) != before
        path.write_text(text)
    (pipeline / "unet" / "model.bin").rename(pipeline / "unet" / "other.bin")
    assert model_files(str(pipeline)) != before


def test_a_model_without_an_index_has_a_unet(pipeline):
    (pipeline / "model_index.json").unlink()
    before = model_files(str(pipeline))
    (pipeline / "vae" / "model.bin").write_text("changed")
    assert model_files(str(pipeline)) == before
    (pipeline / "unet" / "model.bin").write_text("changed")
    assert model_files(str(pipeline)) != before
    assert model_files("a/name/of/the/hub") == "a/name/of/the/hub"


@pytest.mark.parametrize(("name", "value"), [("sources", "0" * 16), ("versions", {"python": "2.7"})])
def test_other_sources_versions_and_models_have_another_folder(pipeline, tmp_path, monkeypatch, name, value):
    folders = {folder_of_programs(tmp_path, str(pipeline)), folder_of_programs(tmp_path, str(pipeline))}
    assert len(folders) == 1
    folders.add(folder_of_programs(tmp_path, "another"))
    monkeypatch.setattr(cached_programs, name, lambda: value)
    folders.add(folder_of_programs(tmp_path, str(pipeline)))
    assert len(folders) == 3 and {folder.parent for folder in folders} == {tmp_path}


def test_what_decides_a_program_is_in_its_key():
    keys = {
        program_key("unet", 128, "tome", ToMeConfig(0.5), "paddle"),
        program_key("block", 128, "tome", ToMeConfig(0.5), "paddle"),
        program_key("unet", 256, "tome", ToMeConfig(0.5), "paddle"),
        program_key("unet", 128, "limit", ToMeConfig(0.5), "paddle"),
        program_key("unet", 128, "plain", None, "paddle"),
        program_key("unet", 128, "tome", ToMeConfig(0.4), "paddle"),
        program_key("unet", 128, "tome", ToMeConfig(0.5, use_rand=False), "paddle"),
        program_key("unet", 128, "tome", ToMeConfig(0.5, seed=1), "paddle"),
        program_key("unet", 128, "tome", ToMeConfig(0.5), "onnx"),
    }
    assert len(keys) == 9 and program_key("unet", 128, "tome", ToMeConfig(ratio=0.5), "paddle") in keys


def saved_program(folder, onnx):
    paths = {"onnx": "key.onnx"} if onnx else {"program": "key/a.pdmodel", "params": "key/a.pdiparams"}
    for path in paths.values():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("content")
    parities = {"parity": {"batch 1": 1e-6}, "onednn_parity": {"batch 1": float("inf")}}
    return ProgramFile("unet", size=Size(8, 8), ratio=0.5, **paths, **parities)


@pytest.mark.parametrize("onnx", [False, True])
def test_a_program_is_found_while_it_is_complete(tmp_path, onnx):
    programs = CachedPrograms(tmp_path / "here")
    saved = saved_program(programs.folder, onnx)
    assert programs.find("key") is None, "nothing is recorded"
    programs.store("key", saved)
    assert programs.find("key") == saved and programs.find("other") is None
    moved = Path((tmp_path / "here").rename(tmp_path / "there"))
    assert CachedPrograms(moved).find("key") == saved
    (moved / ("key.onnx" if onnx else "key/a.pdiparams")).unlink()
    assert CachedPrograms(moved).find("key") is None
    (moved / "key.json").write_text("{")
    assert CachedPrograms(moved).find("key") is None
