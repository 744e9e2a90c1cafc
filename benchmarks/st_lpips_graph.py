"""Writes the ONNX graph of ST-LPIPS, which measures images; its weights stay in a package on PyPI.

    python benchmarks/st_lpips_graph.py       (writes benchmarks/lab/quality/graphs/stlpips-pytorch.onnx)

The file of weights is of `torch.save` before PyTorch 1.6, where the values of each tensor stand as they are in memory:
the graph names their offsets. No code is taken from the network's authors.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from lab.quality.networks import STLPIPS, Weights
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
PADDINGS = (2, 2, 1, 1, 1)  # padding of each convolution of AlexNet
# LPIPS' scale of images in −1…1, per colour
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)


def read_tensors(weights: Weights, unused: Sequence[str]) -> Iterator[tuple[tuple[int, ...], int]]:
    """The shape of each float32 tensor of a file in its order, and the offset of its values.

    Tensors whose names end like `unused` are left out.
    """
    file = io.BytesIO(weights.read())

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if name == "_rebuild_tensor_v2":
                return lambda storage, offset, shape, *_: (storage, tuple(shape))
            return OrderedDict if name == "OrderedDict" else {"FloatStorage": 4}[name]

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
    for name, (storage, shape) in state.items():
        if not name.endswith(tuple(unused)):
            yield shape, offsets[storage]


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
        shape, offset = next(self._tensors)
        name, size = f"weight_{len(self._initializers)}", 4 * int(np.prod(shape))
        proto = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
        proto.data_location = TensorProto.EXTERNAL
        for key, value in {"location": self._weights.path.name, "offset": offset, "length": size}.items():
            proto.external_data.add(key=key, value=str(value))
        self._initializers.append(proto)
        return name

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
    write_st_lpips()
