"""An engine's images are those of the pipeline, whatever is in their batch; and `serve` starts, refuses and stops."""

import base64
import io
import json
import logging
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import httpx
import numpy as np
import openai
import paddle
import ppdiffusers
import pytest
from conftest import tiny_pipeline
from exporting import export_linked, export_once
from PIL import Image
from ppdiffusers import (
    EulerAncestralDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
    UniPCMultistepScheduler,
)
from serving_support import LIMITS, OPENAI, TEXT, FakeEngine, serving, until
from zoo.parts import ONE_DEPTH, ONE_LEVEL, SDXL, sdxl, unet

from ppdiffusers_tome import ToMeConfigError, ToMeError, ToMeExportError
from ppdiffusers_tome.cli import FAILED, USAGE, main
from ppdiffusers_tome.commands import serve as serve_command
from ppdiffusers_tome.errors import install_command
from ppdiffusers_tome.inference import load_pipeline, read_manifest
from ppdiffusers_tome.run import pipeline
from ppdiffusers_tome.run.defaults import ModelDefaults, read_defaults
from ppdiffusers_tome.run.models import ExportedUNet
from ppdiffusers_tome.run.sizes import Size
from ppdiffusers_tome.serving.app import create_app
from ppdiffusers_tome.serving.app_config import KEY_VARIABLE, AppConfig, url_of
from ppdiffusers_tome.serving.engine import Engine, load_engine, load_warm_engine, scheduler_failure, warm_up_jobs
from ppdiffusers_tome.serving.image_engine import DETERMINISTIC, ServedModel
from ppdiffusers_tome.serving.jobs import MAX_STEPS, AbandonedError, GenerationError, Job, JobError, SecondPass
from ppdiffusers_tome.serving.limits import Limits
from ppdiffusers_tome.serving.offline import generate_batch
from ppdiffusers_tome.serving.pool import EnginePool
from ppdiffusers_tome.serving.prometheus import Metrics
from ppdiffusers_tome.serving.prompt_file import Prompt
from ppdiffusers_tome.serving.queue import JobQueue
from ppdiffusers_tome.serving.server import ServerFailedError, serve

JOB = Job("a 3d render of fox", size=Size(32, 48), ratio=0.5, seed=3, steps=3, guidance_scale=2.0)
NEGATIVE = [{"negative_prompt": text} for text in ("blue", "red", "a dog")]
JOBS = [
    replace(JOB, **NEGATIVE[0]),
    replace(JOB, prompt="owl", seed=4, **NEGATIVE[1]),
    replace(JOB, prompt="", seed=2**32 - 1, **NEGATIVE[2]),
]


@pytest.fixture(scope="module")
def engine(exported_folder):
    return load_engine(exported_folder, threads=1)


def pixels(image):
    return np.asarray(image, dtype="int32")


def difference(one, other):
    """The largest difference of two images, in levels of 255."""
    return np.abs(pixels(one) - pixels(other)).max()


def test_image_does_not_depend_on_its_batch(engine):
    together = engine.generate(JOBS)
    alone = [engine.generate([job])[0] for job in JOBS]
    assert [image.size for image in together] == 3 * [(48, 32)]
    assert max(map(difference, together, alone)) <= 1, "equal but for rounding, which depends on the batch"
    assert difference(alone[0], alone[1]) > 10


def test_image_equals_the_pipelines(engine, exported_folder):
    pipe = load_pipeline(exported_folder, threads=1)
    pipe.set_progress_bar_config(disable=True)
    paddle.seed(3)
    own = pipe(JOB.prompt, height=32, width=48, num_inference_steps=3, guidance_scale=2.0).images[0]
    assert difference(engine.generate([JOB])[0], own) == 0


def sdxl_pipeline(**settings):
    """A tiny pipeline of SDXL, always with the same weights."""
    paddle.seed(0)
    changes = {**SDXL, **ONE_LEVEL, **ONE_DEPTH}
    return StableDiffusionXLPipeline(**sdxl(unet=unet(**changes)), add_watermarker=False, **settings)


@pytest.fixture(scope="module")
def sdxl_folder(tmp_path_factory):
    return export_once(tmp_path_factory, "sdxl", sdxl_pipeline, 0.5, [(32, 48)], format="onnx")


