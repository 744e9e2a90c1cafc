"""Canny edges for ControlNets, and the distance between the edges of two images."""

import math

import numpy as np

# Pillow must be imported before Paddle: otherwise Paddle 2.6's bundled zlib breaks Pillow's PNGs.
from PIL import Image  # isort: skip
import cv2

LOW, HIGH = 100, 200  # thresholds, as in the examples of OpenCV and ControlNet
OUTLINE = 3  # px: edges this close to the background belong to the outline
WHITE = 245  # darkest background, of 255


def canny(image) -> np.ndarray:
    """The edges of an RGB image as a mask, bool [H, W]."""
    return cv2.Canny(cv2.cvtColor(np.asarray(image), cv2.COLOR_RGB2GRAY), LOW, HIGH) > 0


def as_image(edges: np.ndarray) -> Image.Image:
    """A mask as a ControlNet's input: an RGB image, white on black."""
    return Image.fromarray(np.where(edges, 255, 0).astype("uint8")).convert("RGB")


def distances(edges: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Distance in px from each pixel of `edges` to the nearest of `reference`; the diagonal if that is empty."""
    if not reference.any():
        return np.full(int(edges.sum()), math.hypot(*reference.shape))
    background = np.where(reference, 0, 255).astype("uint8")
    return cv2.distanceTransform(background, cv2.DIST_L2, cv2.DIST_MASK_PRECISE)[edges]


def mean_distance(edges: np.ndarray, reference: np.ndarray) -> float:
    """Mean of `distances`; NaN if `edges` is empty."""
    return float(distances(edges, reference).mean()) if edges.any() else math.nan


def outline_region(image) -> np.ndarray:
    """The white region connected to the border, dilated by OUTLINE px, bool [H, W]: edges elsewhere are inner ones."""
    white = np.pad(np.asarray(image).min(axis=2) >= WHITE, 1, constant_values=True)
    _, regions = cv2.connectedComponents(white.astype("uint8"), connectivity=4)
    disk = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (2 * OUTLINE + 1, 2 * OUTLINE + 1))
    return cv2.dilate((regions == regions[0, 0]).astype("uint8"), disk)[1:-1, 1:-1] > 0


def mean_distances(input_edges: np.ndarray, images) -> dict[str, float]:
    """`mean_distance` between a mask of input edges and the edges of images, in both directions; means over images."""
    output_edges = [canny(image) for image in images]
    return {
        "input_to_output": float(np.mean([mean_distance(input_edges, edges) for edges in output_edges])),
        "output_to_input": float(np.mean([mean_distance(edges, input_edges) for edges in output_edges])),
    }
