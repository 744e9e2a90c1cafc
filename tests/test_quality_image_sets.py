"""The settings and prompts of an evaluation."""

import json
import math
from dataclasses import replace

import pytest

from ppdiffusers_tome import ToMeConfig, ToMeConfigError
from ppdiffusers_tome.evaluation.quality.image_sets import (
    OTHER_SEEDS,
    PHOTOGRAPHS,
    PLAIN_IMAGES,
    Evaluation,
    list_image_sets,
    read_texts,
    with_seeds,
)

EVALUATION = Evaluation("model", (("a fox", 1), ("an owl", 2**32 - 1)), 32, 20, 7.5, "eager", threads=1)


def test_every_setting_differs_from_the_defaults_in_one_thing():
    settings = {setting.name: setting for setting in list_image_sets(ratios=(0.25, 0.5), levels=(1, 2, 4))}
    assert list(settings) == [
        *("0.25", "0.5", "0.5-down2", "0.5-down4"),
        *("0.5-crossattn", "0.5-mlp", "0.5-crossattn-mlp", "0.25-fixed", "0.5-fixed"),
    ]
    assert settings["0.5-down4"].config == ToMeConfig(ratio=0.5, max_downsample=4)
    assert settings["0.5-crossattn-mlp"].config == ToMeConfig(ratio=0.5, merge_crossattn=True, merge_mlp=True)
    assert settings["0.25-fixed"].config == ToMeConfig(ratio=0.25, use_rand=False)
    groups = [setting.group for setting in settings.values()]
    assert groups == ["ratio"] * 2 + ["max_downsample"] * 2 + ["layers"] * 3 + ["use_rand"] * 2


def test_methods_are_generated_at_each_ratio_or_at_their_own():
    methods = [{"window": 4, "proportional": True}, {"merge_attn": "kv", "match": "grid", "ratio": 0.75}]
    methods.append({"window": ToMeConfig().window})  # equals the defaults, which are generated already
    settings = list_image_sets((0.25, 0.5), ablations=(), methods=methods)[2:]
    assert {setting.group for setting in settings} == {"method"}
    assert {setting.name: setting.config for setting in settings} == {
        "0.25-window=4_proportional=True": ToMeConfig(ratio=0.25, window=4, proportional=True),
        "0.5-window=4_proportional=True": ToMeConfig(ratio=0.5, window=4, proportional=True),
        "0.75-merge_attn=kv_match=grid": ToMeConfig(ratio=0.75, merge_attn="kv", match="grid"),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ratios": (0.0,)}, "ratio=0.0 is not allowed: it must be above 0"),
        ({"ratios": (0.9,)}, "ratio=0.9"),
        ({"ratios": (0.5, 0.5)}, "0.5 is repeated"),
        ({"ratios": (0.5,), "ablations": ("seeds",)}, "'seeds' is not allowed: it must be one of use_rand"),
        ({"ratios": (0.5,), "ablations": (), "ablation_ratio": 0.9}, "ratio=0.9"),  # though nothing uses it
        ({"ratios": (0.5,), "methods": [{"ratio": 0}]}, "ratio=0 is not allowed: it must be above 0"),
        ({"ratios": (0.5,), "methods": [{"sx": 4}, {"ratio": 0.5, "sx": 4}]}, "ratio=0.5, sx=4 is repeated"),
        ({"ratios": (0.5,), "methods": [{"match": "grid"}]}, "ratio=0.5 is not allowed: with match='grid'"),
    ],
)
def test_settings_out_of_range_are_refused(arguments, message):
    with pytest.raises(ToMeConfigError, match=message):
        list_image_sets(**arguments)


@pytest.mark.parametrize(
    "change",
    [
        *({"size": 20}, {"steps": 0}, {"threads": 10**23}, {"guidance_scale": math.inf}),
        *({"strength": 0.0}, {"strength": 1.1}, {"strength": 0.04}, {"strength": math.nan}),
    ],
)
def test_evaluations_out_of_range_are_refused(change):
    with pytest.raises(ToMeConfigError, match=f"{next(iter(change))}=.* is not allowed"):
        replace(EVALUATION, **change)


def test_photographs_take_turns_and_other_seeds_are_other_noise_of_the_same_images():
    prompts = (*((f"a fox {seed}", seed) for seed in range(8)), ("an owl", 2**32 - 1))
    evaluation = replace(EVALUATION, prompts=prompts, strength=0.4)
    plain, other = evaluation.jobs(PLAIN_IMAGES), evaluation.jobs(OTHER_SEEDS)
    assert [prompt.name for prompt in plain] == [prompt.name for prompt in other] == [*PHOTOGRAPHS, PHOTOGRAPHS[0]]
    seeds = {prompt.job.seed for prompt in (*plain, *other)}
    assert len(seeds) == 18 and max(seeds) < 2**32
    for one, another in zip(plain, other, strict=True):
        assert (one.job.image, one.job.prompt) == (another.job.image, another.job.prompt) and one.job.strength == 0.4
        assert (one.job.image.mode, one.job.image.size) == ("RGB", (32, 32))
    assert len({prompt.job.image.tobytes() for prompt in plain}) == len(PHOTOGRAPHS)
    assert len(set(plain)) == 9, "generation counts them in sets"


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
        ("a.txt", "\n", "has no prompt"),
    ],
)
def test_files_without_prompts_are_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ToMeConfigError, match=message):
        read_texts(tmp_path / name)


def test_prompts_repeat_with_other_seeds():
    assert with_seeds(["a", "b"], 5, seed=7) == (("a", 7), ("b", 8), ("a", 9), ("b", 10), ("a", 11))
    for count, seed in ((1, 0), (2, -1), (10, 2**32 - 5)):
        with pytest.raises(ToMeConfigError, match="is not allowed"):
            with_seeds(["a"], count, seed)
