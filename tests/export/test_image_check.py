"""An export makes the images of its pipeline, or is refused: by classes and configs of components, or by images."""

import sys
from dataclasses import replace

import numpy as np
import paddle
import pytest
from conftest import tiny_pipeline
from exporting import export_linked, programs_of, unmerged_programs
from ppdiffusers import (
    AsymmetricAutoencoderKL,
    AutoencoderTiny,
    DDIMScheduler,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
)
from ppdiffusers.models.attention_processor import Attention, SlicedAttnProcessor
from zoo.parts import (
    AUTOENCODER,
    ONE_LEVEL,
    controlnet,
    ready,
    scheduler,
    stable_diffusion,
    text_encoder_with_projection,
    tokenizer,
    unet,
)

from ppdiffusers_tome import ToMeConfig, ToMeExportError
from ppdiffusers_tome.cli import main
from ppdiffusers_tome.export import export as export_module
from ppdiffusers_tome.export import exportable, loading
from ppdiffusers_tome.export.image_check import ImageCase, image_cases
from ppdiffusers_tome.export.request import list_merging
from ppdiffusers_tome.inference import load_pipeline, read_manifest

SIZE = [(32, 32)]


def asymmetric_vae():
    """A VAE whose decoder takes the image and the mask of inpainting."""
    channels = {f"{way}_block_out_channels": AUTOENCODER["block_out_channels"] for way in ("down", "up")}
    types = {name: AUTOENCODER[name] for name in ("down_block_types", "up_block_types")}
    return ready(AsymmetricAutoencoderKL(**types, **channels, sample_size=32))


def small_vae():
    """A VAE that encodes to latents, and not to a distribution."""
    parts = {f"{part}_block_out_channels": (32, 32) for part in ("encoder", "decoder")}
    blocks = {f"num_{part}_blocks": (1, 1) for part in ("encoder", "decoder")}
    return ready(AutoencoderTiny(**parts, **blocks))


def inpainting(**changes):
    return StableDiffusionInpaintPipeline(**stable_diffusion(unet=unet(**ONE_LEVEL, in_channels=9), **changes))


def with_controlnet(**config):
    network = controlnet(**ONE_LEVEL, **config)
    return StableDiffusionControlNetPipeline(**stable_diffusion(unet=unet(**ONE_LEVEL), controlnet=network))


def changed(change):
    """A tiny pipeline after a call with it."""
    pipe = tiny_pipeline()
    change(pipe)
    return pipe


class OwnScheduler(DDIMScheduler):
    """One that only its author has."""


class OwnPipeline(StableDiffusionPipeline):
    """One with a call of its own, and a known name."""


OwnPipeline.__name__ = StableDiffusionPipeline.__name__


# By classes and configs, at once


