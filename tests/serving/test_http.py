"""Requests over HTTP: each valid field reaches the job, and each invalid one an error that names it."""

import base64
import codecs
import gzip
import hashlib
import io
import json
import logging
import pickle
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import get_args

import numpy as np
import openai
import psutil
import pytest
from PIL import Image
from serving_support import (
    EDITS,
    IMAGE,
    LIMITS,
    OPENAI,
    TEXT,
    FakeEngine,
    assert_refused_whatever_the_host,
    events_of,
    read_answer,
    serving,
    until,
)
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from ppdiffusers_tome import ToMeConfigError
from ppdiffusers_tome.run.sizes import Size
from ppdiffusers_tome.serving import api_openai, middleware, protocol
from ppdiffusers_tome.serving.app import FOLDER
from ppdiffusers_tome.serving.app_config import AppConfig
from ppdiffusers_tome.serving.jobs import EngineLostError, GenerationError, Job, JobError
from ppdiffusers_tome.serving.middleware import RequestMiddleware
from ppdiffusers_tome.serving.tickets import Progress, Ticket

ROOT = Path(__file__).parents[2]
KEY = "correct-horse"
JSON_HEADER = {"Content-Type": "application/json"}
JSON = "Content-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server():
    with serving(capacity=3, config=AppConfig(steps=2, body_bytes=200_000, prompts=("a fox", "an owl"))) as server:
        yield server


def png(size=(30, 20), image=None, format="PNG", **options):
    """An image, a red one by default, as a client sends it."""
    file = io.BytesIO()
    (image or Image.new("RGB", size, "red")).save(file, format, **options)
    return base64.b64encode(file.getvalue()).decode()


def png_file(image=None):
    return base64.b64decode(png(image=image))


def bomb(side):
    """A small PNG with a header of side x side pixels; Pillow itself warns at 12,000 and raises at 60,000."""
    data = bytearray(base64.b64decode(png()))
    data[16:24] = 2 * side.to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return base64.b64encode(data).decode()


def many_scans():
    """A progressive JPEG of 4 KB with 1,000 copies of its last scan, each of which costs a pass over the image."""
    data = base64.b64decode(png((2000, 2000), format="JPEG", progressive=True))
    last = data.rindex(b"\xff\xda")
    return base64.b64encode(data[:last] + 1000 * data[last:-2] + data[-2:]).decode()


def opened(encoded):
    return Image.open(io.BytesIO(base64.b64decode(encoded)))


# Valid requests


def test_openai_defaults(server):
    body = server.post(OPENAI, {"prompt": "fox", "size": "auto"}).json()
    job = Job("fox", Size(48, 64), ratio=0.5, seed=body["data"][0]["seed"], steps=2, guidance_scale=7.5)
    assert server.engine.calls[-1] == [job]
    seeds = {server.post(OPENAI, {"prompt": "fox"}).json()["data"][0]["seed"] for _ in range(3)}
    assert len(seeds) == 3, "a missing seed is random"


@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,"])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_image_to_image(server, kind, prefix):
    fields = {"init_images": [prefix + png(format=kind)], "denoising_strength": 0.5, "seed": -1}
    body = server.post(IMAGE, fields).json()
    job = server.engine.calls[-1][0]
    assert job.image.mode == "RGB" and job.image.size == (64, 48) and job.strength == 0.5
    assert json.loads(body["info"])["denoising_strength"] == 0.5


def test_metadata_is_in_the_png(server):
    prompt = "a fox, 狐, naïve"
    body = server.post(OPENAI, {"prompt": prompt, "seed": 5, "steps": 4, "guidance_scale": 1.5}).json()
    chunks = opened(body["data"][0]["b64_json"]).text
    assert chunks["parameters"].startswith(prompt + "\nSteps: 4, Sampler: DDIM, CFG scale: 1.5, Seed: 5, Size: 64x48")
    assert 'Token merging method: "todo, min_tokens=64"' in chunks["parameters"]
    metadata = json.loads(chunks["ppdiffusers_tome"])
    job = Job(prompt, Size(48, 64), ratio=0.5, seed=5, steps=4, guidance_scale=1.5)
    expected = {**job.settings(), "tome_method": "todo, min_tokens=64", "model": "fake"}
    assert expected.items() <= metadata.items()


def test_models_and_health(server):
    models = server.http.get("/v1/models").json()
    assert [one["id"] for one in models["data"]] == ["fake"] and models["data"][0]["sizes"] == ["64x48", "64x64"]
    model = server.http.get("/v1/models/fake").json()
    assert model["tome_ratios"] == [0.5, 0.0] and (model["steps"], model["guidance_scale"]) == (2, 7.5)
    assert model["ranges"]["steps"] == [1, 50] and model["ranges"]["n"] == [1, 3] and model["prompt_characters"] == 100
    assert models["data"][0]["tome_methods"] == ["todo, min_tokens=64", ""] and model["prompts"] == [
        "a fox",
        "an owl",
    ]
    assert server.http.get("/health").json() == server.http.get("/ready").json() == {"state": "ready", "engines": 1}


# Server-sent events and the page


def test_stream_reports_steps_then_images():
    with serving(FakeEngine(0.11)) as server:
        answer = server.post(OPENAI, {"prompt": "fox", "stream": True, "n": 2, "seed": 7, "steps": 4})
        *progress, first, second = events_of(answer)
        assert {event["type"] for event in progress} == {"image_generation.progress"}
        steps = [event["step"] for event in progress if event["steps"]]
        assert steps == sorted(set(steps)) and len(steps) >= 3, "only changes, and each step of 0.11 s"
        assert [event["steps"] for event in progress][-1] == 4 and progress[-1]["position"] == 0
        assert [(one["index"], one["seed"]) for one in (first, second)] == [(0, 7), (1, 8)]
        assert first["type"] == "image_generation.completed" and first["size"] == "64x48" and first["batch"] == 2
        assert 0.44 <= first["seconds"] < 5 and first["created_at"] > 0
        assert [opened(one["b64_json"]).getpixel((0, 0))[0] for one in (first, second)] == [7, 8]
        assert answer.headers["cache-control"] == "no-store"
        assert len(first["step_seconds"]) == 4 and all(0.11 <= one < 2 for one in first["step_seconds"])
        assert len(events_of(server.post(OPENAI, {"prompt": "fox", "stream": True, "steps": 1}))) >= 1


class FailsTogether(FakeEngine):
    """A call of several jobs fails at its last step but one."""

    def generate(self, jobs, should_stop=None):
        if len(jobs) == 1:
            return super().generate(jobs, should_stop)
        for step in range(1, jobs[0].steps):
            should_stop(step, jobs[0].steps)
        assert self.gate.wait(60)
        raise RuntimeError("secret reason")


def test_stream_takes_no_step_back():
    """A batch that failed is repeated image by image."""
    with serving(FailsTogether(0.15)) as server:
        server.engine.gate.clear()
        events, body = [], {"prompt": "fox", "stream": True, "n": 3, "steps": 6}
        with server.http.stream("POST", OPENAI, json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    events.append(json.loads(line.removeprefix("data: ")))
                    if events[-1].get("step") == 5:
                        server.engine.gate.set()
        *progress, _, _, completed = events
        steps = [event["step"] for event in progress]
        assert steps == sorted(steps) and {5, 6}.issuperset(steps[-2:]) and len(server.engine.calls) == 3
        assert completed["batch"] == 1 and len(completed["step_seconds"]) == 6
        assert completed["seconds"] > sum(completed["step_seconds"]), "of three calls"


def test_progress_of_a_request_is_the_mean_of_its_images():
    tickets = [Ticket(Job("fox", Size(48, 64), 0.5, seed=seed), arrived=0.0, place=seed) for seed in range(3)]

    def shown(last_step=0):
        event = api_openai._progress(tickets, "image_edit", last_step)
        return event.type, event.position, event.step, event.steps

    assert shown() == ("image_edit.progress", 2, 0, 0)
    for ticket, step in zip(tickets, (6, 5, 0), strict=True):
        ticket.place, ticket.progress = 0, Progress(images=1, steps=6, since=0.0, step=step)
    assert shown() == ("image_edit.progress", 0, 3, 6) and shown(4)[2] == 4


def test_openai_starts_from_an_image(server):
    """Image-to-image as by /sdapi/v1/img2img, with a stream. `strength` needs an image."""
    fields = {"prompt": "fox", "image": png(), "stream": True}
    for strength, expected in ((0.5, 0.5), (None, 0.75)):
        *_, completed = events_of(server.post(OPENAI, {**fields, "strength": strength}))
        job = server.engine.calls[-1][0]
        assert (job.image.size, job.image.getpixel((0, 0)), job.strength) == ((64, 48), (255, 0, 0), expected)
        assert json.loads(opened(completed["b64_json"]).text["ppdiffusers_tome"])["strength"] == expected
    for change, field in (
        ({"strength": 0.5, "image": None}, "strength"),
        ({"image": "no"}, "image"),
        ({"strength": 0}, "strength"),
    ):
        answer = server.post(OPENAI, {**fields, "stream": False, **change})
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, field), answer.text
    with serving(limits=replace(LIMITS, image_to_image=False)) as other:
        answer = other.post(OPENAI, {"prompt": "fox", "image": png()})
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, "image"), answer.text
        answer = other.post(IMAGE, {"init_images": [png()]})
        assert answer.status_code == 422 and "--img2img" in answer.json()["detail"][0]["msg"]


