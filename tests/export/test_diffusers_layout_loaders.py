"""Optimum, optimum-intel and OpenVINO GenAI generate our own runtime's images: run by `make test-optimum`.

They are in an environment of their own, whose interpreter is OPTIMUM_PYTHON; without it these tests are skipped.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
from exporting import export_linked, programs_of
from PIL import Image
from ppdiffusers import (
    DiffusionPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLPipeline,
)
from zoo.parts import SDXL, sdxl, unet

from ppdiffusers_tome.cli import main
from ppdiffusers_tome.inference import load_pipeline, read_manifest

PYTHON = os.environ.get("OPTIMUM_PYTHON")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="needs Optimum in an environment of its own: make test-optimum"),
    pytest.mark.timeout(3000),
]
ROOT = Path(__file__).parents[2]
SCENES_SD = ROOT / "examples" / "scenes_sd"
SIZES = {"scenes": (128, 192), "sdxl": (64, 96)}  # height and width in px
PROMPT = "a photo of a fox on grass"
# Decibels to our runtime's image. GenAI returns bytes, and rounds down.
LIMITS = {"optimum": 80, "optimum-intel": 80, "genai": 40}
NEARER = 20  # decibels by which an image is nearer to ours at its own ratio than at another
LAYOUTS = {
    "plain": (0, {"format": "onnx"}),
    "merged": (0.5, {"format": "onnx"}),
    "fused": (0.5, {"format": "onnx", "runtime": "onnxruntime"}),
    "openvino": (0.5, {"format": "openvino"}),
}
READERS = [
    ("plain", "optimum"),
    ("plain", "optimum-intel"),
    ("merged", "optimum"),
    ("merged", "optimum-intel"),
    ("fused", "optimum"),
    ("openvino", "optimum-intel"),
    ("openvino", "genai"),
]


class Model:
    """Our own export of a model, and folders in the layout that are made when a test asks for them."""

    def __init__(self, pipe, name, root):
        self.pipe, self.size, self.root = pipe, SIZES[name], root
        self.class_name = type(pipe).__name__
        self.ours = root / "ours"
        export_linked(pipe, self.ours, (0.5, 0), [self.size], image_to_image=True, format="onnx")

    def folder(self, name):
        folder = self.root / name
        if not folder.exists():
            ratio, options = LAYOUTS[name]
            programs = programs_of(self.ours)
            if "XL" in self.class_name:  # its text encoders have more outputs here
                programs = [(ours, file) for ours, file in programs if not file.model.startswith("text_encoder")]
            # "plain" has no encoder: then the size that is not square is in the UNet's config
            options = {"image_to_image": name != "plain", "linked": programs, **options}
            export_linked(self.pipe, folder, ratio, [self.size], layout="diffusers", **options)
            if options["format"] == "openvino":
                for tokenizer in folder.glob("tokenizer*"):  # the command in the folder's README.md
                    run_there(Path(PYTHON).with_name("convert_tokenizer"), tokenizer, "--output", tokenizer)
        return folder

    def noise(self, count, batch):
        latent = [side // read_manifest(self.ours).vae_factor for side in self.size]
        random = np.random.RandomState(3)
        return [random.standard_normal((batch, 4, *latent)).astype("float32") for _ in range(count)]


def run_there(*arguments):
    """Run a program of the other environment, which gets nothing of this one."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run([*map(str, arguments)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    pipe = DiffusionPipeline.from_pretrained(str(SCENES_SD))
    return Model(pipe, "scenes", tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="module")
def tiny_sdxl(tmp_path_factory):
    paddle.seed(0)
    return Model(StableDiffusionXLPipeline(**sdxl(unet=unet(**SDXL))), "sdxl", tmp_path_factory.mktemp("sdxl"))


