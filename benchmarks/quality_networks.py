"""Writes the ONNX graphs of the two networks that measure images; their weights stay in the packages on PyPI.

    python benchmarks/quality_networks.py       (writes benchmarks/lab/quality/graphs/*.onnx)

The files of weights are of `torch.save` before PyTorch 1.6, where the values of each tensor stand as they are in
memory: the graphs name their offsets. No code is taken from the networks' authors.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
from lab.quality.networks import EFFICIENTNET, STLPIPS, Weights
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
# EfficientNet-Lite0, as in efficientnet_lite_builder.py: blocks, kernel, stride of the first block, expansion and
# channels of each stage.
STAGES = [
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
]
PADDINGS = (2, 2, 1, 1, 1)  # padding of each convolution of AlexNet
# LPIPS' scale of images in −1…1, per colour
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)


@dataclass(frozen=True)
class Tensor:
    """A float32 tensor in a file of weights. Its storage may have the values in the order of other axes."""

    storage: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_tensors(weights: Weights, unused: Sequence[str]) -> Iterator[tuple[Tensor, int]]:
    """The tensors of a file in its order, with the offset of their values; without names that end like `unused`."""
    file = io.BytesIO(weights.read())

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if name == "_rebuild_tensor_v2":
                return lambda storage, offset, shape, strides, *_: Tensor(storage, tuple(shape), tuple(strides))
            return OrderedDict if name == "OrderedDict" else {"FloatStorage": 4, "LongStorage": 8}[name]

        def persistent_load(self, pid: Any) -> str:
            _, size, key, _, length, _ = pid
            sizes[key] = size * length
            return key

    sizes: dict[str, int] = {}  # bytes of each storage
    # The first three: magic number, protocol, machine.
    _, _, _, state, keys = (Unpickler(file).load() for _ in range(5))
    offsets, position = {}, file.tell()
    for key in keys:
        offsets[key] = position + 8  # after the storage's length
        position = offsets[key] + sizes[key]
    for name, tensor in state.items():
        if not name.endswith(tuple(unused)):
            yield tensor, offsets[tensor.storage]


class Graph:
    """An ONNX graph that grows node by node; its weights are taken in the order of their file."""

    def __init__(self, weights: Weights, unused: Sequence[str]) -> None:
        self._nodes: list[Any] = []
        self._initializers: list[Any] = []
        self._weights, self._tensors = weights, read_tensors(weights, unused)

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        """The output of a new node."""
        name = f"{op}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(op, inputs, [name], **attributes))
        return name

    def constant(self, values: Any, dtype: str = "float32") -> str:
        name = f"constant_{len(self._initializers)}"
        self._initializers.append(numpy_helper.from_array(np.array(values, dtype), name))
        return name

    def weight(self) -> str:
        """The next tensor of the file."""
        tensor, offset = next(self._tensors)
        axes = sorted(range(len(tensor.shape)), key=lambda axis: -tensor.strides[axis])  # as they are in memory
        shape = [tensor.shape[axis] for axis in axes]
        name, size = f"weight_{len(self._initializers)}", 4 * int(np.prod(tensor.shape))
        proto = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
        proto.data_location = TensorProto.EXTERNAL
        for key, value in {"location": self._weights.path.name, "offset": offset, "length": size}.items():
            proto.external_data.add(key=key, value=str(value))
        self._initializers.append(proto)
        in_order = axes == sorted(axes)
        return name if in_order else self.node("Transpose", name, perm=np.argsort(axes).tolist())

    def save(self, inputs: dict[str, Sequence[Any]], output: str, shape: Sequence[Any]) -> None:
        """Write the graph; inputs are uint8, the output is float32."""
        assert next(self._tensors, None) is None, "all weights are used"
        graph = helper.make_graph(
            self._nodes,
            self._weights.package,
            [helper.make_tensor_value_info(name, TensorProto.UINT8, of) for name, of in inputs.items()],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)],
            self._initializers,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
        onnx.save(model, str(self._weights.graph))


def write_efficientnet() -> None:
    """EfficientNet (Tan and Le 2019, arXiv:1905.11946) with ReLU6, no squeeze-and-excitation; Google's weights."""
    graph = Graph(EFFICIENTNET, ("num_batches_tracked", "_fc.weight", "_fc.bias"))

    def convolution(x: str, stride: int = 1, group: int = 1, is_linear: bool = False) -> str:
        # Padded as in TensorFlow: at stride 2 more at the end than at the beginning.
        attributes = {"auto_pad": "SAME_UPPER", "strides": [stride, stride], "group": group}
        x = graph.node("Conv", x, graph.weight(), **attributes)
        x = graph.node("BatchNormalization", x, *(graph.weight() for _ in range(4)), epsilon=1e-3)
        return x if is_linear else graph.node("Clip", x, graph.constant(0), graph.constant(6))

    # Google's scale (efficientnet_lite_builder.py). With ImageNet's, as in the package's README, the variances
    # before the first batch norm are three times the recorded ones.
    x = graph.node("Cast", "images", to=TensorProto.FLOAT)
    x = graph.node("Div", graph.node("Sub", x, graph.constant(127)), graph.constant(128))
    x = convolution(graph.node("Transpose", x, perm=[0, 3, 1, 2]), stride=2)
    widths = [32, *(stage[-1] for stage in STAGES)]
    for (count, _, first_stride, expansion, _), (c_in, c_out) in zip(STAGES, pairwise(widths), strict=True):
        for nth in range(count):
            wide, stride = (c_out if nth else c_in) * expansion, 1 if nth else first_stride
            before, x = x, convolution(x) if expansion > 1 else x
            x = convolution(convolution(x, stride, group=wide), is_linear=True)
            x = graph.node("Add", x, before) if nth else x  # every first block changes the channels
    features = graph.node("ReduceMean", convolution(x), axes=[2, 3], keepdims=0)
    graph.save({"images": ("batch", 224, 224, 3)}, features, ("batch", 1280))


