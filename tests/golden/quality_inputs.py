"""The images behind quality.npz: make_quality_golden.py and the tests draw them."""

from pathlib import Path

import numpy as np
from PIL import Image

FOX = Path(__file__).parents[2] / "examples" / "emoji_sd" / "fox.png"
# name, height, width: ST-LPIPS at odd and oblong sizes, and at the smallest that its layers allow
PAIRS = [("even", 64, 64), ("odd", 45, 71), ("smallest", 21, 21), ("fox", 128, 128)]


def noise(seed, height, width, cell):
    """[height, width, 3] uint8: random colours in squares of cell × cell pixels."""
    rows, columns = -(-height // cell), -(-width // cell)
    squares = np.random.RandomState(seed).randint(0, 256, (rows, columns, 3))
    return squares.repeat(cell, 0).repeat(cell, 1)[:height, :width].astype(np.uint8)


def pair(name, height, width):
    """Two images [H, W, 3] uint8 of one case."""
    if name == "fox":
        fox = np.asarray(Image.open(FOX).convert("RGB"))
        return fox, np.roll(fox, 3, axis=1)
    return noise(height, height, width, 7), noise(width + 1, height, width, 5)
