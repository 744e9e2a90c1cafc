"""Which settings an evaluation has, and which prompts."""

import json

import pytest

from ppdiffusers_tome import ToMeConfig, ToMeConfigError
from ppdiffusers_tome.evaluation.quality.prompts import choose, read_texts
from ppdiffusers_tome.evaluation.quality.settings import study


def by_name(**arguments):
    return {setting.name: setting for setting in study(**arguments)}


def test_every_setting_differs_from_the_defaults_in_one_thing():
    found = by_name(ratios=(0.25, 0.5), levels=(1, 2, 4))
    assert list(found) == [
        *("0.25", "0.5", "0.5-down2", "0.5-down4"),
        *("0.5-crossattn", "0.5-mlp", "0.5-crossattn-mlp", "0.25-fixed", "0.5-fixed"),
    ]
    assert found["0.5-down4"].config == ToMeConfig(ratio=0.5, max_downsample=4)
    assert found["0.5-crossattn-mlp"].config == ToMeConfig(ratio=0.5, merge_crossattn=True, merge_mlp=True)
    assert found["0.25-fixed"].config == ToMeConfig(ratio=0.25, use_rand=False)
    groups = [setting.group for setting in found.values()]
    assert groups == ["ratio"] * 2 + ["max_downsample"] * 2 + ["layers"] * 3 + ["use_rand"] * 2


def test_tomesd_draws_by_its_defaults():
    found = study((0.5,), ablations=(), tomesd=(0.5,))
    assert [(s.name, s.framework, s.config.use_rand) for s in found] == [
        ("0.5", "Paddle", True),
        ("0.5-tomesd", "PyTorch", True),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ratios": (0.0,)}, "ratio=0.0 is not allowed: it must be above 0"),
        ({"ratios": (0.9,)}, "ratio=0.9"),
        ({"ratios": (0.5, 0.5)}, "0.5 is given twice"),
        ({"ratios": (0.5,), "ablations": ("seeds",)}, "'seeds' is not allowed: it must be one of use_rand"),
        ({"ratios": (0.5,), "tomesd": (0,)}, "ratio=0 is not allowed"),
    ],
)
def test_what_cannot_be_studied_is_refused(arguments, message):
    with pytest.raises(ToMeConfigError, match=message):
        study(**arguments)


def test_prompts_of_each_kind_of_file(tmp_path):
    (tmp_path / "a.txt").write_text("a fox\n\na “blue” owl\n")
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a fox", "seed": 3}) + "\n")
    (tmp_path / "a.tsv").write_text('Prompt\tCategory\na "red" cube\tAbstract\n\tnone\nbears\tAnimals\n')
    assert read_texts(tmp_path / "a.txt") == ["a fox", "a “blue” owl"]
    assert read_texts(tmp_path / "a.jsonl") == ["a fox"]
    assert read_texts(tmp_path / "a.tsv") == ['a "red" cube', "bears"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "Category\nx\n", "must name a column 'Prompt'"),
        ("a.tsv", None, "cannot be read"),
        ("a.csv", "a", "must end in .txt or .jsonl"),
        ("a.txt", "\n", "holds no prompt"),
    ],
)
def test_files_without_prompts_are_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ToMeConfigError, match=message):
        read_texts(tmp_path / name)


def test_prompts_begin_again_with_other_seeds():
    assert choose(["a", "b"], 5, seed=7) == (("a", 7), ("b", 8), ("a", 9), ("b", 10), ("a", 11))
    for count, seed in ((0, 0), (1, -1), (10, 2**32 - 5)):
        with pytest.raises(ToMeConfigError, match="is not allowed"):
            choose(["a"], count, seed)