def generate_there(model, name, loader, class_name, tmp_path, noise, settings, **images):
    """Images of a folder in another library, [B, H, W, 3] from 0 to 1."""
    settings = {"prompt": PROMPT, "size": model.size, **settings}
    arrays = {f"noise_{i}": array for i, array in enumerate(noise)}
    np.savez(tmp_path / "job.npz", settings=json.dumps(settings), **arrays, **images)
    script, job, output = Path(__file__).with_name("loader_images.py"), tmp_path / "job.npz", tmp_path / "images.npy"
    run_there(PYTHON, script, model.folder(name), loader, class_name, job, output)
    return np.load(output)


def generate_here(model, cls, ratio, noise, settings, monkeypatch, **images):
    """The same in our own runtime."""
    pipe = load_pipeline(model.ours, cls, ratio=ratio, runtime="onnxruntime", threads=1)
    pipe.set_progress_bar_config(disable=True)
    given = iter(noise)
    for module in [module for name, module in sys.modules.items() if name.startswith("ppdiffusers.")]:
        if "randn_tensor" in vars(module):
            monkeypatch.setattr(module, "randn_tensor", lambda *_, **__: paddle.to_tensor(next(given)))
    renamed = {"steps": "num_inference_steps"}
    settings = {renamed.get(name, name): value for name, value in settings.items()}
    inputs = {name: Image.fromarray(array) for name, array in images.items()}
    if "image" not in images or "mask_image" in images:  # image-to-image takes the size of its image
        inputs |= {"height": model.size[0], "width": model.size[1]}
    return pipe(PROMPT, num_images_per_prompt=len(noise[-1]), output_type="np", **settings, **inputs).images


def decibels(image, expected, loader):
    """The peak signal-to-noise ratio of images from 0 to 1."""
    expected = np.asarray(expected, "float64")
    if loader == "genai":
        expected = np.floor(expected * 255) / 255
    error = np.square(image - expected).mean()
    value = -10 * np.log10(error) if error else np.inf
    print(f"{loader}: {value:.1f} dB")
    return value


@pytest.mark.parametrize(("name", "loader"), READERS)
def test_images_of_stable_diffusion(scenes, name, loader, tmp_path, monkeypatch):
    """Not square, two images of a prompt."""
    noise, settings = scenes.noise(1, 2), {"steps": 4, "guidance_scale": 3.0}
    ratio = LAYOUTS[name][0]
    images = generate_there(scenes, name, loader, scenes.class_name, tmp_path, noise, settings)
    assert images.shape == (2, *scenes.size, 3)
    expected = generate_here(scenes, None, ratio, noise, settings, monkeypatch)
    value = decibels(images, expected, loader)
    assert value > LIMITS[loader]
    other = generate_here(scenes, None, 0.5 - ratio, noise, settings, monkeypatch)
    assert decibels(images, other, loader) < value - NEARER  # so the folder merges, or does not


@pytest.fixture(scope="module")
def interlaced(scenes):
    """The folder that the command writes."""
    name, size = "interlaced", "x".join(map(str, scenes.size[::-1]))
    options = f"--method interlace --ratio 0.5 --layout diffusers --size {size}".split()
    main(["export", "--model", str(SCENES_SD), "--output", str(scenes.root / name), *options])
    return name


@pytest.mark.parametrize("steps", [1, 2, 5, 10])
def test_interlace_keeps_the_same_tokens_in_each_step(scenes, interlaced, steps, tmp_path, monkeypatch):
    """Which tokens follows from the timestep, and each number of steps has timesteps of its own."""
    noise, settings = scenes.noise(1, 1), {"steps": steps, "guidance_scale": 3.0}
    images = generate_there(scenes, interlaced, "optimum", scenes.class_name, tmp_path, noise, settings)
    expected = generate_here(scenes, None, 0.5, noise, settings, monkeypatch)
    assert decibels(images, expected, "optimum") > LIMITS["optimum"]


