"""Exported programs of Stable Diffusion 1.5's UNet on a CUDA GPU, in ONNX Runtime, beside PyTorch with tomesd.

    python benchmarks/gpu_onnx.py export FOLDER            # where Paddle is; a minute for each program, no GPU
    python benchmarks/gpu_onnx.py reference FOLDER         # passes at 512 px on the CPU; a minute each
    python benchmarks/gpu_onnx.py measure FOLDER OUTPUT    # on the GPU, without Paddle: see below
    python benchmarks/gpu_onnx.py report
    python benchmarks/gpu_onnx.py count                    # where Paddle is: operators that merging adds to a block

`export` writes each program as `precision="fp16"` runs it, with the mean and standard deviation of each weight in
place of the weight: 2 MB for all programs when packed. `reference` and `measure` draw weights of them, since speed
does not depend on them. `measure` needs onnx, onnxruntime-gpu, torch, diffusers and tomesd. All arms of a cell take
turns: medians of the rounds, after a warm-up. A time that is 20 % above the fastest of its arm is measured again at
once, at most twice. A pass in ONNX Runtime has its inputs and output on the GPU. Memory is what the first pass takes
beside the weights in ONNX Runtime, and PyTorch's peak, weights included.
"""

import argparse
import copy
import json
import math
import statistics
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "gpu_onnx.json"
MERGED = {
    # A step that merges: with plain steps the number of keys differs between steps, and no CUDA graph can record that.
    "interlace 0.5": {"ratio": 0.5, "merge_steps": "all"},
    "interlace 0.75": {"ratio": 0.75, "merge_steps": "all"},
    "todo 0.75": {"ratio": 0.75, "method": "todo"},
    "todo 0.5": {"ratio": 0.5, "method": "todo"},
    "tomesd 0.5": {"ratio": 0.5, "method": "tomesd"},
}
PLAIN, DEFAULT, CHECKERBOARD = "plain", "interlace 0.75", "todo 0.5"
MAIN = [PLAIN, "interlace 0.5", DEFAULT, "todo 0.75", CHECKERBOARD]
# The arms whose gain follows from that of todo 0.75, and the share of the keys that each removes.
PREDICTED = {DEFAULT: 0.75, "interlace 0.5": 0.5, CHECKERBOARD: 0.5}
PRODUCT = {"prefer_nhwc": "1"}  # the options of `OnnxRuntime`
FORMS = {"channels first": {}, "CUDA graph": {**PRODUCT, "enable_cuda_graph": "1"}}
CELLS = {  # (px, batch): programs
    (512, 2): [PLAIN, *MERGED],
    (768, 2): MAIN,
    (1024, 2): [PLAIN, *MERGED],
    (1536, 2): MAIN,
    (512, 8): MAIN,
    (1024, 8): MAIN,
}
IN_ALL_FORMS = ((512, 2), (1024, 2))  # where the arms of MAIN run in all forms
TOMESD_RATIOS = {2: (0.5, 0.75), 8: (0.5,)}  # ratios in PyTorch, by batch
ROUNDS, SECONDS = 7, 0.2  # an arm runs for SECONDS in each round
NOISY, REPETITIONS = 1.2, 2  # a time this much above the arm's fastest is measured again, so many times
REFERENCE = (512, 2)  # the cell whose outputs are compared with the CPU's
WEIGHTS, ORIGIN = "weights", "origin.json"
BOUNDS = {  # operators that merging adds to a block; for interlace with those that read the turn, once in a pass
    "interlace 0.75": 20,
    "interlace 0.5": 20,
    "todo 0.75": 1,
    "todo 0.5": 1,
}
FREE = ("Reshape", "Squeeze", "Unsqueeze")  # operators that launch no kernel


