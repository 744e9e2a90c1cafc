"""How long a picture takes by each setting: pictures drawn in turn, so that a noisy machine is noisy for all."""

import random
import statistics
import time
from collections.abc import Mapping

from tqdm.auto import tqdm

from ...serving.engine import Engine
from .drawing import Plan
from .settings import PLAIN, Setting


def time_settings(plan: Plan, engines: Mapping[Setting, Engine], rounds: int) -> dict[str, dict[str, float]]:
    """Time one picture of each setting per round, plain among them.

    Args:
        plan: its first prompt is drawn.
        engines: who draws each setting; `PLAIN` must be one of them.
        rounds: timed ones, after one that is not.

    Returns:
        For each setting's name the median seconds of a "picture", those of "plain", and their "ratio", plain over
        this setting, a median over the rounds; above 1 is faster than plain.
    """
    jobs = {setting: plan.jobs(setting)[0].job for setting in engines}
    seconds: dict[Setting, list[float]] = {setting: [] for setting in engines}
    order, shuffler = list(engines), random.Random(0)
    for turn in tqdm(range(1 + rounds), desc="seconds a picture", unit="round", disable=None):
        shuffler.shuffle(order)
        for setting in order:
            start = time.perf_counter()
            engines[setting].generate([jobs[setting]])
            if turn:
                seconds[setting].append(time.perf_counter() - start)
    plain = seconds[PLAIN]
    return {
        setting.name: {
            "picture": statistics.median(own),
            "plain": statistics.median(plain),
            "ratio": statistics.median(a / b for a, b in zip(plain, own, strict=True)),
        }
        for setting, own in seconds.items()
    }
