"""What README.md, usage.md, export.md and serve.md tell a reader to run: in this order, in one folder."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import paddle
import pytest
from conftest import tiny_pipeline
from exporting import LinkedProgram, write_program
from markdown_text import ROOT, text_of
from PIL import Image
from ppdiffusers import StableDiffusionPipeline
from serving_support import until

from ppdiffusers_tome.cli import _parser, main
from ppdiffusers_tome.export import export as export_module
from ppdiffusers_tome.export.conversion import Converter
from ppdiffusers_tome.export.tracing import TracedProgram

PAGES = ("README.md", "docs/usage.md", "docs/export.md", "docs/serve.md")
SMALL = {"256": "32", "512": "32", "768": "64", "1024": "64"}  # px, because the model is tiny
INSTALLING = ("python3", "pip", ".", "git", "cd", "make", "ppdiffusers_tome/requirements/serve.txt")
MODEL = "examples/scenes_sd"
OTHER_MODELS = r"\bDIR\b|(?:stable-diffusion-v1-5|runwayml)/stable-diffusion-v1-5"  # of the reader, or of a hub


def blocks(document):
    """(language, code) of each block of Python or shell code."""
    return re.findall(r"^```(python|bash)\n(.*?)^```$", text_of(document), re.DOTALL | re.MULTILINE)


def shell_commands(code):
    """(text, words) of each command; one may have several lines."""
    text = ""
    for line in code.splitlines():
        text += line + "\n"
        try:
            words = shlex.split(text, comments=True)
        except ValueError:  # a quotation is open
            continue
        if not line.endswith("\\"):
            if words:
                yield text, words
            text = ""
    assert not text, text


class Reader:
    """Runs the blocks of pages in the current folder, with a tiny model, small sizes, fewer steps and a free port."""

    def __init__(self):
        self.exports = {}  # words of the command by folder
        self.called = []  # the commands of this package, and the programs beside it
        self.to_serve = self.server = None  # words of the command `serve`, and the process that a client needs
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = str(free.getsockname()[1])

    def read(self, document):
        variables = {}
        for language, code in blocks(document):
            code = re.sub(OTHER_MODELS, MODEL, code).replace("8000", self.port)
            code = re.sub(r"(num_inference_steps=)\d+", r"\g<1>2", code)
            code = re.sub(rf"(?<![\d.])({'|'.join(SMALL)})(?![\d.])", lambda match: SMALL[match[0]], code)
            if language == "python":
                self.run_python(code, variables)
                continue
            for text, words in shell_commands(code):
                self.run_command(text, words)
        self.stop()

    def run_python(self, code, variables):
        if paddle.__version__.startswith("2.") and "paddle.incubate.jit" in code:
            return  # of Paddle 3
        if "localhost" in code:  # a client, whose connections end with its process
            self.start()
            done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-3000:]
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(code, variables)

    def run_command(self, text, words):
        if words[:3] == ["python", "-m", "ppdiffusers_tome"]:
            self.run_package(words[3:])
        elif words[:2] == ["python", "-c"]:
            self.run_python(words[2], {})
        elif words[0] == "python":
            code = ROOT.joinpath(words[1]).read_text(encoding="utf-8").replace("8000", self.port)
            self.run_python(code.replace("127.0.0.1", "localhost"), {})
            self.called.append(words[1])
        elif words[0] == "head":
            subprocess.run(text, shell=True, check=True)
        elif words[0] == "curl":
            self.start()
            done = subprocess.run(["curl", "--fail-with-body", "-sS", *words[1:]], capture_output=True, text=True)
            assert done.returncode == 0, f"{text}{done.stdout}{done.stderr}"
            self.called.append("curl")
        else:
            assert words[0] in INSTALLING, f"a command that this test does not know: {text}"

    def run_package(self, words):
        self.called.append(words[0])
        if words[0] == "serve":
            return self.serve([*words, *([] if "--port" in words else ["--port", self.port])])
        if words[0] == "export":
            folder = words[words.index("--output") + 1]
            if folder in self.exports:  # the reader has it already, if it is the same
                assert self.exports[folder] == words, f"another export was written to {folder} before"
                return None
            self.exports[folder] = words
        fewer = ["--rounds", "3"] if words[0] == "compare" else []
        if "--goal" in words:  # test_compare.py tries the settings of all methods
            fewer += ["--method", "todo"]
        expected = (0, 1) if "--goal" in words else (0,)  # 1: nothing reaches the goal
        assert main([*words, *fewer]) in expected
        return None

    def serve(self, words):
        """Of a server that no client follows the command is parsed: to start each takes seconds."""
        self.stop()
        assert str(_parser().parse_args(words).model) in self.exports
        self.to_serve = [*words, *([] if "--port" in words else ["--port", self.port])]

    def start(self):
        if self.server is None:
            self.server = self.serving(self.to_serve)
            self.server.__enter__()

    def stop(self):
        if self.server is not None:
            self.server.__exit__(None, None, None)
        self.server = None

    @contextmanager
    def serving(self, words):
        log = Path("server.log")
        with log.open("w") as output:
            command = [sys.executable, "-W", "ignore", "-m", "ppdiffusers_tome", *words]
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=os.environ | {"PYTHONPATH": str(ROOT)}
            )
        try:
            until(lambda: "ready: open http://" in log.read_text() or process.poll() is not None, seconds=120)
            assert process.poll() is None, log.read_text()[-3000:]
            yield
        finally:
            process.terminate()
            process.wait()


@pytest.fixture
def traced_once(monkeypatch, tmp_path):
    """A program of a text encoder or VAE is traced once, and copied into the exports that have it too.

    Not a UNet: others are made from it by the names of its weights, which are others each time it is loaded.
    """
    traced = {}

    def trace(traceable, planned, folder, target, dims, threads):
        if planned.model == "unet":
            return TracedProgram(traceable, planned, folder, target, dims, threads)
        if planned.place not in traced:
            root = tmp_path / "traced" / planned.name
            traced[planned.place] = root, write_program(traceable, planned, root, "program", dims, converter)
        return LinkedProgram(*traced[planned.place], folder, target)

    monkeypatch.setattr(export_module, "TracedProgram", trace)
    with Converter() as converter:
        yield


@pytest.fixture
def compared_once(monkeypatch):
    """Images are compared in the first export alone."""
    compare, done = export_module.compare_images, []

    def compare_first(*arguments):
        done.append(arguments)
        return compare(*arguments) if len(done) == 1 else 0.0

    monkeypatch.setattr(export_module, "compare_images", compare_first)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The current folder: it has the examples, with a tiny model in place of the bundled one."""
    (tmp_path / "build").mkdir()
    (tmp_path / "examples").mkdir()
    for path in (ROOT / "examples").iterdir():
        if path.name != "scenes_sd":
            (tmp_path / "examples" / path.name).symlink_to(path)
    model = tmp_path / MODEL
    tiny_pipeline().save_pretrained(str(model))
    (model / "prompts.txt").write_text("a fox\nan owl\n")
    (model / "defaults.json").write_text('{"steps": 2, "guidance_scale": 3.0, "prompts": ["a fox"]}')
    monkeypatch.chdir(tmp_path)
    load, in_float32 = StableDiffusionPipeline.from_pretrained, {"paddle_dtype": paddle.float32}  # there is no GPU
    monkeypatch.setattr(StableDiffusionPipeline, "from_pretrained", lambda name, **_: load(name, **in_float32))
    return tmp_path


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.usefixtures("traced_once", "compared_once")
def test_a_reader_can_run_the_pages_one_after_the_other(folder):
    """Each export is written once, and what a page needs is in the export of the pages before it."""
    reader = Reader()
    try:
        for page in PAGES:
            reader.read(page)
    finally:
        reader.stop()
    assert set(reader.called) >= {"export", "generate", "serve", "compare", "examples/serve_client.py", "curl"}
    assert "build/scenes" in reader.exports
    assert len(list((folder / "build" / "images").glob("*.png"))) == 2
    for image in [*folder.glob("*.png"), *folder.glob("build/images/*.png")]:
        assert Image.open(image).getextrema() != ((255, 255),) * 3, image
