"""Canny edges for ControlNets."""

import numpy as np

# Pillow must be imported before Paddle: otherwise Paddle 2.6's bundled zlib breaks Pillow's PNGs.
from PIL import Image  # isort: skip
import cv2

LOW, HIGH = 100, 200  # thresholds, as in the examples of OpenCV and ControlNet


def canny(image) -> np.ndarray:
    """The edges of an RGB image as a mask, bool [H, W]."""
    return cv2.Canny(cv2.cvtColor(np.asarray(image), cv2.COLOR_RGB2GRAY), LOW, HIGH) > 0


def as_image(edges: np.ndarray) -> Image.Image:
    """A mask as a ControlNet's input: an RGB image, white on black."""
    return Image.fromarray(np.where(edges, 255, 0).astype("uint8")).convert("RGB")
