"""Running an exported folder: an ordinary pipeline with the images of eager; what it does not support is an error."""

import json
import re
import shutil
from unittest import mock

import numpy as np
import paddle
import ppdiffusers
import pytest
from exporting import export_linked, unmerged_programs
from paddle import inference
from ppdiffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    PaddleInferStableDiffusionPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from ppdiffusers.models import paddleinfer_runtime
from ppdiffusers.models.attention_processor import AttnProcessor
from ppdiffusers.transformers import CLIPTextModel
from zoo.parts import ONE_DEPTH, ONE_LEVEL, SDXL, controlnet, image, mask, sdxl, stable_diffusion, unet

from ppdiffusers_tome import NoMergeableLayerError, ToMeConfigError, ToMeExportError
from ppdiffusers_tome.families.schedules import as_numbers
from ppdiffusers_tome.inference import PaddleRuntime, choose_runtime, load_pipeline, read_manifest
from ppdiffusers_tome.methods.steps import PLAIN_STEPS
from ppdiffusers_tome.run import paddle_runtime
from ppdiffusers_tome.run.folder import ExportedFolder
from ppdiffusers_tome.run.manifest import Files
from ppdiffusers_tome.run.paddle_runtime import Predictor

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


def test_images_with_plain_steps_equal_those_of_eager_and_of_switched_programs(exported, tiny, monkeypatch):
    image = draw(exported, num_inference_steps=10)
    with tiny.tome(ratio=0.5):
        np.testing.assert_allclose(image, draw(tiny, num_inference_steps=10), atol=TOLERANCE)
    with tiny.tome(ratio=0.5, merge_steps="all"):
        everywhere = draw(tiny, num_inference_steps=10)
    assert np.abs(image - everywhere).max() > 100 * TOLERANCE
    plain = []

    def switched(sample, timestep, *args, **kwargs):
        plain.append(PLAIN_STEPS.count(as_numbers(timestep)) == 1)
        exported.unet.ratio = 0 if plain[-1] else 0.5
        return type(exported.unet).forward(exported.unet, sample, timestep, *args, **kwargs)

    monkeypatch.setattr(exported.unet, "forward", switched)
    np.testing.assert_allclose(draw(exported, num_inference_steps=10), image, atol=TOLERANCE)
    exported.unet.ratio = 0.5
    assert 1 < sum(plain) < len(plain) / 2


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


def test_a_callback_changes_the_ratio(exported, tiny):
    def lower(pipe, step, timestep, kwargs):
        pipe.unet.ratio = 0
        return kwargs

    def remove(pipe, step, timestep, kwargs):
        pipe.remove_tome()
        return kwargs

    try:
        actual = draw(exported, callback_on_step_end=lower)
    finally:
        exported.unet.ratio = 0.5
    with tiny.tome(ratio=0.5):
        expected = draw(tiny, callback_on_step_end=remove)
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE)
    assert np.abs(actual - draw(exported)).max() > 10 * TOLERANCE


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
    """Models that are exported already, and their programs."""
    return {"vae": tiny.vae, "text_encoder": tiny.text_encoder}, unmerged_programs(exported_folder)


def test_controlnet_is_fused_with_the_unet(others, tmp_path):
    models, linked = others
    pipe = StableDiffusionControlNetPipeline(
        **stable_diffusion(unet=unet(**ONE_LEVEL), controlnet=controlnet(**ONE_LEVEL), **models)
    )
    settings = {"controlnet": 0.25, "linked": linked, "image_check": True}
    manifest = export_linked(pipe, tmp_path / "out", 0.5, [(32, 32)], **settings)
    assert manifest.residuals == 3 and manifest.methods == {0.5: "interlace; ControlNet at ratio 0.25: interlace"}
    exported = load(tmp_path / "out")
    assert "ratio 0.5: interlace; ControlNet at ratio 0.25: interlace" in str(exported.tome_summary())
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
    with pytest.raises(ToMeConfigError, match=r"ExportedControlNet\.attn_processors "):
        exported.controlnet.attn_processors  # noqa: B018
    with pytest.raises(ToMeConfigError, match="copy the exported folder"):
        exported.save_pretrained(str(tmp_path / "copy"))
    assert not (tmp_path / "copy").exists()


def xl_parts(pipe):
    """The components that ppdiffusers' SDXL pipelines have in common."""
    excluded = ("image_encoder", "feature_extractor")
    return {name: component for name, component in pipe.components.items() if name not in excluded}


