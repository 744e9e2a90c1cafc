"""Scenes of coloured shapes with captions, made on the fly: what a small transformer of text and image learns.

Only NumPy is needed, so that training in PyTorch and measuring in Paddle make the same scenes.
"""

from typing import NamedTuple

import numpy as np

SIDE = 32  # px of an image
LENGTH = 16  # words of a caption, with padding
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 70, 220),
    "yellow": (240, 210, 40),
    "white": (245, 245, 245),
    "black": (20, 20, 20),
    "purple": (150, 50, 180),
    "orange": (240, 130, 30),
}
SHAPES = ("circle", "square", "triangle", "ring")
ROWS = {"top": 8.0, "middle": 16.0, "bottom": 24.0}
COLUMNS = {"left": 8.0, "center": 16.0, "right": 24.0}
RADIUS = 6.0  # px, of all shapes on average
WORDS = ("<pad>", "on", *COLOURS, *SHAPES, *ROWS, *COLUMNS)
_NUMBERS = {word: number for number, word in enumerate(WORDS)}
_Y, _X = np.mgrid[0:SIDE, 0:SIDE] + 0.5


class Scenes(NamedTuple):
    """Images, from -1 to 1, and their captions."""

    images: np.ndarray  # [B, 3, SIDE, SIDE] float32
    captions: np.ndarray  # [B, LENGTH] int64, numbers of WORDS


def make_scenes(random: np.random.Generator, count: int) -> Scenes:
    """Scenes of one or two shapes in front of a colour.

    Example:
        >>> scenes = make_scenes(np.random.default_rng(0), 2)
        >>> scenes.images.shape, len(in_words(scenes.captions[0]).split()) in (6, 10)
        ((2, 3, 32, 32), True)
    """
    images, captions = zip(*(_scene(random) for _ in range(count)), strict=True)
    return Scenes(np.stack(images), np.stack(captions))


def in_words(caption: np.ndarray) -> str:  # [LENGTH]
    """A caption as text: "red circle top left on blue"."""
    return " ".join(WORDS[number] for number in caption if number)


def _scene(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    ground, words = str(random.choice(list(COLOURS))), list[str]()
    image = np.tile(np.array(COLOURS[ground]) / 255, (SIDE, SIDE, 1)) + (_Y[..., None] / SIDE - 0.5) * 0.15
    for cell in random.permutation(9)[: random.integers(1, 3)]:
        row, column = list(ROWS)[cell // 3], list(COLUMNS)[cell % 3]
        colour = str(random.choice([name for name in COLOURS if name != ground]))
        shape = str(random.choice(SHAPES))
        y, x = ROWS[row] + random.uniform(-1, 1), COLUMNS[column] + random.uniform(-1, 1)
        inside = np.clip(0.5 - _distance(shape, RADIUS * random.uniform(0.9, 1.1), y, x), 0, 1)[..., None]
        image = image * (1 - inside) + inside * np.array(COLOURS[colour]) / 255
        words += [colour, shape, row, column]
    caption = np.zeros(LENGTH, "int64")
    words += ["on", ground]
    caption[: len(words)] = [_NUMBERS[word] for word in words]
    return (np.clip(image, 0, 1) * 2 - 1).astype("float32").transpose(2, 0, 1), caption


def _distance(shape: str, radius: float, y: float, x: float) -> np.ndarray:  # [SIDE, SIDE] px
    """How far each pixel is outside of a shape."""
    if shape == "circle":
        return np.hypot(_Y - y, _X - x) - radius
    if shape == "ring":
        return np.abs(np.hypot(_Y - y, _X - x) - radius * 0.75) - radius * 0.3
    if shape == "square":
        return np.maximum(np.abs(_Y - y), np.abs(_X - x)) - radius * 0.85
    return np.maximum(np.abs(_X - x) * 0.87 + (_Y - y) * 0.5, y - _Y) - radius * 0.55