def export(options: argparse.Namespace) -> None:
    """Write the programs that the folder lacks."""
    import onnx
    import paddle
    from lab.speed.architectures import ARCHITECTURES
    from onnx import numpy_helper

    from ppdiffusers_tome import ToMeConfig
    from ppdiffusers_tome.attach.attach import attach
    from ppdiffusers_tome.export import programs
    from ppdiffusers_tome.run.onnx_weights import external_places, set_places

    architecture = ARCHITECTURES[options.architecture]
    paddle.seed(0)
    unet = architecture.build()
    unet.eval()
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / ORIGIN).write_text(json.dumps(origin()), encoding="utf-8")
    wanted = dict.fromkeys((size, arm) for (size, _), arms in CELLS.items() for arm in arms)
    for size, arm in wanted if options.size is None else [(options.size, arm) for arm in (PLAIN, DEFAULT)]:
        target = options.folder / f"{size} {arm}.onnx"
        if target.is_file():
            continue
        traceable = programs.denoiser(unet, None)
        if arm != PLAIN:
            attach(traceable.layer.unet, ToMeConfig(**MERGED[arm]), None)
        latent = architecture.latent(size)
        dims = {"height": size, "width": size, "latent_height": latent.h, "latent_width": latent.w}
        with tempfile.TemporaryDirectory() as scratch:
            model = onnx.load(str(write_half(traceable, dims, Path(scratch))))
        for tensor in model.graph.initializer:
            values = numpy_helper.to_array(tensor)
            if values.dtype == np.float16 and values.size >= 256:
                values = values.astype("float32")
                tensor.ClearField("raw_data")
                tensor.data_location = onnx.TensorProto.EXTERNAL
                places = {"location": WEIGHTS, "mean": repr(float(values.mean())), "std": repr(float(values.std()))}
                set_places(tensor, external_places(tensor) | places)
        target.write_bytes(model.SerializeToString())
        print(target, f"{target.stat().st_size / 1e6:.1f} MB", flush=True)


def write_half(traceable: Any, dims: dict[str, int], folder: Path) -> Path:
    """Write the program of a layer for GPUs in float16, with sizes for some of its dimensions."""
    from ppdiffusers_tome.export import tracing
    from ppdiffusers_tome.export.conversion import Converter
    from ppdiffusers_tome.run.folder import ExportedFolder
    from ppdiffusers_tome.run.onnx_gpu import half_program
    from ppdiffusers_tome.run.onnx_weights import SharedWeights

    with Converter() as converter:
        files = tracing.write_program(traceable, folder / "program", dims, "model")
        SharedWeights(folder / "model.weights").move(converter.convert(*files, "model"), folder / "model.onnx")
    return half_program(ExportedFolder(folder), folder.resolve() / "model.onnx")


def origin() -> dict[str, str]:
    """What the programs are of: the versions of the package and of Paddle, and the commit."""
    from ppdiffusers_tome.comparison.environment import commit, describe_environment

    environment = describe_environment()
    return {name: environment[name] for name in ("ppdiffusers_tome", "paddlepaddle")} | {"commit": commit()}


def count(options: argparse.Namespace) -> None:
    """Print the operators that merging adds to a block, as ONNX Runtime runs it on a GPU, beside their bounds."""
    from lab.markdown import table

    added = operators_added(options.architecture)
    rows = [[arm, f"{added[arm][0]}", f"{added[arm][1]}", f"{bound}"] for arm, bound in BOUNDS.items()]
    print(*table(["setting", "operators", "that launch kernels", "bound of operators"], rows), sep="\n")


def operators_added(architecture: str) -> dict[str, tuple[int, int]]:
    """Operators of a block of 64×64 tokens in float16 that the plain block has not, and those that launch kernels."""
    import paddle
    from lab.speed.architectures import ARCHITECTURES
    from top_block import OneBlock, build_transformer

    from ppdiffusers_tome import ToMeConfig
    from ppdiffusers_tome.attach.attach import attach
    from ppdiffusers_tome.export.programs import Input, Traceable

    known = ARCHITECTURES[architecture]
    paddle.seed(0)
    transformer = build_transformer(known)
    shape = ("batch", known.config["block_out_channels"][0], 64, 64)
    inputs = (
        Input("sample", shape),
        Input("encoder_hidden_states", ("batch", 77, known.config["cross_attention_dim"])),
        Input("timestep", (1,)),
    )
    counts = {}
    for arm in (PLAIN, *BOUNDS):
        layer = OneBlock(copy.deepcopy(transformer))
        layer.eval()
        if arm != PLAIN:
            attach(layer, ToMeConfig(**MERGED[arm]), None)
        counts[arm] = Counter(_operators_on_gpu(Traceable(layer, inputs)))
    merged = {arm: counts[arm] for arm in BOUNDS}
    difference = {arm: operators.total() - counts[PLAIN].total() for arm, operators in merged.items()}
    free = {arm: sum(operators[name] - counts[PLAIN][name] for name in FREE) for arm, operators in merged.items()}
    return {arm: (difference[arm], difference[arm] - free[arm]) for arm in merged}


