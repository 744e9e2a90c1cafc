"""Images and times of exports with `--layout diffusers` in the libraries that load them, without Paddle.

Run it in the environment of requirements/optimum.txt, which `make test-optimum` creates in build/optimum-venv/:

    build/optimum-venv/bin/python benchmarks/loaders.py --plain build/scenes_plain --merged build/scenes_onnx

measures how much faster the merged folder is than the plain one, in turns, in each library that reads the folders.
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


def measure(plain: Path, merged: Path, loader: str, rounds: int, steps: int) -> dict:
    """Seconds of one image in turns, plain and merged, in one thread."""
    width, height = map(int, read_index(merged)["_ppdiffusers_tome"]["size"].split("x"))
    unet = json.loads((merged / "unet" / "config.json").read_text(encoding="utf-8"))
    side = np.atleast_1d(unet["sample_size"])
    shape = (1, unet["in_channels"], int(side[0]), int(side[-1]))
    noise = np.random.RandomState(0).standard_normal(shape).astype("float32")
    pipes = {"plain": load(loader, plain), "merged": load(loader, merged)}
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    for turn in range(rounds + 1):  # the first warms up
        for name, pipe in pipes.items():
            start = time.perf_counter()
            generate(pipe, "a photo", [noise], steps, 5.0, (height, width))
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {"seconds": seconds}


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
    add("--plain", type=Path, nargs="+", required=True, help="folders exported at ratio 0")
    add("--merged", type=Path, nargs="+", required=True, help="the same at another ratio, in the same order")
    add("--rounds", type=int, default=5)
    add("--steps", type=int, default=5)
    add("--output", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    results = []
    for plain, merged in zip(args.plain, args.merged, strict=True):
        about = read_index(merged)["_ppdiffusers_tome"]
        for loader in readers(merged):
            result = measure(plain, merged, loader, args.rounds, args.steps)
            results.append({"folder": merged.name, "loader": loader, **about, **result})
            medians = (f"{name} {statistics.median(rounds):.2f} s" for name, rounds in result["seconds"].items())
            print(f"{merged.name} in {loader}: {', '.join(medians)}", flush=True)
    if args.output is not None:
        versions = {name: importlib.metadata.version(name) for name in PACKAGES}
        about = {"kind": "loaders", "format": 1, "command": shlex.join(["python", *sys.argv])}
        about |= {"commit": commit(), "machine": machine(), "threads": 1}
        content = {**about, "steps": args.steps, "versions": versions, "results": results}
        args.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
