"""Clients of both interfaces get images: those that are packages, and the requests that others send."""

import base64
import io
import json
import logging
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from time import process_time

import openai
import pytest
import requests
import webuiapi
from PIL import Image
from serving_support import IMAGE, LIMITS, TEXT, serving, until
from webui_requests import CLIENTS, IMAGE_CLIENTS, IMAGE_DEFAULTS, INFO_TYPES, PROBES, TEXT_DEFAULTS

from ppdiffusers_tome.run.sizes import Size
from ppdiffusers_tome.serving.app_config import AppConfig
from ppdiffusers_tome.serving.jobs import Job, SecondPass
from ppdiffusers_tome.serving.png import parse_infotext
from ppdiffusers_tome.serving.prometheus import Metrics
from ppdiffusers_tome.serving.service import MAX_LOGGED_NAMES

KEY = "correct-horse"
NODE = shutil.which("node")
JAVASCRIPT = Path(__file__).parents[2] / "build" / "javascript" / "node_modules"
DATA_URL = "data:image/png;base64,"


def _png():
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


START = _png()  # of image-to-image


@pytest.fixture(scope="module")
def server():
    with serving(config=AppConfig(api_key=KEY, steps=2)) as server:
        yield server


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def webui(server):
    client = webuiapi.WebUIApi("127.0.0.1", server.port, username="anybody", password=KEY, steps=3)
    yield client
    client.session.close()


def test_openai_generates_images(client, server):
    fields = {"seed": 3, "steps": 4, "guidance_scale": 2.0, "negative_prompt": "red", "tome_ratio": 0.0}
    answer = client.images.generate(
        prompt="fox", n=2, size="64x48", response_format="b64_json", model="fake", user="me", extra_body=fields
    )
    images = [Image.open(io.BytesIO(base64.b64decode(one.b64_json))) for one in answer.data]
    assert [image.size for image in images] == [(64, 48), (64, 48)]
    assert [image.getpixel((0, 0))[0] for image in images] == [3, 4]
    assert [one.seed for one in answer.data] == [3, 4] and answer.size == "64x48" and answer.created > 0
    assert answer.output_format == "png"
    job = Job("fox", Size(48, 64), ratio=0.0, seed=3, negative_prompt="red", steps=4, guidance_scale=2.0)
    assert server.engine.calls[-1] == [job, replace(job, seed=4)]


def opened(encoded):
    return Image.open(io.BytesIO(base64.b64decode(encoded)))


def red(size=(30, 20)):
    """A file as clients read it from the disk."""
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, "PNG")
    return file.getvalue()


def test_openai_gets_a_data_url(client):
    answer = client.images.generate(prompt="fox", n=2, response_format="url", extra_body={"seed": 3})
    assert [one.b64_json for one in answer.data] == [None, None]
    assert [one.url.startswith(DATA_URL) for one in answer.data] == [True, True]
    assert [opened(one.url.removeprefix(DATA_URL)).getpixel((0, 0))[0] for one in answer.data] == [3, 4]


@pytest.mark.parametrize("several", [False, True], ids=["image", "image[]"])
def test_openai_edits_an_image(client, server, several):
    """The client sends a form, in which all but the file is text. What the server does not have is ignored."""
    image = [red()] if several else red()
    fields = {"seed": 3, "steps": 4, "guidance_scale": 2.0, "negative_prompt": "red", "tome_ratio": 0.0}
    answer = client.images.edit(
        image=image, prompt="fox", n=2, size="64x64", model="fake", user="me", quality="high", input_fidelity="high",
        background="transparent", output_format="png", partial_images=0, extra_body={**fields, "strength": 0.5},
    )  # fmt: skip
    assert [opened(one.b64_json).getpixel((0, 0))[0] for one in answer.data] == [3, 4]
    assert [one.seed for one in answer.data] == [3, 4] and answer.size == "64x64"
    first, second = (job for jobs in server.engine.calls[-2:] for job in jobs)
    assert first.image.size == (64, 64) and first.image.getpixel((0, 0)) == (255, 0, 0)
    job = Job("fox", Size(64, 64), 0.0, seed=3, negative_prompt="red", steps=4, guidance_scale=2.0, strength=0.5)
    assert [replace(one, image=None) for one in (first, second)] == [job, replace(job, seed=4)]


def test_openai_edits_with_a_stream_and_a_url(client):
    answer = client.images.edit(image=red(), prompt="fox", response_format="url", extra_body={"seed": 5})
    assert answer.data[0].b64_json is None and opened(answer.data[0].url.removeprefix(DATA_URL)).size == (64, 48)
    *progress, completed = client.images.edit(image=red(), prompt="fox", stream=True, extra_body={"seed": 5})
    assert {event.type for event in progress} <= {"image_edit.progress"}
    assert completed.type == "image_edit.completed" and completed.seed == 5
    assert opened(completed.b64_json).size == (64, 48)


