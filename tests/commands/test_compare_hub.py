"""`compare` with a model of a hub: a server here that has the files of a pipeline, in a process with empty caches."""

import json
import os
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import paddle
from ppdiffusers import StableDiffusionPipeline
from ppdiffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
from ppdiffusers.transformers import CLIPConfig
from zoo.parts import ONE_LEVEL, image_config, image_processor, stable_diffusion, text_config, unet

NAME = "owner/stable-diffusion"


class Hub(SimpleHTTPRequestHandler):
    """The files of a folder, with the ETag that PaddleNLP requires; `requests` are the paths that were found."""

    def __init__(self, requests, *arguments, **options):
        self.requests = requests
        super().__init__(*arguments, **options)

    def end_headers(self):
        self.send_header("ETag", "etag")
        super().end_headers()

    def log_message(self, *_):
        pass

    def log_request(self, code="-", size="-"):
        if code == 200:
            self.requests.append(Path(self.path).name)


def test_a_model_of_a_hub_with_a_safety_checker_and_variants(tmp_path):
    """PaddleNLP 2.8.1 does not make the folders of components, so without ours the first download fails."""
    folder = tmp_path / "hub" / "models" / "community" / NAME
    checker = CLIPConfig(vision_config=image_config().to_dict(), text_config=text_config().to_dict())
    parts = {"safety_checker": StableDiffusionSafetyChecker(checker), "feature_extractor": image_processor()}
    pipe = StableDiffusionPipeline(**stable_diffusion(unet=unet(**ONE_LEVEL), **parts, requires_safety_checker=True))
    pipe.save_pretrained(str(folder))
    (folder / "prompts.txt").write_text("a fox\n")
    for name in ("unet", "vae", "text_encoder"):
        config = (folder / name / "config.json").read_bytes()
        getattr(pipe, name).to(dtype="float16").save_pretrained(str(folder / name), variant="fp16")
        (folder / name / "config.json").write_bytes(config)
    requests = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, requests, directory=str(tmp_path / "hub")))
    Thread(target=server.serve_forever, daemon=True).start()
    places = {"PPNLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "PPNLP_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "ppdiffusers_tome", "compare", "--model", NAME, "--size", "32", "--steps", "1"]
    command += ["--rounds", "1", "--method", "tomesd", "todo", "--prompt", "a fox", "--output", str(tmp_path)]
    try:
        done = subprocess.run(command, env=os.environ | places, capture_output=True, text=True)
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr[-2000:]
    assert "diffusion_paddle_model.safetensors" in requests and not any("fp16" in name for name in requests)
    result = json.loads((tmp_path / "compare_32.json").read_text(encoding="utf-8"))
    assert result["kind"] == "comparison"
    assert result["model"] == NAME and result["dtype"] == "float32" and len(result["arms"]) == 3
    assert result["environment"]["machine"] and result["environment"]["paddlepaddle"] == paddle.__version__
    assert "safety" not in done.stderr  # which compare drops
