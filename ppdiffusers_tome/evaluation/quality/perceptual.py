"""ST-LPIPS: how different two pictures look, by a network fitted to people's answers that forgives small shifts.

Ghildyal and Liu, "Shift-tolerant Perceptual Similarity Metric", ECCV 2022, arXiv:2207.13686, after LPIPS (Zhang et al.
2018, arXiv:1801.03924): features of an AlexNet whose strides are anti-aliased, weighed as people judged pairs of
pictures. This is their AlexNet variant in Paddle, with their weights from the package `stlpips-pytorch`; no code is
taken from it.
"""

from importlib.metadata import version

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

from ...errors import ToMeConfigError
from ...inference.programs import Input
from .compiled import compile_network
from .torch_files import read_state_dict, weights_of

PACKAGE, FILE = "stlpips_pytorch", "weights/vST0.0/alex_shift_tolerant.pth"
SMALLEST = 21  # px: of anything smaller the third reflection would be wider than the feature map
# Each convolution: channels in and out, kernel, padding, and where the file has it.
CONVOLUTIONS = [
    (3, 64, 11, 2, "net.slice1.0"),
    (64, 192, 5, 2, "net.slice2.5"),
    (192, 384, 3, 1, "net.slice3.9"),
    (384, 256, 3, 1, "net.slice4.11"),
    (256, 256, 3, 1, "net.slice5.13"),
]
# LPIPS' scale of pictures in −1…1, per colour
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
EPSILON = 1e-10


class ShiftTolerantLPIPS:
    """The distance with its published weights.

    Example:
        >>> pictures = np.random.RandomState(0).randint(0, 256, (2, 64, 64, 3)).astype(np.uint8)
        >>> ShiftTolerantLPIPS().distance(pictures, pictures)
        array([0., 0.], dtype=float32)

    Raises:
        MissingWeightsError: the package with the weights is not installed.
    """

    def __init__(self) -> None:
        network = _Distance()
        network.set_state_dict(_state())
        network.eval()
        pair = (Input("a", ("batch", 3, "height", "width")), Input("b", ("batch", 3, "height", "width")))
        self._run = compile_network(network, pair, {"height": 40, "width": 32}, "ST-LPIPS")

    @staticmethod
    def version() -> str:
        """Which weights these are: the version of the package that carries them."""
        return version(PACKAGE)

    def distance(
        self,
        a: np.ndarray,  # [B, H, W, 3] uint8, H and W at least 21
        b: np.ndarray,  # the same shape
        batch: int = 16,
    ) -> np.ndarray:  # [B] float32
        """0 for equal pictures, more for pictures that look more different; most pairs lie below 1. Not a percentage.

        Args:
            batch: how many pairs go through the network at once; the result does not depend on it.

        Raises:
            ToMeConfigError: not two batches of pictures of one shape, or pictures that are too small.
        """
        for name, pictures in (("a", a), ("b", b)):
            if pictures.ndim != 4 or pictures.shape[-1] != 3 or pictures.dtype != np.uint8:
                raise ToMeConfigError(f"{name} is uint8 [B, H, W, 3], not {pictures.dtype} {list(pictures.shape)}.")
        if a.shape != b.shape:
            raise ToMeConfigError(
                f"a and b are pairs of pictures: {list(a.shape)} and {list(b.shape)} are not one shape."
            )
        if min(a.shape[1:3]) < SMALLEST:
            raise ToMeConfigError(f"pictures of {a.shape[1]}×{a.shape[2]} px: ST-LPIPS needs {SMALLEST} px each way.")
        chunks = [slice(i, i + batch) for i in range(0, len(a), batch)]
        parts = [self._run(a=_scaled(a[chunk]), b=_scaled(b[chunk]))[0] for chunk in chunks]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _state() -> dict[str, np.ndarray]:
    """The file's weights under the names of `_Distance`."""
    given = read_state_dict(weights_of(PACKAGE, FILE))
    state = {f"linear.{i}.weight": given[f"lin{i}.model.1.weight"] for i in range(len(CONVOLUTIONS))}
    for i, (*_, name) in enumerate(CONVOLUTIONS):
        for kind in ("weight", "bias"):
            state[f"features.convolutions.{i}.{kind}"] = given[f"{name}.{kind}"]
    return state


def _scaled(pictures: np.ndarray) -> np.ndarray:
    """[B, H, W, 3] uint8 → [B, 3, H, W] float32, in LPIPS' scale."""
    x = pictures.astype(np.float32) / 127.5 - 1
    x = (x - np.array(SHIFT, np.float32)) / np.array(SCALE, np.float32)
    return x.transpose(0, 3, 1, 2)


def _unit(x: paddle.Tensor) -> paddle.Tensor:
    """[B, C, H, W]: every position's channels divided by their length."""
    return x / ((x**2).sum(axis=1, keepdim=True).sqrt() + EPSILON)


class _Distance(nn.Layer):
    """Two batches [B, 3, H, W] → [B]."""

    def __init__(self) -> None:
        super().__init__()
        self.features = _Features()
        self.linear = nn.LayerList(nn.Conv2D(c_out, 1, 1, bias_attr=False) for _, c_out, *_ in CONVOLUTIONS)

    def forward(self, a: paddle.Tensor, b: paddle.Tensor) -> paddle.Tensor:
        parts = [
            linear((_unit(of_a) - _unit(of_b)) ** 2).mean(axis=[1, 2, 3])
            for linear, of_a, of_b in zip(self.linear, self.features(a), self.features(b))  # noqa: B905 - Paddle 2.6
        ]
        return paddle.add_n(parts)


class _Features(nn.Layer):
    """[B, 3, H, W] → the five rectified feature maps of the shift-tolerant AlexNet."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.LayerList(
            nn.Conv2D(c_in, c_out, kernel, padding=padding) for c_in, c_out, kernel, padding, _ in CONVOLUTIONS
        )

    def forward(self, x: paddle.Tensor) -> list[paddle.Tensor]:
        # Where AlexNet takes strides, 4 in its first convolution and 2 in its poolings, here all go step by step, and
        # blurring takes every second value.
        maps = [F.relu(_halved(self.convolutions[0](x)))]
        for convolution in self.convolutions[1:3]:
            pooled = F.max_pool2d(maps[-1], kernel_size=3, stride=1)
            maps.append(F.relu(convolution(_halved(pooled))))
        for convolution in self.convolutions[3:]:
            maps.append(F.relu(convolution(maps[-1])))
        return maps


def _halved(x: paddle.Tensor) -> paddle.Tensor:
    """[B, C, H, W] → [B, C, ⌊(H+1)/2⌋+1, ⌊(W+1)/2⌋+1]: every second value after a blur by 1-2-1 each way.

    The border is reflected, 2 wide: twice what the blur needs, and as the weights were trained.
    """
    line = np.array([1, 2, 1], np.float32) / 4
    channels = x.shape[1]
    kernel = paddle.to_tensor(np.tile(np.outer(line, line), (channels, 1, 1, 1)))
    return F.conv2d(F.pad(x, [2, 2, 2, 2], mode="reflect"), kernel, stride=2, groups=channels)
