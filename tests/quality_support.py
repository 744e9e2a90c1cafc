"""A quality result with made-up figures that have the order real ones have, and pictures to go with it."""

import numpy as np

from ppdiffusers_tome.evaluation.quality.sheets import save_png

RATIOS = (0.1, 0.25, 0.5, 0.75)
CONFIG = {"max_downsample": None, "use_rand": True, "merge_attn": True, "merge_crossattn": False, "merge_mlp": False}


def pairs(distance, count, seed=0):
    """PSNR, SSIM and perceptual distance of so many pictures, about a distance from 0 to 1."""
    each = distance * np.random.RandomState(seed).uniform(0.6, 1.4, count)
    return {
        "psnr": (10 - 20 * np.log10(each)).tolist(),
        "ssim": (1 - 0.8 * each).tolist(),
        "perceptual": each.tolist(),
    }


def against(kid, frechet):
    return {"kid": {"mean": kid, "std": 0.002}, "frechet": frechet}


def setting(name, group, distance, count, seconds=0.9, framework="Paddle", **config):
    return {
        "name": name,
        "group": group,
        "config": {**CONFIG, **config},
        "framework": framework,
        "count": count,
        "pairs": pairs(distance, count),
        "set": {"to plain, other seeds": against(0.001 + distance**3, 30 + 80 * distance)},
        "seconds": seconds and {"picture": 2 * seconds, "plain": 2.0, "ratio": 1 / seconds},
    }


def make_result(count=12):
    settings = [setting(f"{r:g}", "ratio", 0.4 * r, count, 1 - 0.3 * r, ratio=r) for r in RATIOS]
    settings += [
        setting(f"fixed-{r:g}", "use_rand", 0.5 * r, count, 1 - 0.31 * r, ratio=r, use_rand=False) for r in RATIOS
    ]
    settings += [
        setting(f"level-{d}", "max_downsample", 0.2 + 0.03 * d, count, 0.85 - 0.02 * d, ratio=0.5, max_downsample=d)
        for d in (2, 4, 8)
    ]
    settings += [
        setting("with-crossattn", "layers", 0.24, count, 0.82, ratio=0.5, merge_crossattn=True),
        setting("with-mlp", "layers", 0.33, count, 0.8, ratio=0.5, merge_mlp=True),
        setting("tomesd-0.5", "tomesd", 0.21, count, None, "PyTorch", ratio=0.5),
    ]
    return {
        "kind": "quality",
        "format": 1,
        "command": "python -m ppdiffusers_tome evaluate --quick",
        "commit": "0123456789abcdef",
        "environment": {"machine": "Some CPU", "threads": "1", "paddlepaddle": "2.6.2", "python": "3.11.9"},
        "model": "examples/emoji_sd",
        "size": 32,
        "steps": 20,
        "guidance": 2.0,
        "scheduler": "DDIMScheduler",
        "prompts": [{"prompt": f"a 3d render of thing {n}", "seed": 100 + n} for n in range(count)],
        "features": {"efficientnet-lite0": "1.0", "stlpips": "0.1.2"},
        "calibration": {
            "plain, other seeds": {"pairs": pairs(0.5, count, 1), "set": against(0.001, 31.0)},
            "plain, blurred": {"pairs": pairs(0.3, count, 2), "set": against(0.05, 90.0)},
            "real halves": {"pairs": None, "set": against(0.0002, 25.0)},
            "real, blurred": {"pairs": None, "set": against(0.06, 95.0)},
            "plain against real": {"pairs": None, "set": against(0.02, 60.0)},
        },
        "settings": settings,
    }


def write_pictures(result, folder, names=("plain", *(f"{r:g}" for r in RATIOS))):
    """Plain pictures of one random colour each; under a setting each is as much brighter as it is distant."""
    random = np.random.RandomState(0)
    colours = random.randint(0, 128, (len(result["prompts"]), 3))
    distances = {each["name"]: each["pairs"]["perceptual"] for each in result["settings"]}
    side = result["size"]
    for name in names:
        for n, colour in enumerate(colours):
            brighter = 0 if name == "plain" else round(200 * distances[name][n])
            save_png(np.full((side, side, 3), colour + brighter, np.uint8), folder / name / f"{n:04d}.png")