def test_tokens_of_a_prompt(server):
    counted = server.post("/v1/tokens", {"prompt": "one two three four five six seven"}).json()
    assert counted == {"tokens": 9, "max_tokens": 7, "cut": "six seven"}
    assert server.post("/v1/tokens", {"prompt": "x" * 101}).status_code == 422
    event = threading.Event()
    with serving(load=lambda: event.wait(20) and FakeEngine()) as loading:
        answer = loading.post("/v1/tokens", {"prompt": "fox"})
        event.set()
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5"


def test_stream_that_is_refused_is_an_ordinary_error(server):
    """Before the first event there is a status; afterwards errors are events."""
    for change, status in (({"size": "9x9"}, 422), ({"model": "x"}, 404)):
        answer = server.post(OPENAI, {"prompt": "fox", "stream": True, **change})
        assert answer.status_code == status and answer.json()["error"]["message"]
    *_, error = events_of(server.post(OPENAI, {"prompt": "explode", "stream": True}))
    assert error["type"] == "error" and error["error"]["code"] == "generation_failed" and "secret" not in str(error)


class Broken(FakeEngine):
    """What it returns is a bug, which the client does not see."""

    def generate(self, jobs, should_stop=None):
        return ["no image" for _ in jobs]


def test_bugs_are_internal_errors(caplog):
    with serving(Broken()) as server:
        answer = server.post(OPENAI, {"prompt": "fox"})
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
        *_, error = events_of(server.post(OPENAI, {"prompt": "fox", "stream": True}))
        assert error["error"]["code"] == "internal_error" and "a stream failed" in caplog.text
        assert server.requests(500) == 1 and server.http.get("/health").status_code == 200


def test_page_files_and_their_headers(server):
    page = server.http.get("/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    names = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
    assert len(names) == 4 and "http:" not in page.text and "https:" not in page.text
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", page.text), "nothing inline"
    for path in ("/", *(f"/{name}" for name in names), "/page/vendor/ssim.js-3.5.0/LICENSE"):
        answer = server.http.get(path)
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["frame-ancestors"] == "'none'" and policy["script-src"] == "'self'"
        assert "unsafe" not in str(policy) and answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["x-content-type-options"] == "nosniff" and answer.status_code == 200
        head = server.http.head(path)
        assert (head.status_code, head.content) == (200, b"") and head.headers["content-length"] != "0"
    for path in ("/page/", "/page/none.js", "/page/..%2fapp.py", "/page//etc/passwd", "/index.html"):
        assert server.http.get(path).status_code == 404, path
    assert "/" not in server.http.get("/openapi.json").json()["paths"]


def test_page_without_and_with_a_key():
    with serving(config=AppConfig(page=False)) as server:
        assert [server.http.get(path).status_code for path in ("/", "/page/page.js")] == [404, 404]
    with serving(config=AppConfig(api_key=KEY)) as server:
        assert [server.http.get(path).status_code for path in ("/", "/page/page.js", "/v1/models")] == [200, 200, 401]


def test_vendored_files_are_those_of_npm():
    """The versions in the page's folders, unchanged: sha256 of the files in npm's packages."""
    expected = {
        "ssim.js-3.5.0/LICENSE": "3f39f7495c4ee13283933dfacefe57a7bf81607c577a047f358838ca8c40fa5c",
        "ssim.js-3.5.0/ssim.web.js": "238ab90f2dd1c6dfe9ab532d5e9da9b541545760fb970fb621398ae84daaacfe",
    }
    vendor = FOLDER / "vendor"
    files = {file.relative_to(vendor).as_posix(): file.read_bytes() for file in vendor.rglob("*") if file.is_file()}
    assert {name: hashlib.sha256(content).hexdigest() for name, content in files.items()} == expected


def test_page_is_package_data():
    """What setuptools would put into the wheel, without building it."""
    script = (
        "import setuptools; from distutils.core import run_setup\n"
        "command = run_setup('setup.py', stop_after='init').get_command_obj('build_py'); command.ensure_finalized()\n"
        "print(*(f'{folder}/{name}' for _, folder, _, names in command.data_files for name in names), sep='\\n')"
    )
    listed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    packaged = {(ROOT / line).resolve() for line in listed.stdout.splitlines()}
    assert {file for file in FOLDER.rglob("*") if file.is_file()} <= packaged


# Invalid fields

FROM_IMAGE = {"init_images": [png()]}


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"prompt": None}, "prompt", ""),
        ({"prompt": "x" * 101}, "prompt", "100"),
        ({"negative_prompt": "x" * 101}, "negative_prompt", "100"),
        ({"n": 0}, "n", "1 to 3"),
        ({"n": 4}, "n", "1 to 3"),
        ({"steps": 51}, "steps", "1 to 50"),
        ({"seed": 2**32}, "seed", "0 to 4294967295"),
        ({"guidance_scale": 31}, "guidance_scale", "0 to 30"),
        *(({"size": size}, "size", "auto, 64x48, 64x64") for size in ("48x64", "64X64", "64", "0x0", "64 x 48\n")),
        ({"size": 9000 * "9"}, "size", f"'{60 * '9'}'"),
        ({"tome_ratio": 0.25}, "tome_ratio", "0.5, 0.0"),
        ({"response_format": "png"}, "response_format", "b64_json"),
        ({"output_format": "jpeg"}, "output_format", "png"),
        ({"output_compression": 101}, "output_compression", ""),
        ({"stream": "yes"}, "stream", ""),
        ({"stream": True, "partial_images": 1}, "partial_images", "0"),
        ({"quality": 101 * "x"}, "quality", ""),
        ({"style": ["vivid"]}, "style", ""),
        ({"colour": "red"}, "colour", "no such field"),
        ({"__class__": "x"}, "__class__", "no such field"),
    ],
)
def test_openai_error_names_the_field(server, change, field, message):
    answer = server.post(OPENAI, {"prompt": "fox", **change})
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["param"] == field and message in error["message"]
    assert error["message"].startswith(f"{field}: "), "OpenAI's client shows only the message"
    assert error["type"] == "invalid_request_error" and error["code"]
    assert "images=" not in error["message"], "the field is n"


def test_fields_that_are_ignored_are_logged_once(caplog):
    """An image without what they ask for is one too. Values that are usual here ask for nothing."""
    usual = {"background": "opaque", "moderation": "auto", "output_compression": 100, "quality": "standard"}
    asking = {"background": "transparent", "moderation": "low", "output_compression": 50, "quality": "hd"}
    with serving() as server:
        empty = dict.fromkeys(("background", "moderation", "quality", "style"), "")
        for fields in (usual, empty, asking | {"style": "vivid"}, {"quality": "low", "style": "natural\nforged"}):
            assert server.post(OPENAI, {"prompt": "fox", **fields}).status_code == 200
        form = {"prompt": "fox", "input_fidelity": "high", "quality": "high"}
        assert server.http.post(EDITS, data=form, files={"image": png_file()}).status_code == 200
    logged = [record.getMessage() for record in caplog.records if record.name == api_openai.__name__]
    asking |= {"style": "vivid", "input_fidelity": "high"}
    expected = {f"a client asks for {name}={value!r}, which this server ignores" for name, value in asking.items()}
    assert {message.removesuffix(" (logged once)") for message in logged} == expected and len(logged) == len(expected)


