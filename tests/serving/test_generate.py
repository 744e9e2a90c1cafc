"""`generate` reads prompt files as it says, and a run that was killed continues with the same bytes."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import pytest
from PIL import Image

from ppdiffusers_tome import progress
from ppdiffusers_tome.cli import main
from ppdiffusers_tome.inference import read_manifest
from ppdiffusers_tome.run.sizes import Size
from ppdiffusers_tome.serving.engine import load_engine
from ppdiffusers_tome.serving.jobs import Job
from ppdiffusers_tome.serving.limits import Limits
from ppdiffusers_tome.serving.offline import OutputError, generate, generate_batch, generate_here, model_hash, split
from ppdiffusers_tome.serving.prompt_file import Prompt, PromptFileError, read_prompts

LIMITS = Limits(sizes=(Size(32, 32), Size(32, 48)), ratios=(0.5, 0.0))
DEFAULTS = Job("", Size(32, 32), 0.5, seed=10, negative_prompt="grey", steps=2, guidance_scale=2.0)


def read(tmp_path, text, name="prompts.jsonl", defaults=DEFAULTS, limits=LIMITS):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_prompts(path, defaults, limits)


# Prompt files


def test_txt_line_is_a_prompt(tmp_path):
    prompts = read(tmp_path, b"\xef\xbb\xbfa fox\r\n\n  an \xc3\xa9toile,\xe2\x80\xa8still one line \n", "prompts.txt")
    first = Job("a fox", Size(32, 32), 0.5, seed=10, negative_prompt="grey", steps=2, guidance_scale=2.0)
    assert prompts == [Prompt(0, first), Prompt(1, replace(first, prompt="an étoile,\u2028still one line", seed=11))]


def test_jsonl_line_with_all_fields(tmp_path):
    line = {"prompt": "a fox", "negative_prompt": "", "seed": 4, "steps": 9, "guidance_scale": 3, "size": "48x32"}
    prompts = read(tmp_path, json.dumps({**line, "tome_ratio": 0, "name": "fox.1"}) + '\n{"prompt": ""}')
    job = Job("a fox", size=Size(32, 48), ratio=0.0, seed=4, steps=9, guidance_scale=3.0)
    assert prompts[0] == Prompt(0, job, "fox.1")
    assert (prompts[1].job.seed, prompts[1].job.negative_prompt) == (11, "grey")


def test_seeds_wrap_around(tmp_path):
    prompts = read(tmp_path, "a\nb", "prompts.txt", replace(DEFAULTS, seed=2**32 - 1))
    assert [prompt.job.seed for prompt in prompts] == [2**32 - 1, 0]


def test_null_is_the_default(tmp_path):
    nothing = dict.fromkeys(("negative_prompt", "seed", "steps", "guidance_scale", "size", "tome_ratio"))
    assert read(tmp_path, json.dumps({"prompt": "a", **nothing})) == read(tmp_path, '{"prompt": "a"}')


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "it is not JSON: Expecting ',' delimiter at column 15$"),
        ("[" * 100_000, "it is not JSON that can be read: its brackets are nested too deeply$"),
        ('{"prompt": "a", "seed": %s}' % ("9" * 5000), "a number has 5000 digits$"),
        ('["a"]', r"Input should be a valid dictionary .* not \['a'\]"),
        ("null", "Input should be a valid dictionary .* not None"),
        ("{}", "prompt: Field required"),
        ('{"prompt": 3}', "prompt: Input should be a valid string, not 3"),
        ('{"prompt": null}', "prompt: Input should be a valid string, not None"),
        ('{"prompt": "a", "prompt": "b"}', "a field appears twice: prompt, prompt"),
        ('{"prompt": "a", "stepz": 3}', "stepz: .*no such field; the fields are prompt, .*, size, tome_ratio, name$"),
        ('{"prompt": "a", "ratio": 0.5}', "ratio: there is no such field"),
        ('{"prompt": "a\\ud800"}', "prompt: it contains an unpaired surrogate"),
        ('{"prompt": "%s"}' % ("a" * 2001), "prompt: 2001 characters are too many"),
        ('{"prompt": "a", "seed": true}', "seed: Input should be a valid integer, not True"),
        ('{"prompt": "a", "seed": 1.5}', "seed: Input should be a valid integer, not 1.5"),
        ('{"prompt": "a", "seed": -1}', "seed: -1 is not allowed"),
        ('{"prompt": "a", "seed": %s}' % ("9" * 400), "seed: 9+ is not allowed"),
        ('{"prompt": "a", "steps": 0}', "steps: 0 is not allowed"),
        ('{"prompt": "a", "guidance_scale": NaN}', "guidance_scale: Input should be a finite number, not nan"),
        ('{"prompt": "a", "guidance_scale": 1e999}', "guidance_scale: Input should be a finite number, not inf"),
        ('{"prompt": "a", "guidance_scale": 1%s}' % ("0" * 400), "guidance_scale: Input should be a valid number"),
        ('{"prompt": "a", "guidance_scale": "7"}', "guidance_scale: Input should be a valid number, not '7'"),
        ('{"prompt": "a", "size": "64x64"}', "size: 64x64 was not exported: .* 32x32, 48x32"),
        ('{"prompt": "a", "size": "big"}', "size: size='big' is not allowed"),
        ('{"prompt": "a", "size": 64}', "size: 64x64 was not exported: .* 32x32, 48x32"),
        ('{"prompt": "a", "size": 32.5}', "size: size=32.5 is not allowed"),
        ('{"prompt": "a", "size": "%sx32"}' % ("9" * 5000), "size: size='9+ is not allowed"),
        ('{"prompt": "a", "tome_ratio": 0.3}', "tome_ratio: ratio 0.3 was not exported"),
        ('{"prompt": "a", "tome_ratio": false}', "tome_ratio: Input should be a valid number, not False"),
        (
            '{"prompt": "a", "name": "../a"}',
            r"name: '../a' is not allowed: it must begin with a letter or digit, have",
        ),
        ('{"prompt": "a", "name": "a\\n"}', r"name: 'a\\n' is not allowed: it must begin"),
        ('{"prompt": "a", "name": ""}', "name: '' is not allowed: it must begin"),
        ('{"prompt": "a", "name": "%s"}' % ("狐" * 67), "name: .* at most 200 bytes in UTF-8"),
    ],
)
def test_invalid_line_is_named_with_its_number_and_field(tmp_path, line, message):
    with pytest.raises(PromptFileError, match=rf"prompts.jsonl, line 3: {message}") as caught:
        read(tmp_path, f'{{"prompt": "good"}}\n\n{line}\n{{"prompt": "good"}}')
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.jsonl",
            b'{"prompt": "a"}\n{"prompt": "\xff"}',
            "line 2: it is not UTF-8: byte 0xff at position 12$",
        ),
        ("a.txt", b"\n \n", "a.txt has no prompt"),
        ("a.csv", b"a", "must end in .txt or .jsonl"),
        ("a.txt", None, r"a\.txt cannot be read: No such file"),
    ],
)
def test_invalid_file_is_named(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_bytes(text)
    with pytest.raises(PromptFileError, match=message):
        read_prompts(tmp_path / name, DEFAULTS, LIMITS)


def test_file_name_depends_on_everything_in_the_image():
    prompt = Prompt(3, Job("a fox", Size(32, 32), 0.5, seed=1), "fox")
    name = prompt.file_name("model")
    assert name.startswith("000003-fox-") and name.endswith(".png")
    changes = {"prompt": "an owl", "negative_prompt": "x", "size": Size(48, 48), "ratio": 0.0, "seed": 2}
    changes |= {"steps": 3, "guidance_scale": 1.0}
    others = [replace(prompt, job=replace(prompt.job, **{key: value})) for key, value in changes.items()]
    names = {name, prompt.file_name("another model"), *(other.file_name("model") for other in others)}
    assert len(names) == 2 + len(others)


# Batches and files


class Painter:
    """An engine that returns images of one colour, which depends on the seed; "explode" fails its batch."""

    name, sampler, methods = "painter", "DDIM", {}

    def __init__(self, can_batch=True):
        self.batches, self.can_batch = [], can_batch

    def generate(self, jobs, should_stop=None):
        self.batches.append([job.seed for job in jobs])
        if any("explode" in job.prompt for job in jobs):
            raise RuntimeError("no such image")
        return [Image.new("RGB", (job.size.width, job.size.height), (job.seed, 0, 0)) for job in jobs]


def prompts_of(*texts):
    return [Prompt(i, Job(text, Size(32, 32), 0.5, seed=i, steps=2)) for i, text in enumerate(texts)]


def paint(prompts, folder, load=Painter, batch=2, identity="model"):
    return generate(prompts, identity, folder, batch, generate_here(load))


def test_batches_keep_the_order_of_the_list():
    prompts = prompts_of(*"abcdefg")
    prompts[1] = replace(prompts[1], job=replace(prompts[1].job, steps=3))
    prompts[4] = replace(prompts[4], job=replace(prompts[4].job, ratio=0.0))
    assert [[p.index for p in batch] for batch in split(prompts, 2)] == [[0, 2], [1], [3, 5], [4], [6]]


def test_only_missing_and_changed_images_are_generated(tmp_path):
    out, painter, prompts = tmp_path / "new" / "out", Painter(), prompts_of(*"abcd")
    assert str(paint(prompts, out, lambda: painter)).startswith("4 made, 0 skipped")
    times = {path: path.stat().st_mtime_ns for path in out.glob("*.png")}
    assert len(times) == 4
    prompts[2] = replace(prompts[2], job=replace(prompts[2].job, prompt="changed"))
    assert str(paint(prompts, out, lambda: painter)).startswith("1 made, 3 skipped")
    assert painter.batches == [[0, 1], [2, 3], [2, 3]], "the complete batch, because rounding depends on it"
    assert {path: path.stat().st_mtime_ns for path in times} == times and len(list(out.glob("*.png"))) == 5
    assert paint(prompts, out, lambda: painter, identity="another model").made == 4
    assert paint(prompts, out, lambda: pytest.fail("loaded, and nothing is missing")).skipped == 4


def test_progress_is_about_twenty_lines_outside_of_a_terminal(tmp_path, capsys):
    """A line for every second image, by their number and not by a clock."""
    paint(prompts_of(*"ab"), tmp_path)
    capsys.readouterr()
    paint(prompts_of(*"ab", *map(str, range(45))), tmp_path)
    loading, *lines = capsys.readouterr().err.splitlines()
    assert loading == "loading the model"
    assert [int(line.split()[0]) for line in lines] == [*range(4, 47, 2), 47]
    assert re.fullmatch(r"4 of 47 images, [\d:]+ so far, about [\d:]+ left", lines[0])
    assert lines[-1].endswith("about 00:00 left")


def test_progress_is_a_bar_in_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    paint(prompts_of(*"abc"), tmp_path)
    printed = capsys.readouterr().err
    assert "3/3" in printed and " of 3 images" not in printed


def test_hash_of_a_model_and_its_runtime(tmp_path):
    runtimes = [{"runtime": "paddle", "device": "cpu"}, {"runtime": "paddle", "device": "gpu"}]
    identities = set()
    for manifest in ("{}", '{"exported": "again"}'):
        (tmp_path / "tome.json").write_text(manifest)
        identities |= {model_hash(tmp_path, runtime) for runtime in runtimes}
    assert len(identities) == 4 and model_hash(tmp_path, runtimes[0]) in identities


@pytest.mark.parametrize(
    "damage", [lambda png: b"", lambda png: png[:-1], lambda png: b"?" + png[1:], lambda png: b"fox"]
)
def test_truncated_png_is_generated_again(tmp_path, damage):
    prompts = prompts_of("a", "b")
    paint(prompts, tmp_path)
    complete = images(tmp_path)
    path = tmp_path / min(complete)
    path.write_bytes(damage(complete[path.name]))
    assert str(paint(prompts, tmp_path)).startswith("1 made, 1 skipped")
    assert images(tmp_path) == complete


def test_failed_prompt_does_not_fail_its_batch(tmp_path):
    painter = Painter()
    summary = paint(prompts_of("a", "explode", "c"), tmp_path, lambda: painter, batch=3)
    assert (summary.made, painter.batches) == (2, [[0, 1, 2], [0], [1], [2]])
    assert [(prompt.index, reason) for prompt, reason in summary.failures] == [(1, "RuntimeError: no such image")]


def test_jobs_of_an_engine_that_cannot_batch_run_alone():
    painter = Painter(can_batch=False)
    assert [prompt.index for prompt, _ in generate_batch(painter, prompts_of("a", "b"))] == [0, 1]
    assert painter.batches == [[0], [1]]


@pytest.mark.parametrize(("owner", "call"), [(os, "fsync"), (Path, "replace")])
def test_file_gets_its_name_when_it_is_on_the_disk(tmp_path, monkeypatch, owner, call):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(owner, call, full)
        with pytest.raises(OutputError, match=r"000000-.*png cannot be written: No space left on device"):
            paint(prompts_of("a"), tmp_path)
    assert not list(tmp_path.glob("*png")), "the unfinished file is removed"
    assert paint(prompts_of("a"), tmp_path).made == 1
    assert [path.name[:7] for path in tmp_path.glob("*png")] == ["000000-"]


def test_the_backend_is_closed_when_an_image_cannot_be_written(tmp_path, monkeypatch):
    """And not when the error is forgotten: its workers must end before what they run on."""
    closed = []

    def backend(batches):
        try:
            yield from generate_here(Painter)(batches)
        finally:
            closed.append(True)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    try:
        generate(prompts_of("a", "b"), "model", tmp_path, 1, backend)
    except OutputError:
        assert closed
    else:
        pytest.fail("no error")


def test_two_runs_do_not_share_a_folder(tmp_path):
    def backend(batches):
        with pytest.raises(OutputError, match="another run writes to"):
            paint(prompts_of("a"), tmp_path)
        yield from generate_here(Painter)(batches)

    assert generate(prompts_of("a"), "model", tmp_path, 1, backend).made == 1


def test_folder_that_cannot_be_created_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file/out cannot be written: Not a directory"):
        paint(prompts_of("a"), tmp_path / "file" / "out")


# The command, with an exported model


def command(prompts, model, out, *options):
    arguments = ["--prompts", prompts, "--model", model, "--output", out, "--threads", "1", "--guidance-scale", "2"]
    return ["generate", *map(str, arguments), *options]


PYTHON_M = (sys.executable, "-W", "ignore", "-m", "ppdiffusers_tome")


def images(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.png")}


def test_resumed_run_writes_the_same_images(tmp_path, exported_folder, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"a 3d render of {animal}\n" for animal in ("fox", "owl", "cat", "dog", "bee")))
    options = ["--batch", "2", "--steps", "15", "--negative-prompt", "red"]
    killed, unbroken = tmp_path / "killed", tmp_path / "unbroken"
    arguments = [*PYTHON_M, *command(prompts, exported_folder, killed, *options)]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = monotonic() + 120
    while len(list(killed.glob("0*.png"))) < 2 and process.poll() is None and monotonic() < end:
        sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it ended before the signal"
    before = {path: path.stat().st_mtime_ns for path in killed.glob("0*.png")}
    assert 2 <= len(before) < 5
    for path in before:
        Image.open(io.BytesIO(path.read_bytes())).load()
    (killed / ".unfinished-000004-half.png").write_bytes(b"\x89PNG")  # as if killed while writing

    assert main(command(prompts, exported_folder, killed, *options)) == 0
    missing = 5 - len(before)
    printed = capsys.readouterr()
    assert f"{missing} made, {len(before)} skipped (already there), 0 failed of 5" in printed.out
    assert f"5 images, to {killed}; those that are already there stay" in printed.out
    assert "5 of 5 images" in printed.err
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert main(command(prompts, exported_folder, unbroken, *options)) == 0
    assert images(killed) == images(unbroken) and len(images(killed)) == 5


def test_image_has_metadata_and_does_not_depend_on_its_batch(tmp_path, exported_folder, capsys):
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "fox", "seed": 7, "name": "狐_1"},
        {"prompt": "étoile", "size": "48x32", "tome_ratio": 0.0},
        {"prompt": "owl", "negative_prompt": "red"},
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out"
    assert main(command(prompts, exported_folder, out, "--steps", "2", "--batch", "3", "--seed", "40")) == 0
    paths = sorted(out.glob("0*.png"))
    assert paths[0].name.startswith("000000-狐_1-")
    fox, star, owl = (Image.open(io.BytesIO(path.read_bytes())) for path in paths)
    assert json.loads(star.text["ppdiffusers_tome"])["seed"] == 41 and star.size == (48, 32)
    metadata, engine = json.loads(owl.text["ppdiffusers_tome"]), load_engine(exported_folder, threads=1)
    assert metadata.items() >= {
        "prompt": "owl", "negative_prompt": "red", "seed": 42, "steps": 2, "guidance_scale": 2.0,
        "width": 32, "height": 32, "tome_ratio": 0.5, "model": engine.name,
        "tome_method": read_manifest(exported_folder).methods[0.5],
    }.items()  # fmt: skip
    text = fox.text["parameters"]
    assert "Seed: 7" in text and f"Token merging method: {metadata['tome_method']}" in text
    assert f"{engine.name}, ratio 0.5: interlace" in capsys.readouterr().out
    job = Job("owl", Size(32, 32), 0.5, seed=42, negative_prompt="red", steps=2, guidance_scale=2.0)
    alone = engine.generate([job])[0]
    assert np.abs(np.asarray(alone, int) - np.asarray(owl, int)).max() <= 1


def test_long_batches_are_not_silent(tmp_path, exported_folder, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("fox\nowl")
    assert main(command(prompts, exported_folder, tmp_path / "out", "--steps", "2", "--batch", "1")) == 0
    lines = capsys.readouterr().err.splitlines()
    steps = [f"batch {batch} of 2, step {step} of 2" for batch in (1, 2) for step in (1, 2)]
    assert lines[0] == "loading the model" and [line for line in lines if "step" in line] == steps


def test_steps_and_guidance_scale_are_the_models_own(tmp_path, exported_folder):
    folder, prompts = tmp_path / "export", tmp_path / "prompts.txt"
    shutil.copytree(exported_folder, folder)
    (folder / "defaults.json").write_text('{"steps": 3, "guidance_scale": 4}')
    prompts.write_text("fox")
    for options, steps in ([], 3), (["--steps", "2"], 2):
        out = tmp_path / str(steps)
        arguments = ["--prompts", prompts, "--model", folder, "--output", out, "--threads", "1", *options]
        assert main(["generate", *map(str, arguments)]) == 0
        (image,) = out.glob("0*.png")
        metadata = json.loads(Image.open(image).text["ppdiffusers_tome"])
        assert (metadata["steps"], metadata["guidance_scale"]) == (steps, 4.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps: 0 is not allowed"),
        (["--size", "64"], "--size: 64x64 was not exported"),
        (["--size", "big"], "error: --size big is not allowed"),
        (["--ratio", "0.3"], "--ratio: ratio 0.3 was not exported"),
        (["--guidance-scale", "-1"], "--guidance-scale: -1.0 is not allowed"),
        (["--seed", "-1"], "--seed: -1 is not allowed"),
        (["--batch", "0"], "--batch 0 is not allowed"),
        (["--threads", "1025"], "--threads 1025 is not allowed: it must be 1 to 1024"),
        (["--max-programs", "0"], "--max-programs 0 is not allowed: it must be 1 or more"),
        (["--ray", "--actors", "0"], "--actors 0 is not allowed"),
        (["--runtime", "openvino"], "{folder} has no ONNX programs"),
        (["--precision", "fp16"], "error: --precision fp16 is not allowed: on a CPU Paddle Inference runs in fp32"),
        ([], "line 2: steps: Input should be a valid integer, not 'many'"),
    ],
)
def test_an_error_is_one_line_before_anything_is_written(tmp_path, exported_folder, capsys, options, message):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "good"}\n{"prompt": "bad", "steps": "many"}')
    assert main(command(prompts, exported_folder, tmp_path / "out", *options)) == 2
    printed = capsys.readouterr()
    assert message.format(folder=exported_folder) in printed.err and printed.err.count("\n") == 1
    assert not (tmp_path / "out").exists() and not printed.out


def test_exit_status_of_a_failed_image(tmp_path, exported_folder, capsys, monkeypatch):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nexplode")
    monkeypatch.setattr("ppdiffusers_tome.serving.engine.load_engine", lambda *options, **verify: Painter())
    assert main(command(prompts, exported_folder, tmp_path / "out")) == 1
    printed = capsys.readouterr()
    assert "1 made, 0 skipped (already there), 1 failed of 2" in printed.out
    assert "failed: image 1 ('explode'): RuntimeError: no such image" in printed.err
