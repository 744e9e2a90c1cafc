"""The command line: signals, usage, examples in the help, the commands that it suggests, missing packages."""

import os
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import paddle
import pytest

from ppdiffusers_tome import __version__
from ppdiffusers_tome.cli import _parser, main
from ppdiffusers_tome.commands import compare, export, generate
from ppdiffusers_tome.errors import install_command
from ppdiffusers_tome.method_names import DEFAULT_METHOD, DESCRIPTIONS
from ppdiffusers_tome.methods import METHODS
from ppdiffusers_tome.replacement import TERMINATED
from ppdiffusers_tome.run.formats import RUNTIME_FORMATS
from ppdiffusers_tome.run.pipeline import RUNTIMES
from ppdiffusers_tome.serving.offline import LOCK

COMMANDS = ("compare", "export", "generate", "merge-onnx", "serve")
PADDLE = {"paddle", "paddlenlp", "ppdiffusers"}


def run_of(*command):
    """The names of the modules that a run of Python imports, without those within packages, and what it prints."""
    done = subprocess.run([sys.executable, "-X", "importtime", *command], capture_output=True, text=True, check=True)
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}, done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["--help"], *([name, "--help"] for name in COMMANDS)],
)
def test_help_and_version_do_not_import_paddle(arguments):
    """Its import takes seconds."""
    modules, printed = run_of("-m", "ppdiffusers_tome", *arguments)
    assert "argparse" in modules and not modules & PADDLE
    assert printed.startswith("usage: " if "--help" in arguments else f"{__version__}\n")


@pytest.mark.parametrize("command", [["-m", "app", "ppdiffusers_tome"], ["-m", "app"], ["-c", "import app.__main__"]])
def test_any_other_program_that_imports_the_package_imports_paddle_at_once(command, tmp_path, monkeypatch):
    """Only `python -m ppdiffusers_tome` imports it later. Here it is missing, which is an error without delay."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").write_text("import sys; sys.modules['paddle'] = None; import ppdiffusers_tome")
    (tmp_path / "app" / "__main__.py").write_text("print('the import came back')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 1 and "needs PaddlePaddle" in done.stderr and not done.stdout


def test_the_command_line_describes_each_method():
    assert list(DESCRIPTIONS) == list(METHODS) and DEFAULT_METHOD in DESCRIPTIONS
    assert all("\n" not in text and text[-1] != "." for text in DESCRIPTIONS.values())


def test_the_command_line_names_each_runtime():
    assert list(RUNTIME_FORMATS) == list(RUNTIMES)


TINY_SDXL = Path(__file__).parents[2] / "examples" / "tiny" / "sdxl"
AGAIN = "continue with python -m ppdiffusers_tome"


@pytest.mark.parametrize(
    ("module", "function", "command", "remedy"),
    [
        (generate, "_generate", "generate --prompts p --model m --output o", f"{AGAIN} generate --prompts p"),
        (export, "_export", "export --model m --output o", "nothing was written"),
        (compare, "run", "compare --model m", ""),
    ],
)
def test_ctrl_c_is_one_line_that_names_how_to_continue(monkeypatch, capsys, module, function, command, remedy):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, function, interrupt)
    assert main(command.split()) == 130
    error = capsys.readouterr().err
    assert error.startswith(f"interrupted: {remedy}" if remedy else "interrupted\n") and error.count("\n") == 1


FIRST_PROCESS = ["unshare", "--pid", "--fork", "--kill-child", "--map-root-user"]  # what follows is process 1
EMOJI_SD = Path(__file__).parents[2] / "examples" / "emoji_sd"


@pytest.mark.parametrize(("command", "remedy"), [("export", "nothing was written"), ("generate", AGAIN)])
def test_sigterm_ends_a_command_as_first_process_of_a_container(command, remedy, tmp_path, request):
    """Also there, where the kernel ignores the default action. What is finished stays, and nothing half-written.

    `main` turns the signal into the end of every command; these two write files. Until then an export prints its steps
    and no warning: Paddle 3 logs one for each program that it traces, about its own code.
    """
    if subprocess.run([*FIRST_PROCESS, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not allow unshare")
    prompts, output = tmp_path / "prompts.txt", tmp_path / "output"
    prompts.write_text("a fox\n" * 5)
    model = request.getfixturevalue("exported_folder") if command == "generate" else TINY_SDXL
    arguments = ["--model", str(model), "--output", str(output)]
    arguments += {
        "export": ["--ratio", "0"],
        "generate": ["--prompts", str(prompts), "--batch", "1", "--steps", "60", "--guidance-scale", "1"],
    }[command]
    line = {"export": "(2 of ", "generate": "1 of 5 images"}[command]
    python = [*FIRST_PROCESS, sys.executable, "-m", "ppdiffusers_tome"]
    with subprocess.Popen([*python, command, *arguments], stderr=subprocess.PIPE, text=True) as process:
        written = []
        for text in process.stderr:
            written.append(text)
            if line in text:
                break
        else:
            pytest.fail(f"it ended before: {written}")
        child = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        os.kill(int(child), signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(60) == TERMINATED
    assert remedy in rest and "terminated" in rest and "Traceback" not in rest
    assert command != "export" or all(text.startswith("exporting ") for text in written), written
    left = [path.name for path in tmp_path.rglob("*") if path.name not in ("prompts.txt", LOCK)]
    images = [name for name in left if name.endswith(".png")]
    assert set(left) <= {"output", *images} and not any(name.startswith(".") for name in images)
    assert len(images) in (range(1, 5) if command == "generate" else (0,))


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "merge-onnx"])
def test_an_unknown_option_is_answered_with_the_usage_of_its_command(command, capsys):
    arguments = ["--model", "m", "--output", "o", "--prompts", "p", "--sise", "64"]
    known = {"generate": arguments[:6], "serve": arguments[:2]}
    with pytest.raises(SystemExit, match="2"):
        main([command, *known.get(command, arguments[:4]), "--sise", "64"])
    error = capsys.readouterr().err
    assert error.startswith(f"usage: python -m ppdiffusers_tome {command} [-h]")
    assert "unrecognized arguments: --sise 64 (did you mean --size?)" in error


@pytest.mark.parametrize("command", ["compare", "export"])
def test_a_missing_folder_is_named_before_a_hub(command, tmp_path, monkeypatch, capsys):
    def no_such_model(model):
        raise OSError("404 for url https://hub.example/examples/scenes_sd")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ppdiffusers_tome.export.loading.download_index", no_such_model)
    assert main([command, "--model", "examples/scenes_sd", "--output", "out"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: examples/scenes_sd is not a folder in {tmp_path}, and could not be loaded as")
    assert "on ppdiffusers' hub (FROM_HF_HUB=1 in the environment: Hugging Face's): 404" in error


EXAMPLES = {  # by command: how often the examples of its help call each command; None is the program itself
    None: ["compare", "export", "serve"],
    **{name: [name] for name in COMMANDS},
}


OTHERS = (Path("build/scenes"), Path("sd15"))  # models of examples that another command of them writes


def command_lines(text):
    """The arguments of each command of this package in a text."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.strip(), comments=True) if line.strip().startswith("python -m ") else []
        if words and "COMMAND" not in words:
            assert words[:3] == ["python", "-m", "ppdiffusers_tome"]
            yield words[3:]