def test_openai_edit_errors(client):
    for change, param, message in (
        ({"image": b"no image"}, "image", "none of PNG"),
        ({"mask": red()}, "mask", "masks are not supported"),
    ):
        with pytest.raises(openai.UnprocessableEntityError, match=message) as caught:
            client.images.edit(**{"image": red(), "prompt": "fox", **change})
        assert caught.value.param == param
    with pytest.raises(openai.NotFoundError, match="this server has fake"):
        client.images.edit(image=red(), prompt="fox", model="gpt-image-1")


def test_openai_with_any_model():
    """Requests that name DALL-E get URLs by default, as at OpenAI; LangChain's DallEAPIWrapper reads nothing else."""
    with (
        serving(config=AppConfig(any_model=True, steps=2)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        dall_e = client.images.generate(prompt="fox", n=2, size="64x48", model="dall-e-2")
        assert [opened(one.url.removeprefix(DATA_URL)).size for one in dall_e.data] == 2 * [(64, 48)]
        explicit = client.images.generate(prompt="fox", model="dall-e-3", response_format="b64_json")
        gpt = client.images.edit(image=red(), prompt="fox", model="gpt-image-1")
        assert [(one.data[0].url, opened(one.data[0].b64_json).size) for one in (explicit, gpt)] == 2 * [
            (None, (64, 48))
        ]
        assert [one.id for one in client.models.list()] == ["fake"]
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-image-1")
        *_, completed = client.images.generate(prompt="fox", model="dall-e-3", stream=True)
        assert opened(completed.b64_json).size == (64, 48), "events have no URL"


@pytest.mark.skipif(NODE is None, reason="no node: apt-get install nodejs npm")
@pytest.mark.skipif(not JAVASCRIPT.is_dir(), reason="no client for JavaScript: make build/javascript/.installed")
def test_openai_for_javascript(server, tmp_path):
    version = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version[1:].partition(".")[0]) < 20:
        pytest.skip(f"node is {version}, and OpenAI's client for JavaScript sends files from Node 20 on")
    (tmp_path / "red.png").write_bytes(red())
    script = Path(__file__).with_name("javascript") / "openai_client.js"
    command = [NODE, str(script), f"{server.url}/v1", KEY, str(tmp_path / "red.png")]
    environment = {**os.environ, "NODE_PATH": str(JAVASCRIPT)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    got = json.loads(run.stdout)
    assert [opened(one["b64_json"]).getpixel((0, 0))[0] for one in got["generated"]["data"]] == [3, 4]
    assert got["url"]["data"][0].keys() == got["editedOne"]["data"][0].keys() == {"url", "seed"}
    for name in ("url", "editedOne"):
        assert opened(got[name]["data"][0]["url"].removeprefix(DATA_URL)).getpixel((0, 0))[0] == 3
    for name in ("edited", "editedFromTheDisk"):
        assert opened(got[name]["data"][0]["b64_json"]).size == (64, 48)
    for name, stream in (("streamed", "image_generation"), ("editStreamed", "image_edit")):
        assert got[name][-1] == f"{stream}.completed" and set(got[name][:-1]) <= {f"{stream}.progress"}
    job = server.engine.calls[-1][0]
    assert (job.seed, job.steps, job.strength, job.ratio) == (3, 4, 0.5, 0.0)
    assert job.image.getpixel((0, 0)) == (255, 0, 0)
    for name, kind, status, param, message in (
        ("size", "UnprocessableEntityError", 422, "size", "'1024x1024' was not exported"),
        ("model", "NotFoundError", 404, "model", "this server has fake"),
        ("mask", "UnprocessableEntityError", 422, "mask", "masks are not supported"),
        ("two", "UnprocessableEntityError", 422, "image", "2 were sent"),
    ):
        error = got[name]
        assert (error["type"], error["status"], error["param"]) == (kind, status, param)
        assert message in error["message"]


def test_openai_lists_models(client):
    assert [one.id for one in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "ppdiffusers_tome"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("dall-e-3")


def test_openai_errors(client, server):
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        client.images.generate(prompt="fox", size="1024x1024")
    assert caught.value.param == "size" and "64x48" in caught.value.message
    with pytest.raises(openai.NotFoundError) as caught:
        client.images.generate(prompt="fox", model="dall-e-3")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.InternalServerError):
        client.images.generate(prompt="explode")
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as wrong,
        pytest.raises(openai.AuthenticationError),
    ):
        wrong.images.generate(prompt="fox")


def test_openai_streams_an_image(client):
    """The client passes on the progress events, which OpenAI's own server does not have, and raises `error` events."""
    events = list(client.images.generate(prompt="fox", stream=True, extra_body={"seed": 3, "steps": 2}))
    assert {event.type for event in events[:-1]} == {"image_generation.progress"}
    assert (events[0].position, events[0].steps) in ((0, 0), (0, 2), (1, 0))
    completed = events[-1]
    assert completed.type == "image_generation.completed" and completed.size == "64x48" and completed.seed == 3
    assert Image.open(io.BytesIO(base64.b64decode(completed.b64_json))).getpixel((0, 0))[0] == 3
    with pytest.raises(openai.APIError, match="the pipeline failed"):
        list(client.images.generate(prompt="explode", stream=True))
    with pytest.raises(openai.UnprocessableEntityError, match="partial_images: only 0"):
        client.images.generate(prompt="fox", stream=True, partial_images=2)


def test_webui_starts_up(webui):
    assert (webui.has_controlnet, webui.has_adetailer, webui.has_animatediff) == (False, False, False)
    assert webui.get_scripts() == {"txt2img": [], "img2img": []}
    assert webui.util_get_model_names() == ["fake"] and webui.util_get_sampler_names() == ["DDIM"]
    assert webui.util_get_current_model() == "fake" and webui.util_get_scheduler_names() == ["automatic"]


def test_webui_endpoints_that_have_nothing_to_list(webui, server):
    """In the shapes of stable-diffusion-webui's modules/api/models.py."""
    for name in ("hypernetworks", "face-restorers", "realesrgan-models", "extensions", "script-info"):
        assert webui.custom_get(f"sdapi/v1/{name}") == [], name
    assert webui.get_hypernetworks() == webui.get_face_restorers() == webui.get_realesrgan_models() == []
    assert webui.get_embeddings() == {"loaded": {}, "skipped": {}}
    assert webui.get_cmd_flags() == {"api": True, "nowebui": False}
    memory = webui.get_memory()
    assert memory["cuda"] == {"error": "unavailable"}
    assert 0 < memory["ram"]["used"] < memory["ram"]["total"] == memory["ram"]["free"] + memory["ram"]["used"]
    assert webui.refresh_checkpoints() is None
    for name in ("refresh-vae", "refresh-loras"):
        answer = webui.session.post(f"{webui.baseurl}/{name}")
        assert (answer.status_code, answer.json()) == (200, None)
    assert requests.get(f"{webui.baseurl}/cmd-flags").status_code == 401, "they need the key"


def test_webui_probes():
    """Discord bots, front ends and IntraPaint ask these before they use the API. Others would be untrue."""
    with serving(config=AppConfig(api_key="secret")) as other:
        for path in ("/internal/ping", "/login_check", "/queue/status"):
            refused = other.http.get(path)
            assert (refused.status_code, refused.json()) == (401, {"detail": "the API key is missing or wrong"})
            assert refused.headers["WWW-Authenticate"].startswith("Basic")
            assert other.http.get(path, auth=("any", "secret")).status_code == 200
    with serving(capacity=3, batch_wait=0) as server, ThreadPoolExecutor(2) as pool:
        assert [server.http.get(path).json() for path in ("/internal/ping", "/login_check")] == [{}, None]
        empty = {"msg": "estimation", "rank": None, "queue_size": 0, "rank_eta": None, "queue_eta": 0}
        averages = dict.fromkeys(("avg_event_process_time", "avg_event_concurrent_process_time"))
        assert server.http.get("/queue/status").json() == empty | averages
        server.engine.gate.clear()
        requests = [pool.submit(server.post, TEXT, {"prompt": "fox", "steps": 5 + more}) for more in range(2)]
        until(lambda: server.queue.waiting == server.queue.running == 1)
        status = server.http.get("/queue/status").json()
        assert status == {**empty, **averages, "queue_size": 1}
        server.engine.gate.set()
        assert [one.result().status_code for one in requests] == [200, 200]
        for path in ("/config", "/app_id", "/info", "/sdapi/v1/version", "/sdapi/v1/status"):
            assert server.http.get(path).status_code == 404, path


def test_webui_memory_where_it_is_not_known(webui, monkeypatch):
    monkeypatch.setattr(Metrics, "resident_bytes", None)
    assert webui.get_memory()["ram"] == {"error": "unavailable"}


def test_webui_png_info(webui):
    """What it reads is what `describe` has written."""
    made = webui.txt2img(
        prompt='a "red" fox, steps: 2\nat night', negative_prompt="blue\nowl", seed=5, width=64, height=48, cfg_scale=2
    )
    read = webui.png_info(made.image)
    assert read.info == made.info["infotexts"][0] == made.image.text["parameters"]
    assert json.loads(read.json["items"]["ppdiffusers_tome"])["seed"] == 5
    expected = {"Steps": "3", "Sampler": "DDIM", "CFG scale": "2.0", "Seed": "5", "Size-1": "64", "Size-2": "48"}
    expected |= {"Prompt": 'a "red" fox, steps: 2\nat night', "Negative prompt": "blue\nowl", "Model": "fake"}
    assert expected.items() <= read.parameters.items()
    assert read.parameters["Token merging method"] == "todo, min_tokens=64"
    for image in (Image.new("RGB", (8, 8)), Image.new("RGB", (8193, 16))):
        answer = webui.session.post(f"{webui.baseurl}/png-info", json={"image": webuiapi.b64_img(image)})
        if image.width == 8:
            nothing = {"Prompt": "", "Negative prompt": ""}
            assert answer.json() == {"info": "", "items": {}, "parameters": nothing}
        else:
            assert answer.status_code == 422 and answer.json()["detail"][0]["loc"] == ["body", "image"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {"Prompt": "", "Negative prompt": ""}),
        ("a fox, Steps: 20", {"Prompt": "a fox, Steps: 20", "Negative prompt": ""}),
        (
            'Steps: 20, Size: 64x48, Lora hashes: "a: 1, b: \\"2\\"", Hashes: {"model": "x", "vae": "y"}, RNG: CPU',
            {"Size-1": "64", "Size-2": "48", "Lora hashes": 'a: 1, b: "2"', "RNG": "CPU", "Prompt": ""},
        ),
        ('a fox\nSteps: 1, Model: "unclosed, Seed: 2', {"Prompt": "a fox", "Model": '"unclosed', "Seed": "2"}),
        (
            "two\nlines\nNegative prompt: red\nblue\nSteps: 1, Sampler: DPM++ 2M, CFG scale: 7",
            {"Prompt": "two\nlines", "Negative prompt": "red\nblue", "Sampler": "DPM++ 2M"},
        ),
    ],
)
def test_infotexts_of_stable_diffusion_webui(text, expected):
    assert expected.items() <= parse_infotext(text).items()