def _operators_on_gpu(traceable: Any) -> list[str]:
    """The types of the operators of a program for GPUs, as ONNX Runtime optimizes them."""
    import onnx
    import onnxruntime as ort

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        half = write_half(traceable, {}, folder)
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(folder / "optimized.onnx")
        for value in onnx.load(str(half), load_external_data=False).graph.input:
            for name in filter(None, (dim.dim_param for dim in value.type.tensor_type.shape.dim)):
                options.add_free_dimension_override_by_name(name, 2)
        ort.InferenceSession(str(half), options, providers=["CPUExecutionProvider"])
        nodes = onnx.load(str(folder / "optimized.onnx"), load_external_data=False).graph.node
    return [node.op_type for node in nodes if not node.name.startswith("InsertedPrecisionFreeCast")]


class Weights:
    """A file of random weights for all programs, the same on all machines."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / WEIGHTS
        self._path.write_bytes(b"")
        self._offsets: dict[tuple, int] = {}

    def place(self, path: Path) -> bytes:
        """A program with weights in this file."""
        import onnx

        model = onnx.load(str(path), load_external_data=False)
        with self._path.open("ab") as file:
            for tensor in (t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL):
                places = {entry.key: entry.value for entry in tensor.external_data}
                key, count = (tensor.name, *tensor.dims), int(np.prod(tensor.dims))
                if key not in self._offsets:
                    random = np.random.default_rng(zlib.crc32(repr(key).encode()))
                    values = random.standard_normal(count, "float32")
                    values = values * np.float32(places["std"]) + np.float32(places["mean"])
                    file.write(bytes(-file.tell() % 4096))
                    self._offsets[key] = file.tell()
                    file.write(values.astype("float16").tobytes())
                del tensor.external_data[:]
                for name, value in (("location", WEIGHTS), ("offset", self._offsets[key]), ("length", 2 * count)):
                    tensor.external_data.add(key=name, value=str(value))
        return model.SerializeToString()


class Session:
    """A program in ONNX Runtime, with inputs and output on the device."""

    def __init__(self, program: bytes, weights: Path, feed: dict[str, np.ndarray], device: str, **form: str) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights))
        sample, text = feed["sample"], feed["encoder_hidden_states"]
        for name, dim in (("0", len(text)), ("1", text.shape[1]), ("2", len(sample))):
            options.add_free_dimension_override_by_name(f"DynamicDimension.{name}", dim)
        fixed = {"cudnn_conv_algo_search": "HEURISTIC", "arena_extend_strategy": "kSameAsRequested", "use_tf32": "0"}
        name = "CPUExecutionProvider" if device == "cpu" else "CUDAExecutionProvider"
        provider: Any = name if device == "cpu" else (name, fixed | form)
        self._session = ort.InferenceSession(program, options, providers=[provider])
        if self._session.get_providers()[0] != name:
            raise SystemExit(f"ONNX Runtime cannot use {name}")
        self._binding = self._session.io_binding()
        for key, value in feed.items():
            self._binding.bind_ortvalue_input(key, ort.OrtValue.ortvalue_from_numpy(value, device, 0))
        self._output = ort.OrtValue.ortvalue_from_shape_and_type(sample.shape, np.float32, device, 0)
        self._binding.bind_ortvalue_output(self._session.get_outputs()[0].name, self._output)

    @property
    def output(self) -> np.ndarray:
        """What the last pass returned."""
        return self._output.numpy()

    def __call__(self) -> None:
        self._session.run_with_iobinding(self._binding)


class Torch:
    """Passes of a UNet of diffusers, merged by tomesd at a ratio, or plain at 0."""

    def __init__(self, unet: Any, feed: dict[str, np.ndarray], ratio: float) -> None:
        import torch

        self._unet, self._ratio = unet, ratio
        like = next(unet.parameters())
        names = ("sample", "timestep", "encoder_hidden_states")  # by position, because tomesd sees no others
        self._inputs = [torch.from_numpy(feed[name]).to(like) for name in names]

    def prepare(self) -> None:
        """Merge in the UNet, which all arms share, at this arm's ratio."""
        import tomesd

        tomesd.remove_patch(self._unet)
        if not self._ratio:
            return
        tomesd.apply_patch(self._unet, ratio=self._ratio)
        for block in self._unet.modules():  # tomesd's old forward reads attributes that newer diffusers may lack
            if type(block).__name__ == "ToMeBlock":
                for name in ("use_ada_layer_norm", "use_ada_layer_norm_zero", "only_cross_attention"):
                    if not hasattr(block, name):
                        setattr(block, name, False)

    def __call__(self) -> None:
        import torch

        with torch.inference_mode():
            self._unet(*self._inputs)


