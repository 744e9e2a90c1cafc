"""The page for browsers, in a real one: against the server with the bundled model, and with an engine of one colour.

The tests are skipped where there is no browser: apt-get install chromium, or name one with CHROMIUM=...
"""

import io
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import load_bundled
from PIL import Image
from serving_support import LIMITS, OPENAI, serving, until
from skimage.metrics import structural_similarity

from ppdiffusers_tome.commands.serve import warm_up_jobs
from ppdiffusers_tome.evaluation.quality.metrics import psnr
from ppdiffusers_tome.generation.engine import Engine, load_engine
from ppdiffusers_tome.inference.manifest import Size
from ppdiffusers_tome.serving.app_config import AppConfig

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright: pip install -r requirements-test.txt"
)
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
BROWSER = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser: apt-get install chromium, or set CHROMIUM")
expect = playwright.expect

MODEL = os.environ.get("PAGE_MODEL")  # an export of the bundled model; without it, the model runs in eager mode
SCREENSHOT = os.environ.get("PAGE_SCREENSHOT")  # file to write
KEY = "correct-horse"
NARROW = {"width": 320, "height": 640}


class EagerEngine(Engine):
    """The bundled pipeline itself in place of its exported programs, which take a minute to make."""

    def generate(self, jobs, should_stop=None):
        if jobs[0].ratio:
            self._text_to_image.apply_tome(jobs[0].ratio)
        else:
            self._text_to_image.remove_tome()
        return super().generate(jobs, should_stop)


@pytest.fixture(scope="module")
def bundled():
    """The server with the bundled model."""
    limits = replace(LIMITS, sizes=(Size(128, 128),), image_to_image=False, steps=100)

    def load():
        if not MODEL:
            return EagerEngine(load_bundled())
        engine = load_engine(Path(MODEL), threads=1)
        for job in warm_up_jobs(limits, 2.0):
            engine.generate([job])
        return engine

    with serving(load=load, name="emoji_sd", limits=limits, config=AppConfig()) as server:
        until(lambda: server.queue.state == "ready", 120)
        yield server


@pytest.fixture(scope="module")
def fake():
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser, server, refusals=(), fragment="", **options):
    """The page in a new window. Fails on errors in its scripts, violations of its policy, and requests elsewhere.

    `refusals` are statuses that the server is expected to answer, and errors, which the browser logs.
    """
    context = browser.new_context(**{"locale": "en-US", "viewport": {"width": 1200, "height": 900}, **options})
    page, problems = context.new_page(), []
    page.set_default_timeout(20_000)

    def on_console(message):
        is_expected = any(str(refusal) in message.text for refusal in refusals)
        if message.type in ("error", "warning") and not is_expected:
            problems.append(message.text)

    page.on("console", on_console)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: request.url.startswith((server.url, "blob:")) or problems.append(request.url))
    page.goto(f"{server.url}/{fragment}")
    try:
        yield page
        assert problems == []
    finally:
        context.close()


def fill(page, **settings):
    expect(page.locator("#draw")).to_be_enabled(timeout=20_000)
    for name, value in settings.items():
        page.fill(f"#{name}", str(value))


def draw(page, done="Done", **settings):
    """Draw with these settings and wait for the comparison."""
    fill(page, **settings)
    page.click("#draw")
    expect(page.locator("#phase")).to_contain_text(done, timeout=60_000)


def downloaded(page, name):
    """Name and content of what the link downloads."""
    with page.expect_download() as download:
        page.click(f"#download-{name}")
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def serious_findings(page):
    """What axe-core finds, of impact serious or critical."""
    results = axe.Axe().run(page).response
    assert len(results["passes"]) > 10
    rules = [rule for rule in results["violations"] if rule["impact"] in ("serious", "critical")]
    return [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in rules]


def gray_ssim(a, b):
    """scikit-image's SSIM with the windows of Wang et al. 2004, as in the page."""
    grays = [np.round(image @ [0.299, 0.587, 0.114]) for image in (a, b)]
    return structural_similarity(*grays, data_range=255, gaussian_weights=True, sigma=1.5, use_sample_covariance=False)