@pytest.mark.parametrize("unit", [" ", "a", '"', ":", 'a:"', 'a:"\\"', "a b:", ", ", "\\"])
def test_long_infotexts_are_cheap(unit):
    """Searches of a backtracking expression would take hours."""
    begin = process_time()
    parse_infotext(2**20 // len(unit) * unit)
    assert process_time() - begin < 20


def test_webui_scripts_that_are_off(webui, server):
    """What webuiapi sends where a server has these scripts, and what it sends if a script is on."""
    webui.has_controlnet = webui.has_adetailer = webui.has_animatediff = True
    answer = webui.txt2img(prompt="fox", width=64, height=48, alwayson_scripts={})
    assert answer.image.size == (64, 48) and answer.parameters["alwayson_scripts"] == {}
    off = {"ControlNet": {"args": [webuiapi.ControlNetUnit(enabled=False).to_dict()]}}
    off["ADetailer"] = {"args": [True, webuiapi.ADetailer().to_dict()]}
    off["animatediff"] = {"args": [webuiapi.AnimateDiff(enable=False).to_dict()]}
    off["reactor"] = {"args": webuiapi.ReActor(Image.new("RGB", (8, 8)), enable=False).to_dict()}
    for script, arguments in off.items():
        assert webui.txt2img(prompt="fox", width=64, height=48, alwayson_scripts={script: arguments}).image
    webui.has_controlnet = webui.has_adetailer = webui.has_animatediff = False
    for script in (
        {"controlnet_units": [webuiapi.ControlNetUnit()]},
        {"adetailer": [webuiapi.ADetailer(ad_model="face_yolov8n.pt")]},
        {"animatediff": webuiapi.AnimateDiff()},
        {"sag": webuiapi.Sag()},
    ):
        with pytest.raises(RuntimeError, match=r"only \{\} is supported, and .* is on"):
            webui.txt2img(prompt="fox", width=64, height=48, alwayson_scripts={}, **script)


def test_webui_text_to_image_with_its_own_defaults(webui, server):
    """webuiapi's default fields are accepted, also "Euler a"; the answer has the sampler that was used."""
    answer = webui.txt2img(
        prompt="fox", negative_prompt="red", seed=5, cfg_scale=2.5, width=64, height=48, batch_size=2
    )
    assert [image.getpixel((0, 0))[0] for image in answer.images] == [5, 6]
    assert answer.info["all_seeds"] == [5, 6] and answer.info["sampler_name"] == "DDIM" and answer.info["steps"] == 3
    assert answer.images[1].text["parameters"] == answer.info["infotexts"][1]
    assert "Token merging ratio: 0.5" in answer.info["infotexts"][0]
    assert answer.parameters["cfg_scale"] == 2.5
    assert answer.info["infotexts"][0].splitlines()[:2] == ["fox", "Negative prompt: red"]
    assert "Seed: 6, Size: 64x48" in answer.info["infotexts"][1]
    assert answer.info["extra_generation_params"]["Token merging method"] == "todo, min_tokens=64"
    assert 'Token merging method: "todo, min_tokens=64"' in answer.info["infotexts"][0]
    job = Job("fox", Size(48, 64), ratio=0.5, seed=5, negative_prompt="red", steps=3, guidance_scale=2.5)
    assert server.engine.calls[-1] == [job, replace(job, seed=6)]


def test_webui_text_to_image_without_merging(webui, server):
    """Nor with a second pass: its fields may have any value."""
    settings = {"token_merging_ratio": 0, "sd_model_checkpoint": "fake"}
    answer = webui.txt2img(
        prompt="fox", seed=7, width=64, height=64, n_iter=2, override_settings=settings, sampler_name="DDIM",
        hr_upscaler="R-ESRGAN 4x+",
    )  # fmt: skip
    assert [(job.seed, job.size.height, job.ratio) for job in server.engine.calls[-1]] == [(7, 64, 0), (8, 64, 0)]
    assert answer.info["seed"] == 7 and "Token merging ratio: 0" in answer.info["infotexts"][1]
    assert "Token merging method" not in answer.info["infotexts"][1] + str(answer.info["extra_generation_params"])


def test_webui_image_to_image(webui, server):
    start = Image.new("RGBA", (100, 90), (0, 0, 0, 0))
    answer = webui.img2img(
        images=[start], prompt="fox", width=64, height=64, override_settings={"token_merging_ratio": 0.0}
    )
    job = server.engine.calls[-1][0]
    assert job.strength == 0.75 and job.ratio == 0 and job.image.size == (64, 64)
    assert job.image.getpixel((0, 0)) == (255, 255, 255), "transparent pixels become white"
    assert answer.info["denoising_strength"] == 0.75 and answer.info["seed"] == job.seed
    mask = Image.new("L", (100, 90))
    with pytest.raises(RuntimeError, match="mask"):
        webui.img2img(images=[start], mask_image=mask, width=64, height=64)


@pytest.mark.parametrize(
    ("settings", "ratio"), [({"token_merging_ratio_hr": 0.5}, 0.5), ({"token_merging_ratio_hr": 0.0}, 0.0), ({}, 0.0)]
)
def test_webui_second_pass(webui, server, settings, ratio):
    """The second pass has its own ratio; 0, which is the server's default, is the first pass's."""
    settings = {"token_merging_ratio": 0.0, **settings}
    answer = webui.txt2img(
        prompt="fox", width=64, height=48, enable_hr=True, hr_resize_x=64, hr_resize_y=64, hr_second_pass_steps=7,
        denoising_strength=0.6, override_settings=settings,
    )  # fmt: skip
    (job,) = server.engine.calls[-1]
    assert (job.size.width, job.size.height, job.ratio, job.steps, job.strength) == (64, 48, 0, 3, None)
    assert job.second_pass == SecondPass(size=Size(64, 64), ratio=ratio, steps=7, strength=0.6)
    assert answer.info["denoising_strength"] == 0.6
    assert answer.info["extra_generation_params"]["Token merging ratio hr"] == ratio
    facts = f"Hires resize: 64x64, Hires steps: 7, Hires upscaler: Lanczos, Token merging ratio hr: {ratio}"
    assert facts in answer.info["infotexts"][0]
    assert json.loads(answer.images[0].text["ppdiffusers_tome"])["second_pass"]["ratio"] == ratio


def test_webui_second_pass_of_another_ratio_by_options(webui, server):
    webui.set_options({"token_merging_ratio_hr": 0.5})
    try:
        webui.txt2img(width=64, height=64, enable_hr=True, hr_scale=1, override_settings={"token_merging_ratio": 0.0})
        job = server.engine.calls[-1][0]
        assert (job.ratio, job.second_pass.ratio, job.second_pass.steps, job.second_pass.strength) == (0, 0.5, 3, 0.7)
    finally:
        webui.set_options({"token_merging_ratio_hr": 0.0})


@pytest.mark.parametrize("name", ["DDIM", "ddim", "k_ddim", "Euler a"])
def test_webui_samplers_by_name(webui, name):
    assert webui.txt2img(width=64, height=48, sampler_name=name).info["sampler_name"] == "DDIM"


def test_webui_default_size(webui):
    """webuiapi always sends 512x512: accepted if it was exported, else the error lists the exported sizes."""
    with pytest.raises(RuntimeError, match="64x48, 64x64"):
        webui.txt2img(prompt="fox")
    with serving(limits=replace(LIMITS, sizes=(Size(64, 64), Size(512, 512)))) as server:
        other = webuiapi.WebUIApi("127.0.0.1", server.port, steps=1)
        assert other.txt2img(prompt="fox").image.size == (512, 512)
        other.session.close()


def test_webui_options(webui, server):
    ratios = {"token_merging_ratio": 0.5, "token_merging_ratio_hr": 0.0, "token_merging_ratio_img2img": 0.0}
    others = {"sd_vae": "Automatic", "CLIP_stop_at_last_layers": 1, "samples_format": "png"}
    assert webui.get_options() == {"sd_model_checkpoint": "fake", **ratios, **others}
    webui.set_options(webui.get_options())
    webui.util_set_model("fake")
    webui.set_options({"token_merging_ratio": 0.0, "sd_model_checkpoint": "", "sd_vae": "", "outdir_samples": "/"})
    try:
        assert webui.get_options() == {"sd_model_checkpoint": "fake", **ratios, "token_merging_ratio": 0, **others}
        webui.txt2img(width=64, height=48, override_settings={"CLIP_stop_at_last_layers": 1})
        assert server.engine.calls[-1][0].ratio == 0
        webui.txt2img(width=64, height=48, override_settings={"token_merging_ratio": 0.5})
        assert server.engine.calls[-1][0].ratio == 0.5
        for name, value in (("token_merging_ratio", 0.3), ("CLIP_stop_at_last_layers", 2), ("sd_vae", "other.pt")):
            assert webui.set_options({name: value})["detail"][0]["loc"] == ["body", name]
    finally:
        webui.set_options({"token_merging_ratio": 0.5})


def test_webui_options_of_a_request_that_does_not_restore_them(webui):
    settings = {"token_merging_ratio": 0.0}
    webui.txt2img(width=64, height=48, override_settings=settings)
    assert webui.get_options()["token_merging_ratio"] == 0.5
    webui.txt2img(width=64, height=48, override_settings=settings, override_settings_restore_afterwards=False)
    assert webui.get_options()["token_merging_ratio"] == 0
    webui.set_options({"token_merging_ratio": 0.5})


@pytest.fixture(scope="module")
def server_of_three_ratios():
    with serving(limits=replace(LIMITS, ratios=(0.25, 0.5, 0.0))) as server:
        yield server


@pytest.mark.parametrize(
    ("options", "settings", "expected"),
    [
        ({"token_merging_ratio_img2img": 0.5}, {}, 0.5),
        ({}, {"token_merging_ratio_img2img": 0.5}, 0.5),
        ({}, {"token_merging_ratio_img2img": 0}, 0.25),
        ({}, {}, 0.25),
        ({"token_merging_ratio_img2img": 0.5}, {"token_merging_ratio": 0.25}, 0.25),
        ({}, {"token_merging_ratio_img2img": 0.5, "token_merging_ratio": 0}, 0.5),
        ({}, {"token_merging_ratio": 0}, 0),
    ],
)
def test_webui_ratio_of_image_to_image(server_of_three_ratios, options, settings, expected):
    """The order of stable-diffusion-webui's StableDiffusionProcessingImg2Img.get_token_merging_ratio."""
    server = server_of_three_ratios
    defaults = {"token_merging_ratio": 0.25, "token_merging_ratio_img2img": 0}
    assert server.post("/sdapi/v1/options", defaults | options).status_code == 200
    fields = {"init_images": [START], "override_settings": settings}
    assert server.post(IMAGE, fields).status_code == 200
    assert server.engine.calls[-1][0].ratio == expected
    assert server.post(TEXT, {"override_settings": settings}).status_code == 200
    assert server.engine.calls[-1][0].ratio == settings.get("token_merging_ratio", 0.25)


def test_webui_progress_skip_and_interrupt(webui, server):
    """Interrupting gets an empty answer; the interrupted request gets an error and no unfinished image."""
    webui.util_wait_for_ready(check_interval=0.01)
    before = server.engine.steps_done
    server.engine.gate.clear()
    with ThreadPoolExecutor(3) as pool:

        def ask(seed, steps):
            client = webuiapi.WebUIApi("127.0.0.1", server.port, username="anybody", password=KEY)
            with closing(client.session):
                return client.txt2img(width=64, height=48, seed=seed, steps=steps)

        requests = []
        for seed in range(3):  # different steps, so that they do not share a call
            requests.append(pool.submit(ask, seed, seed + 3))
            until(lambda: webui.get_progress()["state"]["job_count"] == len(requests))
        until(lambda: 0 < webui.get_progress()["progress"] < 1)  # once the first image's call has begun
        assert webui.get_progress()["current_image"] is None
        assert webui.skip() == {}
        with pytest.raises(RuntimeError, match="interrupted"):
            requests[0].result(10)
        assert not requests[1].done() and not requests[2].done()
        assert webui.interrupt() == {}
        for request in requests[1:]:
            with pytest.raises(RuntimeError, match="interrupted") as caught:
                request.result(10)
            assert caught.value.args[0] == 409
    server.engine.gate.set()
    webui.util_wait_for_ready(check_interval=0.01)
    assert server.engine.steps_done == before, "they ended at the next step"
    assert webui.txt2img(width=64, height=48).info["steps"] == 3, "the server continues"


# Requests as stable-diffusion-webui reads them


@pytest.fixture(scope="module")
def open_server():
    """Without a key, and with the size that stable-diffusion-webui generates by default."""
    with serving(limits=replace(LIMITS, sizes=(Size(64, 64), Size(512, 512)))) as server:
        yield server


@pytest.mark.parametrize("nulls", [False, True], ids=["defaults", "nulls"])
@pytest.mark.parametrize(("path", "defaults"), [(TEXT, TEXT_DEFAULTS), (IMAGE, IMAGE_DEFAULTS)])
def test_webui_defaults_are_accepted(open_server, path, defaults, nulls):
    """All fields of its schema, as the default and as null; the answer has all that its answers have."""
    image = {"init_images": [START]} if path == IMAGE else {}
    body = (dict.fromkeys(defaults) if nulls else defaults) | image
    answer = open_server.post(path, body)
    assert answer.status_code == 200, answer.text
    answered = answer.json()
    assert answered["parameters"].keys() >= defaults.keys()
    info = json.loads(answered["info"])
    assert info.keys() == INFO_TYPES.keys()
    for name, kind in INFO_TYPES.items():
        assert isinstance(info[name], kind), (name, info[name])
        assert isinstance(info[name], bool) == (kind is bool), (name, info[name])
    sizes = {"width": 64, "height": 64} if nulls else {"width": 512, "height": 512}
    assert sizes.items() <= info.items() and sizes.items() <= answered["parameters"].items()
    assert info["sampler_name"] == "DDIM" and info["denoising_strength"] == (0.75 if path == IMAGE else None)
    if not nulls:
        echoed = {name: answered["parameters"][name] for name in defaults}
        assert echoed == defaults, "without the image, for which it does not ask"


@pytest.mark.parametrize("client", PROBES)
def test_webui_clients_find_what_they_look_for(open_server, client):
    for path, fields in PROBES[client].items():
        answer = open_server.http.get(path)
        if fields == 404:
            assert answer.status_code == 404 and "/openapi.json" in answer.text, path
            assert answer.json().keys() <= {"detail", "error"}, "clients look for fields in it, and find none"
            continue
        assert answer.status_code == 200, path
        for name in fields:
            for entry in answer.json() if isinstance(answer.json(), list) else [answer.json()]:
                for part in name.split("."):
                    assert part in entry, (path, name)
                    entry = entry[part]


def test_webui_models_that_clients_choose_from(open_server):
    """They select the entry whose title is the current model, and take a server without models for a broken one."""
    models, options = (open_server.http.get(f"/sdapi/v1/{name}").json() for name in ("sd-models", "options"))
    assert [one["title"] for one in models] == [options["sd_model_checkpoint"]] == ["fake"]
    assert options["samples_format"] == "png", "without it, KoboldAI Lite reports that no server is there"


@pytest.mark.parametrize("client", CLIENTS)
def test_webui_clients_get_images(open_server, client):
    answer = open_server.post(TEXT, CLIENTS[client])
    assert answer.status_code == 200, answer.text
    job = open_server.engine.calls[-1][0]
    assert (job.prompt, job.strength, job.second_pass) == (CLIENTS[client]["prompt"], None, None)


@pytest.mark.parametrize("client", IMAGE_CLIENTS)
def test_webui_clients_get_images_from_an_image(open_server, client):
    """Without a Content-Type, as Dify sent its body at first."""
    body = json.dumps({**IMAGE_CLIENTS[client], "init_images": [START]}).encode()
    answer = open_server.http.post(IMAGE, content=body)
    assert answer.status_code == 200, answer.text
    assert open_server.engine.calls[-1][0].strength == 0.9
    asked = IMAGE_CLIENTS[client].get("include_init_images")
    assert answer.json()["parameters"]["init_images"] == ([START] if asked else None)


@pytest.mark.parametrize(
    "change",
    [
        {"denoising_strength": 0},
        {"denoising_strength": 7},
        {"s_noise": 0},
        {"s_tmax": 1e9, "s_tmin": 0.5},
        {"clip_skip": "1"},
        {"sampler_name": "Euler a", "sampler_index": ""},
        {"override_settings": {"sd_vae": "None", "token_merging_ratio": "0.5"}},
        {"steps": "3", "cfg_scale": "1.0", "width": "64", "seed": "-1", "batch_size": 1.0},
        {"restore_faces": "false", "send_images": "true", "enable_hr": 0},
        {"styles": ["", "None"]},
        {"script_name": "None"},
        {"alwayson_scripts": {"ControlNet": {"args": []}, "ADetailer": {"args": [False]}, "Seed": {}, "x": None}},
        {"alwayson_scripts": {"ControlNet": {"args": 2 * [{"enabled": False, "image": "AAAA", "weight": 1}]}}},
        {"alwayson_scripts": {"ADetailer": {"args": [True, False, {"ad_model": "None"}]}}},
        {"alwayson_scripts": {"Self Attention Guidance": {"args": [False, 0.75, 1.0]}, "Extra options": [None]}},
        {"script_args": ["of no script"], "comments": {"any": "text"}, "force_task_id": "task(1)"},
        {"subseed": 9, "image_cfg_scale": 1.5, "refiner_switch_at": 0.8},
        {"firstpass_image": "unused", "hr_upscaler": "R-ESRGAN 4x+", "hr_prompt": "unused", "hr_scale": 0},
        {"colour": 1, "n": 1, "__class__": "x", "model_fields": {}},
    ],
    ids=str,
)
def test_webui_fields_that_change_no_image_are_accepted(open_server, change):
    answer = open_server.post(TEXT, {"prompt": "fox", **change})
    assert answer.status_code == 200, answer.text
    assert answer.json()["images"]


def test_webui_second_pass_that_repeats_the_first_passes_fields(open_server):
    """Nothing else than the first pass's prompt, sampler, schedule and model is asked for."""
    same = {"hr_prompt": "fox", "hr_negative_prompt": "red", "hr_checkpoint_name": "fake"}
    for sampler, scheduler in (("DDIM", "Automatic"), ("Euler", "normal"), ("Use same sampler", "Use same scheduler")):
        body = {"prompt": "fox", "negative_prompt": "red", "enable_hr": "true", "hr_scale": "1", **same}
        answer = open_server.post(TEXT, {**body, "hr_sampler_name": sampler, "hr_scheduler": scheduler})
        assert answer.status_code == 200, answer.text
        assert open_server.engine.calls[-1][0].second_pass.strength == 0.75
    for name in ("hr_prompt", "hr_negative_prompt", "hr_checkpoint_name", "hr_sampler_name", "hr_scheduler"):
        refused = open_server.post(TEXT, {"prompt": "fox", "enable_hr": True, "hr_scale": 1, name: "another"})
        assert refused.status_code == 422 and refused.json()["detail"][0]["loc"] == ["body", name]
    refused = open_server.post(TEXT, {"enable_hr": True, "hr_scale": 1, "firstpass_image": START})
    assert refused.status_code == 422 and refused.json()["detail"][0]["loc"] == ["body", "firstpass_image"]


def test_webui_without_images(open_server):
    answer = open_server.post(TEXT, {"prompt": "fox", "send_images": False}).json()
    assert answer["images"] == [] and json.loads(answer["info"])["prompt"] == "fox"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 1024, "height": 1024}, "1024 was not exported: width x height must be one of 64x48, 64x64"),
        ({"width": "64", "height": 512}, "512 was not exported: width x height must be one of 64x48, 64x64"),
        ({"enable_hr": True}, "128x96 was not exported: width x height must be one of 64x48, 64x64"),
        ({"enable_hr": True, "hr_scale": 0}, "128x96 was not exported"),
        ({"enable_hr": True, "hr_resize_x": 100, "hr_resize_y": 90}, "100x90 was not exported"),
    ],
)
def test_webui_size_that_was_not_exported(server, change, message):
    answer = server.http.post(TEXT, json={"prompt": "fox", **change}, auth=("anybody", KEY))
    assert answer.status_code == 422 and message in answer.json()["detail"][0]["msg"]


