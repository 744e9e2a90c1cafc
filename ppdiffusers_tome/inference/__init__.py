"""Paddle Inference: export a pipeline with token merging, and run the exported folder."""

from .export import export_pipeline
from .manifest import Manifest, Size, parse_size, read_manifest
from .pipeline import load_pipeline
from .runtime import Runtime

__all__ = ["Manifest", "Runtime", "Size", "export_pipeline", "load_pipeline", "parse_size", "read_manifest"]
