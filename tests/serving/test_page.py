"""The page works in a real browser: against the server with the bundled model, and with an engine of colours.

The tests are skipped where there is no browser: apt-get install chromium, or name one with CHROMIUM=...
"""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from conftest import load_bundled
from PIL import Image
from serving_support import LIMITS, OPENAI, FakeEngine, serving, until
from skimage.metrics import structural_similarity

from ppdiffusers_tome.comparison.similarity import psnr
from ppdiffusers_tome.methods import METHODS
from ppdiffusers_tome.run.defaults import ModelDefaults, read_defaults
from ppdiffusers_tome.run.manifest import read_manifest
from ppdiffusers_tome.run.sizes import Size
from ppdiffusers_tome.serving.app_config import AppConfig
from ppdiffusers_tome.serving.engine import Engine, load_engine, warm_up_jobs

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright: pip install -r requirements/test.txt"
)
AXE = pytest.importorskip("axe_playwright_python.base", reason="needs axe-playwright-python").AXE_SCRIPT
BROWSER = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser: apt-get install chromium, or set CHROMIUM")
expect = playwright.expect
expect.set_options(timeout=20_000)

MODEL = os.environ.get("PAGE_MODEL")  # an export of the bundled model; without it, the model runs in eager mode
SCREENSHOTS = os.environ.get("PAGE_SCREENSHOTS")  # folder to write images of the page to
KEY = "correct-horse"
NARROW = {"width": 320, "height": 640}
LANDSCAPE = {"width": 740, "height": 340}
RATIOS = (0.5, 0.25, 0.75, 0.0)
PROMPTS = ("a 3d render of fox", "a flat drawing of octopus")
EXPORTED = replace(LIMITS, ratios=RATIOS)
CONFIG = AppConfig(steps=4, prompts=PROMPTS)
ABORTED = ["ERR_ABORTED"]  # of a request that the page cancels


class EagerEngine(Engine):
    """The bundled pipeline itself in place of its exported programs, which take a minute to make."""

    def __init__(self, pipe, **settings):
        super().__init__(pipe, **settings)
        pipe.unet.select = lambda ratio: pipe.apply_tome(ratio) if ratio else pipe.remove_tome()


class ColorEngine(FakeEngine):
    """Images whose upper half is the further from plain the higher the ratio is."""

    methods: ClassVar = {0.5: "interlace", 0.25: "interlace", 0.75: "todo", 0.0: ""}
    seconds: ClassVar = {}  # of a step, by ratio
    held = None  # a ratio whose first step waits until the gate is set

    def generate(self, jobs, should_stop=None):
        self.step_seconds = self.seconds.get(jobs[0].ratio, 0.0)
        if jobs[0].ratio == self.held:
            self.gate.clear()
        return super().generate(jobs, should_stop)

    def paint(self, job):
        image = super().paint(job)
        image.paste((job.seed % 256, round(80 * job.ratio), 0), (0, 0, job.size.width, job.size.height // 2))
        return image


@pytest.fixture(scope="module")
def bundled():
    """The server with a bundled model: that of PAGE_MODEL, or emoji_sd."""
    size, methods = Size(128, 128), {0.5: "interlace", 0.0: ""}
    own = ModelDefaults(guidance_scale=2.0, prompts=PROMPTS)
    if MODEL:
        manifest, own = read_manifest(MODEL), read_defaults(Path(MODEL))
        size, methods = manifest.sizes[0], manifest.methods
    limits = replace(LIMITS, sizes=(size,), ratios=(*methods,), image_to_image=bool(MODEL), steps=100)

    def load():
        if not MODEL:
            return EagerEngine(load_bundled(), methods=methods)
        engine = load_engine(Path(MODEL), threads=1)
        for job in warm_up_jobs(limits, own.guidance_scale):
            engine.generate([job])
        return engine

    config = AppConfig(guidance_scale=own.guidance_scale, prompts=own.prompts)
    name = Path(MODEL or "emoji_sd").name
    with serving(load=load, name=name, methods=methods, limits=limits, config=config) as server:
        until(lambda: server.pool.state == "ready", 120)
        yield server


@pytest.fixture(scope="module")
def shared():
    with serving(ColorEngine(), limits=EXPORTED, config=CONFIG) as server:
        yield server


@pytest.fixture
def fake(shared):
    """The server with plain colours; `engine.calls` has those of this test."""
    shared.engine.calls.clear()
    shared.engine.gate.set()
    shared.engine.seconds, shared.engine.held = {}, None
    yield shared
    # A window that closed in the middle of a request has given it up only when the server has lost its connection.
    until(lambda: not shared.server.server_state.connections and shared.queue.is_idle)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser, server, refusals=(), fragment="", **options):
    """The page in a new window. Fails on errors in its scripts, violations of its policy, requests elsewhere, and
    requests that failed.

    `refusals` are statuses that the server is expected to answer, and errors, which the browser logs.
    """
    context = browser.new_context(**{"locale": "en-US", "viewport": {"width": 1200, "height": 900}, **options})
    page, problems = context.new_page(), []
    page.set_default_timeout(20_000)

    def note(text):
        if not any(str(refusal) in text for refusal in refusals):
            problems.append(text)

    page.on("console", lambda message: message.type in ("error", "warning") and note(message.text))
    page.on("pageerror", lambda error: note(str(error)))
    page.on("requestfailed", lambda request: note(f"{request.url}: {request.failure}"))
    page.on("request", lambda request: request.url.startswith((server.url, "blob:")) or note(request.url))
    page.goto(f"{server.url}/{fragment}")
    try:
        yield page
        assert problems == []
    finally:
        context.close()


def fill(page, **settings):
    expect(page.locator("#generate")).to_be_enabled(timeout=20_000)
    for name, value in settings.items():
        page.fill(f"#{name}", str(value))


def generate(page, done="Done", button="#generate", **settings):
    """Generate with these settings and wait for the comparison."""
    fill(page, **settings)
    page.click(button)
    expect(page.locator("#phase")).to_contain_text(done, timeout=150_000)


def downloaded(page, name):
    """Name and content of what the link downloads."""
    with page.expect_download() as download:
        page.click(f"#download-{name}")
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def results_of(page):
    return json.loads(downloaded(page, "settings")[1])


def serious_findings(page):
    """What axe-core finds, of impact serious or critical."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE)
    results = page.evaluate("axe.run(document, { resultTypes: ['violations'], elementRef: false })")
    assert len(results["passes"]) > 10
    rules = [rule for rule in results["violations"] if rule["impact"] in ("serious", "critical")]
    return [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in rules]


def take_screenshot(page, name, **options):
    """Write an image of the page if a folder for them is named."""
    if SCREENSHOTS:
        page.evaluate("document.activeElement.blur()")
        page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png", **options)


def gray_ssim(a, b):
    """scikit-image's SSIM with the windows of Wang et al. 2004, as in the page."""
    grays = [np.round(image @ [0.299, 0.587, 0.114]) for image in (a, b)]
    return structural_similarity(*grays, data_range=255, gaussian_weights=True, sigma=1.5, use_sample_covariance=False)


def pixels(file):
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))


