"""A model of a hub: a server here has the files of a pipeline, and a process with empty caches loads it by name."""

import hashlib
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import paddle
import pytest
from hub_folders import write_diffusers_folder, write_diffusers_model
from ppdiffusers import StableDiffusionPipeline
from ppdiffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
from ppdiffusers.transformers import CLIPConfig
from zoo.parts import ONE_LEVEL, controlnet, image, image_config, image_processor, stable_diffusion, text_config, unet

import ppdiffusers_tome
from ppdiffusers_tome.errors import ToMeConfigError

NAME = "owner/stable-diffusion"


class Hub(SimpleHTTPRequestHandler):
    """The files of a folder, with the headers of both hubs; `requests` are the names of the files that were found."""

    def __init__(self, requests, *arguments, **options):
        self.requests = requests
        super().__init__(*arguments, **options)

    def send_response(self, code, message=None):
        super().send_response(code, message)
        self.send_header("ETag", hashlib.sha256(self.path.encode()).hexdigest())
        self.send_header("X-Repo-Commit", "0" * 40)
        if code == 404:
            self.send_header("X-Error-Code", "EntryNotFound")

    def log_message(self, *_):
        pass

    def log_request(self, code="-", size="-"):
        if code == 200:
            self.requests.append(Path(self.path).name)


@contextmanager
def serving(folder):
    """A hub with the files of a folder: the paths that were found, and the environment of a process that uses it."""
    requests = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, requests, directory=str(folder / "hub")))
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    places = {"PPNLP_ENDPOINT": url, "PPNLP_HOME": str(folder / "cache")}
    places |= {"HF_ENDPOINT": url, "HF_HOME": str(folder / "cache_of_hugging_face")}
    try:
        yield requests, os.environ | places
    finally:
        server.shutdown()
        server.server_close()


def place_on_hub(folder):
    """The folder of the model on ppdiffusers' hub."""
    return folder / "hub" / "models" / "community" / NAME


def place_on_hugging_face(folder, name):
    """The folder of a model on Hugging Face's hub."""
    return folder / "hub" / name / "resolve" / "main"


OWN_SCRIPT = f"""
import ppdiffusers_tome
from ppdiffusers import StableDiffusionPipeline

try:
    StableDiffusionPipeline.from_pretrained("{NAME}")
    print("loads without the folders")
except OSError:
    print("fails without the folders")
ppdiffusers_tome.prepare_download("{NAME}")
pipe = StableDiffusionPipeline.from_pretrained("{NAME}").apply_tome()
print(len(pipe.tome_summary().blocks), "blocks")
"""


def test_own_script_downloads_a_model_after_prepare_download(tmp_path):
    """And without it fails: once PaddleNLP makes the folders, `prepare_download` can go."""
    StableDiffusionPipeline(**stable_diffusion(unet=unet(**ONE_LEVEL))).save_pretrained(str(place_on_hub(tmp_path)))
    with serving(tmp_path) as (requests, environment):
        done = subprocess.run([sys.executable, "-c", OWN_SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = done.stdout.splitlines()[-2:]
    assert first == "fails without the folders" and second.endswith(" blocks") and second != "0 blocks"
    assert "diffusion_paddle_model.safetensors" in requests


def test_prepare_download_does_nothing_for_a_folder_and_rejects_what_is_no_name(tmp_path, monkeypatch):
    monkeypatch.setattr("ppdiffusers_tome.hub.download_index", None)
    monkeypatch.chdir(tmp_path)
    ppdiffusers_tome.prepare_download(tmp_path)
    with pytest.raises(ToMeConfigError, match=r"no-owner is neither a folder nor a hub name \(owner/name\)"):
        ppdiffusers_tome.prepare_download("no-owner")


def test_a_model_of_a_hub_with_a_safety_checker_and_variants(tmp_path):
    """PaddleNLP 2.8.1 does not make the folders of components, so without ours the first download fails."""
    folder = place_on_hub(tmp_path)
    checker = CLIPConfig(vision_config=image_config().to_dict(), text_config=text_config().to_dict())
    parts = {"safety_checker": StableDiffusionSafetyChecker(checker), "feature_extractor": image_processor()}
    pipe = StableDiffusionPipeline(**stable_diffusion(unet=unet(**ONE_LEVEL), **parts, requires_safety_checker=True))
    pipe.save_pretrained(str(folder))
    (folder / "prompts.txt").write_text("a fox\n")
    for name in ("unet", "vae", "text_encoder"):
        config = (folder / name / "config.json").read_bytes()
        getattr(pipe, name).to(dtype="float16").save_pretrained(str(folder / name), variant="fp16")
        (folder / name / "config.json").write_bytes(config)
    command = [sys.executable, "-m", "ppdiffusers_tome", "compare", "--model", NAME, "--size", "32", "--steps", "1"]
    command += ["--rounds", "1", "--method", "tomesd", "todo", "--prompt", "a fox", "--output", str(tmp_path)]
    with serving(tmp_path) as (requests, environment):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "diffusion_paddle_model.safetensors" in requests and not any("fp16" in name for name in requests)
    result = json.loads((tmp_path / "compare_32.json").read_text(encoding="utf-8"))
    assert result["kind"] == "comparison"
    assert result["model"] == NAME and result["dtype"] == "float32" and len(result["arms"]) == 3
    assert result["environment"]["machine"] and result["environment"]["paddlepaddle"] == paddle.__version__
    assert "safety" not in done.stderr  # which compare drops


@pytest.mark.parametrize("format", ["diffusers", "ppdiffusers"])
def test_a_model_of_hugging_faces_hub(format, tmp_path):
    """Each model in the format that it has there."""
    pipe, network = StableDiffusionPipeline(**stable_diffusion(unet=unet(**ONE_LEVEL))), controlnet(**ONE_LEVEL)
    places = [place_on_hugging_face(tmp_path, name) for name in (NAME, "owner/controlnet")]
    if format == "diffusers":
        write_diffusers_folder(pipe, places[0])
        write_diffusers_model(network, places[1])
    else:
        pipe.save_pretrained(str(places[0]))
        network.save_pretrained(str(places[1]))
    image().save(tmp_path / "edges.png")
    command = [
        sys.executable,
        "-m",
        "ppdiffusers_tome",
        "compare",
        "--model",
        NAME,
        "--controlnet",
        "owner/controlnet",
    ]
    command += ["--image", str(tmp_path / "edges.png"), "--size", "32", "--steps", "1", "--rounds", "1"]
    command += ["--prompt", "a fox", "--ratio", "0.5", "--output", str(tmp_path)]
    with serving(tmp_path) as (requests, environment):
        done = subprocess.run(command, env=environment | {"FROM_HF_HUB": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    framework = {"diffusers": "pytorch", "ppdiffusers": "paddle"}[format]
    assert {name for name in requests if name.startswith("diffusion_")} == {f"diffusion_{framework}_model.safetensors"}