@pytest.mark.parametrize(("command", "called"), EXAMPLES.items())
def test_each_help_ends_with_an_example_that_parses(command, called, capsys):
    with pytest.raises(SystemExit):
        main([*([command] if command else []), "--help"])
    printed = capsys.readouterr().out
    example = printed.split("\nexample:\n")[1]
    assert max(map(len, example.splitlines())) <= 110
    parsed = [_parser().parse_args(words) for words in command_lines(example)]
    assert [options.command for options in parsed] == called
    for options in parsed:
        model = Path(options.model)
        assert (Path(__file__).parents[2] / model / "model_index.json").is_file() or model in OTHERS
        assert getattr(options, "prompts", None) is None or (Path(__file__).parents[2] / options.prompts).is_file()


def test_every_command_has_an_example():
    (subparsers,) = (action for action in _parser()._actions if action.dest == "command")
    assert set(subparsers.choices) == set(filter(None, EXAMPLES))


SCENES = "examples/scenes_sd"
IN_CODE = "ppdiffusers_tome.inference.load_pipeline('build/x')   # in your own code"


@pytest.mark.parametrize(
    ("pipeline", "encoders", "model", "expected"),
    [
        ("StableDiffusionPipeline", ["text_encoder"], SCENES, [f"{SCENES}/prompts.txt", "--output", "outputs"]),
        ("StableDiffusionXLPipeline", ["text_encoder"], "owner/name", ["prompts.txt", "--output", "outputs"]),
        ("StableDiffusionXLImg2ImgPipeline", [], "refiner", None),
        ("StableDiffusionInpaintPipeline", ["text_encoder"], "inpainting", None),
        ("StableDiffusionControlNetPipeline", ["text_encoder"], SCENES, None),
    ],
)
def test_export_ends_with_the_next_commands(pipeline, encoders, model, expected, monkeypatch):
    """`serve` and `generate` only for exports that they take."""
    monkeypatch.chdir(Path(__file__).parents[2])
    manifest = SimpleNamespace(
        pipeline=pipeline, controlnet="ControlNet" in pipeline, formats=("onnx",), programs_of=lambda _: encoders
    )
    text = export._next_steps(manifest, SimpleNamespace(model=model, output=Path("build/x")))
    assert text.startswith("Next:\n") and text.splitlines()[-1].strip() == IN_CODE
    commands = list(command_lines(text))
    if expected is None:
        assert commands == []
        return
    serve, generate_ = commands
    assert serve == ["serve", "--model", "build/x", "--open"]
    assert generate_ == ["generate", "--model", "build/x", "--prompts", *expected]
    assert [_parser().parse_args(words).command for words in commands] == ["serve", "generate"]


def test_export_of_paddle_programs_for_a_gpu_names_the_device(monkeypatch):
    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: True)
    manifest = SimpleNamespace(
        pipeline="StableDiffusionPipeline", controlnet=False, formats=("paddle",), programs_of=lambda _: ["x"]
    )
    text = export._next_steps(manifest, SimpleNamespace(model="owner/name", output=Path("build/x")))
    assert text.count("--device gpu") == 2 and "load_pipeline('build/x', device=\"gpu\")" in text


def test_errors_name_the_locked_versions_of_missing_packages(tmp_path):
    """What pip chooses for an extra replaces locked packages, and ppdiffusers no longer imports."""
    repository = Path(__file__).parents[2]
    build = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path / "a wheel")]
    subprocess.run(build, cwd=repository, check=True, capture_output=True)
    installed = runpy.run_path(str(tmp_path / "a wheel" / "ppdiffusers_tome" / "errors.py"))["install_command"]
    for command in (install_command, installed):
        for feature in ("serve", "onnx", "ray"):
            *words, file = shlex.split(command(feature))
            assert words == ["pip", "install", "--no-deps", "-r"] and Path(file).is_file()
            assert Path(file).is_relative_to(tmp_path) == (command is installed)
    sources = [*(repository / "ppdiffusers_tome").rglob("*.py"), *(repository / "docs").glob("*.md")]
    assert not [path.name for path in sources if "ppdiffusers_tome[" in path.read_text(encoding="utf-8")]