@pytest.mark.parametrize("negative", ["", "a red apple"])
def test_images_of_sdxl_equal_those_of_its_pipeline(sdxl_folder, negative):
    """It computes with zeros where there is no negative prompt, and not with the embedding of an empty text."""
    manifest = read_manifest(sdxl_folder)
    limits = Limits(manifest.sizes, manifest.ratios, image_to_image=True)
    start = Image.fromarray(np.random.RandomState(0).randint(0, 255, (32, 48, 3), dtype="uint8"))
    file = io.BytesIO()
    start.save(file, "PNG")
    request = {"prompt": "a fox", "seed": 3, "steps": 4, "guidance_scale": 5.0, "negative_prompt": negative}
    from_image = {"image": base64.b64encode(file.getvalue()).decode(), "strength": 0.5}
    served = []
    with serving(load_engine(sdxl_folder, threads=1), limits) as server:
        for body in (request, request | from_image):
            answer = server.post(OPENAI, body)
            assert answer.status_code == 200, answer.text
            served.append(Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))))
    pipe = sdxl_pipeline()
    settings = {"num_inference_steps": 4, "guidance_scale": 5.0, "negative_prompt": negative or None}
    starts = [{"height": 32, "width": 48}, {"image": start, "strength": 0.5}]
    with pipe.tome(ratio=0.5):
        for one, image, arguments in zip((pipe, pipeline.from_image(pipe)), served, starts, strict=True):
            one.set_progress_bar_config(disable=True)
            paddle.seed(3)
            assert difference(one("a fox", **settings, **arguments).images[0], image) <= 1
            paddle.seed(3)
            other = settings | {"negative_prompt": "" if not negative else None}
            assert difference(one("a fox", **other, **arguments).images[0], image) > 10


def test_settings_of_sdxl_are_those_of_its_pipeline(sdxl_folder, monkeypatch):
    """Also of the pipeline that starts from an image, and where a package would let it add a watermark."""
    index = json.loads((sdxl_folder / "model_index.json").read_text())
    assert index["force_zeros_for_empty_prompt"] is True and index["add_watermarker"] is False
    for cls in (StableDiffusionXLPipeline, StableDiffusionXLImg2ImgPipeline):
        monkeypatch.setattr(f"{cls.__module__}.is_pp_invisible_watermark_available", lambda: True)
        monkeypatch.setattr(f"{cls.__module__}.StableDiffusionXLWatermarker", object, raising=False)
    pipe = load_pipeline(sdxl_folder, threads=1)
    assert pipe.watermark is None and pipeline.from_image(pipe).watermark is None
    other = sdxl_pipeline(force_zeros_for_empty_prompt=False)
    assert pipeline.from_image(other).config.force_zeros_for_empty_prompt is False


def test_ratio_is_the_jobs(engine):
    merged, plain = engine.generate([JOB])[0], engine.generate([replace(JOB, ratio=0)])[0]
    assert difference(merged, plain) > 0
    assert difference(engine.generate([JOB])[0], merged) == 0
    with pytest.raises(ToMeConfigError, match="64x64"):
        engine.generate([replace(JOB, size=Size(64, 64))])


def test_a_ratio_is_looked_up_once(engine, exported_folder, monkeypatch):
    """By the type of the request's field. The UNet's attribute `ratio`, which the engine does not set, looks it up."""
    monkeypatch.setattr(ExportedUNet, "ratio", property(lambda unet: unet._ratio))
    manifest = read_manifest(exported_folder)
    limits, start = Limits(manifest.sizes, manifest.ratios, image_to_image=True), io.BytesIO()
    Image.new("RGB", (48, 32)).save(start, "PNG")
    with serving(engine, limits=limits, config=AppConfig(steps=2)) as server:
        for fields in ({}, {"image": base64.b64encode(start.getvalue()).decode()}):
            for sent, exported in ((0, 0.0), (0.5000001, 0.5)):
                answer = server.post(OPENAI, {"prompt": "fox", "tome_ratio": sent, **fields})
                assert answer.status_code == 200, answer.text
                assert engine._text_to_image.unet.ratio == exported


