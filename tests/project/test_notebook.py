"""The notebook for a first run, run whole on the bundled model."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import nbformat
import paddle
import pytest
from markdown_text import ROOT, text_of
from nbclient import NotebookClient
from ppdiffusers import StableDiffusionPipeline

from ppdiffusers_tome import ToMeConfig


@pytest.fixture
def notebook():
    return nbformat.read(ROOT / "examples" / "first_run.ipynb", as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_notebook_is_stored_without_outputs(notebook):
    nbformat.validate(notebook)
    assert [cell for cell in code_cells(notebook) if cell.outputs or cell.execution_count is not None] == []


def test_without_a_checkout_it_clones_the_repository_that_is_set(notebook, monkeypatch, tmp_path):
    repository, folder = tmp_path / "repository", tmp_path / "elsewhere"
    (repository / "examples" / "scenes_sd").mkdir(parents=True)
    (repository / "examples" / "scenes_sd" / "model_index.json").write_text("{}")
    folder.mkdir()
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "--quiet"], ["add", "."], [*author, "commit", "--quiet", "--message", "first"]):
        subprocess.run(["git", *words], cwd=repository, check=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FIRST_RUN_MODEL", "m")  # so that it asks no hub
    code = "\n".join(cell.source for cell in code_cells(notebook)[:2])
    with pytest.raises(FileNotFoundError, match=r"elsewhere .*REPOSITORY"):
        exec(code, {})
    monkeypatch.setenv("FIRST_RUN_REPOSITORY", repository.as_uri())
    for _ in range(2):  # the second run clones nothing
        variables = {}
        exec(code, variables)
        assert variables["ROOT"] == folder / "tome_checkout"


@pytest.mark.parametrize(
    ("hubs", "memory", "expected", "sizes"),
    [
        (["ppdiffusers", "Hugging Face"], 24_000, "runwayml/stable-diffusion-v1-5", [768, 1024]),
        (["Hugging Face"], 24_000, "stable-diffusion-v1-5/stable-diffusion-v1-5", [768, 1024]),
        (["Hugging Face"], 12_000, "stable-diffusion-v1-5/stable-diffusion-v1-5", [768]),
        ([], 24_000, "examples/scenes_sd", [256]),
        (None, 0, "examples/scenes_sd", [256]),  # no GPU
    ],
)
def test_on_a_gpu_it_takes_sizes_and_a_call_that_gain_there(notebook, monkeypatch, hubs, memory, expected, sizes):
    """The first hub that has the model; there is no GPU here, so the pipelines are stand-ins."""
    loaded = []

    def load(name, paddle_dtype, from_hf_hub=False):
        loaded.append((name, paddle_dtype, from_hf_hub))
        config = SimpleNamespace(sample_size=32 if "scenes_sd" in name else 64)
        return SimpleNamespace(unet=SimpleNamespace(config=config), vae_scale_factor=8)

    monkeypatch.setattr(StableDiffusionPipeline, "from_pretrained", load)
    prepared = []
    monkeypatch.setattr("ppdiffusers_tome.prepare_download", prepared.append)
    monkeypatch.setattr(paddle, "get_device", lambda: "cpu" if hubs is None else "gpu:0")
    monkeypatch.delenv("FIRST_RUN_MODEL", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings, _, _, cell = [cell.source for cell in code_cells(notebook)[:4]]
    variables = {"ROOT": ROOT, "Path": Path}
    variables["HUBS"] = ["ppdiffusers"] if hubs is None else hubs
    variables["GPU"] = None if hubs is None else ("a GPU", memory, 8.0)
    exec(f"{settings}\n{cell}", variables)
    assert (variables["name"], variables["sizes"]) == (expected, sizes)
    is_bundled = expected == "examples/scenes_sd"
    assert prepared == [expected] * (expected == "runwayml/stable-diffusion-v1-5")
    ((_, dtype, from_hf_hub),) = loaded
    assert dtype == (paddle.float32 if is_bundled else paddle.float16)
    assert from_hf_hub == (expected == "stable-diffusion-v1-5/stable-diffusion-v1-5")
    assert ToMeConfig(**variables["SETTINGS"]["interlace 0.75"]).settings() == ToMeConfig().settings()
    assert "| 768 px | `pipe.apply_tome()` |" in text_of("docs/usage.md")


def test_notebook_runs_whole(notebook, monkeypatch, tmp_path):
    """Offline: if a model is set, it asks no hub. It shows images in rows, because ipywidgets is not installed."""
    model = ROOT / "examples" / "emoji_sd"
    settings = {"FIRST_RUN_MODEL": str(model), "FIRST_RUN_SIZE": "64 32", "FIRST_RUN_STEPS": "2"}
    for name, value in {**settings, "IPYTHONDIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(model.parent)}}).execute()
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    shown = [output.data["image/png"] for output in outputs if output.output_type == "display_data"]
    text = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    rows = re.findall(
        r"^\| (plain|\w+ 0\.\d+) \| [\d.]+ \| [\d.]+× \| ([\d.]+) \| ([\d.]+|inf) \|$", text, re.MULTILINE
    )
    assert len(set(shown)) == 2 * 5
    assert "hubs that answer: not asked" in text
    assert text.index("examples/emoji_sd, 64 px, 2 steps") < text.index("examples/emoji_sd, 32 px, 2 steps")
    arms = ["plain", "interlace 0.5", "interlace 0.75", "interlace 0.875", "todo 0.75", "tomesd 0.5"]
    assert [title for title, _, _ in rows] == 2 * arms
    rows = rows[: len(arms)]
    memory, distances = zip(*((float(memory), float(psnr)) for _, memory, psnr in rows), strict=True)
    assert min(memory) > 0.05 and distances[0] == float("inf") and 20 < distances[3] < distances[1] < 100