@pytest.mark.parametrize(
    ("fields", "request_model", "not_fields"),
    [
        (openai.types.ImageGenerateParams, protocol.ImageRequest, set()),
        (openai.types.ImageEditParams, protocol.EditRequest, {"image", "mask"}),
    ],
    ids=["generate", "edit"],
)
def test_all_fields_of_openais_client_are_known(fields, request_model, not_fields):
    names = set().union(*(one.__annotations__ for one in get_args(fields)))
    assert {"prompt", "stream"} < names and names - set(request_model.model_fields) == not_fields
    assert set(protocol.IGNORED) <= set(protocol.EditRequest.model_fields)


@pytest.mark.parametrize("model", ["other", "../../etc/passwd"])
def test_unknown_model(server, model):
    answer = server.post(OPENAI, {"prompt": "fox", "model": model})
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "model" and answer.json()["error"]["code"] == "model_not_found"
    assert answer.json()["error"]["message"].startswith(f"model: there is no model {model!r}: this server has fake")
    refused = server.post(TEXT, {"override_settings": {"sd_model_checkpoint": model}})
    assert refused.status_code == 422
    assert refused.json()["detail"][0]["loc"] == ["body", "override_settings", "sd_model_checkpoint"]


def test_empty_fields_are_absent(server):
    """Clients with a form of their own send what their user has left empty."""
    empty = dict.fromkeys(("model", "size", "response_format", "output_format", "quality", "style", "user"), "")
    for fields in (empty, {**empty, "image": ""}):
        answer = server.post(OPENAI, {"prompt": "fox", **fields})
        assert answer.status_code == 200, answer.text
        assert opened(answer.json()["data"][0]["b64_json"]).size == (64, 48)
        assert server.engine.calls[-1][0].image is None
    form = {"prompt": "fox", "mask": "", **empty}
    assert server.http.post(EDITS, data=form, files={"image": png_file()}).status_code == 200
    files = {"image": png_file(), "mask": ("", b"", "application/octet-stream")}
    assert server.http.post(EDITS, data={"prompt": "fox"}, files=files).status_code == 200
    assert server.post(IMAGE, {**FROM_IMAGE, "mask": ""}).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/models/..%2f..%2fetc%2fpasswd", "/v1/models/other", "/v1/nothing", "/etc/passwd", "/docs"]
)
def test_unknown_path(server, path):
    answer = server.http.get(path)
    assert answer.status_code == 404 and "root:" not in answer.text
    assert answer.json()["error"]["message"]


PATHS = ("/health", "/ready", "/metrics", "/v1/models", "/v1/models/fake", "/sdapi/v1/options", OPENAI, TEXT, "/no")


@pytest.mark.parametrize("path", PATHS)
def test_trailing_slash(server, path):
    """A redirect names an address that a client behind a proxy with TLS or a prefix cannot use."""
    endpoint = path if path in middleware.ENDPOINTS else "other"
    for method in ("GET", "POST", "HEAD", "OPTIONS"):
        body = {"prompt": "fox"} if method == "POST" else None
        usual, slash = (server.http.request(method, path + end, json=body) for end in ("", "/"))
        assert slash.status_code == usual.status_code != 307 and "location" not in slash.headers, method
        assert server.count("requests_total", endpoint=endpoint, status=str(usual.status_code)) >= 2


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"steps": 51}, ["steps"]),
        ({"cfg_scale": 31}, ["cfg_scale"]),
        ({"batch_size": 4}, ["batch_size"]),
        ({"batch_size": 2, "n_iter": 2}, ["batch_size"]),
        ({"width": 512, "height": 512}, ["width"]),
        ({"n_iter": 0}, ["n_iter"]),
        ({"width": 64, "height": 512}, ["height"]),
        ({"seed": -2}, ["seed"]),
        ({"sampler_name": "DPM++ 2M"}, ["sampler_name"]),
        ({"sampler_index": "Heun"}, ["sampler_index"]),
        ({"scheduler": "karras"}, ["scheduler"]),
        ({"enable_hr": True, "hr_scale": 3}, ["hr_scale"]),
        ({"enable_hr": True, "hr_scale": 1, "denoising_strength": 0}, ["denoising_strength"]),
        ({"enable_hr": True, "hr_upscaler": "R-ESRGAN 4x+"}, ["hr_upscaler"]),
        ({"enable_hr": True, "hr_resize_x": 64, "hr_second_pass_steps": 51}, ["hr_second_pass_steps"]),
        ({"override_settings": {"token_merging_ratio_hr": 0.3}}, ["override_settings", "token_merging_ratio_hr"]),
        ({"restore_faces": True}, ["restore_faces"]),
        ({"clip_skip": 2}, ["clip_skip"]),
        ({"subseed_strength": 0.1}, ["subseed_strength"]),
        ({"seed_resize_from_w": 64}, ["seed_resize_from_w"]),
        ({"firstphase_width": 64}, ["firstphase_width"]),
        ({"refiner_checkpoint": "other"}, ["refiner_checkpoint"]),
        ({"infotext": "a fox\nSteps: 3"}, ["infotext"]),
        ({"cfg_scale": "nan"}, ["cfg_scale"]),
        ({"steps": "2.5"}, ["steps"]),
        ({"override_settings": {"sd_vae": "other.pt"}}, ["override_settings", "sd_vae"]),
        ({"eta": 0.5}, ["eta"]),
        ({"script_name": "../x.py"}, ["script_name"]),
        ({"styles": ["None", "nice"]}, ["styles"]),
        ({"alwayson_scripts": {"ControlNet": {"args": [{}]}}}, ["alwayson_scripts"]),
        (
            {"alwayson_scripts": {"ControlNet": {"args": [{"enabled": False}, {"enabled": True}]}}},
            ["alwayson_scripts"],
        ),
        ({"alwayson_scripts": {"ADetailer": {"args": [True, {"ad_model": "x.pt"}]}}}, ["alwayson_scripts"]),
        ({"alwayson_scripts": {"on": "text"}}, ["alwayson_scripts"]),
        ({"override_settings": {"token_merging_ratio": 0.3}}, ["override_settings", "token_merging_ratio"]),
        ({"override_settings": {"token_merging_ratio": "half"}}, ["override_settings", "token_merging_ratio"]),
        ({"override_settings": {"token_merging_ratio": True}}, ["override_settings", "token_merging_ratio"]),
        ({"override_settings": []}, ["override_settings"]),
        ({**FROM_IMAGE, "resize_mode": 1}, ["resize_mode"]),
        ({**FROM_IMAGE, "enable_hr": True}, ["enable_hr"]),
        ({**FROM_IMAGE, "denoising_strength": 0}, ["denoising_strength"]),
        ({**FROM_IMAGE, "denoising_strength": 1.1}, ["denoising_strength"]),
        ({**FROM_IMAGE, "denoising_strength": 0.3, "steps": 2}, ["denoising_strength"]),
    ],
)
def test_webui_error_names_the_field(server, change, where):
    path = IMAGE if FROM_IMAGE.items() <= change.items() else TEXT
    answer = server.post(path, {"prompt": "fox", **change})
    assert answer.status_code == 422
    detail = answer.json()["detail"][0]
    assert detail["loc"] == ["body", *where] and detail["msg"]
    assert not re.search("(images|guidance_scale|ratio)=", detail["msg"]), "names that this interface does not have"


@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,", "\n data:image/png;base64,\n"])
@pytest.mark.parametrize(
    "lines",
    [
        lambda text: base64.encodebytes(base64.b64decode(text)).decode(),  # as Ruby's too
        lambda text: "\r\n".join(text[start : start + 76] for start in range(0, len(text), 76)),  # MIME, Android
        lambda text: f" {text}\t\n",
    ],
    ids=["encodebytes", "MIME", "around it"],
)
def test_whitespace_in_base64(server, lines, prefix):
    image = prefix + lines(png(image=halves((200, 10, 30), (0, 99, 0))))
    for path, fields in (
        (IMAGE, {"init_images": [image]}),
        (OPENAI, {"prompt": "fox", "image": image}),
        ("/sdapi/v1/png-info", {"image": image}),
    ):
        answer = server.post(path, fields)
        assert answer.status_code == 200, answer.text
    assert server.engine.calls[-1][0].image.getpixel((0, 0)) == (200, 10, 30)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([], "at least 1 item"),
        ([png(), png()], "at most 1 item"),
        (["/etc/passwd"], "base64"),
        ([png()[:40] + "!" + png()[40:]], "base64"),
        ([png()[:40] + "\u00a0" + png()[40:]], "base64"),
        ([png()[:40] + "\0" + png()[40:]], "base64"),
        ([png()[:40] + "\n" + png()[41:]], "base64"),
        (["http://127.0.0.1:1/x.png"], "base64"),
        (["data:image/svg+xml,<svg/>"], "base64"),
        ([base64.b64encode(pickle.dumps({})).decode()], "none of PNG"),
        ([png(format="GIF")], "none of PNG"),
        ([png()[:80] + "AAAA"], "broken"),
        ([""], "none of PNG"),
        ([png((5000, 5000))], "too large"),
        ([bomb(12_000)], "too large"),
        ([bomb(60_000)], "too large"),
        ([png((1, 2**22))], "1x4194304 is too large or too narrow"),
        ([png((8193, 512))], "sides of 8192"),
        ([png((64, 1025))], "1:16"),
        ([many_scans()], "more than 100 scans"),
        ([None], "valid string"),
    ],
)
def test_images_that_are_refused(server, images, message):
    before = len(server.engine.calls)
    answer = server.post(IMAGE, {"prompt": "fox", "init_images": images})
    assert answer.status_code == 422, answer.text
    detail = answer.json()["detail"][0]
    assert detail["loc"][:2] == ["body", "init_images"] and message in detail["msg"]
    assert len(server.engine.calls) == before


