"""Tiny random pipelines of every family, one builder each, for the tests: `ZOO["StableDiffusionPipeline"]()`."""

from . import controlnets, images, others, transformers, videos  # noqa: F401
from .base import ZOO, Tiny, picture

__all__ = ["ZOO", "Tiny", "picture"]
