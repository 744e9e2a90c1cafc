"""A quality result of 12 images, which is that of release 2.2.0 cut short, and images that belong to it."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

RATIOS = (0.1, 0.25, 0.5, 0.75)
RESULT = Path(__file__).with_name("quality_result.json")


def make_result(count=12):
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    for entry in (*result["settings"], *result["calibration"].values()):
        entry["pairs"] = entry["pairs"] and {name: values[:count] for name, values in entry["pairs"].items()}
    return {**result, "size": 32, "prompts": result["prompts"][:count]}


def write_images(result, folder, names=("plain", *(f"{r:g}" for r in RATIOS))):
    """Images of one random colour each, which is brighter in each further setting."""
    colours = np.random.RandomState(0).randint(0, 128, (len(result["prompts"]), 3))
    for index, name in enumerate(names):
        for n, colour in enumerate(colours):
            image = Image.new("RGB", (result["size"],) * 2, tuple((colour + index * (n + 1)).tolist()))
            path = folder / "images" / name / f"{n:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
