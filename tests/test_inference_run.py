"""Running an exported folder: an ordinary pipeline with the images of eager; what it does not support is an error."""

import json
import shutil
from unittest import mock

import numpy as np
import paddle
import ppdiffusers
import pytest
from paddle import inference
from ppdiffusers import (
    EulerDiscreteScheduler,
    PaddleInferRuntimeModel,
    PaddleInferStableDiffusionPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
)
from zoo.parts import ONE_DEPTH, ONE_LEVEL, SDXL, controlnet, image, mask, sdxl, stable_diffusion, unet

from ppdiffusers_tome import NoMergeableLayerError, ToMeConfigError, ToMeExportError
from ppdiffusers_tome.inference import (
    PaddleRuntime,
    ProgramFile,
    choose_runtime,
    export_pipeline,
    load_pipeline,
    paddle_runtime,
    read_manifest,
    unmerged_programs,
)
from ppdiffusers_tome.inference.paddle_runtime import SHAPE_FILE, Predictor

PADDLE2 = paddle.__version__.startswith("2.")
TOLERANCE = 2e-5  # of images from 0 to 1 after two steps, because of oneDNN's rounding


def draw(pipe, **settings):
    """An image from seed 0, as a float array."""
    pipe.set_progress_bar_config(disable=True)
    paddle.seed(0)
    arguments = {"prompt": "a 3d render of fox", "num_inference_steps": 2, "output_type": "np", **settings}
    return pipe(**arguments).images[0]


def load(folder, **settings):
    return load_pipeline(folder, threads=1, **settings)


@pytest.fixture(scope="module")
def _exported(exported_folder):
    return load(exported_folder)


@pytest.fixture
def exported(_exported):
    _exported.unet.ratio = 0.5
    return _exported


# The same images as eager


@pytest.mark.parametrize("size", [{"height": 32, "width": 32}, {"height": 32, "width": 48}, {}])
@pytest.mark.parametrize("ratio", [0.5, 0])
def test_images_equal_those_of_eager(exported, tiny, ratio, size):
    exported.unet.ratio = ratio
    with tiny.tome(ratio=ratio):
        merged = draw(tiny, **size)
    np.testing.assert_allclose(draw(exported, **size), merged, atol=TOLERANCE)
    with tiny.tome(ratio=0 if ratio else 0.5):
        assert np.abs(merged - draw(tiny, **size)).max() > 100 * TOLERANCE


def test_batches_and_guidance(exported, tiny):
    arguments = {"prompt": ["a fox", "a red apple", "a fish"], "negative_prompt": ["blue"] * 3, "guidance_scale": 3.0}
    with tiny.tome(ratio=0.5):
        expected = draw(tiny, **arguments)
    np.testing.assert_allclose(draw(exported, **arguments), expected, atol=TOLERANCE)


def test_schedulers_callbacks_and_progress_bar(exported, tiny, capfd):
    steps = []

    def record(pipe, step, timestep, kwargs):
        steps.append((step, list(kwargs["latents"].shape)))
        return kwargs

    before = exported.scheduler
    exported.scheduler = EulerDiscreteScheduler.from_config(before.config)
    try:
        actual = draw(exported, callback_on_step_end=record)
        exported.set_progress_bar_config(disable=False)
        exported("a fox", num_inference_steps=2, output_type="latent")
    finally:
        exported.scheduler = before
    assert steps == [(0, [1, 4, 16, 16]), (1, [1, 4, 16, 16])]
    assert "2/2" in capfd.readouterr().err
    ddim, tiny.scheduler = tiny.scheduler, EulerDiscreteScheduler.from_config(before.config)
    try:
        with tiny.tome(ratio=0.5):
            np.testing.assert_allclose(actual, draw(tiny), atol=TOLERANCE)
    finally:
        tiny.scheduler = ddim


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (StableDiffusionImg2ImgPipeline, {"strength": 1.0}),
        (StableDiffusionInpaintPipeline, {"mask_image": mask(), "height": 32, "width": 32}),
    ],
)
def test_other_pipelines_over_the_same_programs(exported, tiny, cls, settings, exported_folder):
    arguments = {"image": image(), **settings}
    pipe = cls(**exported.components, requires_safety_checker=False)
    with tiny.tome(ratio=0.5):
        expected = draw(cls(**tiny.components, requires_safety_checker=False), **arguments)
    np.testing.assert_allclose(draw(pipe, **arguments), expected, atol=TOLERANCE)
    np.testing.assert_allclose(draw(load(exported_folder, cls=cls), **arguments), expected, atol=TOLERANCE)


