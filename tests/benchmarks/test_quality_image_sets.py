"""The images that a comparison generates: prompts, photographs, seeds, and settings out of range."""

import math
from dataclasses import replace

import pytest
from lab.arm import Arm
from lab.quality.image_sets import PHOTOGRAPHS, Evaluation, with_seeds

from ppdiffusers_tome import ToMeConfigError

EVALUATION = Evaluation("model", (("a fox", 1), ("an owl", 2**32 - 1)), 32, 20, 7.5, threads=1)


@pytest.mark.parametrize(
    "change",
    [
        *({"size": 20}, {"steps": 0}, {"threads": 10**23}, {"guidance_scale": math.inf}),
        *({"strength": 0.0}, {"strength": 1.1}, {"strength": 0.04}, {"strength": math.nan}),
    ],
)
def test_evaluations_out_of_range_are_refused(change):
    with pytest.raises(ToMeConfigError, match=f"{next(iter(change))}="):
        replace(EVALUATION, **change)


def test_photographs_take_turns_and_other_seeds_are_other_noise_of_the_same_images():
    prompts = (*((f"a fox {seed}", seed) for seed in range(8)), ("an owl", 2**32 - 1))
    evaluation = replace(EVALUATION, prompts=prompts, strength=0.4)
    plain, other = evaluation.jobs(Arm()), evaluation.jobs(Arm(other_seed=True))
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