# With the bundled model


def test_draw_and_download(browser, bundled):
    """Plain and merged from the same noise; the measures are those of the downloaded files."""
    with opened(browser, bundled) as page:
        draw(page, prompt="a 3d render of fox", seed=1, steps=20 if SCREENSHOT else 2, guidance_scale=2)
        names, files = zip(*(downloaded(page, name) for name in ("plain", "merged", "settings")), strict=True)
        assert names == ("plain_seed1.png", "merged_seed1.png", "settings_seed1.json")
        images = [Image.open(io.BytesIO(file)) for file in files[:2]]
        made = [json.loads(image.text["ppdiffusers_tome"]) for image in images]
        assert [one["tome_ratio"] for one in made] == [0, 0.5] and [one["seed"] for one in made] == [1, 1]
        plain, merged = (np.asarray(image.convert("RGB")) for image in images)
        results = json.loads(files[2])
        expected = {"prompt": "a 3d render of fox", "seed": 1, "guidance_scale": 2, "size": "128x128"}
        assert expected.items() <= results.items() and results["tome_ratio"] == 0.5
        assert results["psnr"] == pytest.approx(psnr(plain, merged), abs=0.01) and results["psnr"] < 70
        assert results["ssim"] == pytest.approx(gray_ssim(plain, merged), abs=1e-3)
        assert results["speed_up"] == pytest.approx(results["plain"]["seconds"] / results["merged"]["seconds"])
        assert results["plain"]["images_in_the_call"] == 1 and results["plain"]["seconds"] > 0
        expect(page.locator("#psnr")).to_have_text(f"{results['psnr']:.1f} dB")
        expect(page.locator("#speed-up")).to_have_text(f"{results['speed_up']:.2f}×")
        largest = np.abs(plain.astype(int) - merged).max()
        assert page.get_attribute("#difference", "aria-label").startswith(f"Difference map: at most {largest} of 255")
        assert serious_findings(page) == []
        if SCREENSHOT:
            page.screenshot(path=SCREENSHOT, full_page=True)


def test_cancel_stops_at_the_next_step(browser, bundled):
    with opened(browser, bundled) as page:
        fill(page, prompt="owl", steps=100)
        page.click("#draw")
        expect(page.locator("#step")).to_have_text(re.compile("^step [1-9]"), timeout=20_000)
        expect(page.locator("#cancel")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#draw")).to_be_focused()
        expect(page.locator("#phase")).to_contain_text("Cancelled")
        expect(page.locator("#drawn")).to_be_hidden()
        until(lambda: bundled.queue.is_idle)
        assert bundled.count("images_total", outcome="abandoned") == 1
        draw(page, steps=1)


# With an engine that draws one colour at once


def test_slider(browser, fake):
    """By mouse and by keyboard; its value is read out in words."""
    with opened(browser, fake) as page:
        draw(page, seed=7)
        box = page.locator("#split").bounding_box()
        page.mouse.click(box["x"] + box["width"] * 0.25, box["y"] + box["height"] / 2)
        assert float(page.input_value("#split")) == pytest.approx(25, abs=0.5)
        page.keyboard.press("Home")
        assert page.get_attribute("#split", "aria-valuetext") == "0 % plain, on the left"
        page.keyboard.press("PageUp")
        clip = page.eval_on_selector("#plain", "image => getComputedStyle(image).clipPath")
        assert page.get_attribute("#split", "aria-valuetext") == "10 % plain, on the left" and "90%" in clip
        assert page.inner_text("#psnr") == "∞ (equal)" and page.inner_text("#ssim") == "1.000"


def test_only_the_keyboard(browser, fake):
    """From the prompt through all fields to the button and the slider, in the order of the page."""
    with opened(browser, fake) as page:
        fill(page)
        page.focus("#prompt")
        page.keyboard.type("fox")
        visited = []
        for _ in range(7):
            page.keyboard.press("Tab")
            visited.append(page.evaluate("document.activeElement.id"))
        assert visited == ["seed", "new-seed", "steps", "guidance_scale", "size", "tome_ratio", "draw"]
        page.keyboard.press("Enter")
        expect(page.locator("#phase")).to_contain_text("Done")
        page.keyboard.press("Tab")
        expect(page.locator("#split")).to_be_focused()
        page.keyboard.press("ArrowRight")
        assert page.input_value("#split") == "50.5"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", "0", "Steps must be a whole number from 1 to 50."),
        ("steps", "2.5", "Steps must be a whole number from 1 to 50."),
        ("seed", "-1", "Seed must be a whole number from 0 to 4294967295."),
        ("guidance_scale", "much", "Guidance must be a number from 0 to 30."),
        ("prompt", "x" * 101, "The prompt has 101 characters; the limit is 100."),
    ],
)
def test_wrong_input_is_explained_at_its_field(browser, fake, name, value, message):
    before = len(fake.engine.calls)
    with opened(browser, fake) as page:
        fill(page, **{name: value})
        page.click("#draw")
        expect(page.locator(f"#{name}-error")).to_have_text(message)
        expect(page.locator(f"#{name}")).to_be_focused()
        expect(page.locator(f"#{name}")).to_have_attribute("aria-invalid", "true")
        assert len(fake.engine.calls) == before
        draw(page, **{name: "1"})
        expect(page.locator(f"#{name}")).not_to_have_attribute("aria-invalid", "true")