def test_webui_unknown_fields_are_named_once_in_the_log(caplog):
    def logged():
        records = [record for record in caplog.records if record.name == "ppdiffusers_tome.serving.api_webui"]
        return [record.getMessage().rpartition(": ")[2] for record in records]

    with serving() as server, caplog.at_level(logging.WARNING):
        for _ in range(2):
            body = {"auth": "secret", "a\nforged": 1, "override_settings": {"outdir_samples": "/"}}
            assert server.post(TEXT, body).status_code == 200
        assert server.post("/sdapi/v1/options", {"auth": "secret", "samples_format": "jpg"}).status_code == 200
        names = ["'auth'", r"'a\nforged'", "'override_settings.outdir_samples'", "'samples_format'"]
        assert logged() == names and "secret" not in caplog.text
        many = {f"{index} {1000 * 'x'}": 1 for index in range(2 * MAX_LOGGED_NAMES)}
        assert server.post(TEXT, many).status_code == 200
        assert len(logged()) == MAX_LOGGED_NAMES and max(map(len, logged())) < 200


# A client with strict types


@pytest.mark.skipif(sys.version_info < (3, 11), reason="sd-backend-client needs Python 3.11")
def test_sd_backend_client(server):
    """It raises where a field of an answer is missing or has another type than stable-diffusion-webui's."""
    from sd_backend_client import A1111Webservice, connect_to_backend
    from sd_backend_client.api.webui.diffusion_request_body import DiffusionRequestBody

    backend = connect_to_backend(server.url, credentials_provider=lambda: ("anybody", KEY))
    assert isinstance(backend, A1111Webservice)
    with closing(backend._session):
        assert [one.name for one in backend.list_checkpoints()] == ["fake"]
        assert [one.display_name for one in backend.list_samplers()] == ["DDIM"]
        assert [one.display_name for one in backend.list_schedulers()] == ["Automatic"]
        assert [one.name for one in backend.list_upscalers()] == ["Lanczos"]
        assert backend.list_vaes() == backend.list_loras() == backend.list_hypernetworks() == []
        assert backend.list_controlnet_models() == backend.get_styles() == backend.get_latent_upscale_modes() == []
        capabilities = backend.get_capabilities()
        assert capabilities.scheduler and not capabilities.controlnet and not capabilities.interrogate
        assert backend.progress_check().progress == 0
        assert backend.get_config()["sd_model_checkpoint"] == "fake"
        backend.set_config({"sd_model_checkpoint": "fake"})

        fields = {"prompt": "fox", "width": 64, "height": 48, "seed": 5, "sd_model_name": "fake", "n_iter": 2}
        result = backend.submit_txt2img(DiffusionRequestBody(**fields)).wait(60)
        assert [image.getpixel((0, 0))[0] for image in result.images] == result.seeds == [5, 6]
        assert result.raw_info.sampler_name == "DDIM" and result.raw_info.denoising_strength is None
        start = Image.new("RGB", (64, 48), "red")
        body = DiffusionRequestBody(**fields, init_images=[start], denoising_strength=0.5)
        result = backend.submit_img2img(body).wait(60)
        assert result.raw_info.denoising_strength == 0.5 and server.engine.calls[-1][0].strength == 0.5
        assert backend.interrupt() == {}