def test_image_to_image(engine):
    start = Image.fromarray(np.random.RandomState(0).randint(0, 255, (32, 48, 3), dtype="uint8"))
    job = replace(JOB, image=start, strength=0.7)
    once, again = engine.generate([job])[0], engine.generate([job])[0]
    assert once.size == (48, 32) and difference(once, again) == 0
    assert difference(engine.generate([replace(job, image=start.rotate(180))])[0], once) > 0
    assert difference(engine.generate([replace(job, seed=4)])[0], once) > 0
    assert job.batch_key is None, "its noise would be sampled for the complete batch"
    for wrong in (start.resize((1, 50_000)), start.convert("RGBA"), start.rotate(90, expand=True)):
        with pytest.raises(JobError, match="it must be RGB, 48x32"):
            replace(job, image=wrong)


def test_second_pass_starts_from_the_enlarged_image_of_the_first(engine):
    first = replace(JOB, size=Size(32, 32), ratio=0)
    second = SecondPass(size=Size(32, 48), ratio=0.5, steps=2, strength=0.6)
    steps = []

    def should_stop(*step):
        steps.append(step)
        return False

    image = engine.generate([replace(first, second_pass=second)], should_stop)[0]
    enlarged = engine.generate([first])[0].resize((48, 32), Image.Resampling.LANCZOS)
    expected = engine.generate([replace(JOB, image=enlarged, steps=4, strength=0.6)])[0]
    assert image.size == (48, 32) and difference(image, expected) == 0
    assert steps == [(step, 5) for step in range(6)]
    assert replace(first, second_pass=second).batch_key is None


@pytest.mark.parametrize("strength", [0.001, 0.05, 0.3, 0.6, 0.7, 0.999, 1.0])
def test_all_steps_of_a_second_pass_run(strength):
    for steps in (1, 7, 20, 100):
        if steps <= strength * MAX_STEPS:
            assert int(SecondPass(Size(64, 64), 0.5, steps, strength).scheduled_steps * strength) == steps
        else:
            with pytest.raises(JobError, match=f"{strength} leaves less than {steps} of 1000 steps"):
                SecondPass(Size(64, 64), 0.5, steps, strength)


def test_steps_that_the_scheduler_does_not_have_are_422(exported_folder, monkeypatch):
    """1,000 steps of a DDIM with steps_offset=1 begin at timestep 1,000, and 0 to 999 have an entry in its tables."""
    engine = load_engine(exported_folder, threads=1)
    engine._text_to_image.scheduler.register_to_config(steps_offset=1)
    monkeypatch.setattr("ppdiffusers_tome.serving.pool.logger.exception", None)  # clients cannot fill the log either
    limits = Limits(sizes=(Size(32, 48),), ratios=(0.5,), image_to_image=True, steps=2000)
    with serving(limits=limits, load=lambda: engine) as server:
        until(lambda: server.pool.state == "ready", seconds=60)
        for steps in (1000, 1001, 1000, 1001, 1000):
            answer = server.post(OPENAI, {"prompt": "fox", "steps": steps})
            assert (answer.status_code, answer.json()["error"]["param"]) == (422, "steps"), answer.text
        assert answer.json()["error"]["message"].endswith(
            "the exported scheduler, DDIM, has no schedule of 1000 steps: choose another number, such as 20"
        )
        second = {"enable_hr": True, "hr_resize_x": 48, "hr_resize_y": 32, "hr_second_pass_steps": 1000}
        answer = server.post(TEXT, {"prompt": "fox", "steps": 2, "denoising_strength": 1, **second})
        assert answer.json()["detail"][0]["loc"] == ["body", "hr_second_pass_steps"]
        assert server.http.get("/health").status_code == 200
        assert server.post(OPENAI, {"prompt": "fox", "steps": 2}).status_code == 200
    start = Image.new("RGB", (48, 32))
    with pytest.raises(AbandonedError, match="after step 1"):  # the second half of the 1,000
        engine.generate([replace(JOB, steps=1000, image=start, strength=0.5)], lambda step, steps: step > 0)


def test_different_jobs_do_not_share_a_call():
    for change in ({"steps": 2}, {"guidance_scale": 3.0}, {"ratio": 0}, {"size": Size(32, 32)}, NEGATIVE[0]):
        assert replace(JOB, **change).batch_key != JOB.batch_key
    assert replace(JOB, seed=9, prompt="x").batch_key == JOB.batch_key
    assert len({job.batch_key for job in JOBS}) == 1, "each with another negative prompt"


