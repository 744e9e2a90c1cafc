"""Exported programs of Stable Diffusion 1.5's UNet on a CUDA GPU, in ONNX Runtime, beside PyTorch with tomesd.

    python benchmarks/gpu_onnx.py export FOLDER            # where Paddle is; a minute for each program, no GPU
    python benchmarks/gpu_onnx.py measure FOLDER OUTPUT    # on the GPU, without Paddle: see below
    python benchmarks/gpu_onnx.py report

`export` writes each program as `precision="fp16"` runs it, with the mean and standard deviation of each weight in
place of the weight: 2 MB for all programs when packed. `measure` draws weights of them, since speed does not depend on
them, and needs onnx, onnxruntime-gpu, torch, diffusers and tomesd. All arms of a cell take turns: medians of seven
rounds, after a warm-up. A pass in ONNX Runtime has its inputs and output on the GPU. Memory is what the first pass
takes beside the weights in ONNX Runtime, and PyTorch's peak, weights included.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "gpu_onnx.json"
MERGED = {
    "default 0.25": {"ratio": 0.25},
    "default 0.5": {"ratio": 0.5},
    "default 0.75": {"ratio": 0.75},
    "symmetric 0.5": {"ratio": 0.5, "merge_attn": True},
    "tomesd's 0.5": {"ratio": 0.5, "method": "tomesd"},
}
PLAIN, DEFAULT = "plain", "default 0.5"
FORMS = {"NHWC": {"prefer_nhwc": "1"}, "CUDA graph": {"enable_cuda_graph": "1"}}
CELLS = {  # (px, batch): programs
    (512, 2): [PLAIN, *MERGED],
    (768, 2): [PLAIN, "default 0.5", "default 0.75", "tomesd's 0.5"],
    (1024, 2): [PLAIN, *MERGED],
    (1536, 2): [PLAIN, "default 0.5", "default 0.75"],
    (512, 8): [PLAIN, "default 0.5"],
    (1024, 8): [PLAIN, "default 0.5"],
}
IN_ALL_FORMS = ((512, 2), (1024, 2))
TOMESD_RATIOS = {2: (0.25, 0.5, 0.75), 8: (0.5,)}  # ratios in PyTorch, by batch
ROUNDS, SECONDS = 7, 0.25  # an arm runs for SECONDS in each round
WEIGHTS = "weights"


def export(options: argparse.Namespace) -> None:
    """Write the programs that the folder lacks."""
    import onnx
    import paddle
    from onnx import numpy_helper

    from ppdiffusers_tome.config import TOMESD_SETTINGS, ToMeConfig
    from ppdiffusers_tome.evaluation.speed.architectures import ARCHITECTURES
    from ppdiffusers_tome.inference import programs, tracing
    from ppdiffusers_tome.inference.conversion import Converter
    from ppdiffusers_tome.inference.onnx_gpu import half_program
    from ppdiffusers_tome.inference.onnx_weights import SharedWeights, external_places, set_places
    from ppdiffusers_tome.patch import attach

    architecture = ARCHITECTURES[options.architecture]
    paddle.seed(0)
    unet = architecture.build()
    unet.eval()
    options.folder.mkdir(parents=True, exist_ok=True)
    wanted = dict.fromkeys((size, arm) for (size, _), arms in CELLS.items() for arm in arms)
    for size, arm in wanted if options.size is None else [(options.size, arm) for arm in (PLAIN, DEFAULT)]:
        target = options.folder / f"{size} {arm}.onnx"
        if target.is_file():
            continue
        traceable = programs.denoiser(unet, None)
        if arm != PLAIN:
            settings = dict(MERGED[arm])
            settings |= TOMESD_SETTINGS if settings.pop("method", None) else {}
            attach(traceable.layer.unet, ToMeConfig(**settings), None)
        latent = architecture.latent(size)
        dims = {"height": size, "width": size, "latent_height": latent.h, "latent_width": latent.w}
        with tempfile.TemporaryDirectory() as scratch, Converter() as converter:
            folder = Path(scratch)
            files = tracing._trace(traceable, folder / "program", dims, "UNet")
            SharedWeights(folder / "unet.weights").move(converter.convert(*files, "UNet"), folder / "unet.onnx")
            half = half_program(folder / "unet.onnx")
            model = onnx.load(str(half))
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


class Weights:
    """A file of random weights for all programs."""

    def __init__(self, folder: Path, device: str) -> None:
        self._path, self._device = folder / WEIGHTS, device
        self._path.write_bytes(b"")
        self._offsets: dict[tuple, int] = {}

    def place(self, path: Path) -> bytes:
        """A program with weights in this file."""
        import onnx
        import torch

        model = onnx.load(str(path), load_external_data=False)
        with self._path.open("ab") as file:
            for tensor in (t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL):
                places = {entry.key: entry.value for entry in tensor.external_data}
                key, count = (tensor.name, *tensor.dims), int(np.prod(tensor.dims))
                if key not in self._offsets:
                    generator = torch.Generator(self._device).manual_seed(zlib.crc32(repr(key).encode()))
                    values = torch.randn(count, generator=generator, device=self._device)
                    values = values * float(places["std"]) + float(places["mean"])
                    file.write(bytes(-file.tell() % 4096))
                    self._offsets[key] = file.tell()
                    file.write(values.half().cpu().numpy().tobytes())
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
        output = ort.OrtValue.ortvalue_from_shape_and_type(sample.shape, np.float32, device, 0)
        self._binding.bind_ortvalue_output(self._session.get_outputs()[0].name, output)

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
        from torch_worker import merge

        merge(self._unet, {"ratio": self._ratio} if self._ratio else None)

    def __call__(self) -> None:
        import torch

        with torch.inference_mode():
            self._unet(*self._inputs)


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
    config = json.loads((ROOT / "ppdiffusers_tome/evaluation/speed/architectures.json").read_text(encoding="utf-8"))
    architecture = config[options.architecture]
    unet = UNet2DConditionModel(**architecture["config"]).eval().to(device, torch.float16 if is_gpu else None)
    result: dict[str, Any] = {
        "kind": "gpu_onnx",
        "command": " ".join(["python", "benchmarks/gpu_onnx.py", *sys.argv[1:]]),
        "gpu": torch.cuda.get_device_name() if is_gpu else "none",
        "versions": {"cuda": torch.version.cuda}
        | {name: version(name) for name in ("torch", "diffusers", "tomesd")}
        | {"onnxruntime-gpu": ort.__version__},
        "rounds": ROUNDS,
        "rows": [],
    }
    cells = CELLS if options.size is None else {(options.size, 2): [PLAIN, DEFAULT]}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        weights = Weights(Path(shared), device)
        for (size, batch), names in cells.items():
            random = np.random.default_rng(0)
            text = (batch, architecture["text"], architecture["config"]["cross_attention_dim"])
            feed = {
                "sample": random.standard_normal((batch, 4, size // 8, size // 8), "float32"),
                "timestep": np.array([500], "float32"),
                "encoder_hidden_states": random.standard_normal(text, "float32"),
            }
            arms: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {}
            memory = {}
            for name in names:
                program = weights.place(options.folder / f"{size} {name}.onnx")
                has_forms = is_gpu and (size, batch) in IN_ALL_FORMS and name in (PLAIN, DEFAULT)
                for form, settings in {"": {}, **(FORMS if has_forms else {})}.items():
                    session = Session(program, Path(shared), feed, device, **settings)
                    before = used_bytes(is_gpu)
                    session()
                    arm = f"onnxruntime {name}{', ' if form else ''}{form}"
                    memory[arm], arms[arm] = used_bytes(is_gpu) - before, (lambda: None, session)
            for ratio in (0, *TOMESD_RATIOS[batch]):
                one = Torch(unet, feed, ratio)
                arm = f"torch {f'tomesd {ratio}' if ratio else PLAIN}"
                arms[arm] = (one.prepare, one)
                if is_gpu:
                    torch.cuda.reset_peak_memory_stats()
                one.prepare()
                one()
                memory[arm] = torch.cuda.max_memory_allocated() if is_gpu else 0
            for arm, times in in_turns(arms, torch.cuda.synchronize if is_gpu else lambda: None).items():
                result["rows"].append({"size": size, "batch": batch, "arm": arm, "ms": times, "bytes": memory[arm]})
                print(f"{size} px, batch {batch}, {arm}: {statistics.median(times):.2f} ms", flush=True)
            options.output.write_text(json.dumps(result, indent=1), encoding="utf-8")


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
            times[arm].append(1000 * seconds(run, counts[arm]))
    return times


def report(options: argparse.Namespace) -> None:
    """Write gpu_onnx.md beside the folder of the result."""
    from ppdiffusers_tome.evaluation.markdown import NOT_MEASURED, table

    result = json.loads(options.result.read_text(encoding="utf-8"))
    cells = list(dict.fromkeys((row["size"], row["batch"]) for row in result["rows"]))
    rows = {(row["size"], row["batch"], row["arm"]): row for row in result["rows"]}
    arms = list(dict.fromkeys(row["arm"] for row in result["rows"]))

    def time_of(cell: tuple[int, int], arm: str) -> str:
        row, plain = rows.get((*cell, arm)), rows[(*cell, f"{arm.split()[0]} {PLAIN}")]
        if row is None:
            return NOT_MEASURED
        milliseconds = statistics.median(row["ms"])
        speed_up = statistics.median(a / b for a, b in zip(plain["ms"], row["ms"], strict=True))
        return f"{milliseconds:.1f} ms" + (f", {speed_up:.2f}×" if row is not plain else "")

    def memory_of(cell: tuple[int, int], arm: str) -> str:
        row = rows.get((*cell, arm))
        return f"{row['bytes'] / 2**30:.2f}" if row else NOT_MEASURED

    heads = [f"{size} px, batch {batch}" for size, batch in cells]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        f"# {(__doc__ or '').splitlines()[0].removesuffix('.')}\n",
        (__doc__ or "").split("\n\n", 2)[2],
        "Speed-ups are against plain in the same program, as medians of the ratios within rounds.\n",
        *table(["one pass", *heads], [[arm, *(time_of(cell, arm) for cell in cells)] for arm in arms]),
        "\nMemory in GiB:\n",
        *table(["", *heads], [[arm, *(memory_of(cell, arm) for cell in cells)] for arm in arms]),
        f"\n[{options.result.name}](results/{options.result.name}): {result['gpu']}, {versions};",
        f"`{result['command']}`",
        *(f"\n{note}" for note in result.get("notes", [])),
    ]
    (options.result.parents[1] / "gpu_onnx.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for command in (export, measure):
        one = commands.add_parser(command.__name__, help=command.__doc__)
        one.add_argument("folder", type=Path, help="of the programs")
        one.add_argument("--architecture", default="sd15", choices=["sd15", "tiny"], help="default: %(default)s")
        one.add_argument("--size", type=int, help="one size, plain and default, instead of all")
        one.set_defaults(run=command)
    one.add_argument("output", type=Path, help="JSON file")
    one.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    one = commands.add_parser("report", help=report.__doc__)
    one.add_argument("--result", type=Path, default=RESULT)
    one.set_defaults(run=report)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
