"""Files of ONNX programs: the weights that programs share, and the form in which ONNX Runtime runs them on a CPU.

ONNX Runtime reorders and packs weights for the processor when it loads a program: for each session in memory of its
own, larger than the weights themselves. `optimized` writes them to a file once, in that form and for all programs of a
folder, and sessions map them from it: a second program of a model adds next to nothing, nor does a second process.
"""

import fcntl
import hashlib
import importlib
import json
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import write_file

if TYPE_CHECKING:
    import onnx

LARGE = ".data"  # suffix of the file with the weights of a model of more than 2 GB, which a `.onnx` file cannot hold
SHARED_BYTES = 1024  # smaller constants stay in the `.onnx` file
ALIGNMENT = 4096  # bytes: runtimes map weights into memory page by page
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"  # of a program that is not read from a file
OPTIMIZED = "optimized"  # the folder of optimized programs, beside the `.onnx` files; without it they are made again
FORMAT = 1  # of optimized programs: increase it when `fuse_attention` or the files change
HEADS_FIRST, KEYS_LAST = [0, 2, 1, 3], [0, 2, 3, 1]  # from [B, N, heads, d]: transpositions of queries, and of keys
SWAPPED = [0, 1, 3, 2]  # after HEADS_FIRST: the same as KEYS_LAST


