"""A quality result with invented figures of realistic size, and images that belong to it."""

from dataclasses import asdict

import numpy as np
from PIL import Image

from ppdiffusers_tome.config import ToMeConfig
from ppdiffusers_tome.evaluation.quality.sheets import save_png

RATIOS = (0.1, 0.25, 0.5, 0.75)
CONFIG = asdict(ToMeConfig())


def make_pairs(distance, count, seed=0):
    """PSNR, SSIM and perceptual distance of so many images, about a distance from 0 to 1."""
    values = distance * np.random.RandomState(seed).uniform(0.6, 1.4, count)
    return {
        "psnr": (10 - 20 * np.log10(values)).tolist(),
        "ssim": (1 - 0.8 * values).tolist(),
        "perceptual": values.tolist(),
    }


def make_kid(mean):
    return {"mean": mean, "std": 0.002}


def make_setting(name, group, distance, count, framework="Paddle", **config):
    return {
        "name": name,
        "group": group,
        "config": {**CONFIG, **config},
        "framework": framework,
        "pairs": make_pairs(distance, count),
        "kid": {"to plain, other seeds": make_kid(0.001 + distance**3)},
    }


def make_result(count=12):
    settings = [make_setting(f"{r:g}", "ratio", 0.4 * r, count, ratio=r) for r in RATIOS]
    settings += [make_setting(f"{r:g}-fixed", "use_rand", 0.5 * r, count, ratio=r, use_rand=False) for r in RATIOS]
    settings += [
        make_setting(f"0.5-down{d}", "max_downsample", 0.2 + 0.03 * d, count, ratio=0.5, max_downsample=d)
        for d in (2, 4, 8)
    ]
    settings += [
        make_setting("0.5-crossattn", "layers", 0.24, count, ratio=0.5, merge_crossattn=True),
        make_setting("0.5-mlp", "layers", 0.33, count, ratio=0.5, merge_mlp=True),
        make_setting("0.5-tomesd", "tomesd", 0.21, count, "PyTorch", ratio=0.5),
        make_setting("plain-bf16", "precision", 0.02, count, ratio=0),
    ]
    return {
        "kind": "quality",
        "format": 3,
        "command": "python -m ppdiffusers_tome evaluate --quick",
        "commit": "0123456789abcdef",
        "environment": {"machine": "Some CPU", "threads": "1", "paddlepaddle": "2.6.2", "python": "3.11.9"},
        "model": "examples/emoji_sd",
        "size": 32,
        "steps": 20,
        "guidance_scale": 2.0,
        "strength": None,
        "scheduler": "DDIMScheduler",
        "prompts": [{"prompt": f"a 3d render of thing {n}", "seed": 100 + n} for n in range(count)],
        "weights": {"efficientnet-lite0": "1.0", "stlpips": "0.1.2"},
        "real": None,
        "calibration": {
            "plain, other seeds": {"pairs": make_pairs(0.5, count, 1), "kid": make_kid(0.001)},
            "plain, blurred": {"pairs": make_pairs(0.3, count, 2), "kid": make_kid(0.05)},
        },
        "settings": settings,
    }


def add_real(result):
    """KID to real images, for every setting and as calibration."""
    result["real"] = {"folder": "real", "images": 20}
    for name, mean in (("real halves", 0.0002), ("real, blurred", 0.06), ("plain against real", 0.02)):
        result["calibration"][name] = {"pairs": None, "kid": make_kid(mean)}
    for setting in result["settings"]:
        setting["kid"]["to real"] = make_kid(0.03)
    return result


def write_images(result, folder, names=("plain", *(f"{r:g}" for r in RATIOS))):
    """Plain images of one random colour each; under a setting each is brighter by its distance."""
    colours = np.random.RandomState(0).randint(0, 128, (len(result["prompts"]), 3))
    distances = {setting["name"]: setting["pairs"]["perceptual"] for setting in result["settings"]}
    side = result["size"]
    for name in names:
        for n, colour in enumerate(colours):
            brighter = 0 if name == "plain" else round(200 * distances[name][n])
            image = Image.new("RGB", (side, side), tuple((colour + brighter).tolist()))
            save_png(image, folder / "images" / name / f"{n:04d}.png")