def write_st_lpips() -> None:
    """ST-LPIPS (Ghildyal and Liu 2022, arXiv:2207.13686) with AlexNet and its authors' weights.

    AlexNet has strides of 4 in its first convolution and of 2 in its poolings. Here all strides are 1, and blurring
    takes every second value.
    """
    graph = Graph(STLPIPS, ("shift", "scale", "filt"))
    convolutions = [(graph.weight(), graph.weight(), padding) for padding in PADDINGS]
    linear = [graph.weight() for _ in PADDINGS]
    line = np.array([1, 2, 1]) / 4
    # Twice what the blur needs: the weights were trained so.
    border = graph.constant([0, 0, 2, 2, 0, 0, 2, 2], "int64")
    blurs = {c: graph.constant(np.tile(np.outer(line, line), (c, 1, 1, 1))) for c in (64, 192)}

    def halved(x: str, channels: int) -> str:
        x = graph.node("Pad", x, border, mode="reflect")
        return graph.node("Conv", x, blurs[channels], strides=[2, 2], group=channels)

    def convolved(x: str, nth: int) -> str:
        weight, bias, padding = convolutions[nth]
        return graph.node("Conv", x, weight, bias, pads=[padding] * 4)

    def units(x: str) -> list[str]:
        """The five rectified feature maps, the channels of every position divided by their length."""
        x = graph.node("Div", graph.node("Cast", x, to=TensorProto.FLOAT), graph.constant(127.5))
        x = graph.node("Sub", graph.node("Sub", x, graph.constant(1)), graph.constant(SHIFT))
        x = graph.node("Transpose", graph.node("Div", x, graph.constant(SCALE)), perm=[0, 3, 1, 2])
        maps = [graph.node("Relu", halved(convolved(x, 0), 64))]
        for nth, channels in ((1, 64), (2, 192)):
            pooled = graph.node("MaxPool", maps[-1], kernel_shape=[3, 3])
            maps.append(graph.node("Relu", convolved(halved(pooled, channels), nth)))
        for nth in (3, 4):
            maps.append(graph.node("Relu", convolved(maps[-1], nth)))
        lengths = [graph.node("ReduceL2", x, axes=[1], keepdims=1) for x in maps]
        return [
            graph.node("Div", x, graph.node("Add", length, graph.constant(1e-10)))
            for x, length in zip(maps, lengths, strict=True)
        ]

    distances = []
    for weight, a, b in zip(linear, units("a"), units("b"), strict=True):
        difference = graph.node("Sub", a, b)
        weighted = graph.node("Conv", graph.node("Mul", difference, difference), weight)
        distances.append(graph.node("ReduceMean", weighted, axes=[1, 2, 3], keepdims=0))
    size = ("batch", "height", "width", 3)
    graph.save({"a": size, "b": size}, graph.node("Sum", *distances), ("batch",))


if __name__ == "__main__":
    write_efficientnet()
    write_st_lpips()
