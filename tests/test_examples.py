"""The examples, run like a user runs them: as they stand but for fewer steps, from another folder."""

import re
import sys
from pathlib import Path

import pytest
from paddle.nn import functional
from PIL import Image
from serving_support import FakeEngine, serving

from ppdiffusers_tome import inference

EXAMPLES = Path(__file__).parents[1] / "examples"
MAX_LINES = 30
OF_OTHER_LIBRARIES = {"with_optimum", "with_optimum_intel", "with_openvino_genai"}  # test_diffusers_layout_loaders.py
SCRIPTS = {path.stem for path in EXAMPLES.glob("*.py")} - {"tiny"}
GENERATING = sorted(SCRIPTS - OF_OTHER_LIBRARIES - {"serve_client"})


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a script by its name in an empty folder, with two steps; returns its variables."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    if hasattr(functional, "scaled_dot_product_attention_"):  # sd3.py defines it where it is missing
        monkeypatch.delattr(functional, "scaled_dot_product_attention_")

    def run(name, **replaced):
        path = EXAMPLES / f"{name}.py"
        code = re.sub(r'(num_inference_steps"?[=:] ?)\d+', r"\g<1>2", path.read_text(encoding="utf-8"))
        for old, new in replaced.items():
            code = re.sub(rf"^{old} = .*$", f"{old} = {new!r}", code, flags=re.MULTILINE)
        variables = {"__file__": str(path), "__name__": "__main__"}
        exec(compile(code, str(path), "exec"), variables)
        return variables

    yield run
    vars(functional).pop("scaled_dot_product_attention_", None)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of ppdiffusers' functions for LoRA
@pytest.mark.parametrize("name", GENERATING)
def test_example_writes_its_file(name, run, monkeypatch, tmp_path, exported_folder):
    if name == "export_and_run":  # an export of a tiny model in place of that of the bundled one
        monkeypatch.setattr(inference, "export_pipeline", lambda *_, **__: None)
        (tmp_path / "emoji_export").symlink_to(exported_folder)
    variables = run(name)
    if name == "export_and_run":
        assert variables["exported"].unet.ratio == 0.5
    elif name != "second_pass":  # which merges in a `with` block
        assert any(block.merges for block in variables["pipe"].tome_summary(height=64, width=64).blocks)
    file = tmp_path / ("video.mp4" if name == "video" else f"{name}.png")
    if file.suffix == ".png":
        with Image.open(file) as image:
            assert len(image.getcolors(10**6)) > 100
    else:
        assert file.stat().st_size > 1000


def test_client_writes_the_image_that_the_server_sent(run, tmp_path):
    with serving(FakeEngine()) as server:
        run("serve_client", URL=server.url)
        (job,) = server.engine.calls[0]
    assert (job.prompt, job.seed, job.ratio, job.steps) == ("a 3d render of fox", 0, 0.5, 20)
    with Image.open(tmp_path / "served.png") as image:
        assert image.getpixel((0, 0)) == (0, 0, 0)


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_example_is_short_and_shows_the_call(name):
    code = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert len(code.splitlines()) <= MAX_LINES and "argparse" not in code
    if name in GENERATING:
        assert "ratio=0.5" in code
