"""Run `compare` on Stable Diffusion 1.5 with random weights: all but the servers that have the published ones.

    python benchmarks/sd15_rehearsal.py

Builds the model as ppdiffusers 0.29 saves it, with a safety checker and with weights in fp16 beside those in fp32, and
serves it on this machine as the hub does. Then `compare` loads it by its name. Prints seconds and the peak of its
memory; they and the files that were asked for are in the result. Needs 14 GB of disk until it ends.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

from lab.result_files import make_result

from ppdiffusers_tome.comparison.results import write_result

ROOT = Path(__file__).parents[1]
NAME = "runwayml/stable-diffusion-v1-5"
HUB = f"models/community/{NAME}"  # its path on the server
OPTIONS = "--size 512 --steps 1 --rounds 1 --method interlace todo --prompt fox"  # of compare
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
    import paddle
    import ppdiffusers

    index: dict[str, Any] = {"_class_name": "StableDiffusionPipeline", "_ppdiffusers_version": ppdiffusers.__version__}
    index |= {"image_encoder": [None, None], "requires_safety_checker": True}
    for name, library, make in components():
        component, place = make(), str(folder / name)
        index[name] = [library, type(component).__name__]
        component.save_pretrained(place)
        if isinstance(component, paddle.nn.Layer):
            config = (folder / name / "config.json").read_bytes()
            component.to(dtype="float16")
            component.save_pretrained(place, variant="fp16")
            (folder / name / "config.json").write_bytes(config)
        del component
    (folder / "model_index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


class Hub(SimpleHTTPRequestHandler):
    """Serves files with an ETag, as ppdiffusers asks for one; `requests` are those so far, with their status."""

    requests: ClassVar[dict[str, int]] = {}

    def end_headers(self) -> None:
        self.send_header("ETag", f'"{abs(hash(self.path))}"')
        super().end_headers()

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        self.requests[self.path.removeprefix(f"/{HUB}/")] = int(code)


def run(command: list[str], **environment: str) -> dict[str, float]:
    """Seconds of a command, and the most memory that it had; an error if it fails."""
    start = time.perf_counter()
    process = subprocess.Popen(command, env={**os.environ, **environment})
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return {"seconds": time.perf_counter() - start, "peak_bytes": usage.ru_maxrss * 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "rehearsal_sd15.json")
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)  # what a process of its own does
    options = parser.parse_args()
    if options.build:
        return build(options.build)
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as scratch:
        hub = Path(scratch, "hub")
        built = run([sys.executable, __file__, "--build", str(hub / HUB)])
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, directory=str(hub)))
        Thread(target=server.serve_forever, daemon=True).start()
        places = {"PPNLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "PPNLP_HOME": f"{scratch}/cache"}
        arguments = ["-m", "ppdiffusers_tome", "compare", "--model", NAME, *OPTIONS.split(), "--output", scratch]
        compared = run([sys.executable, *arguments], **places)
        server.shutdown()
        comparison = json.loads(Path(scratch, "compare_512.json").read_text(encoding="utf-8"))
    content = {"build": built, "compare": compared, "requests": dict(sorted(Hub.requests.items()))}
    command = "python benchmarks/sd15_rehearsal.py"
    write_result(options.output, make_result("rehearsal", command, **content, result=comparison))
    print(f"compare: {compared['seconds']:.0f} s, at most {compared['peak_bytes'] / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