def test_errors_of_the_server_are_in_words(browser, fake):
    with opened(browser, fake, refusals=[422]) as page:
        draw(page, prompt="explode", done="")
        expect(page.locator("#error")).to_contain_text("The server could not draw the image: the pipeline failed")
        page.evaluate("document.querySelector('#size').add(new Option('512x512'))")
        page.select_option("#size", "512x512")
        page.click("#draw")
        expect(page.locator("#error")).to_contain_text("it must be one of the exported values")
        expect(page.locator("#size")).to_be_focused()


def test_places_in_the_queue_and_a_full_queue(browser):
    """One image runs and one waits; the page's is the second of the queue. Then the queue has no room."""
    with serving(capacity=3, largest_batch=1) as server, opened(browser, server, refusals=[429]) as page:
        fill(page, steps=2)
        server.engine.gate.clear()
        with ThreadPoolExecutor(3) as pool:
            others = [pool.submit(server.post, OPENAI, {"prompt": "a", "seed": seed}) for seed in range(2)]
            until(lambda: server.queue.progress().waiting == 1)
            page.click("#draw")
            expect(page.locator("#phase")).to_have_text("Waiting in the queue: place 2.")
            page.click("#cancel")
            until(lambda: server.queue.progress().waiting == 1)
            more = pool.submit(server.post, OPENAI, {"prompt": "a", "seed": 2, "n": 2})
            until(lambda: server.queue.progress().waiting == 3)
            page.click("#draw")
            expect(page.locator("#error")).to_contain_text("The queue is full. Try again in")
            server.engine.gate.set()
            assert [one.result().status_code for one in (*others, more)] == [200, 200, 200]
        draw(page)


def test_server_that_has_ended(browser):
    with ExitStack() as contexts:
        with serving() as server:
            page = contexts.enter_context(opened(browser, server, refusals=["ERR_CONNECTION_REFUSED"]))
            fill(page)
        page.click("#draw")
        expect(page.locator("#error")).to_have_text("The server cannot be reached. Is it still running?")


def test_key_is_asked_for_once_and_not_stored(browser):
    with (
        serving(config=AppConfig(api_key=KEY, steps=2)) as server,
        opened(browser, server, refusals=[401]) as page,
    ):
        expect(page.locator("#key")).to_be_focused()
        assert serious_findings(page) == []
        for key in ("wrong", KEY):
            page.fill("#key", key)
            page.keyboard.press("Enter")
            if key == "wrong":
                expect(page.locator("#key-error")).to_have_text("The server does not accept this key.")
        expect(page.locator("#key-dialog")).to_be_hidden()
        draw(page)
        draw(page)
        stored = (
            "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href, history.state])"
        )
        assert KEY not in page.evaluate(stored) and KEY not in page.content()
        page.reload()
        expect(page.locator("#key")).to_be_focused()
        page.keyboard.press("Escape")
        expect(page.locator("#error")).to_contain_text("Without a key")
        expect(page.locator("#draw")).to_be_disabled()