@pytest.fixture(scope="module")
def others(tiny, exported_folder):
    """Models that are exported already, and the argument of an export that links them."""
    return {"vae": tiny.vae, "text_encoder": tiny.text_encoder}, {
        "linked": unmerged_programs(exported_folder),
        "progress": False,
    }


def test_controlnet_is_fused_with_the_unet(others, tmp_path):
    models, linked = others
    pipe = StableDiffusionControlNetPipeline(
        **stable_diffusion(unet=unet(**ONE_LEVEL), controlnet=controlnet(**ONE_LEVEL), **models)
    )
    manifest = export_pipeline(pipe, tmp_path / "out", 0.5, [(32, 32)], controlnet=0.25, **linked)
    assert manifest.residuals == 3 and manifest.merging["0.5"][1].ratio == 0.25
    exported = load(tmp_path / "out")
    for settings in (
        {"image": image()},
        {"image": image(seed=1)},
        {"image": image(), "controlnet_conditioning_scale": 0.3, "control_guidance_end": 0.5},
    ):
        with pipe.tome(ratio=0.5, controlnet=0.25):
            expected = draw(pipe, **settings)
        np.testing.assert_allclose(draw(exported, **settings), expected, atol=TOLERANCE)
    with pytest.raises(ToMeConfigError, match="guess_mode"):
        draw(exported, image=image(), guess_mode=True)
    with pytest.raises(ToMeConfigError, match="StableDiffusionControlNetPipeline"):
        draw(load(tmp_path / "out", cls=ppdiffusers.StableDiffusionPipeline))
    with pytest.raises(ToMeConfigError, match="--img2img"):
        exported.vae.encode(paddle.zeros([1, 3, 32, 32]))


def xl_parts(pipe):
    """The components that ppdiffusers' SDXL pipelines have in common."""
    excluded = ("image_encoder", "feature_extractor")
    return {name: component for name, component in pipe.components.items() if name not in excluded}


def test_sdxl_with_its_additional_inputs(others, tmp_path):
    models, linked = others
    of_vae = [program for program in linked["linked"] if program[1].model.startswith("vae")]
    pipe = StableDiffusionXLPipeline(**sdxl(unet=unet(**{**SDXL, **ONE_LEVEL, **ONE_DEPTH}), vae=models["vae"]))
    export_pipeline(pipe, tmp_path / "out", 0.5, [(32, 32)], image_to_image=True, **{**linked, "linked": of_vae})
    exported = load(tmp_path / "out")
    with pipe.tome(ratio=0.5):
        np.testing.assert_allclose(draw(exported), draw(pipe), atol=TOLERANCE)
        arguments = {"image": image(), "strength": 1.0}
        expected = draw(StableDiffusionXLImg2ImgPipeline(**xl_parts(pipe)), **arguments)
    actual = draw(StableDiffusionXLImg2ImgPipeline(**xl_parts(exported)), **arguments)
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE)
    with pytest.raises(ToMeConfigError, match="clip_skip"):
        draw(exported, clip_skip=1)


def test_inpainting_model_with_nine_channels(others, tmp_path):
    models, linked = others
    pipe = StableDiffusionInpaintPipeline(**stable_diffusion(unet=unet(**ONE_LEVEL, in_channels=9), **models))
    manifest = export_pipeline(pipe, tmp_path / "out", 0.5, [(32, 32)], **linked)
    assert manifest.image_to_image
    arguments = {"image": image(), "mask_image": mask(), "height": 32, "width": 32}
    with pipe.tome(ratio=0.5):
        np.testing.assert_allclose(draw(load(tmp_path / "out"), **arguments), draw(pipe, **arguments), atol=TOLERANCE)


@pytest.mark.skipif(PADDLE2, reason="ppdiffusers calls predictor.run([tensors]), which crashes on Paddle 2.6's CPU")
def test_pipeline_class_of_ppdiffusers_loads_the_folder(exported_folder, tiny, monkeypatch):
    def cpu_config():
        config = inference.Config()
        config.disable_gpu()
        config.disable_mkldnn()
        return config

    index = json.loads((exported_folder / "model_index.json").read_text())
    parts = {
        # The pipeline's from_pretrained expects inference.pdmodel, which Paddle 3 does not write.
        name: PaddleInferRuntimeModel.from_pretrained(
            str(exported_folder / name), model_file_name="inference.json", infer_configs=cpu_config()
        )
        for name, library_and_class in index.items()
        if library_and_class == ["ppdiffusers", "PaddleInferRuntimeModel"]
    }
    others = dict.fromkeys(("safety_checker", "feature_extractor", "image_encoder"))
    pipe = PaddleInferStableDiffusionPipeline(**parts, **others, tokenizer=tiny.tokenizer, scheduler=tiny.scheduler)
    # It assumes Stable Diffusion's VAE.
    pipe.post_init(tiny.vae.config.scaling_factor, tiny.vae_scale_factor)
    monkeypatch.setattr(paddle.device, "synchronize", lambda: None)  # it calls this on CPUs, where it raises
    with tiny.tome(ratio=0.5):
        expected = draw(tiny)
    np.testing.assert_allclose(draw(pipe, height=32, width=32, parse_prompt_type="raw"), expected, atol=TOLERANCE)


