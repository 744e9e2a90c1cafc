"""Tiny random pipelines of every family for the tests, one builder each: `ZOO["StableDiffusionPipeline"]()`."""

from . import controlnets, images, others, transformers, videos  # noqa: F401
from .base import ZOO, Tiny, generate
from .refused import REFUSED

__all__ = ["REFUSED", "ZOO", "Tiny", "generate"]
