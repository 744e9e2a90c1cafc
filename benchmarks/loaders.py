"""Images and times of exports with `--layout diffusers` in the libraries that load them, without Paddle.

Run it in the environment of requirements/optimum.txt, which `make test-optimum` creates in build/optimum-venv/:

    build/optimum-venv/bin/python benchmarks/loaders.py --plain build/scenes_plain --merged build/scenes_onnx

measures how much faster an image of the merged folder is than one of the plain one, in turns, in each library that
reads the folders, and how near it is: 20 steps of DPM-Solver++ with guidance 7.5, or of the folder's own scheduler in
OpenVINO GenAI, which has no DPM-Solver. The folders of the committed result are of `scenes_sd` at 256 px, at the
ratios 0 and 0.75: two exports with `--layout diffusers --for onnxruntime`, two with `--layout diffusers --format
openvino`, and what Optimum's exporter makes (`optimum-cli export onnx --task text-to-image`) of the folder that
`save_pretrained(…, to_diffusers=True)` writes, with what `merge-onnx --ratio 0.75` makes of that.
`tests/export/test_diffusers_layout_loaders.py` calls `generate` in a process of its own.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

LOADERS = ("optimum", "optimum-intel", "genai")
PROMPTS = [
    "a 3d render of sunflower on green bubbles",
    "a flat drawing of penguin on black leaves",
    "a flat drawing of giraffe on purple leaves",
]
PACKAGES = ("optimum-onnx", "onnxruntime", "optimum-intel", "openvino", "openvino-genai", "diffusers", "transformers")


def read_index(folder: Path) -> dict:
    return json.loads((folder / "model_index.json").read_text(encoding="utf-8"))


def readers(folder: Path) -> list[str]:
    """The libraries that can load a folder."""
    if (folder / "unet" / "openvino_model.xml").exists():
        return ["optimum-intel", *(["genai"] if (folder / "tokenizer" / "openvino_tokenizer.xml").exists() else [])]
    is_fused = b"com.microsoft" in (folder / "unet" / "model.onnx").read_bytes()
    return ["optimum"] if is_fused else ["optimum", "optimum-intel"]


def load(loader: str, folder: Path, class_name: str | None = None, threads: int = 1):
    """A pipeline over a folder, which computes in fp32 on the CPU.

    Args:
        loader: one of LOADERS.
        class_name: of diffusers; None: the folder's own.
    """
    class_name = class_name or read_index(folder)["_class_name"]
    openvino = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    if loader == "genai":
        import openvino_genai

        kind = "Image2Image" if "Img2Img" in class_name else "Inpainting" if "Inpaint" in class_name else "Text2Image"
        return getattr(openvino_genai, f"{kind}Pipeline")(folder, "CPU", **openvino)
    if loader == "optimum":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        pipe = getattr(importlib.import_module("optimum.onnxruntime"), f"ORT{class_name}")
        return pipe.from_pretrained(folder, session_options=options)
    is_onnx = (folder / "unet" / "model.onnx").exists()
    pipe = getattr(importlib.import_module("optimum.intel"), f"OV{class_name}")
    return pipe.from_pretrained(folder, from_onnx=is_onnx, dynamic_shapes=False, ov_config=openvino)


def generate(
    pipe, prompt: str, noise: list[np.ndarray], steps: int, guidance_scale: float, size: tuple[int, int], **inputs
) -> np.ndarray:
    """The images [B, H, W, 3], from 0 to 1.

    Args:
        noise: what the pipeline gets as random numbers, one after another: the latents [B, C, h, w], and before them
            for an image as input the noise of the VAE.
        size: height and width in pixels.
        inputs: `image` and `mask_image`, uint8, [H, W, 3] and [H, W]; and `strength`.
    """
    given = iter(noise)
    settings = {"num_inference_steps": steps, "guidance_scale": guidance_scale}
    if type(pipe).__module__.startswith(("openvino_genai", "py_openvino_genai")):
        import openvino
        import openvino_genai

        class Generator(openvino_genai.Generator):
            def __init__(self):
                openvino_genai.Generator.__init__(self)

            def next(self):
                raise NotImplementedError

            def randn_tensor(self, shape):
                return openvino.Tensor(np.ascontiguousarray(next(given).reshape(list(shape))))

        images = []
        for name in ("image", "mask_image"):
            if name in inputs:
                array = inputs.pop(name)
                array = array if array.ndim == 3 else np.stack([array] * 3, axis=-1)
                images.append(openvino.Tensor(np.ascontiguousarray(array[None])))
        settings |= {"height": size[0], "width": size[1]} | inputs
        count = len(noise[-1])
        output = pipe.generate(prompt, *images, generator=Generator(), num_images_per_prompt=count, **settings)
        return np.asarray(output.data, "float64") / 255
    import torch
    from PIL import Image

    pipe.set_progress_bar_config(disable=True)
    inputs = {name: Image.fromarray(x) if isinstance(x, np.ndarray) else x for name, x in inputs.items()}
    settings |= inputs
    if "image" not in inputs or "mask_image" in inputs:  # image-to-image takes the size of its image
        settings |= {"height": size[0], "width": size[1]}
    if len(noise) == 1 and not inputs:
        settings["latents"] = torch.from_numpy(noise[0])
    else:
        for name in [name for name in sys.modules if name.startswith("diffusers.")]:
            if hasattr(sys.modules[name], "randn_tensor"):
                sys.modules[name].randn_tensor = lambda *_, **__: torch.from_numpy(next(given))
    count = len(noise[-1])
    return pipe(prompt, num_images_per_prompt=count, output_type="np", **settings).images


def measure(plain: Path, merged: Path, loader: str, options: argparse.Namespace) -> dict:
    """Seconds of images in turns, plain and merged, in one thread; and the PSNR of the merged to the plain ones."""
    unet = json.loads((merged / "unet" / "config.json").read_text(encoding="utf-8"))
    shape = (1, unet["in_channels"], *2 * [options.latents])
    size = 2 * (options.size,)
    pipes = {"plain": load(loader, plain), "merged": load(loader, merged)}
    scheduler = "the folder's own"
    if loader != "genai":
        import diffusers

        scheduler = "DPMSolverMultistepScheduler"
        for pipe in pipes.values():
            pipe.scheduler = getattr(diffusers, scheduler).from_config(pipe.scheduler.config)
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    decibels = []
    for turn, prompt in enumerate([options.prompts[0], *options.prompts]):  # the first warms up
        noise = np.random.RandomState(turn).standard_normal(shape).astype("float32")
        images = {}
        for name, pipe in pipes.items():
            start = time.perf_counter()
            images[name] = generate(pipe, prompt, [noise], options.steps, options.guidance_scale, size)
            if turn:
                seconds[name].append(time.perf_counter() - start)
        if turn:
            error = np.square(np.asarray(images["merged"], "float64") - images["plain"]).mean()
            decibels.append(float(-10 * np.log10(error)))
    return {"seconds": seconds, "psnr": decibels, "scheduler": scheduler}


def commit() -> str:
    """The commit of the repository that this file is in; that of `comparison.environment` needs Paddle."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def machine() -> str:
    """The processor and the number of cores."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{models[0].partition(':')[2].strip()}, {os.cpu_count()} cores"


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--plain", type=Path, nargs="+", required=True, help="folders that do not merge")
    add("--merged", type=Path, nargs="+", required=True, help="the same models merged, in the same order")
    add("--steps", type=int, default=20)
    add("--guidance-scale", type=float, default=7.5)
    add("--size", type=int, default=256, help="px of both sides (default: %(default)s)")
    add("--latents", type=int, default=64, help="latent pixels of both sides (default: %(default)s)")
    add("--prompts", nargs="+", default=PROMPTS, help="an image each (default: %(default)s)")
    add("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    results = []
    for plain, merged in zip(options.plain, options.merged, strict=True):
        for loader in readers(merged):
            folders = {"folder": merged.name, "plain": plain.name}
            row = {**folders, "loader": loader, **measure(plain, merged, loader, options)}
            results.append(row)
            medians = (f"{name} {statistics.median(rounds):.2f} s" for name, rounds in row["seconds"].items())
            nearness = f"{statistics.mean(row['psnr']):.1f} dB, worst {min(row['psnr']):.1f}"
            print(f"{merged.name} and {plain.name} in {loader}: {', '.join(medians)}, {nearness}", flush=True)
    if options.output is not None:
        versions = {name: importlib.metadata.version(name) for name in PACKAGES}
        about = {"kind": "loaders", "format": 2, "command": shlex.join(["python", *sys.argv])}
        about |= {"commit": commit(), "machine": machine(), "threads": 1}
        settings = {"steps": options.steps, "guidance_scale": options.guidance_scale, "prompts": options.prompts}
        content = {**about, **settings, "versions": versions, "results": results}
        options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