def test_stochastic_sampler_is_not_batched(exported_folder):
    pipe = load_pipeline(exported_folder, threads=1)
    pipe.scheduler = EulerAncestralDiscreteScheduler.from_config(pipe.scheduler.config)
    engine = Engine(pipe)
    assert not engine.can_batch and engine.sampler == "EulerAncestralDiscrete"
    assert difference(engine.generate([JOB])[0], engine.generate([JOB])[0]) == 0
    with pytest.raises(ToMeConfigError, match="image-to-image"):
        engine.generate([replace(JOB, image=Image.new("RGB", (48, 32)), strength=0.7)])


PADDLE_3 = int(paddle.__version__.partition(".")[0]) >= 3


@pytest.fixture
def unipc_folder(exported_folder, tmp_path):
    """The export with a scheduler whose steps fail in Paddle 3, from the third one on."""
    scheduler = UniPCMultistepScheduler.from_config(tiny_pipeline().scheduler.config)
    exported = read_manifest(exported_folder)
    linked = [(exported_folder, file) for file in exported.programs]
    settings = {"linked": linked, "image_to_image": True}
    export_linked(tiny_pipeline(scheduler=scheduler), tmp_path / "unipc", (0.5, 0), exported.sizes, **settings)
    return tmp_path / "unipc"


def test_scheduler_that_fails_here_is_refused(unipc_folder, tmp_path, capsys):
    """Before the first request, and not with a 500 for each; `/sdapi/v1/samplers` lists it where it runs."""
    if not PADDLE_3:
        engine = load_engine(unipc_folder, threads=1)
        assert engine.sampler == "UniPC" and engine.generate([replace(JOB, steps=5)])[0].size == (48, 32)
        return
    reason = "UniPCMultistepScheduler, that fails in Paddle 3"
    with pytest.raises(ToMeConfigError, match=rf"{reason}.*export the model with another scheduler"):
        load_engine(unipc_folder, threads=1)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a fox")
    output = str(tmp_path / "out")
    generate = ["generate", "--prompts", str(prompts), "--output", output]
    for command, status in ((["serve", "--port", "0"], FAILED), (generate, USAGE)):
        assert main([*command, "--model", str(unipc_folder), "--threads", "1"]) == status
        assert reason in capsys.readouterr().err
    assert not list(tmp_path.glob("out/*.png"))


def test_scheduler_that_fails_is_refused_with_the_reason(exported_folder, monkeypatch):
    def step(self, *tensors):
        raise ValueError("\n\nthe data types differ\n  [Hint: ...]")

    monkeypatch.setattr(f"{type(tiny_pipeline().scheduler).__module__}.DDIMScheduler.step", step)
    with pytest.raises(ToMeConfigError, match=r"\(ValueError: the data types differ\): use another version of Paddle"):
        load_engine(exported_folder, threads=1)


def test_scheduler_that_has_no_two_steps(exported_folder, tmp_path):
    """PNDM with its Runge-Kutta steps needs four: the server starts, and a failed job is checked by as many."""
    scheduler = PNDMScheduler.from_config(tiny_pipeline().scheduler.config, skip_prk_steps=False)
    exported = read_manifest(exported_folder)
    linked = [(exported_folder, file) for file in exported.programs]
    settings = {"linked": linked, "image_to_image": True}
    export_linked(tiny_pipeline(scheduler=scheduler), tmp_path / "pndm", (0.5, 0), exported.sizes, **settings)
    limits = Limits(exported.sizes, exported.ratios, image_to_image=True)
    engine = load_warm_engine(tmp_path / "pndm", limits, 2.0, {"runtime": "paddle", "max_programs": 1}, 1)
    assert engine.fewest_steps == 4
    with pytest.raises(JobError, match="PLMS, has no schedule of 3 steps: choose another number"):
        engine.generate([JOB])
    with serving(limits=limits, load=lambda: engine) as server:
        until(lambda: server.pool.state == "ready")
        generate, calls = engine.generate, []

        def fail_once(jobs, should_stop=None):
            calls.extend(jobs)
            if len(calls) == 1:
                raise RuntimeError("the first one fails")
            return generate(jobs, should_stop)

        engine.generate = fail_once
        assert server.post(OPENAI, {"prompt": "fox", "steps": 6}).status_code == 500
        assert server.post(OPENAI, {"prompt": "fox", "steps": 4}).status_code == 200
        assert [job.steps for job in calls] == [6, 4, 4] and server.pool._failures == 0


