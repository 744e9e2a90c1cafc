"""Results for the tests of the frontier page: invented distances and times, as `evaluate` and `bench` write them."""

from dataclasses import asdict, replace

import numpy as np
import speed_results
from quality_support import make_result

from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.evaluation.speed.cases import Case

TOMESD = ToMeConfig(merge_attn=True, proportional=False, window=None)
DEFAULT = ToMeConfig()
# Config → distance, and share of plain's time in the predictor.
POINTS = {
    replace(TOMESD, ratio=0.5): (0.04, 0.7),
    replace(TOMESD, ratio=0.75): (0.06, 0.6),
    replace(DEFAULT, ratio=0.5): (0.01, 0.69),  # faster and nearer than tomesd's
    replace(DEFAULT, ratio=0.7): (0.02, 0.62),
    replace(TOMESD, merge_attn="kv", ratio=0.5): (0.005, 1.05),  # nearest, but slower than plain
    replace(TOMESD, merge_attn="kv", match="grid", blend=0, use_rand=False, ratio=0.75): (0.03, 0.65),
    replace(TOMESD, merge_attn="kv", match="grid", blend=0, ratio=0.75): (0.035, 0.65),  # random dst: the same time
}


def make_pairs(distance, count, seed):
    """PSNR, SSIM and perceptual distance of so many images, about a distance from 0 to 1."""
    away = distance * np.random.RandomState(seed).uniform(0.6, 1.4, count)
    pairs = {"psnr": 10 - 20 * np.log10(away), "ssim": 1 - away, "perceptual": away}
    return {measure: values.tolist() for measure, values in pairs.items()}


def quality(size, strength=None, points=POINTS):
    """A result of `evaluate`; image to image, distances are twice as large."""
    settings = [
        {"name": str(nth), "group": "method", "config": asdict(config), "framework": "Paddle"}
        | {"pairs": make_pairs(distance * (1 if strength is None else 2), 12, nth), "kid": {}}
        for nth, (config, (distance, _)) in enumerate(points.items())
    ]
    return {**make_result(), "size": size, "strength": strength, "settings": settings}


def speed(sizes, points=POINTS):
    """A result of `bench`; eager saves half as much time as the predictor."""
    cases = []
    for size in sizes:
        arms = []
        for backend, saving in (("eager", 0.5), ("predictor", 1.0)):
            arms.append(speed_results.arm("plain", speed_results.PLAIN, backend=backend))
            for config, (_, share) in points.items():
                seconds = speed_results.times(1 - saving * (1 - share))
                fixed = asdict(replace(config, use_rand=False))
                arms.append(speed_results.arm("tome", seconds, backend=backend, config=fixed))
        cases.append({**asdict(Case("examples/emoji_sd", size=size)), "arms": arms})
    return speed_results.result(cases)
