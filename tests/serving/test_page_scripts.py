"""The page's scripts that need no document pass their tests in Node: tests/serving/page/*.test.js."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from ppdiffusers_tome.run.sizes import Size
from ppdiffusers_tome.serving.app import FOLDER
from ppdiffusers_tome.serving.jobs import Job
from ppdiffusers_tome.serving.png import encode_png

ROOT = Path(__file__).parents[2]
NODE = shutil.which("node")


class Source:
    name, sampler, methods = "fake", "DDIM", {0.5: "todo, min_tokens=64"}


@pytest.mark.skipif(NODE is None, reason="no node: apt-get install nodejs")
def test_scripts(tmp_path):
    """The tests run in a folder of their own, whose package.json makes them modules, with files of the server."""
    shutil.copytree(FOLDER, tmp_path / "page")
    for test in Path(__file__).with_name("page").glob("*.test.js"):
        shutil.copy(test, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    job = Job(
        "a fox, 狐", Size(48, 64), ratio=0.5, seed=7, negative_prompt="red", steps=9, guidance_scale=2.5, strength=0.4
    )
    (tmp_path / "made.png").write_bytes(encode_png(Image.new("RGB", (64, 48)), job, Source()))
    made = {key: value for key, value in job.settings().items() if key not in ("width", "height")}
    (tmp_path / "made.json").write_text(json.dumps({**made, "size": "64x48"}))
    Image.new("RGB", (8, 8)).save(tmp_path / "other.png")
    command = [NODE, "--test", "--test-reporter=tap"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and "# fail 0" in run.stdout and "# pass 0" not in run.stdout, run.stdout + run.stderr