STOCHASTIC = ("DDPMScheduler", "KDPM2AncestralDiscreteScheduler", "EulerAncestralDiscreteScheduler", "LCMScheduler")


@pytest.mark.parametrize("name", sorted({*DETERMINISTIC, *STOCHASTIC} - {"UniPCMultistepScheduler"}))
def test_schedulers_that_run_here(name):
    cls = getattr(ppdiffusers, name)
    assert scheduler_failure(cls.from_config(tiny_pipeline().scheduler.config)) is None
    assert scheduler_failure(cls(num_train_timesteps=8)) is None, "it has no schedule of so many steps"


@pytest.mark.parametrize("steps", [0, 2])
def test_call_stops_at_the_next_step(engine, steps):
    calls = []

    def should_stop(*step):
        calls.append(step)
        return len(calls) > steps

    with pytest.raises(AbandonedError):
        engine.generate([replace(JOB, steps=20)], should_stop)
    assert calls == [(0, 20), (1, 20), (2, 20)][: steps + 1]
    assert difference(engine.generate([JOB])[0], engine.generate([JOB])[0]) == 0, "the engine still works"


@pytest.fixture
def damaged_folder(exported_folder, tmp_path):
    """The export with one NaN in the decoder's weights."""
    folder = shutil.copytree(exported_folder, tmp_path / "damaged")
    (params,) = {program.files["paddle"].weights for program in read_manifest(folder).programs_of("vae_decoder")}
    with (folder / params).open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(np.float32("nan").tobytes())
    return folder


def test_damaged_weights_are_refused_or_give_no_image(damaged_folder):
    with pytest.raises(ToMeExportError, match="differs from the exported file"):
        load_engine(damaged_folder, threads=1)
    engine = load_engine(damaged_folder, threads=1, verify=False)
    start = Image.new("RGB", (48, 32))
    for job in (JOB, replace(JOB, image=start, strength=0.7)):
        with pytest.raises(GenerationError, match="not finite"):
            engine.generate([job])
    [(_, reason)] = generate_batch(engine, [Prompt(0, JOB)])
    assert "not finite" in reason


def test_server_does_not_start_with_damaged_weights(damaged_folder, capsys):
    serve = ["serve", "--model", str(damaged_folder), "--port", "0", "--threads", "1"]
    assert main(serve) == FAILED
    assert "differs from the exported file" in capsys.readouterr().err
    assert main([*serve, "--no-verify"]) == FAILED
    assert "an image has values that are not finite" in capsys.readouterr().err, "from the first warm-up image"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_only_the_image_that_is_not_finite_fails(engine, monkeypatch, value):
    pipe = engine._text_to_image
    bad, decode = [], pipe.vae.decode

    def decode_and_spoil(latents, **kwargs):
        image = decode(latents, **kwargs)[0].numpy()
        if not bad:
            bad.append(latents[0])
        for row, latent in enumerate(latents):
            if float((latent - bad[0]).abs().max()) < 1e-2:
                image[row, 0, 5, 5] = value
        return (paddle.to_tensor(image),)

    monkeypatch.setattr(pipe.vae, "decode", decode_and_spoil)
    with pytest.raises(GenerationError, match="not finite"):
        engine.generate([JOBS[1]])
    drawn = [file for _, file in generate_batch(engine, [Prompt(index, job) for index, job in enumerate(JOBS)])]
    assert [isinstance(file, bytes) for file in drawn] == [True, False, True]
    assert str(pickle.loads(pickle.dumps(GenerationError("x")))) == "x", "Ray sends it from process to process"


