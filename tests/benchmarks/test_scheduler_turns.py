"""The timesteps of ppdiffusers' own schedulers take turns: the table of the page, and what it may say."""

import numpy as np
import paddle
import pytest
import scheduler_turns
from scheduler_turns import CHOICES, FLOWS, repeats, timesteps_by_setting

# The page says why.
WORSE = {"HeunDiscrete", "VQDiffusion", "KDPM2Discrete", "KDPM2AncestralDiscrete", "Align Your Steps for SDXL"}
USUAL = 25  # steps at most


@pytest.mark.skipif(paddle.__version__.startswith("2."), reason="some timesteps are others by rounding in Paddle 2.6")
def test_the_page_has_the_table_of_today():
    assert scheduler_turns.make_table() in scheduler_turns.PAGE.read_text(encoding="utf-8")


def test_steps_rarely_keep_the_tokens_of_the_step_before():
    """In up to 25 steps less often than by chance, also with the noise levels of EDM and Stable Video Diffusion."""
    for name, by_steps in timesteps_by_setting().items():
        for choices in CHOICES:
            usual = [timesteps for steps, timesteps in by_steps.items() if steps <= USUAL]
            same, pairs = np.sum([repeats(one, choices, name in FLOWS) for one in usual], axis=0)
            assert name in WORSE or same < pairs / choices, (name, choices, same, pairs)
    levels = [name for name in timesteps_by_setting() if "continuous" in name or name.startswith("EDM")]
    assert len(levels) == 3