class SharedWeights:
    """A file of weights for several `.onnx` files in the same folder, which contains equal weights once.

    Args:
        path: of the file; what it contains already is only found again with an index.
        index: a file that lists the weights by their hash, to add to them later; None: the file must not exist.
    """

    def __init__(self, path: Path, index: Path | None = None) -> None:
        self.path, self._index = path, index
        self._offsets: dict[str, int] = {}  # by SHA-256
        path.parent.mkdir(parents=True, exist_ok=True)
        if index is not None and index.is_file():
            self._offsets = json.loads(index.read_text(encoding="utf-8"))
        path.touch(exist_ok=index is not None)

    def save_index(self) -> None:
        """Write the index."""
        assert self._index is not None
        write_file(self._index, json.dumps(self._offsets))

    def move(self, source: Path, target: Path) -> None:
        """Write the `.onnx` file `source` as `target`, beside the shared weights and without its own; remove it."""
        self.copy(source, target)
        source.unlink()
        Path(f"{source}{LARGE}").unlink(missing_ok=True)

    def copy(self, source: Path, target: Path) -> None:
        """The same without removing it. Its weights may be in another shared file."""
        import onnx

        model = onnx.load(str(source))
        graph = model.graph
        for tensor in graph.initializer:
            if len(tensor.raw_data) >= SHARED_BYTES:
                tensor.CopyFrom(self._external(tensor))
        nodes = []
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                tensor = node.attribute[0].t
                if len(tensor.raw_data) >= SHARED_BYTES:
                    tensor.name = node.output[0]
                    graph.initializer.append(self._external(tensor))
                    continue
            nodes.append(node)
        del graph.node[:]
        graph.node.extend(nodes)
        target.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(model, str(target))
        onnx.checker.check_model(str(target))

    def copy_optimized(self, source: Path, target: Path) -> None:
        """Write a program that ONNX Runtime has optimized as `target`, beside the shared weights and without its own.

        A tensor there names the place of its data, and of the same data packed for an operator, if it is:
        "prepacked_0": "MatMul+<hash>|<offset>;<length>;<checksum>|…".
        """
        import onnx

        model = onnx.load(str(source), load_external_data=False)
        tensors = [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
        with Path(f"{source}{LARGE}").open("rb") if tensors else tempfile.TemporaryFile() as own:

            def move(offset: str, length: str) -> str:
                own.seek(int(offset))
                return str(self.store(own.read(int(length))))

            for tensor in tensors:
                places = external_places(tensor)
                places |= {"location": self.path.name, "offset": move(places["offset"], places["length"])}
                for key in (key for key in places if key.startswith("prepacked")):
                    operator, *blobs = places[key].split("|")
                    parts = [blob.split(";") for blob in blobs]
                    moved = [";".join([move(offset, length), length, *rest]) for offset, length, *rest in parts]
                    places[key] = "|".join([operator, *moved])
                del tensor.external_data[:]
                set_places(tensor, places)
        onnx.save(model, str(target))

    def store(self, data: bytes) -> int:
        """The offset of data in the file, to which it is added if it is not there."""
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self._offsets:
            with self.path.open("ab") as file:
                file.write(bytes(-file.tell() % ALIGNMENT))
                offset = file.tell()
                file.write(data)
            self._offsets[digest] = offset
        return self._offsets[digest]

    def _external(self, tensor: "onnx.TensorProto") -> "onnx.TensorProto":
        """The tensor with a reference to the shared file in place of its data."""
        import onnx

        stored = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        stored.data_location = onnx.TensorProto.EXTERNAL
        data = tensor.raw_data
        set_places(stored, {"location": self.path.name, "offset": str(self.store(data)), "length": str(len(data))})
        return stored


def external_places(tensor: "onnx.TensorProto") -> dict[str, str]:
    """Where the data of a tensor lies: the file "location", "offset" and "length" in bytes, and others."""
    return {entry.key: entry.value for entry in tensor.external_data}


def set_places(tensor: "onnx.TensorProto", places: dict[str, str]) -> None:
    for key, value in places.items():
        tensor.external_data.add(key=key, value=value)


def fused(path: Path, threads: int) -> bytes:
    """The program of an `.onnx` file with operators of ONNX Runtime; its large weights stay in their file.

    Attention is fused. With one thread, rows are added by ScatterND, which is twenty times as fast as ScatterElements
    and correct then.
    """
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    fuse_attention(model)
    if threads == 1:
        _add_rows(model)
    else:
        add_in_order(model)  # exports before 0.12 need it
    return model.SerializeToString()


def add_in_order(model: "onnx.ModelProto") -> None:
    """Add rows by ScatterElements in place of ScatterND.

    Of rows that are added to the same one, ONNX Runtime's ScatterND loses some if it has several threads.
    """
    from onnx import helper

    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.op_type == "ScatterND" and any(attribute.s == b"add" for attribute in node.attribute):
            data, rows, updates = node.input  # [D, C], [R, 1], [R, C]
            shape, index = f"{node.output[0]}.shape", f"{node.output[0]}.index"
            nodes.append(helper.make_node("Shape", [updates], [shape]))
            nodes.append(helper.make_node("Expand", [rows, shape], [index]))
            node = helper.make_node(
                "ScatterElements", [data, index, updates], [node.output[0]], axis=0, reduction="add"
            )
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _add_rows(model: "onnx.ModelProto") -> None:
    from onnx import helper

    graph = model.graph
    makers = {output: node for node in graph.node for output in node.output}
    nodes = []
    for node in graph.node:
        index = makers.get(node.input[1]) if node.op_type == "ScatterElements" else None
        if index is not None and index.op_type == "Expand":
            inputs = [node.input[0], index.input[0], node.input[2]]
            node = helper.make_node("ScatterND", inputs, [node.output[0]], reduction="add")
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(_used(nodes, [output.name for output in graph.output]))


def fuse_attention(model: "onnx.ModelProto") -> None:
    """Replace attention that is computed step by step by ONNX Runtime's operator for it.

    What is replaced is, for queries, keys and values [B, N, heads·d]: reshape to [B, N, heads, d], transpose, product
    of queries and keys, softmax, product with the values, transpose, reshape to [B, N, heads·d]; with a constant that
    scales the queries or the product. Attention of another form, for instance with a mask, stays as it is.
    """
    from onnx import helper, numpy_helper

    graph = model.graph
    makers = {output: node for node in graph.node for output in node.output}
    users: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    weights = {tensor.name: tensor for tensor in graph.initializer}

    def maker(name: str) -> "onnx.NodeProto | None":
        """The node that computes a value, behind nodes that change nothing."""
        node = makers.get(name)
        while node is not None and (node.op_type == "Identity" or number(node, "Add") == 0):
            node = makers.get(node.input[0])
        return node

    def constant(name: str) -> Any:
        """The array of a constant; None if it is none, or is stored in another file."""
        node = maker(name)
        is_value = node is not None and node.op_type == "Constant" and node.attribute[0].name == "value"
        tensor = node.attribute[0].t if is_value and node is not None else weights.get(name)
        return None if tensor is None or tensor.external_data else numpy_helper.to_array(tensor)

    def number(node: "onnx.NodeProto", operator: str) -> float | None:
        """The one number that a node adds to its first input, or multiplies it by."""
        value = constant(node.input[1]) if node.op_type == operator else None
        return float(value.reshape([-1])[0]) if value is not None and value.size == 1 else None

    def unscaled(name: str) -> "tuple[onnx.NodeProto | None, float]":
        """The node whose output is multiplied by one number, and the number; 1 if it is not."""
        node = maker(name)
        factor = None if node is None else number(node, "Mul")
        return (node, 1.0) if node is None or factor is None else (maker(node.input[0]), factor)

    def tokens(node: "onnx.NodeProto | None", order: list[int]) -> tuple[str, int] | None:
        """[B, N, heads·d] from which heads were made with that order of axes, and their number."""
        if order == KEYS_LAST and _is_transpose(node, SWAPPED) and node is not None:
            node, order = maker(node.input[0]), HEADS_FIRST
        if node is None or not _is_transpose(node, order):
            return None
        reshape = maker(node.input[0])
        shape = constant(reshape.input[1]) if reshape is not None and reshape.op_type == "Reshape" else None
        if reshape is None or shape is None or shape.size != 4 or shape[0] != 0 or shape[1] != 0:
            return None
        return reshape.input[0], int(shape[2])

    def only_user(node: "onnx.NodeProto | None") -> "onnx.NodeProto | None":
        using = [] if node is None else users.get(node.output[0], [])
        return using[0] if len(using) == 1 else None

    replaced = {}
    for softmax in (node for node in graph.node if node.op_type == "Softmax"):
        scores, scale = unscaled(softmax.input[0])
        output = only_user(softmax)
        if scores is None or output is None or {scores.op_type, output.op_type} != {"MatMul"}:
            continue
        query, query_scale = unscaled(scores.input[0])
        key, key_scale = unscaled(scores.input[1])
        sources = tokens(query, HEADS_FIRST), tokens(key, KEYS_LAST), tokens(maker(output.input[1]), HEADS_FIRST)
        joined = only_user(output)
        last = only_user(joined) if _is_transpose(joined, HEADS_FIRST) else None
        if None in sources or last is None or last.op_type != "Reshape" or output.input[0] != softmax.output[0]:
            continue
        (q, heads), (k, _), (v, _) = (source for source in sources if source is not None)
        replaced[last.output[0]] = helper.make_node(
            "MultiHeadAttention",
            [q, k, v],
            [last.output[0]],
            domain="com.microsoft",
            num_heads=heads,
            scale=scale * query_scale * key_scale,
        )
    nodes = [replaced.get(node.output[0], node) for node in graph.node]
    del graph.node[:]
    graph.node.extend(_used(nodes, [output.name for output in graph.output]))
    if replaced:
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def _is_transpose(node: "onnx.NodeProto | None", order: list[int]) -> bool:
    return node is not None and node.op_type == "Transpose" and list(node.attribute[0].ints) == order


def _used(nodes: Iterable["onnx.NodeProto"], outputs: Iterable[str]) -> "list[onnx.NodeProto]":
    """The nodes, in their order, that outputs are computed from."""
    needed, used = set(outputs), []
    for node in reversed([*nodes]):
        if needed.intersection(node.output):
            used.append(node)
            needed.update(node.input)
    return used[::-1]


def weight_offsets(path: Path) -> dict[str, int]:
    """Where the weights of an `.onnx` file lie in the file that it shares with others, by name."""
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    places = {t.name: external_places(t) for t in graph.initializer}
    return {name: int(place["offset"]) for name, place in places.items() if "offset" in place}


def optimized(path: Path, threads: int) -> Path:
    """The program of an `.onnx` file as this ONNX Runtime runs it on this processor, without further optimization.

    Raises:
        OSError: the folder cannot be written.
        Exception: ONNX Runtime cannot load the program.
    """

    def write(target: Path, weights: SharedWeights) -> None:
        unshared = target.with_name("unshared.onnx")
        _write_optimized(path, threads, unshared)
        weights.copy_optimized(unshared, target)

    return cached(path, "one" if threads == 1 else "several", write)


def cached(path: Path, form: str, write: Callable[[Path, SharedWeights], None]) -> Path:
    """Another form of the program of an `.onnx` file, which the first call makes for later ones and other processes.

    It lies in a folder beside the program, whose name depends on the version of ONNX Runtime and the processor. The
    file's name depends on the content of the program, and on the time and size of its weights.

    Args:
        path: of the program.
        form: part of the file's name.
        write: writes the file, and its weights to a file that all programs of the folder share.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = path.parent / OPTIMIZED / _machine()
    target = folder / f"{path.stem}-{form}-{_state(path)}.onnx"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        if target.is_file():  # another process was faster
            return target
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            weights = SharedWeights(folder / "weights", folder / "weights.json")
            write(Path(temporary) / "program.onnx", weights)
            weights.save_index()
            (Path(temporary) / "program.onnx").replace(target)
    return target


def _write_optimized(path: Path, threads: int, target: Path) -> None:
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors, not that the file is for this processor
    options.optimized_model_filepath = str(target)
    entries = {
        WEIGHTS_FOLDER: str(path.parent),
        "session.optimized_model_external_initializers_file_name": f"{target.name}{LARGE}",
        "session.optimized_model_external_initializers_min_size_in_bytes": str(SHARED_BYTES),
        "session.save_external_prepacked_constant_initializers": "1",
    }
    for name, value in entries.items():
        options.add_session_config_entry(name, value)
    onnxruntime.InferenceSession(fused(path, threads), options, providers=["CPUExecutionProvider"])


def _state(path: Path) -> str:
    """What distinguishes the programs and weights that a path has had."""
    import onnx

    content = path.read_bytes()
    model = onnx.load_model_from_string(content)
    files = {entry.value for t in model.graph.initializer for entry in t.external_data if entry.key == "location"}
    stats = [(path.parent / file).stat() for file in sorted(files)]
    return _digest(content, *(f"{stat.st_size} {stat.st_mtime_ns}".encode() for stat in stats))


@lru_cache(maxsize=1)
def _machine() -> str:
    """What decides the form of optimized programs: this code, ONNX Runtime and the processor."""
    version = importlib.import_module("onnxruntime").__version__
    lines = set()
    with suppress(OSError):
        lines = {*Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()}
    processor = sorted(line for line in lines if line.startswith(("model name", "flags", "CPU part", "Features")))
    return _digest(*map(str.encode, (str(FORMAT), version, *processor)))


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]