def give(page, action, target, name, kind, content):
    """Drop a file on an element, or paste it there, as a browser does."""
    script = """([action, target, name, type, base64]) => {
        const data = new DataTransfer();
        data.items.add(new File([Uint8Array.from(atob(base64), (one) => one.charCodeAt(0))], name, { type }));
        const isDrop = action === "drop";
        const options = { bubbles: true, cancelable: true, [isDrop ? "dataTransfer" : "clipboardData"]: data };
        for (const kind of isDrop ? ["dragover", "drop"] : ["paste"]) {
            const event = new (isDrop ? DragEvent : ClipboardEvent)(kind, options);
            document.querySelector(target).dispatchEvent(event);
        }
    }"""
    page.evaluate(script, [action, target, name, kind, b64encode(content).decode()])


# With the bundled model


def test_generate_and_download(browser, bundled):
    """Plain and merged from the same noise; the measures are those of the downloaded files."""
    with opened(browser, bundled, viewport={"width": 1400, "height": 900}) as page:
        fill(page, seed=1)
        expect(page.locator("#tokens")).to_have_text(
            re.compile(r"[0-9]+ of [0-9]+ tokens") if MODEL else "9 of 24 tokens"
        )
        take_screenshot(page, "page_first")
        model = page.evaluate("async () => (await (await fetch('/v1/models')).json()).data[0]")
        generate(page, steps=20 if SCREENSHOTS else 5)
        names, files = zip(*(downloaded(page, name) for name in ("left", "right", "settings")), strict=True)
        ratio = model["tome_ratios"][0]
        assert names == ("plain_seed1.png", f"ratio{ratio}_seed1.png", "settings_seed1.json")
        images = [Image.open(io.BytesIO(file)) for file in files[:2]]
        made = [json.loads(image.text["ppdiffusers_tome"]) for image in images]
        assert [one["tome_ratio"] for one in made] == [0, ratio] and [one["seed"] for one in made] == [1, 1]
        plain, merged = map(pixels, files[:2])
        results = json.loads(files[2])
        expected = {"prompt": model["prompts"][0], "seed": 1, "guidance_scale": model["guidance_scale"]}
        expected |= {"size": model["sizes"][0], "tome_ratio": ratio}
        assert expected.items() <= results.items()
        shown, (of_plain, of_merged) = results["shown"], results["images"]
        assert shown["psnr"] == pytest.approx(psnr(plain, merged), abs=0.01) and shown["psnr"] < 70
        assert shown["ssim"] == pytest.approx(gray_ssim(plain, merged), abs=1e-3)
        assert of_merged["psnr_to_plain"] == shown["psnr"] and of_plain["images_in_the_call"] == 1
        assert of_plain["seconds"] > sum(of_plain["step_seconds"]) > 0, "the first step is not in the sum"
        assert len(of_plain["step_seconds"]) == of_plain["seconds_per_step"]["count"] == (19 if SCREENSHOTS else 4)
        assert of_merged["seconds_per_step"]["median"] == pytest.approx(np.median(of_merged["step_seconds"]))
        expect(page.locator("#psnr")).to_have_text(f"{shown['psnr']:.1f} dB")
        expect(page.locator("#phase")).to_have_text(f"Done: PSNR {shown['psnr']:.1f} dB.")
        largest = np.abs(plain.astype(int) - merged).max()
        assert page.get_attribute("#difference", "aria-label").startswith(f"Difference map: at most {largest} of 255")
        assert serious_findings(page) == []
        if SCREENSHOTS:
            generate(page, done="Done: 2 images", button="#all")
            take_screenshot(page, "page", full_page=True)
            for _ in range(3):
                page.click("#zoom-in")
            page.click("#pixelated")
            take_screenshot(page, "page_zoom")


@pytest.mark.skipif(not SCREENSHOTS, reason="PAGE_SCREENSHOTS names no folder")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("page_zh", {"locale": "zh-CN", "viewport": {"width": 1400, "height": 900}}),
        ("page_dark", {"color_scheme": "dark", "viewport": {"width": 1400, "height": 900}}),
        ("page_phone", {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True}),
    ],
)
def test_screenshots(browser, bundled, name, options):
    with opened(browser, bundled, **options) as page:
        generate(page, done="4", button="#all", seed=1, steps=8)
        take_screenshot(page, name, full_page=True)