# Errors


def test_sizes_and_ratios_that_were_not_exported(exported):
    with pytest.raises(ToMeConfigError, match=r"size=64x32 .* only 32x32, 48x32"):
        draw(exported, height=32, width=64)
    with pytest.raises(ToMeConfigError, match=r"ratio=0.25 was not exported, only 0.5, 0\."):
        exported.unet.ratio = 0.25
    assert exported.unet.ratio == 0.5


def test_at_most_so_many_programs_are_in_memory(exported_folder, exported):
    pipe = load_pipeline(exported_folder, max_programs=1, threads=1)
    (size, *_), ratios = read_manifest(exported_folder).sizes, (0.5, 0, 0, 0.5)
    for loads, ratio in zip((1, 2, 2, 3), ratios, strict=True):
        pipe.unet.ratio = exported.unet.ratio = ratio
        np.testing.assert_array_equal(draw(pipe), draw(exported))
        assert pipe.unet.loaded == [(size, ratio)] and pipe.unet.loads == loads
    assert pipe.unet.loading_seconds > 0


@pytest.mark.parametrize("most", [0, -1, True])
def test_no_programs_in_memory_is_an_error(exported_folder, most):
    with pytest.raises(ToMeConfigError, match=f"max_programs={most} is not allowed: it must be 1 or more, or None"):
        load_pipeline(exported_folder, max_programs=most)


def test_apply_tome_points_to_the_ratio_of_the_unet(exported):
    with pytest.raises(NoMergeableLayerError, match=r"pipe\.unet\.ratio"):
        exported.apply_tome(ratio=0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"clip_skip": 1}, "clip_skip"), ({"cross_attention_kwargs": {"gligen": {}}}, "cross_attention_kwargs")],
)
def test_inputs_that_programs_do_not_have(exported, settings, message):
    with pytest.raises(ToMeConfigError, match=message):
        draw(exported, **settings)


def test_unet_called_directly(exported):
    sample, text = paddle.zeros([1, 4, 16, 16]), paddle.zeros([1, 24, 32])
    out = exported.unet(sample, 10, encoder_hidden_states=text)
    assert out.sample.shape == [1, 4, 16, 16]
    with pytest.raises(ToMeConfigError, match="no input text_embeds"):
        exported.unet(sample, 10, encoder_hidden_states=text, added_cond_kwargs={"text_embeds": text})
    with pytest.raises(ToMeConfigError, match="without a ControlNet"):
        exported.unet(sample, 10, encoder_hidden_states=text, down_block_additional_residuals=[sample])
    with pytest.raises(ToMeConfigError, match="2 values"):
        exported.unet(sample, paddle.to_tensor([1, 2]), encoder_hidden_states=text)


def test_other_folders_and_classes_are_rejected(tmp_path, exported_folder):
    with pytest.raises(ToMeExportError, match="not an exported pipeline"):
        load(tmp_path)
    with pytest.raises(ToMeConfigError, match=r"needs a controlnet"):
        load(exported_folder, cls=StableDiffusionControlNetPipeline)


# Runtime settings


