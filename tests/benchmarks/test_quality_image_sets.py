"""The settings and prompts of an evaluation."""

import math
from dataclasses import replace

import pytest
from lab.quality.image_sets import (
    OTHER_SEEDS,
    PHOTOGRAPHS,
    PLAIN_IMAGES,
    Evaluation,
    list_arms,
    with_seeds,
)

from ppdiffusers_tome import ToMeConfig, ToMeConfigError

EVALUATION = Evaluation("model", (("a fox", 1), ("an owl", 2**32 - 1)), 32, 20, 7.5, threads=1)


def test_methods_are_generated_at_each_ratio_or_at_their_own():
    methods = [
        {"method": "default", "window": 4, "proportional": True},
        {"method": "todo", "use_rand": True, "ratio": 0.75},
    ]
    methods.append({"method": "default", "window": 16})  # equals the first, which is generated already
    methods.append({"method": "interlace"})
    assert {arm.name: arm.config for arm in list_arms((0.25, 0.5), methods)} == {
        "default 0.25": ToMeConfig(0.25, "default"),
        "default 0.5": ToMeConfig(0.5, "default"),
        "default 0.25, window=4": ToMeConfig(0.25, "default", window=4, proportional=True),
        "default 0.5, window=4": ToMeConfig(0.5, "default", window=4, proportional=True),
        "todo 0.75, use_rand=True": ToMeConfig(0.75, "todo", use_rand=True),
        "interlace 0.25": ToMeConfig(0.25, "interlace"),
        "interlace 0.5": ToMeConfig(0.5, "interlace"),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ratios": (0.0,)}, "ratio=0.0 is not allowed: it must be above 0"),
        ({"ratios": (0.9,)}, "ratio=0.9"),
        ({"ratios": (0.5, 0.5)}, "0.5 is repeated"),
        ({"ratios": (0.5,), "methods": [{"ratio": 0.95}]}, "ratio=0.95"),
        ({"ratios": (0.5,), "methods": [{"ratio": 0}]}, "ratio=0 is not allowed: it must be above 0"),
        ({"ratios": (0.5,), "methods": 2 * [{"method": "kv", "sx": 4}]}, "ratio=0.5, method='kv', sx=4 is repeated"),
        ({"ratios": (0.6,), "methods": [{"method": "todo"}]}, "ratio=0.6 is not allowed: method='todo'"),
    ],
)
def test_settings_out_of_range_are_refused(arguments, message):
    with pytest.raises(ToMeConfigError, match=message):
        list_arms(**arguments)


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


def test_prompts_repeat_with_other_seeds():
    assert with_seeds(["a", "b"], 5, seed=7) == (("a", 7), ("b", 8), ("a", 9), ("b", 10), ("a", 11))
    for count, seed in ((1, 0), (2, -1), (10, 2**32 - 5)):
        with pytest.raises(ToMeConfigError, match="is not allowed"):
            with_seeds(["a"], count, seed)