def test_cancel_stops_at_the_next_step(browser, bundled):
    with opened(browser, bundled, refusals=ABORTED) as page:
        fill(page, prompt="owl", steps=100)
        before = bundled.count("images_total", outcome="abandoned")
        page.click("#generate")
        expect(page.locator("#step")).to_have_text(re.compile("step [1-9]"), timeout=20_000)
        expect(page.locator("#cancel")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#generate")).to_be_focused()
        expect(page.locator("#phase")).to_contain_text("Cancelled")
        expect(page.locator("#generated")).to_be_hidden()
        until(lambda: bundled.queue.is_idle)
        assert bundled.count("images_total", outcome="abandoned") == before + 1
        generate(page, steps=1)


# All ratios


def test_compare_all_ratios(browser, fake):
    """Each image is shown as soon as it is there; any two of them are at the divider; maps have one scale."""
    fake.engine.held = 0.25
    with opened(browser, fake) as page:
        fill(page, seed=9)
        page.click("#all")
        cards = page.locator("#ratios button")
        expect(cards).to_have_count(1)
        expect(page.locator("#step")).to_contain_text("image 2 of 4")
        expect(page.locator("#result-phase")).to_contain_text("Generating ratio 0.25… · image 2 of 4")
        assert page.locator("#ratios .missing").all_inner_texts()[0].startswith("ratio 0.25")
        expect(page.locator("#plot-figure")).to_be_hidden()
        fake.engine.held, fake.engine.seconds = 0.5, {0.75: 0.2}
        fake.engine.gate.set()
        expect(cards).to_have_count(2)
        expect(page.locator("#plot .point")).to_have_count(2)
        fake.engine.held = None
        fake.engine.gate.set()
        expect(page.locator("#phase")).to_have_text("Done: 4 images.")
        assert [call[0].ratio for call in fake.engine.calls] == [0, 0.25, 0.5, 0.75]
        expect(page.locator("#plot .point")).to_have_count(4)
        assert "ratio 0.75: 0.2" in page.get_attribute("#plot", "aria-label")
        # One scale: 60 levels at most, so 64 is white in all maps, and each map is as bright as its difference.
        assert set(page.locator(".scale").all_inner_texts()) >= {"0\n16\n64"}
        script = "all => all.map((one) => [...one.getContext('2d').getImageData(0, 0, 1, 1).data].slice(0, 3))"
        roots = np.sqrt(np.array([[20], [40], [60]]) / 64)
        expected = np.clip(roots * [510, 340, 510] - [0, 85, 255], 0, 255).round().tolist()
        assert page.eval_on_selector_all("#ratios canvas", script) == expected
        names = page.locator("#left-name"), page.locator("#right-name")
        assert [name.inner_text() for name in names] == ["plain", "ratio 0.5"]
        for pick, expected in ((0.75, ["plain", "ratio 0.75"]), (0.25, ["ratio 0.25", "ratio 0.75"])):
            page.click(f"#ratios [data-ratio='{pick}']")
            expect(names[1]).to_have_text(expected[1])
            assert [name.inner_text() for name in names] == expected
        assert page.locator("#ratios [aria-pressed=true]").count() == 2
        results = results_of(page)
        assert results["shown"]["ratios"] == [0.25, 0.75]
        assert [one["tome_ratio"] for one in results["images"]] == [0, 0.25, 0.5, 0.75]
        files = [downloaded(page, side)[1] for side in ("left", "right")]
        assert results["shown"]["psnr"] == pytest.approx(psnr(*map(pixels, files)), abs=1e-6)
        assert results["images"][3]["rms_to_plain"] == pytest.approx(60 / np.sqrt(6), abs=1e-6)
        assert serious_findings(page) == []


def test_plain_image_is_reused(browser, fake):
    """Another ratio needs one image; another seed two; the same settings none."""
    with opened(browser, fake) as page:
        generate(page, seed=3)
        page.select_option("#tome_ratio", "0.75")
        generate(page, done="Done: PSNR")
        expect(page.locator("#right-name")).to_have_text("ratio 0.75")
        generate(page, done="already here")
        assert [call[0].ratio for call in fake.engine.calls] == [0, 0.5, 0.75]
        expect(page.locator("#thumbnails li")).to_have_count(1)
        generate(page, seed=4)
        assert [(call[0].ratio, call[0].seed) for call in fake.engine.calls[3:]] == [(0, 4), (0.75, 4)]
        expect(page.locator("#thumbnails li")).to_have_count(2)


def test_finished_plain_image_stays(browser, fake):
    """It is shown while the merged one is generated, and after a cancel, and after a reload."""
    fake.engine.held = 0.5
    with opened(browser, fake, refusals=ABORTED) as page:
        fill(page, prompt="a fox", seed=5, steps=30)
        page.click("#generate")
        expect(page.locator("#right-name")).to_have_text("plain")
        expect(page.locator("#split")).to_be_hidden()
        expect(page.locator("#phase")).to_have_text("Generating ratio 0.5…")
        assert "seed=5" in page.url, "the link is there from the start"
        until(lambda: len(fake.engine.calls) == 2)
        page.keyboard.press("Escape")
        expect(page.locator("#phase")).to_contain_text("finished images stay")
        expect(page.locator("#right")).to_be_visible()
        assert serious_findings(page) == []
        page.reload()
        expect(page.locator("#phase")).to_have_text("Ready.")
        assert (page.input_value("#prompt"), page.input_value("#steps")) == ("a fox", "30")
        expect(page.locator("#right-name")).to_have_text("plain")
        fake.engine.held = None
        fake.engine.gate.set()
        generate(page, done="Done: PSNR")
        assert [call[0].ratio for call in fake.engine.calls] == [0, 0.5, 0.5], "the plain image is of this server"


# Speed


def test_speed_is_a_spread_and_not_a_number_of_one_image(browser, fake):
    fake.engine.seconds = {0.0: 0.06, 0.5: 0.02}
    with opened(browser, fake) as page:
        generate(page, steps=2, seed=1)
        expect(page.locator("#speed-note")).to_contain_text("needs 10 steps or more")
        generate(page, steps=10, seed=2)
        expect(page.locator("#speed")).to_have_text(re.compile(r"[0-9.]+× as fast"))
        assert results_of(page)["shown"]["speed"]["times_as_fast"] == pytest.approx(3, rel=0.4)
        expect(page.locator("#left-spread")).to_contain_text("9 steps")
        assert "fast" not in page.inner_text("#phase")
        fake.engine.seconds = {0.0: 0.02, 0.5: 0.02}
        page.click("#again")
        expect(page.locator("#again")).to_be_disabled()
        assert page.get_attribute("#again", "title") == "When the images are done."
        expect(page.locator("#phase")).to_contain_text("Done: 6 images")
        expect(page.locator("#left-spread")).to_contain_text("36 steps")
        assert [call[0].ratio for call in fake.engine.calls[-6:]] == [0, 0.5] * 3
        fake.engine.seconds = {0.0: 0.1, 0.5: 0.1}  # long: other processes may take milliseconds of a step
        generate(page, steps=10, seed=3)
        expect(page.locator("#speed")).to_have_text("about the same")
        expect(page.locator("#speed-note")).to_contain_text("the spreads overlap")


def test_times_of_shared_calls_are_marked(browser):
    """The page's plain image waits for another one and shares its call."""
    with serving(batch_wait=1.0, max_batch=2) as server, opened(browser, server) as page:
        fill(page, steps=2, guidance_scale=7.5)
        with ThreadPoolExecutor(1) as pool:
            page.click("#generate")
            other = pool.submit(server.post, OPENAI, {"prompt": "a", "tome_ratio": 0})
            expect(page.locator("#shared")).to_contain_text("2 images in one call", timeout=20_000)
            assert other.result().status_code == 200


# The divider and zoom


def test_divider(browser, fake):
    """By mouse and by keyboard; its value is read out in words."""
    with opened(browser, fake) as page:
        generate(page, seed=7)
        box = page.locator("#frame").bounding_box()
        page.mouse.click(box["x"] + box["width"] * 0.25, box["y"] + box["height"] / 2)
        assert float(page.input_value("#split")) == pytest.approx(25, abs=0.5)
        expect(page.locator("#split")).to_be_focused()
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("ArrowRight")
        assert float(page.input_value("#split")) == pytest.approx(26, abs=0.5), "no focus is needed"
        page.keyboard.press("1")
        assert page.inner_text("#zoom-level") != "100 %", "but for characters it is"
        page.focus("#split")
        page.keyboard.press("Home")
        assert page.get_attribute("#split", "aria-valuetext") == "0 % plain, on the left"
        page.keyboard.press("PageUp")
        clip = page.eval_on_selector("#clip", "element => getComputedStyle(element).clipPath")
        assert page.get_attribute("#split", "aria-valuetext") == "10 % plain, on the left" and "90%" in clip


def test_zoom_and_pan_in_step(browser, fake):
    with opened(browser, fake) as page:
        generate(page, seed=7)
        script = "all => all.map((one) => getComputedStyle(one).transform)"

        def transforms():
            """The scale and place of both images and the map, in pixels."""
            matrices = page.eval_on_selector_all("#left, #right, #difference", script)
            left, *others = ([float(x) for x in re.findall(r"-?[\d.]+(?:e-\d+)?", one)] for one in matrices)
            assert [other == pytest.approx(left, abs=0.1) for other in others] == [True, True]
            return left

        box = page.locator("#frame").bounding_box()
        middle = box["x"] + box["width"] * 0.75, box["y"] + box["height"] / 2
        at = "([x, y]) => document.elementFromPoint(x, y).id"
        assert page.evaluate(at, middle) == "right", "a right-click meets the image"
        assert page.evaluate(at, (box["x"] + box["width"] * 0.3, middle[1])) == "left"
        level = int(page.inner_text("#zoom-level").removesuffix(" %"))
        assert level == pytest.approx(100 * box["width"] / 64, abs=1)
        page.click("#zoom-actual")
        expect(page.locator("#zoom-level")).to_have_text("100 %")
        page.click("#zoom-fit")
        page.click("#zoom-in")
        scale, _, _, _, x, y = transforms()
        assert scale == 1.5 and x == pytest.approx(-box["width"] / 4, abs=1)
        page.mouse.move(*middle)
        page.mouse.down()
        page.mouse.move(middle[0] + 40, middle[1] - 10, steps=3)
        page.mouse.up()
        moved = transforms()
        assert moved[4] - x == pytest.approx(40, abs=1) and moved[5] - y == pytest.approx(-10, abs=1)
        assert page.input_value("#split") == "50", "the divider stays"
        page.focus("#zoom-in")
        page.keyboard.press("Shift+ArrowRight")
        assert transforms()[4] == pytest.approx(moved[4] - box["width"] / 10, abs=1)
        page.keyboard.press("0")
        assert transforms()[0] == 1
        page.click("#pixelated")
        assert page.eval_on_selector("#left", "image => getComputedStyle(image).imageRendering") == "pixelated"
        page.click("#full-screen")
        expect(page.locator("#full-screen")).to_have_text("Exit full screen")
        assert page.evaluate("document.fullscreenElement.id") == "viewer"
        box = page.locator("#frame").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.mouse.wheel(0, -300)
        page.wait_for_function("() => document.querySelector('#panes').classList.contains('zoomed')")
        assert transforms()[0] == pytest.approx(2, abs=0.1)
        page.keyboard.press("Escape")


def test_wide_screen_is_used(browser, fake):
    with opened(browser, fake, viewport={"width": 2200, "height": 1200}) as page:
        generate(page, seed=7)
        left, right = (page.locator(one).bounding_box() for one in ("#frame", "#difference-figure .frame"))
        assert left["width"] > 450 and right["x"] > left["x"] + left["width"] and left["y"] == right["y"]


# The form


def test_first_press(browser, fake):
    """One press is enough: the model's own steps and prompt. Words are explained, tokens counted."""
    with opened(browser, fake) as page:
        fill(page)
        assert (page.input_value("#prompt"), page.input_value("#steps")) == (PROMPTS[0], "4")
        expect(page.locator("#tokens")).to_have_text("7 of 7 tokens")
        expect(page.locator("#tokens-cut")).to_be_empty()
        page.click(f"#examples button:has-text('{PROMPTS[1]}')")
        assert page.input_value("#prompt") == PROMPTS[1]
        page.fill("#prompt", "one two three four five six seven")
        expect(page.locator("#tokens-cut")).to_have_text(
            "9 tokens: the text encoder reads 7 and not the end, “six seven”."
        )
        expect(page.locator("#method")).to_contain_text("Method: interlace")
        assert page.locator("#method-terms .term").all_inner_texts() == ["interlace"]
        page.select_option("#tome_ratio", "0.75")
        expect(page.locator("#method")).to_contain_text("Method: todo")
        expect(page.locator("#method-terms .term")).to_have_count(0)
        page.select_option("#tome_ratio", "0.5")
        assert serious_findings(page) == []
        generate(page)
        page.click("#measures [data-term=ssim]")
        expect(page.locator("#term-ssim")).to_contain_text("1 is equal")
        assert serious_findings(page) == []
        page.keyboard.press("Escape")
        expect(page.locator("#glossary")).to_be_hidden()


def test_only_the_keyboard(browser, fake):
    """From the prompt through all fields to the button and the slider, in the order of the page."""
    with opened(browser, fake) as page:
        fill(page)
        page.focus("#prompt")
        page.keyboard.type(" fox")
        visited = []
        for _ in range(13):
            page.keyboard.press("Tab")
            visited.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        fields = "more-summary seed new-seed steps guidance_scale size tome_ratio"
        assert visited == f"BUTTON BUTTON {fields} BUTTON BUTTON generate all".split()
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Enter")
        expect(page.locator("#phase")).to_contain_text("Done")
        page.focus("#full-screen")
        page.keyboard.press("Tab")
        expect(page.locator("#split")).to_be_focused()
        page.keyboard.press("ArrowRight")
        assert page.input_value("#split") == "50.5"
        page.focus("#seed")
        page.keyboard.type("1")
        page.keyboard.press("Control+Enter")
        expect(page.locator("#thumbnails li")).to_have_count(2)
        expect(page.locator("#phase")).to_contain_text("Done")


def test_wrong_input_is_explained_at_its_field(browser, fake):
    """The message vanishes when the value is corrected, before the next press."""
    wrong = {
        "steps": ("2.5", "Steps must be a whole number from 1 to 50."),
        "seed": ("-1", "Seed must be a whole number from 0 to 4294967295."),
        "guidance_scale": ("much", "Guidance must be a number from 0 to 30."),
        "prompt": ("x" * 101, "The prompt has 101 characters; the limit is 100."),
    }
    with opened(browser, fake) as page:
        for name, (value, message) in wrong.items():
            fill(page, **{name: value})
            page.click("#generate")
            expect(page.locator(f"#{name}-error")).to_have_text(message)
            expect(page.locator(f"#{name}")).to_be_focused()
            expect(page.locator(f"#{name}")).to_have_attribute("aria-invalid", "true")
            assert fake.engine.calls == []
            if name == "prompt":
                assert serious_findings(page) == []
            page.fill(f"#{name}", "1")
            expect(page.locator(f"#{name}-error")).to_be_empty()
            expect(page.locator(f"#{name}")).not_to_have_attribute("aria-invalid", "true")
        generate(page)


def test_start_image_and_negative_prompt(browser, fake):
    """Chosen, dropped or pasted; its middle in the chosen size; the history has it."""
    picture = Image.new("RGB", (200, 100), "white")
    picture.paste("red", (60, 0, 140, 100))
    file = io.BytesIO()
    picture.save(file, "PNG")
    with opened(browser, fake) as page:
        fill(page, seed=1)
        page.click("#more-summary")
        page.set_input_files("#image-file", {"name": "a.png", "mimeType": "image/png", "buffer": file.getvalue()})
        expect(page.locator("#image-preview")).to_be_visible()
        assert serious_findings(page) == []
        generate(page, strength=0.5, negative_prompt="blue")
        jobs = [call[0] for call in fake.engine.calls]
        assert [(job.image.size, job.strength, job.negative_prompt) for job in jobs] == [((64, 48), 0.5, "blue")] * 2
        assert jobs[0].image.getpixel((32, 24)) == (255, 0, 0) and jobs[0].image.getpixel((1, 24)) == (255, 255, 255)
        expect(page.locator("#caption")).to_contain_text("from an image, strength 0.5")
        expect(page.locator("#caption")).to_contain_text("without: blue")
        page.fill("#strength", "0.1")
        page.click("#generate")
        expect(page.locator("#strength-error")).to_contain_text("leaves none")
        page.click("#image-remove")
        expect(page.locator("#strength-field")).to_be_hidden()
        generate(page)
        assert fake.engine.calls[-1][0].image is None
        page.click("#thumbnails li:last-child button")
        expect(page.locator("#image-preview")).to_be_visible()
        assert page.input_value("#strength") == "0.5"
        give(page, "drop", "#image-zone", "b.png", "image/png", file.getvalue())
        page.select_option("#size", "64x64")
        page.wait_for_function("() => document.querySelector('#image-preview').naturalHeight === 64")
        page.click("#image-remove")
        give(page, "paste", "#prompt", "c.png", "image/png", file.getvalue())
        expect(page.locator("#image-preview")).to_be_visible()
        give(page, "drop", "#image-zone", "text.png", "image/png", b"no image")
        expect(page.locator("#image-error")).to_have_text("text.png cannot be read as an image.")


def test_model_without_image_to_image(browser):
    with serving(limits=replace(EXPORTED, image_to_image=False)) as server, opened(browser, server) as page:
        fill(page)
        page.click("#more-summary")
        expect(page.locator("#negative_prompt")).to_be_visible()
        expect(page.locator("#image-zone")).to_be_hidden()
        give(page, "drop", "body", "a.png", "image/png", b"no image")
        expect(page.locator("#phase")).to_contain_text("this export has no image-to-image")


def test_dropping_our_files_restores_their_settings(browser, fake):
    with opened(browser, fake) as page:
        generate(page, prompt="a fox, 狐", seed=11, steps=3)
        (name, image), (_, results) = downloaded(page, "right"), downloaded(page, "settings")
        for file, kind, content in ((name, "image/png", image), ("s.json", "application/json", results)):
            fill(page, prompt="other", seed=2, steps=9)
            page.select_option("#tome_ratio", "0.75")
            give(page, "drop", "#result", file, kind, content)
            expect(page.locator("#phase")).to_have_text(f"The settings are those of {file}.")
            values = [page.input_value(f"#{field}") for field in ("prompt", "seed", "steps", "tome_ratio")]
            assert values == ["a fox, 狐", "11", "3", "0.5"]


# The server's answers


def test_errors_of_the_server_are_in_words(browser, fake):
    with opened(browser, fake, refusals=[422]) as page:
        generate(page, prompt="explode", done="")
        expect(page.locator("#error")).to_contain_text("The server could not generate the image: the pipeline failed")
        page.fill("#prompt", "fox")
        page.route(
            "**/generations", lambda route: route.continue_(post_data={**route.request.post_data_json, "steps": 99})
        )
        page.click("#generate")
        expect(page.locator("#steps-error")).to_contain_text("99 is not allowed: it must be 1 to 50")
        expect(page.locator("#steps")).to_be_focused()
        page.unroute_all(behavior="wait")


def test_places_in_the_queue_and_a_full_queue(browser):
    """One image runs and one waits; the page's is the second of the queue. Then the queue has no room."""
    refusals = [429, *ABORTED]
    with serving(capacity=3, max_batch=1) as server, opened(browser, server, refusals=refusals) as page:
        fill(page, steps=2)
        server.engine.gate.clear()
        with ThreadPoolExecutor(3) as pool:
            others = [pool.submit(server.post, OPENAI, {"prompt": "a", "seed": seed}) for seed in range(2)]
            until(lambda: server.queue.waiting == 1)
            page.click("#generate")
            expect(page.locator("#phase")).to_have_text("Waiting in the queue: place 2.")
            page.click("#cancel")
            until(lambda: server.queue.waiting == 1)
            more = pool.submit(server.post, OPENAI, {"prompt": "a", "seed": 2, "n": 2})
            until(lambda: server.queue.waiting == 3)
            page.click("#generate")
            expect(page.locator("#error")).to_contain_text("The queue is full. Try again in")
            server.engine.gate.set()
            assert [one.result().status_code for one in (*others, more)] == [200, 200, 200]
        generate(page)


def test_server_that_is_not_ready_is_asked_again(browser, fake):
    with opened(browser, fake, refusals=[503]) as page:
        fill(page, seed=21)
        page.clock.install()
        fake.queue.refuse("the server is not ready: loading")
        page.click("#generate")
        expect(page.locator("#phase")).to_have_text("The server is not ready. Trying again in 5 s.")
        fake.queue.open()
        page.clock.fast_forward(5_000)
        expect(page.locator("#phase")).to_contain_text("Done: PSNR")


def test_lost_connection(browser, fake):
    """A stream stays silent though the server answers, as after a proxy or a network lost it: it is given up."""
    with opened(browser, fake, refusals=ABORTED) as page:
        fill(page)
        page.clock.install()
        page.route("**/generations", lambda route: None)  # never answered
        page.click("#generate")
        page.clock.fast_forward(9_000)
        expect(page.locator("#silence")).to_be_hidden()
        with page.expect_response("**/health"):
            page.clock.fast_forward(1_500)
        expect(page.locator("#silence")).to_contain_text("not answered for ten seconds")
        page.wait_for_timeout(100)  # the page reads the answer
        page.clock.fast_forward(10_500)
        expect(page.locator("#phase")).to_have_text("The server is back.")
        expect(page.locator("#silence")).to_be_hidden()
        page.unroute_all()
        generate(page, done="Done: PSNR")


RELAY = """
import asyncio, sys

async def copy(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()

async def connect(reader, writer):
    to_server = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))
    await asyncio.gather(copy(reader, to_server[1]), copy(to_server[0], writer))

async def relay():
    listener = await asyncio.start_server(connect, "127.0.0.1", 0)
    print(listener.sockets[0].getsockname()[1], flush=True)
    await listener.serve_forever()

asyncio.run(relay())
"""


@pytest.fixture
def relay(fake):
    """A process in front of the server, to stop and to kill: for the page it is the server, and it starts at once."""
    command = [sys.executable, "-c", RELAY, str(fake.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        process.port = int(process.stdout.readline())
        process.url = f"http://127.0.0.1:{process.port}"
        yield process
        process.kill()


def test_frozen_and_killed_server(browser, fake, relay):
    """A hint after ten seconds of silence, and on with the image; then the plain image stays, and the page waits."""
    refusals = [
        "ERR_CONNECTION",
        "ERR_INCOMPLETE_CHUNKED_ENCODING",
        "ERR_EMPTY_RESPONSE",
        "ERR_SOCKET_NOT_CONNECTED",
        *ABORTED,
    ]
    fake.engine.held = 0.5
    with opened(browser, relay, refusals=refusals) as page:
        fill(page)
        page.clock.install()
        page.click("#generate")
        expect(page.locator("#phase")).to_have_text("Generating ratio 0.5…")
        until(lambda: not fake.engine.gate.is_set())  # the request is in the engine
        relay.send_signal(signal.SIGSTOP)
        page.clock.fast_forward(10_500)
        expect(page.locator("#silence")).to_contain_text("not answered for ten seconds")
        expect(page.locator("#silence")).to_be_in_viewport()
        assert serious_findings(page) == []
        fake.engine.gate.set()
        relay.send_signal(signal.SIGCONT)
        expect(page.locator("#silence")).to_be_hidden()
        expect(page.locator("#phase")).to_contain_text("Done: PSNR")
        page.fill("#seed", "2")
        page.click("#generate")
        expect(page.locator("#phase")).to_have_text("Generating ratio 0.5…")
        relay.kill()
        # After the request was sent, or before.
        ended = re.compile("connection ended before the image|cannot be reached")
        expect(page.locator("#error")).to_have_text(ended)
        expect(page.locator("#silence")).to_contain_text("every two seconds")
        expect(page.locator("#caption")).to_contain_text("seed 2")
        expect(page.locator("#right")).to_be_visible()
        relay.wait()
        with serving(ColorEngine(), limits=EXPORTED, config=CONFIG, port=relay.port):
            page.clock.fast_forward(2_500)
            expect(page.locator("#phase")).to_have_text("The server is back.")
            expect(page.locator("#error")).to_be_hidden()
            generate(page, done="Done: PSNR")


def test_page_while_the_model_loads(browser):
    event = threading.Event()
    with serving(load=lambda: event.wait(30) and FakeEngine()) as server, opened(browser, server) as page:
        expect(page.locator("#phase")).to_have_text("The model is loading…")
        expect(page.locator("#generate")).to_be_disabled()
        assert page.get_attribute("#generate", "aria-describedby") == "phase", "why it is disabled"
        assert serious_findings(page) == []
        event.set()
        generate(page)


def test_key_is_asked_for_once_and_not_stored(browser):
    with serving(config=AppConfig(api_key=KEY, steps=2)) as server, opened(browser, server, refusals=[401]) as page:
        expect(page.locator("#key")).to_be_focused()
        assert serious_findings(page) == []
        for key in ("wrong", KEY):
            page.fill("#key", key)
            page.keyboard.press("Enter")
            if key == "wrong":
                expect(page.locator("#key-error")).to_have_text("The server does not accept this key.")
        expect(page.locator("#key-dialog")).to_be_hidden()
        generate(page)
        stored = """async () => {
            const opening = indexedDB.open("ppdiffusers_tome");
            await new Promise((resolve) => (opening.onsuccess = resolve));
            const reading = opening.result.transaction("entries").objectStore("entries").getAll();
            await new Promise((resolve) => (reading.onsuccess = resolve));
            const others = [{...localStorage}, {...sessionStorage}, document.cookie, location.href, history.state];
            return JSON.stringify([reading.result, ...others]);
        }"""
        text = page.evaluate(stored)
        assert '"seed"' in text and KEY not in text and KEY not in page.content()
        page.reload()
        expect(page.locator("#key")).to_be_focused()
        page.keyboard.press("Escape")
        expect(page.locator("#error")).to_contain_text("Without a key")
        expect(page.locator("#generate")).to_be_disabled()


# History and links


def stored(page, method, *values):
    """The result of a request to the store of the history: one of IDBObjectStore's methods."""
    return page.evaluate(
        """([method, values]) => new Promise((resolve, reject) => {
            const opening = indexedDB.open("ppdiffusers_tome");
            opening.onerror = reject;
            opening.onsuccess = () => {
                const store = opening.result.transaction("entries", "readwrite").objectStore("entries");
                const asked = store[method](...values);
                asked.onerror = reject;
                asked.onsuccess = () => { opening.result.close(); resolve(asked.result); };
            };
        })""",
        [method, values],
    )


def test_history(browser, fake):
    """An entry brings images and settings back, is marked, and survives a reload; a click while an image is generated
    mixes nothing up."""
    with opened(browser, fake) as page:
        generate(page, prompt="a fox & an owl, 狐", seed=1)
        generate(page, prompt="second", seed=2, steps=3)
        entries = page.locator("#thumbnails button")
        expect(entries).to_have_count(2)
        assert "Ratio 0.5\nSeed 2\n" in entries.first.inner_text()
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        entries.last.click()
        expect(page.locator("#phase")).to_have_text(re.compile("From the history: ratio 0.5, seed 1, "))
        expect(page.locator("#frame")).to_be_in_viewport()
        assert page.input_value("#prompt") == "a fox & an owl, 狐" and page.input_value("#steps") == "4"
        expect(page.locator("#caption")).to_contain_text("seed 1")
        title = page.get_attribute("#thumbnails [aria-current=true]", "title")
        assert title.startswith("Show again: a fox & an owl")
        fake.engine.held = 0.5
        fill(page, prompt="third", seed=3, steps=10)
        page.click("#generate")
        expect(page.locator("#step")).to_contain_text("of 10")
        expect(page.locator("#phase")).to_have_text("Generating ratio 0.5…")
        page.click("#thumbnails [title*=second]")
        expect(page.locator("#caption")).to_contain_text("seed 2")
        until(lambda: not fake.engine.gate.is_set())  # the request is in the engine
        fake.engine.gate.set()
        expect(page.locator("#phase")).to_contain_text("Done: PSNR")
        assert page.input_value("#prompt") == "second" and "seed 2" in page.inner_text("#caption")
        expect(entries).to_have_count(3)
        assert [(call[0].seed, call[0].ratio) for call in fake.engine.calls[-2:]] == [(3, 0), (3, 0.5)]
        page.reload()
        expect(entries).to_have_count(3)
        expect(page.locator("#caption")).to_contain_text("seed 2")
        page.click("#thumbnails [title*=third]")
        expect(page.locator("#caption")).to_contain_text("seed 3")
        assert page.evaluate("document.querySelector('#left').naturalWidth") == 64
        stored(page, "put", {"id": "other", "model": "another model", "time": 0, "settings": {}, "images": {}})
        page.once("dialog", lambda dialog: dialog.accept())
        page.click("#clear")
        expect(page.locator("#history")).to_be_hidden()
        until(lambda: stored(page, "getAllKeys") == ["other"])  # what is of another model stays
        page.reload()
        expect(page.locator("#phase")).to_have_text("Ready.")
        expect(page.locator("#history")).to_be_hidden()


def test_links(browser, fake):
    """The link holds the settings, and opening it generates nothing; ratios may be written as people write them."""
    with opened(browser, fake, permissions=["clipboard-read", "clipboard-write"]) as page:
        generate(page, prompt="a fox & an owl, 狐", seed=1)
        fragment = page.get_attribute("#link", "href")
        assert page.url.endswith(fragment) and fragment.startswith("#prompt=a+fox+%26+an+owl")
        page.click("#copy")
        expect(page.locator("#copied")).to_have_text("Copied.")
        assert page.evaluate("navigator.clipboard.readText()") == page.url
    fake.engine.calls.clear()
    with opened(browser, fake, fragment=fragment) as page:
        fill(page)
        assert page.input_value("#prompt") == "a fox & an owl, 狐" and page.input_value("#seed") == "1"
        for ratio, value in (("0", "0"), (".5", "0.5"), ("0.750", "0.75")):
            page.evaluate("(ratio) => (location.hash = `#tome_ratio=${ratio}`)", ratio)
            page.wait_for_function("(value) => document.querySelector('#tome_ratio').value === value", arg=value)
            expect(page.locator("#tome_ratio-error")).to_be_empty()
    with opened(browser, fake, fragment="#size=512x512&steps=9&x=<script>") as page:
        fill(page)
        expect(page.locator("#size-error")).to_have_text("512x512 is not in this export.")
        assert page.input_value("#size") == "64x48" and page.input_value("#steps") == "9"
        assert fake.engine.calls == []


# Screens, colours and languages


COLOURS = (
    {"color_scheme": "light", "forced_colors": "none"},
    {"color_scheme": "dark", "forced_colors": "none"},
    {"color_scheme": "dark", "forced_colors": "active"},
)


@pytest.mark.parametrize("viewport", [NARROW, LANDSCAPE], ids=["narrow", "landscape"])
def test_small_screens_and_colours(browser, fake, viewport):
    """In every state: empty, with all ratios, with an error, with a long prompt; nothing is wider than the screen."""

    def check(page):
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        for colours in COLOURS:
            page.emulate_media(**colours)
            assert serious_findings(page) == [], colours

    with opened(browser, fake, viewport=viewport, has_touch=True) as page:
        fill(page, prompt="fox " * 24)
        check(page)
        generate(page, done="Done: 4 images", button="#all")
        page.locator("#frame").scroll_into_view_if_needed()
        box = page.locator("#frame").bounding_box()
        page.touchscreen.tap(box["x"] + 10, box["y"] + box["height"] / 3)
        assert float(page.input_value("#split")) < 20
        assert box["height"] <= max(LANDSCAPE["height"], viewport["width"])
        page.fill("#steps", "0")
        page.click("#generate")
        check(page)
        ramp = page.eval_on_selector(".ramp", "element => getComputedStyle(element).backgroundImage")
        assert "gradient" in ramp and "255, 85, 0" in ramp, "the scale has its colours, though they are forced"
        outlines = "all => all.map((one) => getComputedStyle(one).outlineStyle)"
        assert page.eval_on_selector_all("#ratios [aria-pressed=true]", outlines) == ["solid"] * 2, "what is selected"


def test_focus_does_not_scroll_a_landscape_phone(browser, fake):
    """The buttons change places while an image is generated; the page stays where it is."""
    fake.engine.seconds = {0.0: 0.1, 0.5: 0.1}
    with opened(browser, fake, viewport=LANDSCAPE, has_touch=True, refusals=ABORTED) as page:
        fill(page, steps=20)
        page.evaluate("scrollTo(0, 0)")
        page.focus("#prompt")
        page.keyboard.press("Control+Enter")
        expect(page.locator("#step")).to_contain_text("of 20")
        assert page.evaluate("scrollY") == 0
        page.keyboard.press("Escape")
        expect(page.locator("#phase")).to_contain_text("Cancelled")


def test_long_prompts_are_folded(browser):
    """And each prompt has the direction of its own script."""
    limits = replace(EXPORTED, prompt_characters=2000)
    with serving(ColorEngine(), limits=limits, config=CONFIG) as server, opened(browser, server) as page:
        generate(page, prompt="שועל " * 200)
        folded = page.locator("#caption details")
        expect(folded).not_to_have_attribute("open", "")
        assert len(page.inner_text("#caption summary bdi")) < 200
        assert page.locator("#caption").bounding_box()["height"] < 200
        page.click("#caption summary")
        assert len(page.inner_text("#caption details > bdi")) >= 990
        assert page.eval_on_selector("#thumbnails bdi", "element => element.tagName") == "BDI"


def test_chinese(browser, fake):
    with opened(browser, fake, locale="zh-CN") as page:
        generate(page, done="完成", button="#all", prompt="狐", steps=5)
        assert page.get_attribute("html", "lang") == "zh-CN" and page.inner_text("h1").startswith("token 合并")
        expect(page.locator("#method-words")).to_have_text("方法：interlace")
        page.click("#more-summary")
        page.fill("#steps", "0")
        page.click("#generate")
        page.click("[data-term=ratio]")
        names = r"\b(ToMe|token|fake|PSNR|SSIM|dB|PNG|JSON|Ctrl|Enter|Esc|src|dst|sx|sy)\b"
        methods = "|".join(METHODS)  # one word each, the same in all languages
        shown = re.sub(rf"{names}|\b({methods})\b|{'|'.join(PROMPTS)}", "", page.inner_text("body"))
        assert re.findall(r"[A-Za-z]{2,}", shown) == []
        labels = page.eval_on_selector_all("[aria-label]", "all => all.map((one) => one.ariaLabel)")
        assert [label for label in labels if label.isascii()] == [] and serious_findings(page) == []
    with opened(browser, fake, locale="zh-TW") as page:
        fill(page)
        assert page.get_attribute("html", "lang") == "en" and page.inner_text("#generate") == "Generate"


@pytest.mark.parametrize(
    ("ratios", "notice", "name"), [((0.5,), "no ratio 0", "ratio 0.5"), ((0.0,), "nothing merges", "plain")]
)
def test_export_without_one_of_both(browser, ratios, notice, name):
    with serving(limits=replace(LIMITS, ratios=ratios)) as server, opened(browser, server) as page:
        fill(page)
        expect(page.locator("#exported")).to_contain_text(notice)
        expect(page.locator("#all")).to_be_hidden()
        generate(page)
        expect(page.locator("#right-name")).to_have_text(name)
        for hidden in ("#left", "#split", "#difference-figure", "#psnr", "#plot-figure"):
            expect(page.locator(hidden)).to_be_hidden()
        assert results_of(page)["shown"] is None
