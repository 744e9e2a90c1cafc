"""Tiny random pipelines of every family for the tests, one builder each: `ZOO["StableDiffusionPipeline"]()`."""

from . import controlnets, images, others, transformers, videos  # noqa: F401
from .base import ZOO, Tiny, generate

__all__ = ["ZOO", "Tiny", "generate"]