def inputs(options: argparse.Namespace, size: int, batch: int) -> dict[str, np.ndarray]:
    """Random inputs of a UNet of the architecture."""
    path = ROOT / "benchmarks/lab/speed/architectures.json"
    architecture = json.loads(path.read_text(encoding="utf-8"))[options.architecture]
    random = np.random.default_rng(0)
    text = (batch, architecture["text"], architecture["config"]["cross_attention_dim"])
    return {
        "sample": random.standard_normal((batch, 4, size // 8, size // 8), "float32"),
        "timestep": np.array([500], "float32"),
        "encoder_hidden_states": random.standard_normal(text, "float32"),
    }


def reference(options: argparse.Namespace) -> None:
    """Write what the programs of one cell return on the CPU."""
    (size, batch), names = cells_of(options)[0]
    feed = inputs(options, size, batch)
    with tempfile.TemporaryDirectory() as folder:
        weights = Weights(Path(folder))
        for name in names:
            session = Session(weights.place(options.folder / f"{size} {name}.onnx"), Path(folder), feed, "cpu")
            session()
            np.save(options.folder / f"{size} {name}.npy", session.output)
            print(size, name, flush=True)


def cells_of(options: argparse.Namespace) -> list[tuple[tuple[int, int], list[str]]]:
    """Sizes and batches with the names of their programs; that of the reference comes first."""
    if options.size is not None:
        return [((options.size, REFERENCE[1]), [PLAIN, DEFAULT])]
    return [(REFERENCE, CELLS[REFERENCE]), *(cell for cell in CELLS.items() if cell[0] != REFERENCE)]


def measure(options: argparse.Namespace) -> None:
    """Measure all cells and write the result after each."""
    from importlib.metadata import version

    import onnxruntime as ort
    import torch
    from diffusers import UNet2DConditionModel

    device, is_gpu = options.device, options.device == "cuda"
    if is_gpu:
        ort.preload_dlls()
    torch.manual_seed(0)
    path = ROOT / "benchmarks/lab/speed/architectures.json"
    architecture = json.loads(path.read_text(encoding="utf-8"))[options.architecture]
    with torch.device(device):
        unet = UNet2DConditionModel(**architecture["config"]).eval().to(torch.float16 if is_gpu else None)
    finish = torch.cuda.synchronize if is_gpu else lambda: None
    result: dict[str, Any] = {
        "kind": "gpu_onnx",
        "command": " ".join(["python", "benchmarks/gpu_onnx.py", *sys.argv[1:]]),
        "gpu": torch.cuda.get_device_name() if is_gpu else "none",
        "programs": json.loads((options.folder / ORIGIN).read_text(encoding="utf-8")),
        "versions": {"cuda": torch.version.cuda}
        | {name: version(name) for name in ("torch", "diffusers", "tomesd")}
        | {"onnxruntime-gpu": ort.__version__},
        "rounds": ROUNDS,
        "rows": [],
    }
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared, ThreadPoolExecutor(8) as threads:
        weights = Weights(Path(shared))
        for (size, batch), names in cells_of(options):
            feed = inputs(options, size, batch)
            programs = {name: weights.place(options.folder / f"{size} {name}.onnx") for name in names}
            turns = [[(name, "") for name in names]]
            if is_gpu and (size, batch) in IN_ALL_FORMS:
                turns.append([(PLAIN, ""), *((name, form) for form in FORMS for name in MAIN)])
            for turn, chosen in enumerate(turns):
                start = partial(start_session, programs, Path(shared), feed, device)
                sessions = dict(zip(chosen, threads.map(start, chosen), strict=True))
                arms: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {}
                facts: dict[str, dict[str, float]] = {}
                for (name, form), session in sessions.items():
                    arm = f"onnxruntime {name}{', ' if form else ''}{form}"
                    before = used_bytes(is_gpu)
                    session()
                    facts[arm], arms[arm] = {"bytes": used_bytes(is_gpu) - before}, (lambda: None, session)
                    file = options.folder / f"{size} {name}.npy"
                    if batch == REFERENCE[1] and file.is_file():
                        facts[arm]["difference"] = difference(session.output, np.load(file))
                for ratio in () if turn else (0, *TOMESD_RATIOS[batch]):
                    one = Torch(unet, feed, ratio)
                    arm = f"torch {f'tomesd {ratio}' if ratio else PLAIN}"
                    arms[arm] = (one.prepare, one)
                    if is_gpu:
                        torch.cuda.reset_peak_memory_stats()
                    one.prepare()
                    one()
                    facts[arm] = {"bytes": torch.cuda.max_memory_allocated() if is_gpu else 0}
                for arm, times in in_turns(arms, finish).items():
                    result["rows"].append({"size": size, "batch": batch, "turn": turn, "arm": arm, "ms": times})
                    result["rows"][-1] |= facts[arm]
                    print(f"{size} px, batch {batch}, {arm}: {statistics.median(times):.2f} ms", facts[arm])
                options.output.write_text(json.dumps(result, indent=1), encoding="utf-8")
                del sessions, session, arms  # the next sessions need their memory


def start_session(
    programs: dict[str, bytes], weights: Path, feed: dict[str, np.ndarray], device: str, arm: tuple[str, str]
) -> Session:
    """The session of a program's name and a form."""
    name, form = arm
    return Session(programs[name], weights, feed, device, **FORMS.get(form, PRODUCT))


def difference(output: np.ndarray, expected: np.ndarray) -> float:
    """Distance from what is expected, relative to it (root mean squares)."""
    return float(np.linalg.norm(output - expected) / np.linalg.norm(expected))


def used_bytes(is_gpu: bool) -> int:
    """Bytes of the GPU's memory that are in use."""
    import torch

    if not is_gpu:
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def in_turns(
    arms: dict[str, tuple[Callable[[], None], Callable[[], None]]], finish: Callable[[], None]
) -> dict[str, list[float]]:
    """Milliseconds of a pass of each arm (what prepares it, and what runs it) in each round."""

    def seconds(run: Callable[[], None], count: int) -> float:
        finish()
        start = time.perf_counter()
        for _ in range(count):
            run()
        finish()
        return (time.perf_counter() - start) / count

    counts, times = {}, {arm: [] for arm in arms}
    for arm, (prepare, run) in arms.items():
        prepare()
        seconds(run, 3)
        counts[arm] = max(2, min(20, int(SECONDS / seconds(run, 1))))
    for _ in range(ROUNDS):
        for arm, (prepare, run) in arms.items():
            prepare()
            run()
            one = seconds(run, counts[arm])
            for _ in range(REPETITIONS):
                if 1000 * one > NOISY * min(times[arm], default=math.inf):
                    one = min(one, seconds(run, counts[arm]))
            times[arm].append(1000 * one)
    return times


def reference_of(row: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The plain arm that an arm is compared with: in the same form and turn; of a plain arm, that without a form."""
    name, _, form = row["arm"].partition(", ")
    plain = f"{name.split()[0]} {PLAIN}"
    wanted = plain if name == plain or not form else f"{plain}, {form}"
    place = ("size", "batch", "turn")
    return next(other for other in rows if other["arm"] == wanted and all(other[key] == row[key] for key in place))


def predicted_gains(rows: list[dict[str, Any]], arm: str = CHECKERBOARD) -> dict[tuple[int, int], str]:
    """The gains, by size and batch, that an arm should have where it was not measured, from those of cells.

    Both need one gather of tokens, and the time that attention saves is proportional to the keys removed.
    """
    from ppdiffusers_tome.comparison.clock import NO_DIFFERENCE, gain

    measured = {(row["size"], row["batch"]) for row in rows if row["arm"] == f"onnxruntime {arm}"}
    gains: dict[tuple[int, int], str] = {}
    for row in rows:
        place = row["size"], row["batch"]
        if row["arm"] == "onnxruntime todo 0.75" and place not in measured | gains.keys():
            of_cells = gain(reference_of(row, rows)["ms"], row["ms"])
            saved = (1 - 1 / of_cells.factor) * PREDICTED[arm] / 0.75
            gains[place] = f"{1 / (1 - saved):.2f}×" if of_cells.is_difference else NO_DIFFERENCE
    return gains


def lacking(rows: list[dict[str, Any]]) -> list[str]:
    """A note with the programs of CELLS that were not measured, and where."""
    measured = {(row["size"], row["batch"], row["arm"]) for row in rows}
    missing = []
    for name in (PLAIN, *MERGED):
        cells = [cell for cell, names in CELLS.items() if name in names]
        places = [
            f"{size} px, batch {batch}"
            for size, batch in cells
            if (size, batch, f"onnxruntime {name}") not in measured
        ]
        if places:
            missing.append(name if len(places) == len(cells) else f"{name} ({'; '.join(places)})")
    return [f"**Not measured** in ONNX Runtime: {', '.join(missing)}."] if missing else []


def predictions(rows: list[dict[str, Any]]) -> list[str]:
    """A note with the predicted gains of each arm that has some."""
    notes = []
    for arm, removed in PREDICTED.items():
        gains = [f"{gain} at {size} px, batch {batch}" for (size, batch), gain in predicted_gains(rows, arm).items()]
        time, keys = ("", "") if removed == 0.75 else ("two thirds of ", "two thirds ")
        if gains:
            notes.append(
                f"**Predicted, not measured**: {arm} gains {', '.join(gains)}, if it saves {time}"
                f"the time that todo 0.75 saves. It removes {keys}as many keys, by the same operator."
            )
    return notes


def report(options: argparse.Namespace) -> None:
    """Write gpu_onnx.md beside the folder of the result."""
    from lab.markdown import NOT_MEASURED, table

    from ppdiffusers_tome.comparison.clock import gain

    result = json.loads(options.result.read_text(encoding="utf-8"))
    cells = list(dict.fromkeys((row["size"], row["batch"]) for row in result["rows"]))
    rows: dict[tuple, dict[str, Any]] = {}
    for row in result["rows"]:
        is_repeated = row["turn"] and "," not in row["arm"]
        rows[row["size"], row["batch"], row["arm"] + (", beside the forms" if is_repeated else "")] = row
    arms = list(dict.fromkeys(arm for *_, arm in rows))

    def text_of(cell: tuple[int, int], arm: str) -> str:
        row = rows.get((*cell, arm))
        if row is None:
            return NOT_MEASURED
        reference = reference_of(row, result["rows"])
        milliseconds = statistics.median(row["ms"])
        gained = f", {gain(reference['ms'], row['ms'])}" if row is not reference else ""
        return f"{milliseconds:.1f} ms{gained}, {row['bytes'] / 2**30:.2f} GiB"

    heads = [f"{size} px, batch {batch}" for size, batch in cells]
    versions = ", ".join(f"{name} {version}" for name, version in (result["programs"] | result["versions"]).items())
    furthest = max(row.get("difference", 0) for row in rows.values())
    lines = [
        f"# {(__doc__ or '').splitlines()[0].removesuffix('.')}\n",
        "Milliseconds of a pass in float16 with random weights (medians of rounds in which the arms take turns);",
        "the gain over plain in the same runtime and form, and of plain in a form over plain beside the forms: the",
        "median of the ratios within the rounds, or no difference where their quartiles include 1; and",
        "the memory that a pass takes beside the weights, in PyTorch with them. Inputs and outputs are on the GPU.",
        "Without a form, ONNX Runtime has channels last, as the package's `OnnxRuntime`.\n",
        *table(["one pass", *heads], [[arm, *(text_of(cell, arm) for cell in cells)] for arm in arms]),
        f"\nAt 512 px a pass differs from that of a CPU by at most {100 * furthest:.2f} % (root mean square).",
        f"\n[{options.result.name}](results/{options.result.name}): {result['gpu']}, {versions}",
        *(f"\n{note}" for note in [*lacking(result["rows"]), *predictions(result["rows"]), *result.get("notes", [])]),
    ]
    (options.result.parents[1] / "gpu_onnx.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for command in (export, reference, measure):
        one = commands.add_parser(command.__name__, help=command.__doc__)
        one.add_argument("folder", type=Path, help="of the programs")
        one.add_argument("--architecture", default="sd15", choices=["sd15", "tiny"], help="default: %(default)s")
        one.add_argument("--size", type=int, help="one size, plain and merged by default, instead of all")
        one.set_defaults(run=command)
    one.add_argument("output", type=Path, help="JSON file")
    one.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    one = commands.add_parser("count", help=count.__doc__)
    one.add_argument("--architecture", default="sd15", choices=["sd15"])
    one.set_defaults(run=count)
    one = commands.add_parser("report", help=report.__doc__)
    one.add_argument("--result", type=Path, default=RESULT)
    one.set_defaults(run=report)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