@pytest.mark.parametrize(
    ("runtime", "settings", "message"),
    [
        ("tflite", {}, "runtime='tflite'.*'onnxruntime'"),
        ("paddle", {"device": "tpu"}, "device='tpu'"),
        ("paddle", {"device": "cpu:1"}, "device='cpu:1'"),
        ("paddle", {"threads": 0}, "threads=0"),
        ("paddle", {"threads": True}, "threads=True"),
        ("paddle", {"precision": "int8"}, "precision='int8'"),
        ("paddle", {"precision": "fp16"}, "^precision='fp16' needs device='gpu'.*runtime='openvino' also in bf16"),
        ("paddle", {"tensorrt": True}, "^tensorrt=True needs device='gpu'"),
        ("paddle", {"tensorrt": "yes"}, "tensorrt='yes'"),
        ("onnxruntime", {"device": "gpu"}, "device='gpu'.*cuda"),
        ("onnxruntime", {"device": "cuda"}, "not in this build"),
        ("onnxruntime", {"device": "cpu:1"}, "device='cpu:1'"),
        ("onnxruntime", {"precision": "bf16"}, "precision='bf16'"),
        ("onnxruntime", {"precision": "fp16"}, "precision='fp16'.*device='cuda' also in fp16"),
        ("onnxruntime", {"onednn": True}, "onednn: .*only the settings device, threads, precision"),
        ("onnxruntime", {"threads": 0}, "threads=0"),
        ("openvino", {"device": "tpu"}, "device='tpu'.*cpu"),
        ("openvino", {"precision": "int8"}, "precision='int8'"),
    ],
)
def test_invalid_runtime_settings_are_rejected(runtime, settings, message):
    with pytest.raises(ToMeConfigError, match=message):
        choose_runtime(runtime, **settings)


@pytest.mark.parametrize(
    ("cuda", "gpus", "device", "message"),
    [
        (False, 0, "gpu", "device='gpu' .* 0 GPUs: .* install paddlepaddle-gpu"),
        (True, 0, "gpu", "device='gpu' .* 0 GPUs: .* CUDA_VISIBLE_DEVICES"),
        (True, 2, "gpu:2", "device='gpu:2' .* 2 GPUs: .* CUDA_VISIBLE_DEVICES"),
    ],
)
def test_missing_gpu_is_an_error(monkeypatch, cuda, gpus, device, message):
    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: cuda)
    monkeypatch.setattr(paddle.device.cuda, "device_count", lambda: gpus)
    with pytest.raises(ToMeConfigError, match=message):
        PaddleRuntime(device=device)


def test_onednn_is_on_if_it_passed_the_export(exported_folder, monkeypatch):
    settings = []

    class Recording(Predictor):
        def __init__(self, folder, file, runtime):
            settings.append(runtime.onednn)
            super().__init__(folder, file, runtime)

    monkeypatch.setattr(paddle_runtime, "Predictor", Recording)
    draw(load(exported_folder))
    assert settings == 3 * [PADDLE2]  # text encoder, UNet, decoder
    settings.clear()
    draw(load(exported_folder, onednn=False))
    assert settings == 3 * [False]
    if not PADDLE2:
        with pytest.raises(ToMeConfigError, match="onednn=True is not allowed"):
            draw(load(exported_folder, onednn=True))


@pytest.mark.skipif(not PADDLE2, reason="only .pdmodel programs are compared with oneDNN")
def test_onednn_is_off_if_it_failed_the_export(exported_folder, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(exported_folder, folder)
    manifest = json.loads((folder / "tome.json").read_text())
    for program in manifest["programs"]:
        program["onednn_parity"]["batch 2"] = 0.01
    (folder / "tome.json").write_text(json.dumps(manifest))
    with mock.patch.object(inference.Config, "enable_mkldnn", side_effect=AssertionError):
        draw(load(folder))


@pytest.mark.parametrize("tensorrt", [False, "tune", True])
def test_gpu_settings_call_existing_methods(tensorrt, tmp_path, monkeypatch):
    """Without a GPU: the methods exist under these names, called as in ppdiffusers' deploy/."""
    monkeypatch.setattr(paddle.device.cuda, "device_count", lambda: 2)
    config = mock.create_autospec(inference.Config, instance=True)
    runtime = PaddleRuntime(device="gpu:1", tensorrt=tensorrt, precision="fp16")
    if tensorrt is True:
        with pytest.raises(ToMeExportError, match='tensorrt="tune"'):
            paddle_runtime._for_gpu(config, runtime, tmp_path)
        (tmp_path / SHAPE_FILE).write_text("")
    paddle_runtime._for_gpu(config, runtime, tmp_path)
    config.enable_use_gpu.assert_called_with(2000, 1, inference.PrecisionType.Half)
    assert config.collect_shape_range_info.called == (tensorrt == "tune")
    assert config.enable_tensorrt_engine.called == config.enable_tuned_tensorrt_dynamic_shape.called
    assert config.enable_tensorrt_engine.called == (tensorrt is True)


@pytest.mark.skipif(not PADDLE2, reason="about Paddle 2.6")
def test_programs_of_paddle_3_are_rejected_by_paddle_2(tmp_path):
    with pytest.raises(ToMeExportError, match="exported by Paddle 3"):
        PaddleRuntime().load(tmp_path, ProgramFile("unet", "inference.json", "inference.pdiparams"))
