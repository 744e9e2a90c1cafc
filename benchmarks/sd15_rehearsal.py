"""Do with Stable Diffusion 1.5 on a CPU what README prints: compare and serve. Its weights are random.

    python benchmarks/export_cost.py images --only "Stable Diffusion 1.5 at 512 px, two ratios"
    python benchmarks/sd15_rehearsal.py

The first command builds the model as ppdiffusers 0.29 saves it, with a safety checker, and exports it, as README does,
to build/ (10 GB). The result of the second one has the seconds of the other commands and the peak of their memory.
`serve` makes images one at a time, plain and merged in turns, and each is timed. What depends on the weights, such as
the PSNR of `compare`, says nothing of the published model.
"""

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
from lab.result_files import make_result, read_json

from ppdiffusers_tome.comparison.results import write_result

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "rehearsal_sd15.json"
MODEL, EXPORT = Path("build", "sd15"), Path("build", "model")
COMPARE = f"compare --model {EXPORT} --steps 4 --prompt 'a photo of a fox' 'a street at night'"  # as README prints it
STEPS, IMAGES, TIMEOUT = 20, 2, 600  # of `serve`: of an image; of each ratio; seconds of a request
VAE = {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "sample_size": 512}
VAE |= {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
TEXT = {"vocab_size": 49408, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}  # CLIP ViT-L/14
VISION = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
VISION |= {"patch_size": 14, "image_size": 224, "projection_dim": 768}
PNDM = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "skip_prk_steps": True}
PNDM |= {"steps_offset": 1, "set_alpha_to_one": False}


def components() -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Name, library and a function that makes it, of each component."""
    from lab.speed.architectures import ARCHITECTURES
    from ppdiffusers import AutoencoderKL, PNDMScheduler, UNet2DConditionModel
    from ppdiffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
    from ppdiffusers.transformers import CLIPConfig, CLIPImageProcessor, CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    ours, clip = "ppdiffusers", "ppdiffusers.transformers"
    text = TEXT | {"num_attention_heads": 12, "projection_dim": 768}
    checker = CLIPConfig(vision_config=VISION, text_config=text, projection_dim=768)
    tokenizer = ROOT / "examples" / "emoji_sd" / "tokenizer"
    yield "feature_extractor", clip, CLIPImageProcessor
    yield "safety_checker", "stable_diffusion", lambda: StableDiffusionSafetyChecker(checker)
    yield "scheduler", ours, lambda: PNDMScheduler(**PNDM)
    yield "text_encoder", clip, lambda: CLIPTextModel(CLIPTextConfig(**text))
    yield "tokenizer", clip, lambda: CLIPTokenizer.from_pretrained(str(tokenizer), model_max_length=77)
    yield "unet", ours, lambda: UNet2DConditionModel(**ARCHITECTURES["sd15"].config)
    yield "vae", ours, lambda: AutoencoderKL(**VAE)


def build(folder: Path) -> None:
    """Write the model; one component is in memory at a time."""
    import ppdiffusers

    index: dict[str, Any] = {"_class_name": "StableDiffusionPipeline", "_ppdiffusers_version": ppdiffusers.__version__}
    index |= {"image_encoder": [None, None], "requires_safety_checker": True}
    for name, library, make in components():
        component = make()
        index[name] = [library, type(component).__name__]
        component.save_pretrained(str(folder / name))
        del component
    (folder / "model_index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def proportional_bytes(process: psutil.Process) -> int:
    """The PSS of a process and its children: what several of them share counts once."""
    total = 0
    for one in (process, *process.children(recursive=True)):
        try:
            total += one.memory_full_info().pss
        except psutil.Error:  # it has ended
            continue
    return total


@contextmanager
def watched(process: psutil.Process) -> Iterator[dict[str, float]]:
    """At its end the dict has the seconds in the context, and the peak of the memory, every second."""
    figures: dict[str, float] = {}
    start, peaks, is_over = time.perf_counter(), [0], Event()

    def watch() -> None:
        while not is_over.wait(1) and process.is_running():
            peaks.append(proportional_bytes(process))

    thread = Thread(target=watch)
    thread.start()
    try:
        yield figures
    finally:
        is_over.set()
        thread.join()
    figures |= {"seconds": time.perf_counter() - start, "peak_bytes": max(peaks)}


def popen(words: Sequence[str], **options: Any) -> psutil.Popen:
    """This package's command in the root of the repository."""
    command = [sys.executable, "-m", "ppdiffusers_tome", *words]
    return psutil.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, **options)


def run(text: str, *others: str) -> dict[str, Any]:
    """Run a command of this package, which must succeed, with other arguments than those that README prints."""
    process = popen([*shlex.split(text), *others])
    with watched(process) as figures:
        status = process.wait()
    if status:
        raise subprocess.CalledProcessError(status, text)
    return {"command": f"python -m ppdiffusers_tome {text}", **figures}


def serve() -> dict[str, Any]:
    """Seconds of images that a server makes one after another, plain and merged in turns, after one of each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["serve", "--model", str(EXPORT), "--port", f"{port}", "--timeout", f"{TIMEOUT}"]
    process = popen(words)
    seconds: dict[str, list[float]] = {"0": [], "0.75": []}
    try:
        with watched(process) as figures:
            wait_for(f"http://127.0.0.1:{port}/ready", process)
            for image in range(IMAGES + 1):
                for ratio, times in seconds.items():
                    body = {"prompt": "a photo of a fox", "steps": STEPS if image else 1, "tome_ratio": float(ratio)}
                    request = urllib.request.Request(
                        f"http://127.0.0.1:{port}/v1/images/generations",
                        json.dumps(body).encode(),
                        {"Content-Type": "application/json"},
                    )
                    start = time.perf_counter()
                    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                        response.read()
                    if image:
                        times.append(time.perf_counter() - start)
    finally:
        process.terminate()
        process.wait()
    command = " ".join(["python -m ppdiffusers_tome", *words])
    return {"command": command, **figures, "steps": STEPS, "image_seconds": seconds}


def wait_for(url: str, process: psutil.Popen) -> None:
    """Wait until a server is ready for requests."""
    while process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise RuntimeError(f"serve ended with status {process.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("compare", "serve"), default=("compare", "serve"))
    options = parser.parse_args()
    earlier = read_json(RESULT) if RESULT.is_file() else {}
    content = {name: earlier.get(name, {}) for name in ("measured", "comparison")}
    for name in options.only:
        if name == "compare":
            output = ROOT / "build" / "rehearsal"
            content["measured"][name] = run(COMPARE, "--output", str(output))
            content["comparison"] = json.loads((output / "compare_512.json").read_text(encoding="utf-8"))
        else:
            content["measured"][name] = serve()
        write_result(RESULT, make_result("rehearsal", "python benchmarks/sd15_rehearsal.py", **content))
        figures = content["measured"][name]
        print(f"{name}: {figures['seconds']:.0f} s, at most {figures['peak_bytes'] / 1e9:.1f} GB", flush=True)


if __name__ == "__main__":
    main()
