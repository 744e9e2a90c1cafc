"""Token merging in int8: how near its images are to plain ones in fp32, and how much faster its passes are.

    python benchmarks/int8.py export
    build/optimum-venv/bin/python benchmarks/int8.py quantize
    build/optimum-venv/bin/python benchmarks/int8.py images
    build/optimum-venv/bin/python benchmarks/int8.py time --size 512
    build/optimum-venv/bin/python benchmarks/int8.py time --size 768
    build/optimum-venv/bin/python benchmarks/int8.py report

The second environment is that of requirements/optimum.txt, which `make test-optimum` creates. Each command skips what
build/int8/ and the result have, so all can be repeated after they were interrupted.

Exports with `--layout diffusers --format openvino` are quantized as with optimum-intel (examples/with_int8.py): int8
weights alone; its hybrid, which is int8 convolutions, and int8 weights in all else; and int8 convolutions and linear
layers. Images are those of `scenes_sd` at 256 px. Times are of Stable Diffusion 1.5's UNet with random weights, batch
2. For each precision, plain and merged programs take turns in one process.
"""

import argparse
import itertools
import json
import os
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parent))
from loaders import commit, generate, load, machine

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "int8"
RESULT = ROOT / "benchmarks" / "results" / "int8.json"
PACKAGES = ("openvino", "nncf", "optimum-intel", "diffusers", "transformers", "torch")
SHOWN = {"OpenVINO": "openvino", "NNCF": "nncf", "optimum-intel": "optimum-intel"}
ARMS = {"plain": 0, "merged": 0.5}  # ratio of the method "default"
UNGUARDED = "unguarded"  # merged, with the matching in int8 too, as optimum-intel does by itself
UNGUARDED_OF = [("hybrid", "scenes_sd"), ("full", "scenes_sd")]
PRECISIONS = {
    "fp32": "fp32",
    "weights": "int8 weights",
    "hybrid": "int8 weights and convolutions",
    "full": "int8 convolutions and linear layers",
}
ABOUT = """\
Exports with `--layout diffusers --format openvino`, plain and merged with the default method at 0.5, quantized with
optimum-intel as in [with_int8.py](../examples/with_int8.py): int8 weights alone; its hybrid, which is int8
convolutions, and int8 weights in all else; and int8 convolutions and linear layers. Made by `int8.py`."""
SCENES, SD15 = "scenes_sd", "sd15"
CASES = [(SCENES, 256), (SD15, 512), (SD15, 768)]
PROMPTS = [
    "a 3d render of fox on red bricks",
    "a 3d render of owl on grass",
    "a 3d render of teapot on wood planks",
    "a 3d render of car on sand",
    "a 3d render of apple on blue tiles",
    "a 3d render of robot on snow",
]
CALIBRATION = ["a 3d render of cat on gravel", "a 3d render of banana on marble"]
STEPS, GUIDANCE = 20, 3.0


def folder_of(model: str, size: int, arm: str, precision: str = "fp32") -> Path:
    return BUILD / f"{model}_{size}_{arm}_{precision}"


def export(options: argparse.Namespace) -> None:
    """Export each model plain and merged; in the environment of this package."""
    from ppdiffusers_tome.export.loading import load_for_export
    from ppdiffusers_tome.inference import export_pipeline

    size = dict(CASES)[SCENES]
    for arm, ratio in ARMS.items():
        if not is_complete(folder := folder_of(SCENES, size, arm)):
            pipe = load_for_export(str(ROOT / "examples" / SCENES))
            export_pipeline(
                pipe, folder, (ratio,), [(size, size)], layout="diffusers", format="openvino", method="default"
            )
    for model, side in CASES[1:]:
        for arm, ratio in ARMS.items():
            if not is_complete(folder := folder_of(model, side, arm)):
                export_sd15(folder, side, ratio)
                print(f"exported {folder}", flush=True)