def rotated(image):
    """The image as a rotated camera stores it, with EXIF orientation 6."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return {"image": image.transpose(Image.Transpose.ROTATE_90), "format": "JPEG", "exif": exif, "quality": 95}


def halves(left_color, right_color, mode="RGB", size=(64, 48)):
    image = Image.new(mode, size, left_color)
    image.paste(right_color, (size[0] // 2, 0, *size))
    return image


PALETTE = halves((200, 10, 30), (0, 0, 0)).quantize(2)
GRAY_16 = Image.fromarray(np.repeat([[0x4000, 0xC000]], 48, 0).repeat(32, 1).astype(np.uint16))


@pytest.mark.parametrize(
    ("options", "left_color", "right_color"),
    [
        ({"image": halves((200, 10, 30), (0, 99, 0))}, (200, 10, 30), (0, 99, 0)),
        ({"image": GRAY_16}, (64, 64, 64), (191, 191, 191)),
        ({"image": halves(64, 191, "L")}, (64, 64, 64), (191, 191, 191)),
        ({"image": halves(0, 1, "1")}, (0, 0, 0), (255, 255, 255)),
        ({"image": halves((64, 255), (0, 0), "LA")}, (64, 64, 64), (255, 255, 255)),
        ({"image": halves((9, 8, 7, 255), (9, 8, 7, 0), "RGBA")}, (9, 8, 7), (255, 255, 255)),
        ({"image": PALETTE}, (200, 10, 30), (0, 0, 0)),
        ({"image": PALETTE, "transparency": PALETTE.getpixel((63, 0))}, (200, 10, 30), (255, 255, 255)),
        ({"image": halves((0, 255, 255, 0), (0, 0, 0, 255), "CMYK"), "format": "JPEG"}, (255, 0, 0), (0, 0, 0)),
        (rotated(halves((200, 10, 30), (0, 99, 0))), (200, 10, 30), (0, 99, 0)),
    ],
    ids=["RGB", "16 bits", "L", "1 bit", "LA", "RGBA", "palette", "palette, transparent", "CMYK", "EXIF"],
)
def test_image_modes_are_converted_to_rgb(server, options, left_color, right_color):
    assert server.post(IMAGE, {"init_images": [png(**options)], "width": 64, "height": 48}).status_code == 200
    image = server.engine.calls[-1][0].image
    assert image.mode == "RGB" and image.size == (64, 48)
    for x, color in ((8, left_color), (56, right_color)):
        assert image.getpixel((x, 24)) == pytest.approx(color, abs=3)


# Forms

FORM = {"Content-Type": "multipart/form-data; boundary=x"}
PROMPT = b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nfox\r\n'
FILE = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n%s\r\n' % png_file()
END = b"--x--\r\n"


def test_form_with_an_image(server):
    """Texts may be empty, as clients send None; a prompt may be empty too."""
    body = PROMPT.replace(b"fox", b"") + PROMPT.replace(b"prompt", b"size").replace(b"fox", b"") + FILE + END
    answer = server.post(EDITS, content=body, headers=FORM)
    assert answer.status_code == 200, answer.text
    job = server.engine.calls[-1][0]
    assert (job.prompt, job.size, job.strength, job.image.getpixel((0, 0))) == ("", (48, 64), 0.75, (255, 0, 0))
    assert answer.json()["data"][0].keys() == {"b64_json", "seed"}
    assert json.loads(opened(answer.json()["data"][0]["b64_json"]).text["ppdiffusers_tome"])["strength"] == 0.75


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 422, "image: it must be one file, and 0 were sent"),
        (b"no form", 400, "the form cannot be read"),
        (PROMPT.replace(b"; name=", b"; x=") + FILE + END, 400, '"name" must be provided'),
        (PROMPT + PROMPT + FILE + END, 422, "prompt: it is sent more than once"),
        (b"".join(PROMPT.replace(b"prompt", b"%d" % number) for number in range(51)) + END, 400, "fields is 50"),
        (b"".join(51 * [FILE]) + END, 400, "files is 50"),
        (PROMPT + END, 422, "image: it must be one file, and 0 were sent"),
        (PROMPT + FILE + FILE + END, 422, "image: it must be one file, and 2 were sent"),
        (PROMPT + FILE + FILE.replace(b'"image"', b'"image[]"') + END, 422, "2 were sent"),
        (
            PROMPT + FILE.replace(b'; filename="a.png"', b"") + END,
            422,
            "image: it must be a file, and was sent as a text",
        ),
        (PROMPT + FILE.replace(b'filename="', b"filename*=\"utf-8''") + END, 422, "filename* is none in a form"),
        (PROMPT + FILE.replace(b'"image"; filename=', b'"image[]"; filename*0=') + END, 422, "sent as a text"),
        (PROMPT + FILE + FILE.replace(b'"image"', b'"mask"') + END, 422, "mask: masks are not supported"),
        (PROMPT + FILE + PROMPT.replace(b"prompt", b"mask") + END, 422, "mask: masks are not supported"),
        (PROMPT + FILE + FILE.replace(b'"image"', b'"size"') + END, 422, "size: only the image is a file"),
        (PROMPT + FILE + PROMPT.replace(b"prompt", b"colour") + END, 422, "colour: there is no such field"),
        (PROMPT + FILE + PROMPT.replace(b"prompt", b"size") + END, 422, "size: 'fox' was not exported"),
        (PROMPT + FILE + PROMPT.replace(b"prompt", b"n") + END, 422, "n: Input should be a valid integer"),
        (PROMPT + FILE + PROMPT.replace(b"prompt", b"seed").replace(b"fox", 5000 * b"9") + END, 422, "seed: "),
        (PROMPT + FILE + PROMPT.replace(b"prompt", b"strength").replace(b"fox", b"nan") + END, 422, "finite"),
        (PROMPT + FILE + PROMPT.replace(b"prompt", b"stream") + END, 422, "stream: Input should be a valid boolean"),
        (PROMPT.replace(b"fox", 101 * b"x") + FILE + END, 422, "prompt: 101 characters are too many"),
        (FILE + END, 422, "prompt: Field required"),
        (PROMPT + FILE + 300_000 * b"x", 413, "the body is larger than 200000 bytes"),
    ],
)
def test_forms_that_are_refused(server, body, status, message):
    before = len(server.engine.calls)
    answer = server.post(EDITS, content=body, headers=FORM)
    assert answer.status_code == status and message in answer.json()["error"]["message"], answer.text
    assert len(server.engine.calls) == before


def test_a_large_file_without_a_filename():
    with serving() as server:
        body = PROMPT + FILE.replace(b'; filename="a.png"', b"").replace(png_file(), 2**21 * b"x") + END
        answer = server.post(EDITS, content=body, headers=FORM)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and "1024KB" in message and 'filename="a.png"' in message


@pytest.mark.parametrize("kind", [None, "application/json", "multipart/form-data", "text/plain; boundary=x"])
def test_content_types_other_than_a_form(server, kind):
    headers = {"Content-Type": kind} if kind else {}
    answer = server.post(EDITS, content=PROMPT + FILE + END, headers=headers)
    assert answer.status_code == 415 and "multipart/form-data" in answer.json()["error"]["message"]


def test_form_with_a_large_file(monkeypatch, tmp_path):
    """Above 1 MiB it is a temporary file while it is read."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (700, 700, 3), dtype=np.uint8))
    with serving() as server:
        answer = server.http.post(EDITS, data={"prompt": "fox"}, files={"image": png_file(noise)})
        assert answer.status_code == 200 and len(png_file(noise)) > 2**20, answer.text
        expected = noise.resize((64, 48), Image.Resampling.LANCZOS)
        assert np.abs(np.asarray(server.engine.calls[-1][0].image, int) - np.asarray(expected, int)).max() <= 1
    assert not list(tmp_path.iterdir())


