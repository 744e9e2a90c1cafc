"""The cache: values and programs under their keys, and for what they must not be used."""

import math
import os
import re
import shutil
from pathlib import Path

import pytest
from lab import cache
from lab.cache import Cache, model_files, program_key, programs_of
from lab.result_files import read_json

from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.comparison.results import write_result
from ppdiffusers_tome.run.manifest import Files


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
    folders = {programs_of(tmp_path, str(pipeline)).folder, programs_of(tmp_path, str(pipeline)).folder}
    assert len(folders) == 1
    folders.add(programs_of(tmp_path, "another").folder)
    monkeypatch.setattr(cache, name, lambda: value)
    folders.add(programs_of(tmp_path, str(pipeline)).folder)
    assert len(folders) == 3 and {folder.parent for folder in folders} == {tmp_path}


@pytest.mark.parametrize(
    ("module", "decides"),
    [("methods/tomesd.py", True), ("commands/export.py", False), ("lab/speed/worker.py", True), ("bench.py", False)],
)
def test_sources_are_the_code_that_measures(module, decides, tmp_path, monkeypatch):
    """That of the package, and of the library of benchmarks/."""
    is_lab = not (cache.PACKAGE / module).exists()
    original = cache.LAB.parent if is_lab else cache.PACKAGE
    copied = shutil.copytree(original, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(cache, "LAB" if is_lab else "PACKAGE", copied / "lab" if is_lab else copied)
    before = cache.sources.__wrapped__()
    assert before == cache.sources.__wrapped__()
    with (copied / module).open("a") as file:
        file.write("answer = 42\n")
    assert (cache.sources.__wrapped__() != before) == decides


def test_what_decides_a_program_is_in_its_key():
    base = {"size": 128, "by": "ours", "config": ToMeConfig(0.5, "tomesd"), "format": "paddle"}
    others = [{"size": 256}, {"by": "built-in"}, {"config": None}, {"format": "onnx"}]
    changes = [{"ratio": 0.4}, {"use_rand": False}, {"seed": 1}, {"method": "interlace"}]
    configs = [ToMeConfig(**{"ratio": 0.5, "method": "tomesd", **change}) for change in changes]
    keys = {program_key(**{**base, **changes}) for changes in [{}, *others, *({"config": c} for c in configs)]}
    assert len(keys) == 9 and program_key(128, "ours", ToMeConfig(0.5, "tomesd"), "paddle") in keys


def saved_program(folder, onnx):
    files = Files("key.onnx" if onnx else "key/a.pdmodel", "key/a.weights", {"batch 1": 1e-6}, {"batch 1": math.inf})
    for path in files.paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("content")
    return files


@pytest.mark.parametrize("onnx", [False, True])
def test_a_program_is_found_while_it_is_complete(tmp_path, onnx):
    programs = Cache(tmp_path / "here")
    saved = saved_program(programs.folder, onnx)
    assert programs.load_files("key") is None, "nothing is stored"
    programs.store_files(saved, "key")
    assert programs.load_files("key") == saved and programs.load_files("other") is None
    moved = Path((tmp_path / "here").rename(tmp_path / "there"))
    assert Cache(moved).load_files("key") == saved
    (moved / ("key.onnx" if onnx else "key/a.weights")).unlink()
    assert Cache(moved).load_files("key") is None


def test_a_value_is_found_by_its_whole_key_while_it_is_complete(tmp_path, recwarn):
    values = Cache(tmp_path / "new")
    assert values.load("a", {"b": 1}) is None
    values.store([1.5, math.inf], "a", {"b": 1, "c": 2})
    assert values.load("a", {"c": 2, "b": 1}) == [1.5, math.inf]
    assert values.load("a", {"b": 2, "c": 2}) is values.load("b", {"b": 1, "c": 2}) is values.load("a") is None
    assert not recwarn.list
    (file,) = values.folder.iterdir()
    file.write_text("[1.5")
    with pytest.warns(RuntimeWarning, match=re.escape(str(file))) as warned:
        assert values.load("a", {"c": 2, "b": 1}) is None
    assert len(warned) == 1


def test_a_damaged_record_of_a_program_is_named(tmp_path):
    programs = Cache(tmp_path)
    programs.store({"name": "unet", "size": "large"}, "key")
    (file,) = tmp_path.iterdir()
    with pytest.warns(RuntimeWarning, match=re.escape(str(file))):
        assert programs.load_files("key") is None


def test_a_file_is_replaced_once_all_is_written(tmp_path):
    write_result(tmp_path / "result.json", {"a": 1})
    with pytest.raises(TypeError):
        write_result(tmp_path / "result.json", {"a": object()})
    assert read_json(tmp_path / "result.json") == {"a": 1}