def export_sd15(folder: Path, side: int, ratio: float) -> None:
    """Write a folder of `scenes_sd` with Stable Diffusion 1.5's UNet, which its text encoder does not fit.

    `export_pipeline` would run the UNet in eager mode, whose attention takes 20 GB at 768 px.
    """
    import paddle
    from lab.speed.architectures import ARCHITECTURES

    from ppdiffusers_tome.attach.attach import attach
    from ppdiffusers_tome.config import ToMeConfig
    from ppdiffusers_tome.export import diffusers_layout, programs, tracing
    from ppdiffusers_tome.export.conversion import Converter
    from ppdiffusers_tome.run.manifest import Size
    from ppdiffusers_tome.run.onnx_weights import SharedWeights

    paddle.seed(0)
    unet = ARCHITECTURES[SD15].build()
    config = {**unet.config, "sample_size": side // 8}
    traceable = programs.denoiser(unet, None)
    del unet
    if ratio:
        attach(traceable.layer.unet, ToMeConfig(ratio, "default"), None)
    dims = {"latent_height": side // 8, "latent_width": side // 8}
    shutil.copytree(folder_of(SCENES, dict(CASES)[SCENES], "plain"), folder, ignore=lambda *_: ["model_index.json"])
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch, Converter() as converter:
        files = tracing.write_program(traceable, Path(scratch, "paddle"), dims, "UNet")
        del traceable
        onnx = Path(scratch, "unet.onnx")
        SharedWeights(onnx.with_suffix(".weights")).move(converter.convert(*files, "UNet"), onnx)
        layout = diffusers_layout.DiffusersLayout("openvino")
        target = folder / "unet" / "model.onnx"
        diffusers_layout.write_model(onnx, target, "unet", ("out_sample",), Size(side, side), 8, layout)
    diffusers_layout.convert_model(target.parent)
    config = diffusers_layout.without_foreign(config)
    (target.parent / "config.json").write_text(json.dumps(config), encoding="utf-8")
    index = folder_of(SCENES, dict(CASES)[SCENES], "plain") / "model_index.json"
    shutil.copy(index, folder)  # the last file: the folder is complete


def is_complete(folder: Path) -> bool:
    if complete := (folder / "model_index.json").exists():
        return complete
    shutil.rmtree(folder, ignore_errors=True)
    return complete


def quantize(options: argparse.Namespace) -> None:
    """Quantize each export in each way."""
    import nncf
    from optimum.intel import (
        OVConfig,
        OVPipelineQuantizationConfig,
        OVQuantizationConfig,
        OVQuantizer,
        OVStableDiffusionPipeline,
        OVWeightQuantizationConfig,
    )

    for precision, (model, size), arm in itertools.product(options.precision, CASES, [*ARMS, UNGUARDED]):
        folder = folder_of(model, size, arm, precision)
        if precision == "fp32" or is_complete(folder) or (arm == UNGUARDED and (precision, model) not in UNGUARDED_OF):
            continue
        source = folder_of(model, size, "merged" if arm == UNGUARDED else arm)
        pipe = OVStableDiffusionPipeline.from_pretrained(source, dynamic_shapes=False, compile=False)
        inputs = [] if precision == "weights" else calibration_inputs(pipe, model, size)
        config = {
            "weights": OVWeightQuantizationConfig(bits=8),
            "hybrid": OVWeightQuantizationConfig(bits=8, quant_method="hybrid"),
            "full": OVQuantizationConfig(),
        }[precision]
        config.num_samples = len(inputs) or None
        if inputs and arm != UNGUARDED:  # a MatMul without weights is the similarity of tokens
            products = [op for op in pipe.unet.model.get_ops() if op.get_type_name() == "MatMul"]
            matching = [op for op in products if op.input_value(1).get_node().get_type_name() != "Constant"]
            config.ignored_scope = {"names": [op.get_friendly_name() for op in matching]} if matching else None
        others = OVWeightQuantizationConfig(bits=8)  # of the text encoder and the VAE
        start = time.perf_counter()
        OVQuantizer(pipe).quantize(
            calibration_dataset={"unet": nncf.Dataset(inputs)} if inputs else None,
            ov_config=OVConfig(quantization_config=OVPipelineQuantizationConfig({"unet": config}, others)),
        )
        partial = folder.with_name(f"{folder.name}.partial")
        pipe.save_pretrained(partial)
        partial.rename(folder)
        print(f"quantized {folder} in {time.perf_counter() - start:.0f} s", flush=True)


def calibration_inputs(pipe: Any, model: str, size: int) -> list[Any]:
    """Inputs of the UNet: of images of CALIBRATION, or random where the weights are."""
    if model == SD15:
        return [unet_inputs(size, 0)]
    from optimum.intel.openvino.quantization import InferRequestWrapper

    inputs: list[Any] = []
    pipe.compile()
    pipe.unet.request = InferRequestWrapper(pipe.unet.request, inputs)
    for index, prompt in enumerate(CALIBRATION):
        generate(pipe, prompt, [noise(size, 100 + index)], STEPS, GUIDANCE, (size, size))
    pipe.unet.request = pipe.unet.request.request
    return inputs


def noise(size: int, seed: int, batch: int = 1, factor: int = 4) -> np.ndarray:
    """Latents of an image; `factor` is how many pixels a latent has along each side, 4 in `scenes_sd`."""
    shape = (batch, 4, size // factor, size // factor)
    return np.random.RandomState(seed).standard_normal(shape).astype("float32")


def unet_inputs(size: int, seed: int) -> dict[str, np.ndarray]:
    """Inputs of Stable Diffusion 1.5's UNet, batch 2."""
    text = np.random.RandomState(seed).standard_normal((2, 77, 768)).astype("float32")
    return {"sample": noise(size, seed, 2, 8), "timestep": np.array([500]), "encoder_hidden_states": text}


def images(options: argparse.Namespace) -> None:
    """Compare the images of `scenes_sd` with its own plain ones, in fp32 and in the same precision."""
    rows = []
    plain = images_of("fp32", "plain")
    for precision in PRECISIONS:
        own = images_of(precision, "plain")
        for arm in [*ARMS, *([UNGUARDED] if (precision, SCENES) in UNGUARDED_OF else [])]:
            made = images_of(precision, arm)
            weights = folder_of(SCENES, dict(CASES)[SCENES], arm, precision) / "unet" / "openvino_model.bin"
            row = {"precision": precision, "arm": arm, "unet_bytes": weights.stat().st_size}
            row["psnr"] = None if (precision, arm) == ("fp32", "plain") else list(map(decibels, made, plain))
            row["psnr_to_own_plain"] = None if arm == "plain" else list(map(decibels, made, own))
            rows.append(row)
            print(row, flush=True)
    content = {"model": SCENES, "size": dict(CASES)[SCENES], "steps": STEPS, "guidance_scale": GUIDANCE}
    save("images", {**content, "prompts": PROMPTS, "calibration": CALIBRATION, "rows": rows})


def images_of(precision: str, arm: str) -> list[np.ndarray]:
    """The images of PROMPTS, from 0 to 1; those that an earlier run made are read."""
    from PIL import Image

    size, pipe, arrays = dict(CASES)[SCENES], None, []
    for seed, prompt in enumerate(PROMPTS):
        path = BUILD / f"image_{seed}_{precision}_{arm}.png"
        if not path.exists():
            pipe = pipe or load("optimum-intel", folder_of(SCENES, size, arm, precision), threads=os.cpu_count() or 1)
            made = generate(pipe, prompt, [noise(size, seed)], STEPS, GUIDANCE, (size, size))[0]
            Image.fromarray((made * 255).round().astype("uint8")).save(path)
        arrays.append(np.asarray(Image.open(path), "float64") / 255)
    return arrays


def decibels(image: np.ndarray, expected: np.ndarray) -> float:
    """The peak signal-to-noise ratio of two images from 0 to 1."""
    return float(-10 * np.log10(np.square(image - expected).mean()))


def measure(options: argparse.Namespace) -> None:
    """Time one pass of Stable Diffusion 1.5's UNet, plain and merged in turns, for each precision."""
    for precision in options.precision:
        row = {"size": options.size, "precision": precision, "threads": options.threads}
        seconds = seconds_of(options.size, precision, options.rounds, options.threads)
        print(f"{options.size} px, {PRECISIONS[precision]}: {seconds}", flush=True)
        save("times", row | {"seconds": seconds})


def seconds_of(size: int, precision: str, rounds: int, threads: int) -> dict[str, list[float]]:
    """Seconds of the timed passes of plain and merged; their programs are not in memory afterwards."""
    import openvino

    core = openvino.Core()
    core.set_property("CPU", {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"})
    inputs, programs = unet_inputs(size, 0), {}
    for arm in ARMS:
        program = core.read_model(folder_of(SD15, size, arm, precision) / "unet" / "openvino_model.xml")
        program.reshape({value.any_name: inputs[value.any_name].shape for value in program.inputs})
        programs[arm] = core.compile_model(program, "CPU").create_infer_request()
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for arm, request in in_turns(programs, rounds):
        start = time.perf_counter()
        request.infer(inputs)
        seconds[arm].append(time.perf_counter() - start)
    return {arm: times[1:] for arm, times in seconds.items()}  # the first pass warms up


def in_turns(programs: dict[str, Any], rounds: int) -> Iterator[tuple[str, Any]]:
    """Each program in each round, every other round in the reverse order; one round more than asked for."""
    for index in range(rounds + 1):
        yield from list(programs.items())[:: 1 if index % 2 else -1]


def save(name: str, content: dict[str, Any]) -> None:
    """Write images or a row of times into the result; a row replaces that of the same size and precision."""
    import importlib.metadata

    result = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"kind": "int8", "format": 1}
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    about = {"command": shlex.join(["python", "benchmarks/int8.py", *sys.argv[1:]]), "commit": commit()}
    content = about | {"machine": machine(), "versions": versions} | content
    if name == "times":
        rows = [
            row
            for row in result.get(name, [])
            if (row["size"], row["precision"]) != (content["size"], content["precision"])
        ]
        content = sorted([*rows, content], key=lambda row: (row["size"], [*PRECISIONS].index(row["precision"])))
    result[name] = content
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def report(options: argparse.Namespace) -> None:
    """Write `int8.md`."""
    from lab.markdown import table

    from ppdiffusers_tome.comparison.clock import gain

    result = json.loads(RESULT.read_text(encoding="utf-8"))
    made, times = result["images"], result.get("times", [])
    sections = [f"# Token merging in int8\n\n{ABOUT}"]
    if times:
        sections.append(
            f"## One pass of Stable Diffusion 1.5's UNet\n\n{origin(times[0])}, {times[0]['threads']} threads."
        )
        medians = [{arm: statistics.median(one) for arm, one in row["seconds"].items()} for row in times]
        pairs = list(zip(times, medians, strict=True))
        fp32 = {row["size"]: seconds["plain"] for row, seconds in pairs if row["precision"] == "fp32"}
        rows = []
        for row, seconds in pairs:
            total = f"{fp32[row['size']] / seconds['merged']:.2f}×" if row["size"] in fp32 else "–"
            gained = gain(row["seconds"]["plain"], row["seconds"]["merged"])
            cells = [f"{seconds['plain']:.2f}", f"{seconds['merged']:.2f}", str(gained), total]
            rows.append([f"{row['size']} px", PRECISIONS[row["precision"]], *cells])
        header = ["size", "precision", "plain, s", "merged, s", "gain of merging", "merged, against plain fp32"]
        sections.append("\n".join(table(header, rows)))
    about = (
        f"{origin(made)}. {len(made['prompts'])} prompts, {made['steps']} steps, guidance {made['guidance_scale']:g}."
    )
    sections.append(
        f"## Images of `{made['model']}` at {made['size']} px\n\nMedian PSNR to plain in fp32, dB. {about}"
    )
    rows = []
    for precision, name in PRECISIONS.items():
        arms = {row["arm"]: row for row in made["rows"] if row["precision"] == precision}
        psnr = [median_of(arms[arm]["psnr"] if arm in arms else None) for arm in (*ARMS, UNGUARDED)]
        own = median_of(arms["merged"]["psnr_to_own_plain"])
        rows.append([name, *psnr, own, f"{arms['plain']['unet_bytes'] / 1e6:.0f}"])
    header = ["precision", "plain", "merged", "merged, matching in int8 too", "merged, to plain of the same precision"]
    sections.append("\n".join(table([*header, "UNet, MB"], rows)))
    sections.append("[int8.json](results/int8.json)\n")
    RESULT.parents[1].joinpath("int8.md").write_text("\n\n".join(sections), encoding="utf-8")


def origin(content: dict[str, Any]) -> str:
    """Machine, versions and commit of a part of the result."""
    versions = content["versions"]
    packages = ", ".join(f"{title} {versions[name]}" for title, name in SHOWN.items())
    return f"{content['machine']}, {packages}, commit `{content['commit']}`"


def median_of(values: list[float] | None) -> str:
    return "–" if values is None else f"{statistics.median(values):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["export", "quantize", "images", "time", "report"])
    parser.add_argument("--size", type=int, default=512, help="px, of the times (default: 512)")
    parser.add_argument(
        "--precision", nargs="+", choices=PRECISIONS, default=[*PRECISIONS], help="of the times (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed passes of each program (default: 5)")
    parser.add_argument("--threads", type=int, default=2, help="of the timed passes (default: 2)")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    commands = {"export": export, "quantize": quantize, "images": images, "time": measure, "report": report}
    commands[options.command](options)


if __name__ == "__main__":
    main()