REFUSED = {
    "a decoder that takes a mask": (
        lambda: inpainting(vae=asymmetric_vae()),
        "vae is of the class Asymm.*AutoencoderKL",
    ),
    "the same without inpainting": (lambda: tiny_pipeline(vae=asymmetric_vae()), "vae is of the class Asymm"),
    "guess mode": (
        lambda: with_controlnet(global_pool_conditions=True),
        "controlnet has global_pool_conditions=True.*eager",
    ),
    "class labels": (lambda: tiny_pipeline(unet=unet(**ONE_LEVEL, num_class_embeds=3)), "unet has num_class_embeds=3"),
    "a mask of the text": (
        lambda: changed(lambda pipe: setattr(pipe.text_encoder.config, "use_attention_mask", True)),
        "text_encoder has use_attention_mask=True",
    ),
    "a text encoder": (
        lambda: tiny_pipeline(text_encoder=text_encoder_with_projection()),
        "text_encoder is of the class CLIPTextModelWithProjection, .*stand for CLIPTextModel:",
    ),
    "a scheduler": (
        lambda: tiny_pipeline(scheduler=scheduler(OwnScheduler)),
        "scheduler is of the class .*OwnScheduler",
    ),
    "a pipeline": (lambda: OwnPipeline(**stable_diffusion()), r"loaded as ppdiffusers\.StableDiffusionPipeline"),
    "FreeU": (lambda: changed(lambda pipe: pipe.enable_freeu(0.9, 0.2, 1.5, 1.6)), r"FreeU .*disable_freeu\(\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_export_cannot_stand_for(name, tmp_path, monkeypatch):
    """Before the first program is traced."""
    make, message = REFUSED[name]
    monkeypatch.setattr(export_module, "_Writer", None)
    with pytest.raises(ToMeExportError, match=message):
        export_linked(make(), tmp_path / "out", 0.5, SIZE)
    assert not any(tmp_path.iterdir())


def test_a_vae_that_encodes_to_latents_decodes_only(exported_folder, tmp_path):
    pipe = changed(lambda pipe: setattr(pipe, "vae", small_vae()))
    from_image = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    for one, options in (pipe, {"image_to_image": True}), (from_image, {}):
        with pytest.raises(ToMeExportError, match=r"AutoencoderTiny, .* AutoencoderKL where --img2img or .*encoder"):
            export_linked(one, tmp_path / "out", 0.5, SIZE, **options)
    assert not any(tmp_path.iterdir())
    linked = [(root, file) for root, file in programs_of(exported_folder) if not file.model.startswith("vae")]
    export_linked(pipe, tmp_path / "out", 0.5, SIZE, linked=linked, image_check=True)


def test_a_tokenizer_that_was_set_is_found(exported_folder, tmp_path):
    """ppdiffusers notes a library for it that does not have it."""
    pipe = changed(lambda pipe: setattr(pipe, "tokenizer", tokenizer()))
    assert pipe.config["tokenizer"] == ("ppdiffusers", "CLIPTokenizer")
    export_linked(pipe, tmp_path / "out", 0.5, SIZE, linked=programs_of(exported_folder), image_check=True)
    assert load_pipeline(tmp_path / "out").tokenizer.model_max_length == pipe.tokenizer.model_max_length


# By images


def check_refused(pipe, folder, message, linked=(), **options):
    """The export is refused with this message, and an earlier one in the folder stays."""
    folder.mkdir()
    (folder / "tome.json").write_text("earlier")
    with pytest.raises(ToMeExportError, match=message):
        export_linked(pipe, folder, 0.5, SIZE, linked=linked, image_check=True, overwrite=True, **options)
    assert [path.name for path in folder.parent.rglob("*")] == [folder.name, "tome.json"]


@pytest.mark.parametrize("image_to_image", [False, True])
def test_a_scheduler_that_was_changed_is_refused(exported_folder, tmp_path, image_to_image):
    """Its config is exported, which does not say so."""
    pipe = tiny_pipeline()
    pipe.scheduler.alphas_cumprod = pipe.scheduler.alphas_cumprod**2
    message = r"an image of the export, at ratio 0\.5, differs from the pipeline's by 0\.\d+ of 1"
    linked = programs_of(exported_folder)
    check_refused(pipe, tmp_path / "out", message, linked, image_to_image=image_to_image)


def test_an_encoder_that_is_called_otherwise_is_refused(exported_folder, tmp_path):
    """Only the second image shows it, of the pipeline that starts from an image."""
    pipe, linked = tiny_pipeline(), programs_of(exported_folder)
    encode = pipe.vae.encode

    def brighter(images):
        return encode(images + 0.5)

    pipe.vae.encode = brighter
    check_refused(pipe, tmp_path / "out", "an image from another image of the export", linked, image_to_image=True)


@pytest.fixture
def without_rules(monkeypatch):
    """As if classes and configs of components were not known."""
    for program, rule in exportable.STANDS_FOR.items():
        monkeypatch.setitem(exportable.STANDS_FOR, program, replace(rule, classes=(paddle.nn.Layer,), config={}))


def test_a_decoder_that_takes_a_mask_is_refused_by_its_image(without_rules, tmp_path):
    check_refused(inpainting(vae=asymmetric_vae()), tmp_path / "out", r"by 0\.\d+ of 1, more than")


def test_guess_mode_is_refused_because_there_is_no_image(without_rules, exported_folder, tmp_path):
    message = r"cannot generate an image of 32x32, which the pipeline can \(guess_mode=True is not supported"
    linked = unmerged_programs(exported_folder)
    check_refused(with_controlnet(global_pool_conditions=True), tmp_path / "out", message, linked)


def test_a_pipeline_that_cannot_generate_is_exported_without_the_check(exported_folder, tmp_path, monkeypatch):
    def step(*tensors, **settings):
        raise ValueError("the data types differ")

    monkeypatch.setattr(DDIMScheduler, "step", step)
    message = r"the pipeline itself cannot .*\(the data types differ\).*image_check=False \(--no-image-check\)"
    linked = programs_of(exported_folder)
    check_refused(tiny_pipeline(), tmp_path / "out", message, linked)
    export_linked(tiny_pipeline(), tmp_path / "other", 0.5, SIZE, linked=linked)


def test_the_check_leaves_no_trace(exported_folder, tiny, tmp_path):
    """Not in the pipeline, and not in Paddle's generator; test_onnx.py looks at the folder."""
    tiny.scheduler.set_timesteps(7)
    before = {name: id(value) for name, value in vars(tiny).items()}
    paddle.seed(3)
    expected = paddle.randn([4]).numpy()
    paddle.seed(3)
    export_linked(tiny, tmp_path / "out", 0.5, SIZE, linked=programs_of(exported_folder), image_check=True)
    np.testing.assert_array_equal(paddle.randn([4]).numpy(), expected)
    assert {name: id(value) for name, value in vars(tiny).items()} == before
    assert len(tiny.scheduler.timesteps) == 7 and tiny.unet.tome_summary().blocks == ()


@pytest.mark.parametrize("option", [[], ["--no-image-check"]])
def test_the_command_leaves_the_check_out(option, tmp_path, monkeypatch):
    requests = []
    monkeypatch.setattr(loading, "load_eager_pipeline", lambda *_, **__: None)
    monkeypatch.setattr(export_module, "write_export", lambda _, request: requests.append(request) or sys.exit(7))
    with pytest.raises(SystemExit, match="7"):
        main(["export", "--model", str(tmp_path), "--output", str(tmp_path / "out"), *option])
    assert [request.image_check for request in requests] == [not option]


def test_images_use_each_kind_of_program_and_each_pipeline_once(exported_folder, refiner_folder):
    manifest = read_manifest(exported_folder)
    three = list_merging([ToMeConfig(ratio) for ratio in (0, 0.75, 0.5)], controlnet=True)
    plain, first, _ = three
    assert image_cases(manifest, three) == [ImageCase(first, False), ImageCase(plain, True)]
    assert image_cases(replace(manifest, image_to_image=False), three) == [
        ImageCase(first, False),
        ImageCase(plain, False),
    ]
    assert image_cases(manifest, [plain]) == [ImageCase(plain, False), ImageCase(plain, True)]
    assert image_cases(read_manifest(refiner_folder), [first]) == [ImageCase(first, False)], (
        "its own call has an image"
    )


# What saves memory in eager mode


def test_eager_passes_of_an_export_have_the_scores_of_one_head_in_memory(monkeypatch, tmp_path):
    """Those of all heads of a large image need more memory than the machine that runs the export may have."""
    heads, compute = set(), Attention.get_attention_scores

    @paddle.jit.not_to_static
    def record(layer, query, *others):
        if paddle.in_dynamic_mode():  # not where a program is traced
            heads.add(query.shape[0])
        return compute(layer, query, *others)

    monkeypatch.setattr(Attention, "get_attention_scores", record)
    pipe = tiny_pipeline()
    processors = pipe.unet.attn_processors
    export_linked(pipe, tmp_path / "out", 0.5, [(64, 64)], image_check=True)
    assert heads == {1}
    assert pipe.unet.attn_processors == processors


def test_slices_and_tiles_are_off_in_programs_and_stay_on_in_the_pipeline(exported_folder, tmp_path):
    pipe = tiny_pipeline()
    pipe.enable_attention_slicing()
    pipe.enable_vae_slicing()
    pipe.enable_vae_tiling()
    manifest = export_linked(pipe, tmp_path / "out", 0.5, [(64, 64)], image_to_image=True, image_check=True)
    parities = [files.parity for program in manifest.programs for files in program.files.values()]
    assert all(max(parity.values()) < 1e-5 for parity in parities)
    assert pipe.vae.use_slicing and pipe.vae.use_tiling
    kinds = {type(processor) for processor in pipe.unet.attn_processors.values()}
    assert kinds == {SlicedAttnProcessor}