def test_client_that_leaves_within_a_form(server, caplog):
    with server.connect() as client:
        head = f"POST {EDITS} HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\nContent-Type: {FORM['Content-Type']}\r\n"
        client.sendall(head.encode() + b"\r\n" + PROMPT)
    until(lambda: server.requests(499) == 1)
    assert "Traceback" not in caplog.text


def test_edits_need_image_to_image():
    """It is not in the schema then. The answer names the remedy, whatever was sent."""
    with serving(limits=replace(LIMITS, image_to_image=False)) as server:
        for body in (PROMPT + FILE + END, b"no form"):
            answer = server.post(EDITS, content=body, headers=FORM)
            assert answer.status_code == 404 and "--img2img" in answer.json()["error"]["message"]
        assert EDITS not in server.http.get("/openapi.json").json()["paths"]
    assert server.count("requests_total", endpoint=EDITS, status="404") == 2


# Malformed bodies


@pytest.mark.parametrize("path", [OPENAI, TEXT])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"fox"',
        b'{"prompt": "fox", "guidance_scale": NaN, "cfg_scale": NaN}',
        b'{"prompt": "fox", "guidance_scale": Infinity, "cfg_scale": -Infinity}',
        b'{"prompt": "fox", "guidance_scale": 1e999, "cfg_scale": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "fox", "\\ud800": 1}',
        b'{"prompt": "fox", "seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 20_000,
        b"\xff\xfe{}",
        b"\x80\x04}.",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_malformed_bodies(server, path, body):
    answer = server.post(path, content=body, headers=JSON_HEADER)
    assert answer.status_code in (400, 413, 422), answer.text
    error = answer.json()
    assert error["error"]["message"] if path == OPENAI else error["detail"]
    assert "Traceback" not in answer.text and "site-packages" not in answer.text


@pytest.mark.parametrize("path", [OPENAI, TEXT])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\xef\xbb\xbf{}", "it begins with a byte order mark (BOM); send it without one"),
        ('{"prompt": "fox"}'.encode("utf-16"), "it is UTF-16; send UTF-8 without a byte order mark"),
        (codecs.BOM_UTF16_BE + "{}".encode("utf-16-be"), "it is UTF-16; send UTF-8 without a byte order mark"),
        (gzip.compress(b'{"prompt": "fox"}'), "it is compressed by gzip; send it as it is"),
    ],
    ids=["BOM", "UTF-16", "UTF-16BE", "gzip"],
)
def test_bodies_in_another_encoding_are_named(server, path, body, message):
    answer = server.post(path, content=body, headers=JSON_HEADER)
    error = answer.json()
    text = error["error"]["message"] if path == OPENAI else error["detail"]
    assert answer.status_code == 400 and text.startswith(f"the body is not JSON: {message}")


@pytest.mark.parametrize("path", [OPENAI, EDITS, TEXT])
def test_compressed_bodies_are_refused(server, path):
    for encoding, named in (("gzip", "gzip"), ("GZip, br", "br, gzip"), ("zstd", "zstd")):
        headers = {**JSON_HEADER, "Content-Encoding": encoding}
        answer = server.post(path, content=gzip.compress(b'{"prompt": "fox"}'), headers=headers)
        assert answer.status_code == 415 and answer.headers["accept-encoding"] == "identity"
        assert f"the body is compressed (Content-Encoding: {named}): send it as it is" in answer.text
    for encoding in ("identity", "utf-8", ""):  # the second one is wrong, but some clients send it
        headers = {**JSON_HEADER, "Content-Encoding": encoding}
        assert server.post(OPENAI, content=b'{"prompt": "fox"}', headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (OPENAI, b"{" + b",".join(b'"%d":0' % number for number in range(1_000_000)) + b"}", 413),
        (IMAGE, b'{"init_images": [' + 8_000_000 * b"0," + b"0]}", 413),
        (IMAGE, b"[" + 5_000_000 * b"[]," + b"[]]", 413),
        (IMAGE, b'{"init_images": ["' + 16_000_000 * b"A" + b'"]}', 422),
    ],
    ids=["fields", "zeros", "lists", "base64"],
)
def test_large_bodies_are_cheap(path, body, status):
    """Three bodies of 10 to 16 MB at once. Without the limit, one of unknown fields takes 17 s and 1.3 GB."""
    process, peak = psutil.Process(), 0
    with serving() as server, ThreadPoolExecutor(3) as pool:
        before = process.memory_info().rss
        begin = process_time()  # the processor's time, which other processes do not change
        answers = [pool.submit(server.post, path, content=body, headers=JSON_HEADER) for _ in range(3)]
        while not all(answer.done() for answer in answers):
            assert server.http.get("/health").status_code == 200
            peak = max(peak, process.memory_info().rss)
        assert {answer.result().status_code for answer in answers} == {status}
        assert all(len(answer.result().content) < 500 for answer in answers)
    assert process_time() - begin < 15 and peak - before < 3 * 300 * 2**20


@pytest.mark.parametrize("field", ["batch_size", "n_iter", "steps", "seed", "width", "cfg_scale", "subseed"])
def test_numbers_of_3000_digits(server, field):
    answer = server.post(TEXT, content=b'{"%s": %s}' % (field.encode(), b"9" * 3000), headers=JSON_HEADER)
    assert answer.status_code == 422 and answer.json()["detail"][0]["loc"] == ["body", field]


@pytest.mark.parametrize("path", [OPENAI, TEXT])
def test_a_missing_content_type_is_json(server, path):
    """Browsers send such a body for a page without a preflight, but not without the page's origin."""
    assert server.post(path, content=b'{"prompt": "fox"}').status_code == 200
    page = {"Origin": "https://evil.example"}
    assert server.post(path, content=b'{"prompt": "fox"}', headers=page).status_code == 403


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", "application/pickle"])
def test_content_types_other_than_json(server, kind):
    headers = {"Content-Type": kind}
    assert server.post(OPENAI, content=b'{"prompt": "fox"}', headers=headers).status_code == 415


def test_large_body_is_refused_by_its_header(server):
    with server.connect() as client:
        client.sendall(f"POST {OPENAI} HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n".encode())
        assert b" 413 " in client.recv(4096), "answered before any of the body came"


def test_large_body_in_chunks_is_refused_before_it_ends(server):
    """The connection can be used again after the rest has come."""
    half = b"186a1\r\n" + 100_001 * b" " + b"\r\n"
    with server.connect() as client:
        client.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: x\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n".encode())
        client.sendall(2 * half)
        assert read_answer(client) == (413, {"detail": "the body is larger than 200000 bytes"})
        client.sendall(20 * half + b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_answer(client) == (200, {"state": "ready", "engines": 1})


def test_body_with_a_length_and_in_chunks(server):
    """Another server in front of this one may read another end of the body than this one, and so other requests."""
    with server.connect() as client:
        lengths = "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n"
        client.sendall(f"POST {OPENAI} HTTP/1.1\r\nHost: x\r\n{JSON}{lengths}\r\n0\r\n\r\n".encode())
        status, body = read_answer(client)
        assert status == 400 and "both a Content-Length and a Transfer-Encoding" in body["error"]["message"]
        assert client.recv(4096) == b"", "the connection is closed"


@pytest.mark.parametrize("length", ["+5", "-1", "1_0", "", "5 5", "0x5", 5_000 * "9", "٣"])
def test_lengths_that_are_no_numbers(server, length, caplog):
    """Without h11, as behind another server."""
    client = TestClient(server.server.config.app, "http://localhost")
    answer = client.post(OPENAI, headers={"Content-Length": length.encode(), **JSON_HEADER})
    assert answer.status_code == 400 and "Content-Length" in answer.json()["error"]["message"]
    assert len(answer.content) < 300
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]  # httpx logs each request


