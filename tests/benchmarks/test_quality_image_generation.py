"""Images of an evaluation: equal noise in all settings, one program folder for all ratios, claimed and resumed."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from lab import cache
from lab.arm import Arm
from lab.quality import image_generation
from lab.quality.image_generation import (
    claim_folder,
    export_programs,
    generate_arm,
    image_folder,
    read_images,
)
from lab.quality.image_sets import PLAIN_IMAGES, Evaluation, list_arms
from PIL import Image

from ppdiffusers_tome import ToMeConfig, ToMeConfigError, ToMeError
from ppdiffusers_tome.comparison.sheets import image_paths

EVALUATION = Evaluation("model", (("a fox", 1), ("an owl", 2)), 32, 1, 7.5, threads=1)
FIXED = Arm(ToMeConfig(0.5, "default", use_rand=False))


def test_failed_images_are_an_error_and_the_others_are_stored(tmp_path):
    def backend(batches):
        for batch in batches:
            yield batch[0], "out of memory"
            yield batch[1], b"png"

    with pytest.raises(
        ToMeError, match=r"1 images of default 0\.5, use_rand=False failed, the first of 'a fox': out of memory"
    ):
        generate_arm(EVALUATION, FIXED, tmp_path, backend, batch=2)
    assert len(image_paths(image_folder(FIXED, tmp_path))) == 1
    generate_arm(EVALUATION, FIXED, tmp_path, lambda batches: (one for one in [(batches[0][0], b"png")]), batch=2)
    assert len(image_paths(image_folder(FIXED, tmp_path))) == 2
    Image.new("RGB", (48, 40), (10, 20, 30)).save(tmp_path / "a.png")
    assert (read_images([tmp_path / "a.png"], 32) == np.full([1, 32, 32, 3], [10, 20, 30])).all(), "resized"


def test_the_commit_of_a_folder_is_that_which_generated(tmp_path, monkeypatch):
    for commit in ("1234567", "7654321"):
        monkeypatch.setattr(image_generation, "commit", lambda commit=commit: commit)
        assert claim_folder(replace(EVALUATION, threads=int(commit) % 9 + 1), tmp_path) == "1234567"
    with pytest.raises(ToMeConfigError, match=r"prompts, steps differ. Choose another folder with --output"):
        claim_folder(replace(EVALUATION, steps=2, prompts=EVALUATION.prompts[:1]), tmp_path)


@pytest.mark.parametrize(
    ("module", "decides"),
    [
        *((f"{name}.py", True) for name in ("methods/pairs", "export/export", "serving/engine", "__init__")),
        *((f"{name}.py", False) for name in ("commands/export", "cli", "_version")),
        *((f"{name}.py", True) for name in ("lab/quality/image_generation", "lab/speed/worker")),
        ("bench.py", False),
    ],
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


def test_one_program_folder_for_settings_that_differ_in_the_ratio(monkeypatch, tmp_path):
    exports = []
    monkeypatch.setattr(image_generation, "load_model", lambda model: "pipe")
    monkeypatch.setattr(image_generation, "write_export", lambda *args, **options: exports.append((args, options)))
    settings = [
        PLAIN_IMAGES,
        *list_arms(
            (0.25, 0.5),
            [{"method": "default", "use_rand": False}, {"method": "default", "sx": 4}, {"method": "interlace"}],
        ),
    ]
    programs = export_programs(EVALUATION, settings, tmp_path)
    folders = {setting.name: folder.name for setting, folder in programs.items()}
    assert folders["plain"] == folders["default 0.25"] == folders["default 0.5"] == "method='default'"
    fixed = {folders["default 0.25, use_rand=False"], folders["default 0.5, use_rand=False"]}
    assert fixed == {"method='default'_use_rand=False"}
    assert folders["interlace 0.25"] == folders["interlace 0.5"] == "defaults"
    assert len(exports) == len(set(folders.values())) == 4
    (_, folder, configs, sizes), options = exports[0]
    assert (folder.name, sizes) == ("method='default'", [(32, 32)])
    assert configs == [ToMeConfig(ratio, "default") for ratio in (0, 0.25, 0.5)]
    assert options["format"] == "onnx"