def test_history_and_links(browser, fake):
    """A thumbnail brings image and settings back; the link holds the settings, and opening it draws nothing."""
    with opened(browser, fake) as page:
        draw(page, prompt="a fox & an owl, 狐", seed=1)
        draw(page, prompt="second", seed=2, steps=3)
        assert page.locator("#thumbnails img").count() == 2
        page.click("#thumbnails li:last-child button")
        assert page.input_value("#prompt") == "a fox & an owl, 狐" and page.input_value("#steps") == "2"
        expect(page.locator("#caption")).to_contain_text("seed 1")
        fragment = page.get_attribute("#link", "href")
        assert page.url.endswith(fragment) and fragment.startswith("#prompt=a+fox+%26+an+owl")
    before = len(fake.engine.calls)
    with opened(browser, fake, fragment=fragment) as page:
        fill(page)
        assert page.input_value("#prompt") == "a fox & an owl, 狐" and page.input_value("#seed") == "1"
        assert len(fake.engine.calls) == before
    with opened(browser, fake, fragment="#size=512x512&steps=9&x=<script>") as page:
        fill(page)
        expect(page.locator("#size-error")).to_have_text("512x512 is not in this export.")
        assert page.input_value("#size") == "64x48" and page.input_value("#steps") == "9"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screen(browser, fake, scheme):
    with opened(browser, fake, viewport=NARROW, color_scheme=scheme, has_touch=True) as page:
        assert serious_findings(page) == []
        draw(page, prompt="fox " * 20)
        page.tap("#split", position={"x": 30, "y": 30})
        assert float(page.input_value("#split")) < 20
        page.fill("#steps", "0")
        page.click("#draw")
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
        assert serious_findings(page) == []


def test_chinese(browser, fake):
    with opened(browser, fake, locale="zh-CN") as page:
        draw(page, done="完成")
        assert page.get_attribute("html", "lang") == "zh-CN" and page.inner_text("h1").startswith("令牌合并")
        texts = page.eval_on_selector_all("[data-text]", "all => all.map(one => [one.dataset.text, one.textContent])")
        english = [name for name, text in texts if text.isascii()]
        assert english == [] and serious_findings(page) == []


@pytest.mark.parametrize(
    ("ratios", "notice", "shown", "hidden"),
    [
        ((0.5,), "no ratio 0", "merged", "plain"),
        ((0.0,), "nothing merges", "plain", "merged"),
    ],
)
def test_export_without_one_of_both(browser, ratios, notice, shown, hidden):
    with serving(limits=replace(LIMITS, ratios=ratios)) as server, opened(browser, server) as page:
        fill(page)
        expect(page.locator("#exported")).to_contain_text(notice)
        draw(page)
        expect(page.locator(f"#{shown}")).to_be_visible()
        expect(page.locator(f"#{hidden}")).to_be_hidden()
        expect(page.locator("#difference-figure")).to_be_hidden()
        assert json.loads(downloaded(page, "settings")[1])["psnr"] is None


def test_times_of_shared_calls_are_marked(browser):
    """The page's plain image waits for another one and shares its call."""
    with serving(batch_wait=1.0, largest_batch=2) as server, opened(browser, server) as page:
        fill(page, steps=2, guidance_scale=7.5)
        with ThreadPoolExecutor(1) as pool:
            page.click("#draw")
            other = pool.submit(server.post, OPENAI, {"prompt": "a", "tome_ratio": 0})
            expect(page.locator("#shared")).to_contain_text("2 images in one call", timeout=20_000)
            assert other.result().status_code == 200