@pytest.mark.parametrize(("name", "loader"), READERS)
def test_images_of_sdxl(tiny_sdxl, name, loader, tmp_path, monkeypatch):
    noise, settings = tiny_sdxl.noise(1, 2), {"steps": 3, "guidance_scale": 3.0}
    images = generate_there(tiny_sdxl, name, loader, tiny_sdxl.class_name, tmp_path, noise, settings)
    expected = generate_here(tiny_sdxl, None, LAYOUTS[name][0], noise, settings, monkeypatch)
    assert decibels(images, expected, loader) > LIMITS[loader]


@pytest.mark.parametrize("cls", [StableDiffusionImg2ImgPipeline, StableDiffusionInpaintPipeline])
@pytest.mark.parametrize(
    ("name", "loader"), [("fused", "optimum"), ("merged", "optimum-intel"), ("openvino", "genai")]
)
def test_images_from_an_image(scenes, cls, name, loader, tmp_path, monkeypatch):
    noise, settings = scenes.noise(3, 1), {"steps": 5, "guidance_scale": 3.0, "strength": 0.6}
    height, width = scenes.size
    column = np.linspace(0, 255, width).astype("uint8")
    images = {"image": np.stack([np.tile(column, (height, 1))] * 3, axis=-1)}
    if "Inpaint" in cls.__name__:
        images["mask_image"] = np.zeros((height, width), "uint8")
        images["mask_image"][: height // 2] = 255
    output = generate_there(scenes, name, loader, cls.__name__, tmp_path, noise, settings, **images)
    expected = generate_here(scenes, cls, 0.5, noise, settings, monkeypatch, **images)
    assert decibels(output, expected, loader) > LIMITS[loader]


@pytest.mark.parametrize(
    ("script", "name"),
    [("with_optimum", "fused"), ("with_optimum_intel", "openvino"), ("with_openvino_genai", "openvino")],
)
def test_examples(tiny_sdxl, script, name, tmp_path):
    output = tmp_path / "image.png"
    example = ROOT / "examples" / f"{script}.py"
    run_there(PYTHON, example, tiny_sdxl.folder(name), PROMPT, output)
    image = Image.open(output)
    assert image.size == tiny_sdxl.size[::-1] and np.ptp(np.asarray(image)) > 0


@pytest.mark.parametrize("mode", ["weights", "hybrid", "full"])
def test_example_of_int8(tiny_sdxl, mode, tmp_path):
    output = tmp_path / "image.png"
    folder = tiny_sdxl.folder("openvino")
    run_there(PYTHON, ROOT / "examples" / "with_int8.py", folder, mode, PROMPT, output)
    weights = Path(f"{folder}_{mode}", "unet", "openvino_model.bin").stat().st_size
    assert weights < 0.5 * (folder / "unet" / "openvino_model.bin").stat().st_size
    image = Image.open(output)
    assert image.size == tiny_sdxl.size[::-1] and np.ptp(np.asarray(image)) > 0


@pytest.mark.parametrize("loader", ["optimum", "optimum-intel"])
def test_images_of_a_folder_that_merge_onnx_has_merged(scenes, loader, tmp_path, monkeypatch):
    """The plain folder, merged there, without Paddle, has the images of our own export at this ratio."""
    name = "merged_there"
    if not (scenes.root / name).exists():
        command = [PYTHON, "-m", "ppdiffusers_tome", "merge-onnx", "--ratio", 0.5]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(ROOT)  # where that environment finds the package
            run_there(*command, "--model", scenes.folder("plain"), "--output", scenes.root / name)
    noise, settings = scenes.noise(1, 2), {"steps": 4, "guidance_scale": 3.0}
    images = generate_there(scenes, name, loader, scenes.class_name, tmp_path, noise, settings)
    expected = generate_here(scenes, None, 0.5, noise, settings, monkeypatch)
    value = decibels(images, expected, loader)
    assert value > LIMITS[loader]
    plain = generate_here(scenes, None, 0, noise, settings, monkeypatch)
    assert decibels(images, plain, loader) < value - NEARER
