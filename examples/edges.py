"""Canny edges for ControlNets, and how far one picture's edges lie from another's."""

import math

import numpy as np

# Pillow has to come before Paddle: Paddle 2.6 brings a zlib along that breaks a later Pillow's PNGs.
from PIL import Image  # isort: skip
import cv2

LOW, HIGH = 100, 200  # thresholds, as in OpenCV's own examples and ControlNet's
OUTLINE = 3  # px: what lies so near to the background belongs to the outline
WHITE = 245  # darkest background, of 255


def canny(picture) -> np.ndarray:
    """The edges of an RGB picture as a mask, bool [H, W]."""
    return cv2.Canny(cv2.cvtColor(np.asarray(picture), cv2.COLOR_RGB2GRAY), LOW, HIGH) > 0


def as_picture(edges: np.ndarray) -> Image.Image:
    """A mask as what a ControlNet takes: an RGB picture, white on black."""
    return Image.fromarray(np.where(edges, 255, 0).astype("uint8")).convert("RGB")


def distances(of: np.ndarray, to: np.ndarray) -> np.ndarray:
    """For each edge pixel in `of` the way to the nearest in `to`, px; the picture's diagonal where `to` is empty."""
    if not to.any():
        return np.full(int(of.sum()), math.hypot(*to.shape))
    return cv2.distanceTransform(np.where(to, 0, 255).astype("uint8"), cv2.DIST_L2, cv2.DIST_MASK_PRECISE)[of]


def mean_distance(of: np.ndarray, to: np.ndarray) -> float:
    """Mean of `distances`; NaN where `of` is empty."""
    return float(distances(of, to).mean()) if of.any() else math.nan


def outline_region(picture) -> np.ndarray:
    """The white that joins the border and OUTLINE px beyond it, bool [H, W]: edges elsewhere are inner ones."""
    white = np.pad(np.asarray(picture).min(axis=2) >= WHITE, 1, constant_values=True)
    _, parts = cv2.connectedComponents(white.astype("uint8"), connectivity=4)
    disk = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (2 * OUTLINE + 1, 2 * OUTLINE + 1))
    return cv2.dilate((parts == parts[0, 0]).astype("uint8"), disk)[1:-1, 1:-1] > 0


def mean_distances(given: np.ndarray, pictures) -> dict[str, float]:
    """`mean_distance` between a given mask and the edges of pictures, both ways; means over the pictures."""
    drawn = [canny(picture) for picture in pictures]
    return {
        "given to drawn": float(np.mean([mean_distance(given, each) for each in drawn])),
        "drawn to given": float(np.mean([mean_distance(each, given) for each in drawn])),
    }