def test_sdxl_with_its_additional_inputs(others, tmp_path):
    models, linked = others
    of_vae = [program for program in linked if program[1].model.startswith("vae")]
    pipe = StableDiffusionXLPipeline(**sdxl(unet=unet(**{**SDXL, **ONE_LEVEL, **ONE_DEPTH}), vae=models["vae"]))
    settings = {"image_to_image": True, "linked": of_vae, "image_check": True}
    export_linked(pipe, tmp_path / "out", 0.5, [(32, 32)], **settings)
    exported = load(tmp_path / "out")
    with pipe.tome(ratio=0.5):
        np.testing.assert_allclose(draw(exported), draw(pipe), atol=TOLERANCE)
        arguments = {"image": image(), "strength": 1.0}
        expected = draw(StableDiffusionXLImg2ImgPipeline(**xl_parts(pipe)), **arguments)
    actual = draw(StableDiffusionXLImg2ImgPipeline(**xl_parts(exported)), **arguments)
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE)
    with pytest.raises(ToMeConfigError, match="clip_skip"):
        draw(exported, clip_skip=1)
    with pytest.raises(ToMeConfigError, match="needs layers"):
        draw(exported, ip_adapter_image=image())


def test_inpainting_model_with_nine_channels(others, tmp_path):
    models, linked = others
    pipe = StableDiffusionInpaintPipeline(**stable_diffusion(unet=unet(**ONE_LEVEL, in_channels=9), **models))
    manifest = export_linked(pipe, tmp_path / "out", 0.5, [(32, 32)], linked=linked, image_check=True)
    assert manifest.image_to_image
    arguments = {"image": image(), "mask_image": mask(), "height": 32, "width": 32}
    with pipe.tome(ratio=0.5):
        np.testing.assert_allclose(draw(load(tmp_path / "out"), **arguments), draw(pipe, **arguments), atol=TOLERANCE)


@pytest.mark.skipif(PADDLE2, reason="ppdiffusers calls predictor.run([tensors]), which crashes on Paddle 2.6's CPU")
def test_pipeline_class_of_ppdiffusers_loads_the_folder(exported_folder, tiny, monkeypatch):
    """With Paddle 3 by the line of docs/export.md; the rest is for CPUs, and for a VAE that is not the usual one."""

    def cpu_config():
        config = inference.Config()
        config.disable_gpu()
        config.disable_mkldnn()
        return config

    monkeypatch.setattr(paddleinfer_runtime, "PADDLE_INFER_MODEL_NAME", "inference.json")
    configs = {name: cpu_config() for name in ("text_encoder", "unet", "vae_decoder", "vae_encoder")}
    pipe = PaddleInferStableDiffusionPipeline.from_pretrained(str(exported_folder), infer_configs=configs)
    pipe.post_init(tiny.vae.config.scaling_factor, tiny.vae_scale_factor)
    monkeypatch.setattr(paddle.device, "synchronize", lambda: None)  # it calls this on CPUs, where it raises
    with tiny.tome(ratio=0.5):
        expected = draw(tiny)
    np.testing.assert_allclose(draw(pipe, height=32, width=32, parse_prompt_type="raw"), expected, atol=TOLERANCE)


# Errors


def test_sizes_and_ratios_that_were_not_exported(exported):
    with pytest.raises(ToMeConfigError, match=r"size=64x32 .* only 32x32, 48x32"):
        draw(exported, height=32, width=64)
    with pytest.raises(ToMeConfigError, match=r"ratio=0.25 .*only 0.5, 0\."):
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
    with pytest.raises(ToMeConfigError, match=f"max_programs={most} .* 1 or more, or None"):
        load_pipeline(exported_folder, max_programs=most)


def test_apply_tome_points_to_the_ratio_of_the_unet(exported):
    for target in (exported, exported.unet):
        with pytest.raises(NoMergeableLayerError, match=r"pipe\.unet\.ratio"):
            target.apply_tome(ratio=0.5)
        assert target.remove_tome() is target


def test_summary_is_what_was_exported(exported):
    expected = """\
unet: exported for 32x32, 48x32 (width x height), at ratio 0.5 now (pipe.unet.ratio)
ratio 0.5: interlace
ratio 0: plain
MACs: cannot be counted for this kind of model"""
    summary = exported.tome_summary()
    assert str(summary) == expected and summary.saved_share is None and summary.blocks == ()
    assert str(exported.tome_summary(height=64, width=64)) == expected.replace("MACs:", "latents 32x32\nMACs:")
    exported.unet.ratio = 0
    assert "at ratio 0 now" in str(exported.tome_summary())
    assert str(exported.unet.tome_summary()) == str(exported.tome_summary()).replace("unet:", "ExportedUNet:")


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"clip_skip": 1}, "clip_skip"), ({"cross_attention_kwargs": {"gligen": {}}}, "cross_attention_kwargs")],
)
def test_inputs_that_programs_do_not_have(exported, settings, message):
    with pytest.raises(ToMeConfigError, match=message):
        draw(exported, **settings)