def test_http_2_is_named(server, caplog):
    """The preface is all that the server reads: neither a name nor a key helps."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # and empty settings
    with serving(config=AppConfig(api_key=KEY)) as with_key:
        for one in (server, with_key):
            with one.connect() as client:
                client.sendall(preface)
                status, body = read_answer(client)
                assert status == 505 and body["error"]["code"] == "http_version_not_supported"
                assert "HTTP/1.1" in body["error"]["message"] and "Host" not in body["error"]["message"]
                assert client.recv(4096) == b"", "the connection is closed"
    assert "Invalid HTTP" not in caplog.text


@pytest.mark.parametrize("config", [AppConfig(), AppConfig(api_key=KEY, origins=("https://good.example",))])
def test_lifespan_and_websockets_in_another_server(config, caplog):
    """Other servers send events of the lifespan, and pass on handshakes of websockets, which they answer with 403."""
    with serving(config=config) as server:
        with TestClient(server.server.config.app, "http://localhost") as client:  # sends startup and shutdown
            assert client.get("/health").status_code == 200
            for path in ("/", "/health", "/queue/join", TEXT):
                with pytest.raises(WebSocketDisconnect) as caught, client.websocket_connect(path):
                    pass
                assert caught.value.code == 1000
        assert server.requests(200) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# Hosts and origins


def test_probes_by_any_name_of_the_server(server):
    """A kubelet uses the pod's address, and a load balancer may send no name. Nothing else answers them."""
    for host in ("10.42.0.17:8000", "[fd00::17]:8000", "evil.example", ""):
        headers = {"Host": host}
        for path in ("/health", "/ready", "/health/"):
            for method in ("GET", "HEAD"):
                assert server.http.request(method, path, headers=headers).status_code == 200, (host, path)
        others = {route.path.replace("{name:path}", "health") for route in server.server.config.app.routes}
        for path in (*others - {"/health", "/ready"}, "/health/x", "/healthz", "//health", "/ready?/v1/models/"):
            expected = 200 if path.startswith("/ready?") else 400
            assert server.http.get(path, headers=headers).status_code == expected, (host, path)
    with server.connect() as client:
        client.sendall(b"GET /ready HTTP/1.0\r\n\r\n")
        assert read_answer(client) == (200, {"state": "ready", "engines": 1})
    page = {"Host": "evil.example", "Origin": "http://evil.example"}
    assert server.http.post("/health", headers=page).status_code in (403, 405)


@pytest.mark.parametrize(
    ("host", "shown", "remedy"),
    [
        ("evil.example:80", "'evil.example:80'", "start it with --allow-host evil.example"),
        ("MyPC.Local.", "'MyPC.Local.'", "start it with --allow-host mypc.local"),
        ("[2001:DB8::7]:80", "'[2001:DB8::7]:80'", "start it with --allow-host '[2001:db8::7]'"),
        ("", "''", "no host can have it, and only --allow-host '*' accepts it"),
        (1000 * "e", f"'{100 * 'e'}'", f"start it with --allow-host {100 * 'e'}"),
    ],
)
def test_refused_host_is_named_with_the_option_that_accepts_it(server, host, shown, remedy):
    openai, webui = (server.http.get(path, headers={"Host": host}) for path in ("/v1/models", "/sdapi/v1/options"))
    assert openai.status_code == webui.status_code == 400
    error = openai.json()["error"]
    assert error["message"] == f"the Host {shown} is not a name of this server: {remedy}"
    assert error["code"] == "host_not_allowed" and webui.json()["detail"] == error["message"]
    if len(host) < 100:
        option = shlex.split(remedy)[-1] if "start" in remedy else "*"
        assert AppConfig(hosts=(option,)).is_allowed_host(host)


def test_hosts_by_name_and_subdomain():
    config = AppConfig(hosts=("www.one.example", "*.two.example", "2001:db8::5", "[2001:db8::6]"))
    for host in ("www.one.example", "www.one.example:8000", "a.two.example", "b.a.two.example:1"):
        assert config.is_allowed_host(host), host
    for host in ("[::1]:80", "[::1]", "[2001:db8::5]:80", "[2001:db8::6]"):
        assert config.is_allowed_host(host), host
    for host in ("[2001:db8::7]:80", "[2001:db8::5", "::1"):
        assert not config.is_allowed_host(host), host
    for host in ("localhost.", "LOCALHOST:80", "Www.One.Example", "www.one.example.:80", "A.TWO.example."):
        assert config.is_allowed_host(host), host
    for option in ("MyPC.Local", "mypc.local.", "*.LOCAL", "*.local."):
        for host in ("mypc.local", "MyPC.Local:8000", "MYPC.LOCAL."):
            assert AppConfig(hosts=(option,)).is_allowed_host(host), (option, host)
    for host in ("one.example", "two.example", "www.one.example.evil", "evil-two.example", "[evil]", "", "evil:x"):
        assert not config.is_allowed_host(host), host
    assert AppConfig(hosts=("*",)).is_allowed_host("any.example") and AppConfig(api_key=KEY).is_allowed_host("any")


def preflight(server, origin, method="POST", headers="content-type", path=OPENAI, **more):
    asked = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": headers, **more}
    return server.http.options(path, headers={"Origin": origin, **asked})


# Those of OpenAI's client in JavaScript, and some that nobody has thought of.
STAINLESS = ("arch", "helper-method", "lang", "os", "package-version", "retry-count", "runtime", "runtime-version")
ASKED = ["authorization", "content-type", *(f"x-stainless-{name}" for name in STAINLESS), "x-new", "traceparent"]


@pytest.mark.parametrize("origin", ["https://good.example", "*"])
def test_preflight_allows_all_headers(origin):
    with serving(config=AppConfig(origins=(origin,))) as server:
        answer = preflight(server, "https://good.example", headers=",".join(ASKED))
        assert answer.status_code == 200, answer.text
        assert answer.headers["access-control-allow-headers"].split(",") == ASKED
        assert answer.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize("origin", ["https://good.example", "*"])
def test_preflight_of_a_private_network(origin):
    """Chromium asks it for a page from the internet, and does not send the request without the answer."""
    asked, allows = "Access-Control-Request-Private-Network", "access-control-allow-private-network"
    with serving(config=AppConfig(origins=(origin,))) as server:
        answer = preflight(server, "https://good.example", **{asked: "true"})
        assert (answer.status_code, answer.headers.get(allows)) == (200, "true")
        assert answer.headers["access-control-allow-headers"] == "content-type"
        assert allows not in preflight(server, "https://good.example").headers
        put = preflight(server, "https://good.example", method="PUT", **{asked: "true"})
        assert put.status_code == 405 and allows not in put.headers
        assert put.headers["allow"] == "POST" and put.json()["error"]["message"]
        assert put.headers["access-control-allow-origin"] == origin
        if origin != "*":
            evil = preflight(server, "https://evil.example", **{asked: "true"})
            assert evil.status_code == 403 and allows not in evil.headers


def test_other_origins_are_refused(server):
    """In JSON, also their preflights, which Starlette would answer in plain text."""
    page = {"Origin": "https://evil.example"}
    for path in (OPENAI, EDITS, TEXT, "/sdapi/v1/interrupt", "/sdapi/v1/options", "/sdapi/v1/nosuch"):
        asked, sent = preflight(server, page["Origin"], path=path), server.post(path, {"prompt": "fox"}, headers=page)
        for answer in (asked, sent):
            assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
            body = answer.json()
            message = body["error"]["message"] if path.startswith("/v1/") else body["detail"]
            assert "--allow-origin" in message and "'https://evil.example'" in message
    assert server.count("requests_total", endpoint="other", status="403") >= 2


@pytest.mark.parametrize(
    ("origin", "remedy"),
    [
        ("https://ok.example", "start the server with --allow-origin and this origin"),
        ("null", "every sandboxed page and every file has this origin"),
        ("https://ok.example/", "an origin has no path: write 'https://ok.example'"),
        ("ok.example", "it must be a scheme and a host"),
    ],
)
def test_refused_origin_is_named_with_a_remedy_that_works(server, origin, remedy):
    error = server.post(OPENAI, {"prompt": "fox"}, headers={"Origin": origin}).json()["error"]
    assert error["message"].startswith(f"web pages of {origin!r} are not allowed: {remedy}")
    if "--allow-origin" in error["message"]:
        assert AppConfig(origins=(origin,)).is_allowed_origin(origin)


def test_bugs_outside_of_the_checks_are_json(monkeypatch):
    def fail(self, origin):
        raise RuntimeError("secret")

    monkeypatch.setattr(middleware.OriginMiddleware, "is_allowed_origin", fail)
    with serving(config=AppConfig(origins=("https://good.example",))) as server:
        for path, key in ((OPENAI, "error"), (TEXT, "detail")):
            answer = server.post(path, {"prompt": "fox"}, headers={"Origin": "https://good.example"})
            assert answer.status_code == 500 and "log" in str(answer.json()[key]) and "secret" not in answer.text