def test_health_reports_an_export_that_was_replaced(exported_folder, tmp_path):
    """Images of programs in memory are still right, so no number of failures in a row would show it."""
    folder = shutil.copytree(exported_folder, tmp_path / "model")
    manifest = read_manifest(folder)
    limits = Limits(manifest.sizes, manifest.ratios)
    with serving(load_engine(folder, expected=manifest, threads=1), limits) as server:

        def status(ratio):
            body = {"prompt": "a fox", "steps": 1, "size": "32x32", "tome_ratio": ratio}
            return server.post(OPENAI, body).status_code

        assert status(0.5) == 200 and server.http.get("/health").status_code == 200
        for path in folder.rglob("*.pdiparams"):
            path.write_bytes(path.read_bytes()[::-1])
        assert status(0.5) == 200 and status(0) == 500 and status(0.5) == 200
        health = server.http.get("/health")
        assert health.status_code == 503
        assert health.json()["reason"] == "the files of the model have changed since it was loaded"


# The command


def test_serve_in_its_own_process(exported_folder, engine, tmp_path):
    """Start, open the page, answer OpenAI's client, SIGTERM during a request: it is answered, the next refused.

    The log says when it is ready, after the model is loaded, and what is at its address.
    """
    command = [sys.executable, "-W", "ignore", "-m", "ppdiffusers_tome", "serve", "--model", str(exported_folder)]
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/url\n')
    browser.chmod(0o755)
    process = subprocess.Popen(
        [*command, "--port", "0", "--threads", "1", "--max-steps", "5000", "--batch", "1", "--open", "--any-model"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, KEY_VARIABLE: "secret", "OMP_NUM_THREADS": "1", "BROWSER": str(browser)},
    )
    try:
        for line in process.stderr:
            if address := re.search(r"listening at (http://127\.0\.0\.1:\d+)", line):
                break
        url = address[1]
        ready = next(line for line in process.stderr if "ready: " in line)
        assert f"ready: open {url}/ in a browser; {url}/openapi.json describes the API" in ready
        assert httpx.get(f"{url}/ready", timeout=60).status_code == 200, "it was announced before"
        with_key = {"headers": {"Authorization": "Bearer secret"}, "timeout": 60}
        assert httpx.get(f"{url}/openapi.json", **with_key).status_code == 200
        threading.Thread(target=process.stderr.read, daemon=True).start()  # or the pipe would block the server
        until(lambda: (tmp_path / "url").exists() and (tmp_path / "url").read_text() == f"{url}/\n")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
            fields = {"seed": 3, "steps": 3, "guidance_scale": 2.0}
            model = client.models.list().data[0].id
            answer = client.images.generate(prompt=JOB.prompt, size="48x32", n=2, model=model, extra_body=fields)
            image = Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json)))
            assert json.loads(image.text["ppdiffusers_tome"])["seed"] == 3
            assert difference(engine.generate([JOB])[0], image) <= 1
            edited = client.images.edit(
                image=base64.b64decode(answer.data[0].b64_json),
                prompt=JOB.prompt, size="48x32", model="gpt-image-1", extra_body=fields | {"strength": 0.7},
            )  # fmt: skip
            job = replace(JOB, image=image.convert("RGB"), strength=0.7)
            edited_image = Image.open(io.BytesIO(base64.b64decode(edited.data[0].b64_json)))
            assert difference(engine.generate([job])[0], edited_image) <= 1

        answers = []

        def ask(steps):
            body = {"prompt": "fox", "steps": steps, "size": "32x32"}
            answers.append(httpx.post(url + OPENAI, json=body, **with_key).status_code)

        def running():
            return "ppdiffusers_tome_running_images 1.0" in httpx.get(f"{url}/metrics", **with_key).text

        running_one = threading.Thread(target=ask, args=(100,))
        running_one.start()
        until(running)
        process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{url}/ready", timeout=60).status_code == 503)
        ask(1)
        running_one.join()
        assert answers == [503, 200], "the request after the signal, then the running one"
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


POSITIVE_LIMITS = ("prompt", "images", "steps", "pixels", "body")