REFUSED = {
    "load_lora_weights": lambda pipe: pipe.load_lora_weights({"unet.to_q.lora.down.weight": paddle.ones([4, 4])}),
    "load_textual_inversion": lambda pipe: pipe.load_textual_inversion(paddle.ones([1, 32]), token="<owl>"),
    "load_ip_adapter": lambda pipe: pipe.load_ip_adapter({"image_proj": {}, "ip_adapter": {}}),
    "set_ip_adapter_scale": lambda pipe: pipe.set_ip_adapter_scale(0.5),
    "encode_image": lambda pipe: pipe.encode_image(image(), 1),  # what ip_adapter_image calls
    "fuse_lora": lambda pipe: pipe.fuse_lora(),
    "unfuse_lora": lambda pipe: pipe.unfuse_lora(),
    "set_adapters": lambda pipe: pipe.set_adapters(["owl"]),
    "enable_vae_slicing": lambda pipe: pipe.enable_vae_slicing(),
    "enable_vae_tiling": lambda pipe: pipe.enable_vae_tiling(),
    "enable_freeu": lambda pipe: pipe.enable_freeu(0.9, 0.2, 1.5, 1.6),
    "enable_attention_slicing": lambda pipe: pipe.enable_attention_slicing(),
    "enable_xformers": lambda pipe: pipe.enable_xformers_memory_efficient_attention(),
    "to(dtype)": lambda pipe: pipe.to(paddle.float16),
    "to(device)": lambda pipe: pipe.to("gpu"),
    "save_pretrained": lambda pipe: pipe.save_pretrained("copy"),
    "set_attn_processor": lambda pipe: pipe.unet.set_attn_processor(AttnProcessor()),
    "attn_processors": lambda pipe: pipe.unet.attn_processors,
    "gradient checkpointing": lambda pipe: pipe.unet.enable_gradient_checkpointing(),
    "weights": lambda pipe: pipe.vae.state_dict(),
    "layers": lambda pipe: pipe.text_encoder.text_model,
    "embeddings": lambda pipe: pipe.text_encoder.resize_token_embeddings(100),
}


REMEDIES = r"before export_pipeline\(\)|copy the exported folder|precision of load_pipeline\("


@pytest.fixture(scope="module")
def over_its_models(_exported):
    """Another pipeline over the same models, which no code of ours has made."""
    return StableDiffusionImg2ImgPipeline(**_exported.components, requires_safety_checker=False)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of ppdiffusers' functions for LoRA
@pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_layers_or_weights_is_one_error_with_a_remedy(
    exported, over_its_models, name, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for pipe in (exported, over_its_models):
        with pytest.raises(ToMeConfigError, match=REMEDIES):
            REFUSED[name](pipe)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("settings", [{"ip_adapter_image": image()}, {"cross_attention_kwargs": {"scale": 0.5}}])
def test_calls_that_need_layers_or_weights(exported, over_its_models, settings):
    for pipe, start in (exported, {}), (over_its_models, {"image": image()}):
        expected = draw(pipe, **start)
        with pytest.raises(ToMeConfigError, match=REMEDIES):
            draw(pipe, **start, **settings)
        np.testing.assert_array_equal(draw(pipe, **start), expected)


def test_weights_are_refused_before_they_are_downloaded(exported):
    for name in ("load_lora_weights", "load_textual_inversion", "load_ip_adapter"):
        with pytest.raises(ToMeConfigError, match=f"StableDiffusionPipeline.{name} "):
            getattr(exported, name)("someone/weights")
    for name in ("unload_lora_weights", "enable_lora", "disable_lora"):  # in ppdiffusers 0.29.0 they always raise
        with pytest.raises(ToMeConfigError, match=REMEDIES):
            getattr(exported, name)()


def test_models_are_of_the_classes_that_they_stand_for(exported):
    """Pipelines ask for them, and by hasattr and getattr for what they have."""
    assert isinstance(exported.unet, UNet2DConditionModel) and isinstance(exported.vae, AutoencoderKL)
    assert isinstance(exported.text_encoder, CLIPTextModel)
    assert exported.device == paddle.get_device() and exported.dtype == paddle.float32
    for model in (exported.unet, exported.vae, exported.text_encoder):
        assert not list(model.sublayers()) and not model.parameters() and model.dtype == paddle.float32
        assert getattr(model, "down_blocks", None) is None and not hasattr(model, "peft_config")
        assert model.to(dtype=paddle.float32) is model and model.eval() is model


def test_unet_called_directly(exported):
    sample, text = paddle.zeros([1, 4, 16, 16]), paddle.zeros([1, 24, 32])
    out = exported.unet(sample, 10, encoder_hidden_states=text)
    assert out.sample.shape == [1, 4, 16, 16]
    with pytest.raises(ToMeConfigError, match="text_embeds"):
        exported.unet(sample, 10, encoder_hidden_states=text, added_cond_kwargs={"text_embeds": text})
    with pytest.raises(ToMeConfigError, match="ControlNet"):
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
        ("paddle", {"precision": "fp16"}, "^precision='fp16' is not allowed: on a CPU.* OpenVINO also has bf16 there"),
        ("onnxruntime", {"device": "gpu"}, "device='gpu'.*cuda"),
        ("onnxruntime", {"device": "cuda"}, "this build of ONNX Runtime has only"),
        ("onnxruntime", {"device": "cpu:1"}, "device='cpu:1'"),
        ("onnxruntime", {"precision": "bf16"}, "precision='bf16'"),
        ("onnxruntime", {"precision": "fp16"}, "precision='fp16'.*with CUDA also in fp16"),
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
        def __init__(self, folder, files, runtime):
            settings.append(runtime.onednn)
            super().__init__(folder, files, runtime)

    monkeypatch.setattr(paddle_runtime, "Predictor", Recording)
    draw(load(exported_folder))
    assert settings == 3 * [PADDLE2]  # text encoder, UNet, decoder
    settings.clear()
    draw(load(exported_folder, onednn=False))
    assert settings == 3 * [False]
    if not PADDLE2:
        with pytest.raises(ToMeConfigError, match="onednn=True"):
            draw(load(exported_folder, onednn=True))


@pytest.mark.skipif(not PADDLE2, reason="only .pdmodel programs are compared with oneDNN")
def test_onednn_is_off_if_it_failed_the_export(exported_folder, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(exported_folder, folder)
    manifest = json.loads((folder / "tome.json").read_text())
    for program in manifest["programs"]:
        program["files"]["paddle"]["onednn_parity"]["batch 2"] = 0.01
    (folder / "tome.json").write_text(json.dumps(manifest))
    with mock.patch.object(inference.Config, "enable_mkldnn", side_effect=AssertionError):
        draw(load(folder))


class Recording:
    """Records the calls of methods, which a config of Paddle carries out: it refuses arguments of wrong types."""

    def __init__(self):
        self._config, self.calls = inference.Config(), []

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, *args))
            return getattr(self._config, name)(*args)

        return call


def test_paddle_takes_the_settings_for_a_gpu(monkeypatch):
    """On any machine: without a GPU its config takes them and ignores them."""
    monkeypatch.setattr(paddle.device.cuda, "device_count", lambda: 2)
    config = Recording()
    paddle_runtime._for_gpu(config, PaddleRuntime(device="gpu:1", precision="fp16"))
    assert ("enable_use_gpu", 2000, 1, inference.PrecisionType.Half) in config.calls
    assert ("delete_pass", "auto_mixed_precision_pass") in config.calls


@pytest.mark.parametrize("name", ["inference.json", "inference.pdmodel"])
def test_memory_is_optimized_where_paddle_can(name, tmp_path):
    """With Paddle 3's programs, which are .json, it fails."""
    config = Recording()
    paddle_runtime._configure(config, PaddleRuntime(), tmp_path / name)
    assert (("enable_memory_optim",) in config.calls) == name.endswith(".pdmodel")
    if name.endswith(".pdmodel"):
        assert re.search(r"memory_optim +\| true", config.summary())


@pytest.mark.skipif(not PADDLE2, reason="about Paddle 2.6")
def test_programs_of_paddle_3_are_rejected_by_paddle_2(tmp_path):
    with pytest.raises(ToMeExportError, match="exported by Paddle 3"):
        PaddleRuntime().load(ExportedFolder(tmp_path), Files("inference.json", "inference.pdiparams"))