def test_own_page_is_allowed(server):
    """Browsers send Origin with a POST of the server's own page too, whatever its name."""
    for host in ("localhost", f"127.0.0.1:{server.port}", "[::1]:80"):
        headers = {"Host": host, "Origin": f"http://{host}"}
        assert server.post(OPENAI, {"prompt": "fox"}, headers=headers).status_code == 200
    headers = {"Host": "evil.example", "Origin": "http://evil.example"}
    assert server.post(OPENAI, {"prompt": "fox"}, headers=headers).status_code == 400, "rebound DNS"
    for host, origin in (
        ("LOCALHOST", "http://localhost"),
        ("localhost", "http://LOCALHOST"),
        ("localhost.", "http://localhost"),
        ("x:443", "https://x"),
        ("x", "http://x:80"),
    ):
        headers = {"Host": host, "Origin": origin}
        assert server.post(OPENAI, {"prompt": "fox"}, headers=headers).status_code == 200, headers
    for origin in ("http://x:443", "https://x:80", "http://x..", "http://localhost:80"):
        headers = {"Host": "x", "Origin": origin}
        assert server.post(OPENAI, {"prompt": "fox"}, headers=headers).status_code == 403, headers
    own = f"127.0.0.1:{server.port}"
    for origin in ("null", "", f"http://{own}1", f"http://u@{own}", f"capacitor://{own}"):
        assert server.post(OPENAI, {"prompt": "fox"}, headers={"Origin": origin}).status_code == 403


def test_allowed_origins():
    """The answer repeats the origin as the browser wrote it, because browsers compare it with theirs."""
    with serving(config=AppConfig(steps=2, api_key=KEY, origins=("https://good.example",))) as server:
        for origin, status in (
            ("https://good.example", 200),
            ("https://GOOD.example", 200),
            ("https://no.example", 403),
        ):
            asked = preflight(server, origin)
            assert asked.status_code == status
            headers = {"Origin": origin, "Authorization": f"Bearer {KEY}"}
            answer = server.post(OPENAI, {"prompt": "fox"}, headers=headers)
            assert answer.status_code == status
            if status == 200:
                assert asked.headers["access-control-allow-origin"] == origin
                assert answer.headers["access-control-allow-origin"] == origin


def test_refusals_have_cors_headers_for_allowed_origins(monkeypatch):
    """Without them a page only learns that its request failed, not why."""
    origin = "https://good.example"
    with serving(config=AppConfig(api_key=KEY, origins=(origin,), body_bytes=100)) as server:

        def status(expected, sent_by=origin, key=KEY, **request):
            headers = {"Origin": sent_by, "Authorization": f"Bearer {key}", **JSON_HEADER}
            answer = server.http.post(OPENAI, headers=headers, **request)
            assert answer.status_code == expected, answer.text
            return answer.headers.get("access-control-allow-origin")

        assert status(401, key="wrong", content=b"{}") == origin
        assert status(413, content=101 * b" ") == origin
        assert status(413, content=iter([101 * b" "])) == origin
        assert status(422, content=b"{}") == origin
        assert status(401, sent_by="https://evil.example", key="wrong", content=b"{}") is None
        assert status(403, sent_by="https://evil.example", content=b"{}") is None
        monkeypatch.setattr(RequestMiddleware, "_check_head", None)  # a bug
        assert status(500, content=b"{}") == origin
        assert preflight(server, origin).status_code == 200 and server.requests(200) == 1, "preflights count"


def test_refused_host_has_cors_headers_for_allowed_origins():
    with serving(config=AppConfig(origins=("https://good.example",))) as server:
        headers = {"Origin": "https://good.example", "Host": "other.example"}
        answer = server.post(OPENAI, {"prompt": "fox"}, headers=headers)
        assert answer.status_code == 400 and answer.headers["access-control-allow-origin"] == "https://good.example"


ORIGINS = (
    "https://example.org",
    "http://localhost:5173",
    "http://[::1]:3000",
    "chrome-extension://abcdefghijklmnopabcdefghijklmnop",
    "moz-extension://6a1b2c3d-0000-4000-8000-000000000000",
    "capacitor://localhost",
    "tauri://localhost",
    "app://obsidian.md",
)


@pytest.mark.parametrize(
    ("option", "sent"),
    [
        *((origin, origin) for origin in ORIGINS),
        ("https://ok.example:443", "https://ok.example"),
        ("https://ok.example", "https://ok.example:443"),
        ("HTTP://OK.example:80", "http://ok.example"),
        ("https://ok.example.", "https://ok.example"),
        ("https://ok.example:8443", "https://OK.example.:8443"),
        ("http://[2001:DB8::5]:80", "http://[2001:db8::5]"),
    ],
)
def test_origins_of_pages_extensions_and_desktop_shells(option, sent):
    """They are compared as DNS does."""
    config = AppConfig(origins=(option,))
    assert config.is_allowed_origin(sent)
    for other in ("http://ok.example:443", "https://ok.example:444", "https://ok.example.evil", "app://other"):
        assert not config.is_allowed_origin(other), other


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hosts": ("a*",)}, "it must be like example.org or"),
        ({"hosts": ("http://a",)}, "it must be like example.org or"),
        ({"origins": ("a.example",)}, "it must be a scheme and a host"),
        ({"origins": ("https://",)}, "it must be a scheme and a host"),
        ({"origins": ("file://",)}, "it must be a scheme and a host"),
        ({"origins": ("https://*.example",)}, "it must be a scheme and a host"),
        ({"origins": ("https://a b",)}, "it must be a scheme and a host"),
        ({"origins": ("",)}, "it must be a scheme and a host"),
        ({"origins": ("https://a.example/",)}, "write 'https://a.example'"),
        ({"origins": ("app://obsidian.md/index.html?a#b",)}, "write 'app://obsidian.md'"),
        ({"origins": ("https://good.example", "null")}, "every sandboxed page"),
    ],
)
def test_malformed_hosts_and_origins(wrong, message):
    with pytest.raises(ToMeConfigError, match="is not allowed") as caught:
        AppConfig(**wrong)
    (texts,) = wrong.values()
    assert message in str(caught.value) and repr(texts[-1]) in str(caught.value)


def test_no_host_header_gets_around_the_key(caplog):
    """Routing reads the path of the request line, so nothing else may decide whether a request needs the key."""
    with serving(config=AppConfig(steps=2, api_key=KEY, origins=("https://good.example",))) as server:
        app = server.server.config.app
        assert_refused_whatever_the_host(app, server.http)
        assert_refused_whatever_the_host(app, TestClient(app))  # without h11, as behind another server
        assert server.engine.calls == [] and server.http.get("/health").status_code == 200
    assert "Traceback" not in caplog.text


def test_a_path_cannot_forge_lines_of_the_log(caplog, monkeypatch):
    monkeypatch.setattr(RequestMiddleware, "_check_head", None)  # a bug
    with serving() as server:
        answer = server.http.get("/x%0d%0a2026%20forged%1b[2J")
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    logged = [record.getMessage() for record in caplog.records if record.name == middleware.__name__]
    assert logged == [r"a request to '/x\r\n2026 forged\x1b[2J' failed"]


# The OpenAPI schema