@pytest.mark.parametrize("has_browser", [True, False])
def test_open_says_so_if_there_is_no_browser(has_browser, monkeypatch, caplog):
    opened = []
    monkeypatch.setattr(serve_command, "logger", logging.getLogger("test_open"))  # servers change uvicorn's
    monkeypatch.setattr(serve_command.webbrowser, "open", lambda url: opened.append(url) or has_browser)
    with caplog.at_level("INFO", logger=serve_command.logger.name):
        serve_command.announce("http://127.0.0.1:8000/", has_page=True, opens=True)
        until(lambda: opened and (has_browser or len(caplog.messages) == 2))
    ready = "ready: open http://127.0.0.1:8000/ in a browser; http://127.0.0.1:8000/openapi.json describes the API"
    warning = "--open: this machine has no browser: open http://127.0.0.1:8000/ in one that reaches it"
    assert caplog.messages == [ready, *([] if has_browser else [warning])]
    caplog.clear()
    with caplog.at_level("INFO", logger=serve_command.logger.name):
        serve_command.announce("http://127.0.0.1:8000/", has_page=False)
    assert caplog.messages == ["ready: http://127.0.0.1:8000/openapi.json describes the API"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "512"], "--size 512x512 was not exported: it must be one of 32x32, 48x32"),
        (["--size", "32", "big"], "error: --size big is not allowed: it must be WIDTHxHEIGHT"),
        *(([f"--max-{name}", "0"], f"--max-{name} 0 is not allowed: it must be pos") for name in POSITIVE_LIMITS),
        (["--steps", "0"], "--steps 0 is not allowed"),
        (["--max-steps", "10"], "--steps 20 is not allowed: --max-steps is 10. Lower the one or raise the other"),
        (["--guidance-scale", "31"], "--guidance-scale: 31.0 is not allowed"),
        (["--queue", "2"], "--queue 2 is not allowed: one request may ask for 4 images (--max-images)"),
        (["--max-images", "70"], "--queue 64 is not allowed: one request may ask for 70 images (--max-images)"),
        (["--batch-wait", "nan"], "--batch-wait nan is not allowed: it must be 0 to 60 s"),
        *((["--timeout", text], f"--timeout {text} is not allowed: it must be") for text in ("0.0", "nan", "inf")),
        *((["--keep-alive", text], f"--keep-alive {text} is not allowed: it must") for text in ("0.0", "nan", "inf")),
        (["--timeout", "1e308"], "twice --timeout inf is not allowed"),
        (["--allow-host", "a/b"], "--host or --allow-host a/b is not allowed: it must be like example.org"),
        (["--allow-origin", "example.org"], "--allow-origin example.org is not allowed: it must be a scheme and"),
        (["--ray", "--replicas", "0"], "--replicas 0 is not allowed: it must be 1 or more"),
        (["--ray", "--min-replicas", "0"], "--min-replicas 0 is not allowed: it must be 1 or more"),
        (["--ray", "--replicas", "3", "--max-replicas", "2"], "--max-replicas 2 is not allowed: --replicas is 3."),
        (["--ray", "--min-replicas", "2", "--max-replicas", "1"], "not allowed: --min-replicas is 2. Raise the one"),
        (["--device", "tpu"], "error: --device tpu is not allowed"),
        (["--device", "gpu:x"], "error: --device gpu:x is not allowed"),
        (["--host", "a" * 100], f"cannot listen on {'a' * 100}, port 8000: "),
        (["--port", "99999"], "error: cannot listen on 127.0.0.1, port 99999: "),
        (["--host", "192.0.2.1"], "error: cannot listen on 192.0.2.1, port 8000: "),
    ],
)
def test_options_that_are_not_allowed(exported_folder, options, message, capsys):
    assert main(["serve", "--model", str(exported_folder), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("ray", [[], ["--ray"]])
def test_port_in_use(exported_folder, ray, capsys):
    if ray:
        pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        assert main(["serve", "--model", str(exported_folder), "--threads", "1", "--port", port, *ray]) == 2
    message = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1, port {port}: " in message
    assert message.endswith("Choose another port, or 0 for a free one.\n")


def test_missing_packages_are_named_with_the_requirements_file(exported_folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["serve", "--model", str(exported_folder), "--threads", "1", "--ray"]) == FAILED
    assert f"--ray needs: {install_command('ray')}" in capsys.readouterr().err
    for name in ("uvicorn", "python_multipart", "prometheus_client"):
        with monkeypatch.context() as missing:
            missing.setitem(sys.modules, name, None)
            assert main(["serve", "--model", str(exported_folder)]) == FAILED
        message = capsys.readouterr().err
        assert name in message and f"Serving needs: {install_command('serve')}" in message


def test_folder_that_is_not_an_export(tmp_path, capsys):
    assert main(["serve", "--model", str(tmp_path)]) == 2
    assert "is not an exported pipeline" in capsys.readouterr().err


def test_empty_key_is_refused(exported_folder, monkeypatch, capsys):
    monkeypatch.setenv(KEY_VARIABLE, "")
    assert main(["serve", "--model", str(exported_folder)]) == 2
    assert KEY_VARIABLE in capsys.readouterr().err


def test_model_that_does_not_load_is_an_error():
    def load(is_unwanted) -> FakeEngine:
        raise ToMeError("broken program")

    metrics = Metrics()
    pool = EnginePool(load, JobQueue(metrics), metrics)
    app = create_app(ServedModel("fake", "DDIM", {}, LIMITS), pool, metrics, AppConfig())
    with pytest.raises(ServerFailedError, match="could not be loaded, or the image thread has ended: broken program"):
        serve(pool, app, port=0)


def test_without_a_page_there_is_none_to_open(exported_folder, capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--model", str(exported_folder), "--no-page", "--open"])
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:8/"), ("::", "http://[::1]:8/"), ("::1", "http://[::1]:8/"), ("x", "http://x:8/")],
)
def test_address_for_a_browser(host, url):
    assert url_of(host, 8) == url


@pytest.mark.parametrize(
    ("runtime", "most", "at_once", "loads"),
    [("paddle", None, 4, 4), ("paddle", 3, 3, 3), ("onnxruntime", None, 1, 2), ("onnxruntime", 1, 1, 1)],
)
def test_programs_are_loaded_before_they_are_needed(exported_folder, onnx_folder, runtime, most, at_once, loads):
    """In Paddle before the server is ready, since it would not answer meanwhile; others when it is idle."""
    folder = exported_folder if runtime == "paddle" else onnx_folder
    manifest = read_manifest(folder)
    limits = Limits(manifest.sizes, manifest.ratios, image_to_image=True)
    engine = load_warm_engine(folder, limits, 2.0, {"runtime": runtime, "max_programs": most}, 1)
    assert engine.program_loads == at_once
    while engine.load_next():
        pass
    assert engine.program_loads == loads
    jobs = [Job("", size, ratio, 0, steps=2) for size in manifest.sizes for ratio in manifest.ratios]
    engine.generate([jobs[0]])
    assert engine.program_loads == loads  # the default has stayed
    for job in jobs:
        engine.generate([job])
    assert engine.program_loads == loads + (0 if most is None else len(jobs) - most)


def test_warm_up_jobs_are_allowed():
    jobs = warm_up_jobs(LIMITS, 2.0)
    assert [job.image and job.image.size for job in jobs] == [None, (64, 48)]
    assert len(warm_up_jobs(replace(LIMITS, image_to_image=False), 2.0)) == 1
    for job in jobs:
        assert LIMITS.find_size(job.size) == job.size and LIMITS.checked(ratio=job.ratio, steps=job.steps)


def test_defaults_of_the_model(exported_folder, tmp_path, capsys):
    """From `defaults.json`, which the export has; options win, and a field that does not exist is refused."""
    folder = tmp_path / "export"
    shutil.copytree(exported_folder, folder)
    assert read_defaults(folder) == ModelDefaults()
    (folder / "defaults.json").write_text('{"steps": 9, "guidance_scale": 2, "prompts": ["a fox"]}')
    assert read_defaults(folder) == ModelDefaults(steps=9, guidance_scale=2.0, prompts=("a fox",))
    for options, steps in ([], 9), (["--steps", "7"], 7):  # the model's own, and the option's
        assert main(["serve", "--model", str(folder), "--max-steps", "6", *options]) == 2
        assert f"--steps {steps} is not allowed: --max-steps is 6" in capsys.readouterr().err
    (folder / "defaults.json").write_text('{"guidance": 2}')
    with pytest.raises(ToMeConfigError, match=r"defaults\.json: guidance: "):
        read_defaults(folder)


def test_tokens_that_the_text_encoder_reads(exported_folder):
    engine = load_engine(exported_folder, threads=1)
    tokens, most, cut = engine.count_tokens("a 3d render of fox")
    assert tokens < most and cut == "" and engine.count_tokens("")[0] == 2
    tokens, most, cut = engine.count_tokens("fox " * 2 * most)
    assert tokens > most and set(cut.split()) == {"fox"}
