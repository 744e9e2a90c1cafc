"""The pictures of what `interlace` keeps in each step."""

import patterns
from markdown_text import text_of


def test_committed_picture_is_what_the_package_chooses():
    assert text_of("docs/interlace.svg") == patterns.draw()
    for parts in patterns.KEPT:
        steps = [patterns.kept_tokens(parts, timestep) for timestep in patterns.TIMESTEPS.values()]
        assert not (steps[0] & steps[1] or steps[1] & steps[2]), "successive steps keep the same tokens"
    steps = patterns.timesteps_of(patterns.SCHEDULES[0], 20)
    assert {number: steps[number - 1] for number in patterns.TIMESTEPS} == patterns.TIMESTEPS
    assert patterns.PLAIN_STEPS.count(patterns.TIMESTEPS.values()) == 0


def test_committed_picture_of_steps_is_what_the_package_chooses():
    assert text_of("docs/steps.svg") == patterns.draw_steps()
