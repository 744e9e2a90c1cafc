"""Images of an evaluation: equal noise in all settings, one program folder for all ratios, claimed and resumed."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from conftest import tiny_pipeline
from PIL import Image
from ppdiffusers import StableDiffusionImg2ImgPipeline

from ppdiffusers_tome import ToMeConfig, ToMeConfigError, ToMeError
from ppdiffusers_tome.commands.evaluation_options import image_settings
from ppdiffusers_tome.comparison import environment
from ppdiffusers_tome.comparison.sheets import image_paths
from ppdiffusers_tome.evaluation.quality import image_generation
from ppdiffusers_tome.evaluation.quality.image_generation import (
    EagerEngine,
    check_model,
    claim_folder,
    export_programs,
    generate_image_set,
    image_folder,
    read_images,
)
from ppdiffusers_tome.evaluation.quality.image_sets import (
    OTHER_SEEDS,
    PHOTOGRAPHS,
    PLAIN_BF16,
    PLAIN_IMAGES,
    Evaluation,
    ImageSet,
    list_image_sets,
    photograph,
)
from ppdiffusers_tome.generation.offline import generate_here

EVALUATION = Evaluation("model", (("a fox", 1), ("an owl", 2)), 32, 1, 7.5, "eager", threads=1)
FIXED = ImageSet("0.5", "ratio", ToMeConfig(ratio=0.5, use_rand=False))


@pytest.fixture(scope="module")
def pipe():
    pipe = tiny_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("strength", [None, 0.5])
def test_the_eager_engine_generates_as_the_pipeline_does_and_leaves_no_trace(pipe, tmp_path, monkeypatch, strength):
    """From noise, and by image-to-image from photographs."""
    monkeypatch.setattr(image_generation, "load_model", lambda model: pipe)
    evaluation = replace(EVALUATION, steps=2, strength=strength)
    for setting in (PLAIN_IMAGES, FIXED):
        engine = EagerEngine("model", setting.config)
        generate_image_set(evaluation, setting, tmp_path, generate_here(lambda engine=engine: engine), batch=2)
    assert pipe.tome_summary().blocks == ()
    plain, merged = (
        read_images(image_paths(image_folder(setting, tmp_path)), 32) for setting in (PLAIN_IMAGES, FIXED)
    )
    assert plain.shape == (2, 32, 32, 3) and (plain != merged).any(axis=(1, 2, 3)).all()
    paddle.seed(2)
    options, generate = {"height": 32, "width": 32}, pipe
    if strength:
        options = {"image": photograph(PHOTOGRAPHS[1], 32), "strength": strength}
        generate = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    with pipe.tome(ratio=0.5, use_rand=False):
        alone = generate("an owl", num_inference_steps=2, guidance_scale=7.5, **options).images[0]
    assert np.abs(np.asarray(alone).astype(int) - merged[1]).max() <= 1


def test_a_model_without_a_size_of_its_own_is_an_error(monkeypatch, tmp_path):
    class Pipe:
        def __call__(self, num_inference_steps=3, guidance_scale=2.0):
            pass

    monkeypatch.setattr(image_generation, "load_model", lambda model: Pipe())
    (tmp_path / "prompts.txt").write_text("a fox\n")
    options = {"prompts": None, "count": 2, "seed": 0, "steps": None, "guidance_scale": None}
    with pytest.raises(ToMeConfigError, match="has no size of its own: pass --size"):
        image_settings(SimpleNamespace(size=None, **options), str(tmp_path))
    settings = image_settings(SimpleNamespace(size=64, **options), str(tmp_path))
    assert (settings["size"], settings["steps"], settings["guidance_scale"]) == (64, 3, 2.0)


def test_failed_images_are_an_error_and_the_others_are_stored(tmp_path):
    def backend(batches):
        for batch in batches:
            yield batch[0], "out of memory"
            yield batch[1], b"png"

    with pytest.raises(ToMeError, match=r"1 images of 0\.5 failed, the first of 'a fox': out of memory"):
        generate_image_set(EVALUATION, FIXED, tmp_path, backend, batch=2)
    assert len(image_paths(image_folder(FIXED, tmp_path))) == 1
    generate_image_set(
        EVALUATION, FIXED, tmp_path, lambda batches: (one for one in [(batches[0][0], b"png")]), batch=2
    )
    assert len(image_paths(image_folder(FIXED, tmp_path))) == 2
    Image.new("RGB", (48, 40), (10, 20, 30)).save(tmp_path / "a.png")
    assert (read_images([tmp_path / "a.png"], 32) == np.full([1, 32, 32, 3], [10, 20, 30])).all(), "resized"


def test_photographs_need_stable_diffusion(pipe, monkeypatch):
    from_photographs = replace(EVALUATION, strength=1.0)
    monkeypatch.setattr(image_generation, "load_model", lambda model: pipe)
    check_model(from_photographs)
    other = SimpleNamespace(image_processor=None, components={"unet": None})
    monkeypatch.setattr(image_generation, "load_model", lambda model: other)
    check_model(EVALUATION)
    with pytest.raises(ToMeConfigError, match=r"SimpleNamespace: photographs.* only with a StableDiffusionPipeline"):
        check_model(from_photographs)


def test_the_commit_of_a_folder_is_that_which_generated(tmp_path, monkeypatch):
    for commit in ("1234567", "7654321"):
        monkeypatch.setattr(image_generation, "commit", lambda commit=commit: commit)
        assert claim_folder(replace(EVALUATION, threads=int(commit) % 9 + 1), tmp_path) == "1234567"
    with pytest.raises(ToMeConfigError, match=r"prompts, steps differ. Choose another folder with --output"):
        claim_folder(replace(EVALUATION, steps=2, prompts=EVALUATION.prompts[:1]), tmp_path)


@pytest.mark.parametrize(
    ("module", "decides"),
    [
        *((f"{name}.py", True) for name in ("matching", "inference/export", "evaluation/quality/image_generation")),
        *((f"{name}.py", True) for name in ("generation/engine", "evaluation/speed/worker", "__init__")),
        *((f"{name}.py", False) for name in ("serving/app", "commands/bench", "cli", "_version")),
    ],
)
def test_sources_are_the_code_that_measures(module, decides, tmp_path, monkeypatch):
    copied = shutil.copytree(environment.PACKAGE, tmp_path / "package", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(environment, "PACKAGE", copied)
    before = environment.sources.__wrapped__()
    assert before == environment.sources()
    with (copied / module).open("a") as file:
        file.write("answer = 42\n")
    assert (environment.sources.__wrapped__() != before) == decides


def test_one_program_folder_for_settings_that_differ_in_the_ratio(monkeypatch, tmp_path):
    exports = []
    monkeypatch.setattr(image_generation, "load_model", lambda model: "pipe")
    monkeypatch.setattr(image_generation, "unmerged_programs", lambda folder: [folder])  # text encoder and VAE
    monkeypatch.setattr(image_generation, "write_export", lambda *args, **options: exports.append((args, options)))
    settings = [PLAIN_IMAGES, *list_image_sets((0.25, 0.5), ("layers", "use_rand"))]
    programs = export_programs(replace(EVALUATION, backend="onnxruntime"), settings, tmp_path)
    folders = {setting.name: folder.name for setting, folder in programs.items()}
    assert folders["plain"] == folders["0.25"] == folders["0.5"] == "defaults"
    assert folders["0.25-fixed"] == folders["0.5-fixed"] == "use_rand=False"
    assert len(exports) == len(set(folders.values())) == 5
    (_, folder, configs, sizes), options = exports[0]
    assert (folder.name, configs, sizes) == ("defaults", [ToMeConfig(ratio) for ratio in (0, 0.25, 0.5)], [(32, 32)])
    assert options["format"] == "onnx"
    assert [options["linked"] for _, options in exports] == [[], *[[programs[PLAIN_IMAGES]]] * 4]


def test_only_plain_images_stay_in_fp32(monkeypatch, tmp_path):
    """The reference: what bfloat16 changes is a part of every distance, and a setting of its own."""
    generated = {}
    settings = [PLAIN_IMAGES, OTHER_SEEDS, FIXED, PLAIN_BF16]
    monkeypatch.setattr(image_generation, "export_programs", lambda *arguments: dict.fromkeys(settings, tmp_path))
    monkeypatch.setattr(image_generation, "load_engine", lambda folder, **runtime: runtime)

    def generate_image_set(evaluation, setting, output, runtime, batch):
        generated[setting.name] = runtime()

    monkeypatch.setattr(image_generation, "generate_image_set", generate_image_set)
    evaluation = replace(EVALUATION, backend="openvino-bf16")
    image_generation.generate_images(evaluation, settings, tmp_path, lambda load: load, batch=2)
    fp32 = {"runtime": "openvino", "threads": 1}
    bf16 = {**fp32, "precision": "bf16"}
    assert generated == {"plain": fp32, "other-seeds": fp32, "0.5": bf16, "plain-bf16": bf16}