def test_openapi_schema_has_all_bounds_and_answers():
    with serving(config=AppConfig(api_key=KEY)) as server:
        schema = server.http.get("/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()
    models, paths = schema["components"]["schemas"], schema["paths"]
    (form,) = (one["schema"] for one in paths[EDITS]["post"]["requestBody"]["content"].values())
    not_read = {"script_args", "comments", "force_task_id", "latent_mask", "override_settings", "init_images", "image"}
    for name in ("ImageRequest", "TwoPassRequest", "ImageToImageRequest", "EditRequest"):
        model = form if name == "EditRequest" else models[name]
        assert model["additionalProperties"] is (name in ("TwoPassRequest", "ImageToImageRequest"))
        for field, kinds in model["properties"].items():
            for kind in kinds.get("anyOf", [kinds]):
                bounded = {"maxLength", "maxItems", "maxProperties", "maximum", "enum", "$ref"} & set(kind)
                unbounded = field in not_read or field.startswith(("hr_", "firstpass_"))
                assert bounded or kind["type"] in ("boolean", "null", "number") or unbounded, (name, field)
    steps = {"type": "integer", "minimum": 1, "maximum": 50}
    assert models["ImageRequest"]["properties"]["steps"]["anyOf"][0] == steps
    assert models["TwoPassRequest"]["properties"]["sampler_name"]["anyOf"][0]["enum"][3:] == ["DDIM", "ddim", "k_ddim"]
    expected = {"200", "400", "401", "403", "413", "415", "422", "429", "500", "503", "504"}
    assert form["required"] == ["prompt", "image"] and form["properties"]["image"]["format"] == "binary"
    for path, more in ((OPENAI, {"404"}), (EDITS, {"404"}), (TEXT, {"409"}), (IMAGE, {"409"})):
        operation = paths[path]["post"]
        assert set(operation["responses"]) == expected | more
        assert operation["security"] == [{"HTTPBearer": []}, {"HTTPBasic": []}]
        assert all("schema" in one["content"]["application/json"] for one in operation["responses"].values())
    assert "security" not in paths["/health"]["get"]
    with serving() as server:
        assert "securitySchemes" not in server.http.get("/openapi.json").json()["components"]


def test_ratio_zero_is_one_ratio():
    """-0.0 equals 0.0, but is another text: in files, in their names, and in the options."""
    assert json.dumps(Job("fox", Size(64, 64), -0.0, seed=0).settings()) == json.dumps(
        Job("fox", Size(64, 64), 0, 0).settings()
    )
    with serving() as server:
        body = server.post(OPENAI, {"prompt": "fox", "tome_ratio": -0.0}).json()
        assert opened(body["data"][0]["b64_json"]).text["parameters"].count("Token merging ratio: 0.0") == 1
        options = {"token_merging_ratio": -0.0, "token_merging_ratio_hr": -0.0}
        assert server.post("/sdapi/v1/options", options).status_code == 200
        assert "-0.0" not in server.http.get("/sdapi/v1/options").text
        refused = server.post("/sdapi/v1/options", {"token_merging_ratio_hr": 0.3}).json()["detail"][0]["msg"]
        assert refused.endswith("it must be one of 0.0, 0.5"), refused
        schema = server.http.get("/openapi.json").text
        assert '"examples":[0.0,0.5]' in schema and '"examples":[0.0,0.5,0.0]' not in schema


def test_one_rule_for_ratios():
    """Both interfaces, options and second passes take what `load_pipeline` takes: the same ratio in six digits."""
    third, near, other = 1 / 3, 0.333333, 0.3333
    same_size = {"enable_hr": True, "hr_scale": 1, "seed": 1}
    with serving(limits=replace(LIMITS, ratios=(0.5, third))) as server:

        def ratios(path, body):
            answer = server.post(path, body)
            assert answer.status_code == 200, answer.text
            job = server.engine.calls[-1][0]
            return job.ratio, job.second_pass and job.second_pass.ratio

        def options(ratio):
            return {"override_settings": {"token_merging_ratio": ratio}}

        for ratio in (third, near):
            assert ratios(OPENAI, {"prompt": "fox", "tome_ratio": ratio}) == (third, None)
            assert ratios(TEXT, options(ratio)) == ratios(IMAGE, FROM_IMAGE | options(ratio)) == (third, None)
            assert ratios(TEXT, same_size | options(ratio)) == (third, third)
            for name, path, body in (
                ("token_merging_ratio", TEXT, {}),
                ("token_merging_ratio_hr", TEXT, same_size),
                ("token_merging_ratio_img2img", IMAGE, FROM_IMAGE),
            ):
                assert ratios(path, body | {"override_settings": {name: ratio}})[name.endswith("_hr")] == third
                assert server.post("/sdapi/v1/options", {name: ratio}).status_code == 200
                assert server.http.get("/sdapi/v1/options").json()[name] == third
                assert ratios(path, body)[name.endswith("_hr")] == third
        for body in ({"prompt": "fox", "tome_ratio": other}, options(other)):
            answer = server.post(OPENAI if "prompt" in body else TEXT, body)
            assert answer.status_code == 422 and str(third) in answer.text, answer.text
        models = server.http.get("/openapi.json").json()["components"]["schemas"]
    names = ("token_merging_ratio", "token_merging_ratio_hr", "token_merging_ratio_img2img")
    for model, name in (("ImageRequest", "tome_ratio"), *(("Options", name) for name in names)):
        schema = models[model]["properties"][name]["anyOf"][0]
        assert "enum" not in schema and third in schema["examples"] and schema["minimum"] <= near


def test_integers_as_in_json_schema(server):
    assert server.post(OPENAI, {"prompt": "fox", "n": 2.0, "output_compression": 100.0}).status_code == 200
    assert server.post(OPENAI, {"prompt": "fox", "stream": 0}).status_code == 422
    assert server.post(OPENAI, {"prompt": "fox", "partial_images": False}).status_code == 422


def test_seeds_wrap_around(server):
    body = server.post(OPENAI, {"prompt": "fox", "seed": 2**32 - 1, "n": 2}).json()
    assert [one["seed"] for one in body["data"]] == [2**32 - 1, 0]


def test_methods(server):
    assert server.http.get(OPENAI).status_code == 405 and "detail" in server.http.get(TEXT).json()
    assert server.http.request("OPTIONS", "/sdapi/v1/options").headers["allow"] == "GET, POST"
    for path in ("/health", "/ready"):
        answer = server.http.head(path)
        assert answer.status_code == 200 and answer.content == b""


def test_health_reports_the_reason():
    """The application is asked itself, because a server whose image thread has failed ends at its next tick."""
    with serving() as server:
        client = TestClient(server.server.config.app, "http://localhost")
        server.pool.state = "failed"
        answer = client.get("/health")
        assert answer.status_code == 503
        assert answer.json() == {"state": "failed", "engines": 1, "reason": server.pool.unhealthy_reason}
        assert client.head("/health").status_code == 503


# Failures, metrics, keys


def test_metrics():
    with serving() as server:
        server.post(OPENAI, {"prompt": "fox", "n": 2})
        server.post(OPENAI, {"prompt": "fox", "n": 9})
        server.http.get("/no/such/" + "x" * 100)
        page = server.http.get("/metrics").text
    assert f'ppdiffusers_tome_requests_total{{endpoint="{OPENAI}",status="200"}} 1.0' in page
    assert f'ppdiffusers_tome_requests_total{{endpoint="{OPENAI}",status="422"}} 1.0' in page
    assert 'ppdiffusers_tome_requests_total{endpoint="other",status="404"} 1.0' in page and "xxx" not in page
    assert 'ppdiffusers_tome_images_total{outcome="generated"} 2.0' in page
    assert "ppdiffusers_tome_batch_images_sum 2.0" in page and "ppdiffusers_tome_ready 1.0" in page
    assert "process_resident_memory_bytes" in page


def test_key():
    def basic(text):
        return "Basic " + base64.b64encode(text.encode()).decode()

    wrong = [None, "", KEY, "Bearer", "Bearer wrong", f"Bearer {KEY}x", "Basic !!", basic("me:wrong"), f"Digest {KEY}"]
    with serving(config=AppConfig(api_key=KEY, steps=2)) as server:
        for sent in wrong:
            headers = {} if sent is None else {"Authorization": sent}
            for path in (OPENAI, TEXT):
                answer = server.post(path, {"prompt": "fox"}, headers=headers)
                assert answer.status_code == 401, sent
                assert answer.headers["www-authenticate"].startswith("Bearer" if path == OPENAI else "Basic")
            assert server.http.get("/metrics", headers=headers).status_code == 401
            assert server.http.get("/openapi.json", headers=headers).status_code == 401
        assert server.engine.calls == []
        assert server.http.get("/health").status_code == server.http.get("/ready").status_code == 200
        for right in (f"Bearer {KEY}", f"bearer {KEY}", basic(f"anybody:{KEY}")):
            for path in (OPENAI, TEXT):
                assert server.post(path, {"prompt": "fox"}, headers={"Authorization": right}).status_code == 200
        latin = server.http.build_request("GET", "/v1/models", headers={"Authorization": b"Bearer \xff\xfe"})
        assert server.http.send(latin).status_code == 401


@pytest.mark.parametrize("key", ["", "with space", "schlüssel", "line\n"])
def test_malformed_keys(key):
    with pytest.raises(ToMeConfigError, match="PPDIFFUSERS_TOME_API_KEY"):
        AppConfig(api_key=key)


def test_key_is_not_in_the_repr():
    assert KEY not in repr(AppConfig(api_key=KEY))


def test_errors_survive_pickling():
    for error in (JobError("steps", "too many"), EngineLostError("lost"), GenerationError("failed")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)
