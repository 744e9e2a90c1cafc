"""The weights of ONNX programs, in files that several programs share."""

import hashlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

EXTERNAL_SUFFIX = ".data"  # of the file with the weights of a model above 2 GB, the limit of a `.onnx` file
SHARED_BYTES = 1024  # smaller constants stay in the `.onnx` file
ALIGNMENT = 4096  # bytes: runtimes map weights into memory page by page
# ONNX Runtime's option for the folder of the weights, for a program that is loaded from memory.
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
IN_MEMORY = "weights"  # a file of weights that is not on the disk
OPTIMIZED = (
    "optimized"  # the folder of optimized programs, beside the `.onnx` files; they are written again if it is missing
)


class SharedWeights:
    """A file of weights for several `.onnx` files in the same folder, which contains equal weights once.

    Args:
        path: the file of weights.
        places: the offset and length of the weights that are in the file, by their SHA-256, to which further
            weights are added. None: there must be no such file yet.
    """

    def __init__(self, path: Path, places: dict[str, tuple[int, int]] | None = None) -> None:
        self.path = path
        self.places = {} if places is None else places
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=places is not None)

    def move(self, source: Path, target: Path) -> None:
        """Write the `.onnx` file `source` as `target`, which refers to the shared weights, and remove `source`."""
        import onnx

        model = onnx.load(str(source), load_external_data=False)
        for tensor in model.graph.initializer:
            if places := external_places(tensor):  # one at a time in memory
                with source.with_name(places["location"]).open("rb") as file:
                    file.seek(int(places.get("offset", 0)))
                    tensor.raw_data = file.read(int(places["length"]))
                tensor.data_location = onnx.TensorProto.DEFAULT
                del tensor.external_data[:]
                self._add(tensor)
        self.write(model, target)
        source.unlink()
        Path(f"{source}{EXTERNAL_SUFFIX}").unlink(missing_ok=True)

    def write(self, model: "onnx.ModelProto", target: Path) -> None:
        """Write a program as the `.onnx` file `target`; its large constants move to the shared weights."""
        import onnx

        graph, nodes = model.graph, []
        for node in graph.node:
            is_value = node.op_type == "Constant" and node.attribute[0].name == "value"
            if is_value and len(node.attribute[0].t.raw_data) >= SHARED_BYTES:
                tensor = node.attribute[0].t
                tensor.name = node.output[0]
                graph.initializer.append(tensor)
            else:
                nodes.append(node)
        del graph.node[:]
        graph.node.extend(nodes)
        for tensor in graph.initializer:
            self._add(tensor)
        target.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(model, str(target))
        onnx.checker.check_model(str(target))

    def _add(self, tensor: "onnx.TensorProto") -> None:
        """Move the data of a tensor to the file if they are large."""
        if len(tensor.raw_data) >= SHARED_BYTES:
            self.place(tensor, tensor.raw_data)

    def copy_optimized(self, source: Path, target: Path) -> None:
        """Write a program that ONNX Runtime has optimized as `target`, which refers to the shared weights.

        A tensor of such a program names the place of its data and, if an operator has packed them, of the packed data:
        "prepacked_0": "MatMul+<hash>|<offset>;<length>;<checksum>|…".
        """
        import onnx

        model = onnx.load(str(source), load_external_data=False)
        tensors = [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
        with Path(f"{source}{EXTERNAL_SUFFIX}").open("rb") if tensors else tempfile.TemporaryFile() as own:

            def move(offset: str, length: str) -> str:
                own.seek(int(offset))
                data = own.read(int(length))
                if len(data) != int(length):  # ONNX Runtime does not notice it
                    raise OSError(f"{own.name} is incomplete")
                return str(self.store(data))

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
        """Add data to the file unless it is there; returns its offset."""
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self.places:
            with self.path.open("ab") as file:
                file.write(bytes(-file.tell() % ALIGNMENT))
                offset = file.tell()
                file.write(data)
            self.places[digest] = offset, len(data)
        return self.places[digest][0]

    def place(self, tensor: "onnx.TensorProto", data: bytes) -> None:
        """Add the data of a tensor to the file, and let the tensor refer to it."""
        import onnx

        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        del tensor.external_data[:]
        set_places(tensor, {"location": self.path.name, "offset": str(self.store(data)), "length": str(len(data))})


def external_places(tensor: "onnx.TensorProto") -> dict[str, str]:
    """A tensor's external data: its file ("location"), "offset" and "length" in bytes, …"""
    return {entry.key: entry.value for entry in tensor.external_data}


def set_places(tensor: "onnx.TensorProto", places: dict[str, str]) -> None:
    """Set a tensor's external data."""
    for key, value in places.items():
        tensor.external_data.add(key=key, value=value)


def weight_files(path: Path) -> list[str]:
    """The names of the files beside an `.onnx` file that have its weights."""
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    return sorted({places["location"] for t in graph.initializer if (places := external_places(t))})
