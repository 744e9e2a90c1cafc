"""Models in the format of diffusers load as those of ppdiffusers do, and errors say what they lack."""

import json
import shutil
import struct

import numpy as np
import pytest
from conftest import tiny_pipeline
from hub_folders import write_diffusers_folder, write_diffusers_model
from paddle import nn
from ppdiffusers import StableDiffusionControlNetPipeline, StableDiffusionXLPipeline
from safetensors.numpy import load_file, save_file
from zoo.parts import ONE_LEVEL, controlnet, sdxl

from ppdiffusers_tome import ToMeExportError
from ppdiffusers_tome.cli import main
from ppdiffusers_tome.export.loading import load_eager_pipeline
from ppdiffusers_tome.inference import load_pipeline


def assert_equal_weights(loaded, model):
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), expected[name].numpy(), name)


def assert_same_pipeline(loaded, pipe):
    """The same class, tokens and scheduler, and models with the same weights."""
    assert type(loaded) is type(pipe) and type(loaded.scheduler) is type(pipe.scheduler)
    assert dict(loaded.scheduler.config).items() >= {"beta_start": 0.00085, "steps_offset": 1}.items()
    prompt = ["a 3d render of fox, on red bricks"]
    assert loaded.tokenizer(prompt)["input_ids"] == pipe.tokenizer(prompt)["input_ids"]
    models = {name: model for name, model in vars(pipe).items() if isinstance(model, nn.Layer)}
    assert {"unet", "vae", "text_encoder"} <= models.keys()
    for name, model in models.items():
        assert_equal_weights(getattr(loaded, name), model)


@pytest.fixture(scope="module")
def diffusers_folder(tiny, tmp_path_factory):
    """The tiny pipeline of this module, as diffusers saves it; tests that change it work on a copy."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    write_diffusers_folder(tiny, folder)
    return folder


@pytest.mark.parametrize("pickles", [False, True])
@pytest.mark.parametrize("make", [tiny_pipeline, lambda: StableDiffusionXLPipeline(**sdxl())], ids=["sd", "sdxl"])
def test_a_folder_of_diffusers_loads_with_its_weights(make, pickles, tmp_path):
    pipe = make()
    write_diffusers_folder(pipe, tmp_path, pickles=pickles)
    assert_same_pipeline(load_eager_pipeline(str(tmp_path)), pipe)
    assert_same_pipeline(load_eager_pipeline(str(tmp_path)), pipe)  # now with the file that PaddleNLP has written


@pytest.mark.parametrize("of_diffusers", ["model", "controlnet"])
def test_model_and_controlnet_may_have_different_formats(of_diffusers, tmp_path):
    pipe, network = tiny_pipeline(), controlnet(**ONE_LEVEL)
    if of_diffusers == "model":
        write_diffusers_folder(pipe, tmp_path / "model")
        network.save_pretrained(str(tmp_path / "model" / "controlnet"))  # in the model's folder, as of emoji_sd
    else:
        pipe.save_pretrained(str(tmp_path / "model"))
        write_diffusers_model(network, tmp_path / "model" / "controlnet")
    loaded = load_eager_pipeline(str(tmp_path / "model"), str(tmp_path / "model" / "controlnet"))
    assert type(loaded) is StableDiffusionControlNetPipeline
    assert_equal_weights(loaded.controlnet, network)
    assert_equal_weights(loaded.unet, pipe.unet)


def test_weights_of_ppdiffusers_beside_configs_of_diffusers(diffusers_folder, tiny, tmp_path):
    """They are loaded as what they are."""
    tiny.save_pretrained(str(tmp_path))
    for path in diffusers_folder.rglob("*.json"):
        shutil.copyfile(path, tmp_path / path.relative_to(diffusers_folder))
    assert_same_pipeline(load_eager_pipeline(str(tmp_path)), tiny)


def test_commands_take_a_folder_of_diffusers(diffusers_folder, tiny, tmp_path, capsys):
    options = ["--model", str(diffusers_folder), "--size", "32"]
    assert main(["export", *options, "--ratio", "0", "--format", "paddle", "--output", str(tmp_path / "out")]) == 0
    pipe = load_pipeline(tmp_path / "out")
    assert pipe.unet.config.sample_size == 16 and type(pipe.scheduler) is type(tiny.scheduler)
    once = ["--steps", "1", "--rounds", "1", "--threads", "1", "--prompt", "a fox", "--ratio", "0.5"]
    assert main(["compare", *options, *once, "--output", str(tmp_path / "images")]) == 0
    assert "interlace 0.5" in capsys.readouterr().out


def test_weights_in_float16_are_loaded_in_float32(diffusers_folder, tiny, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(diffusers_folder, folder)
    for path in folder.rglob("*.safetensors"):
        weights = {name: w.astype("float16") if w.dtype == "float32" else w for name, w in load_file(path).items()}
        save_file(weights, path, metadata={"format": "pt"})
    pipe = load_eager_pipeline(str(folder))
    for model, original in ((pipe.unet, tiny.unet), (pipe.text_encoder, tiny.text_encoder)):
        expected = original.state_dict()
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                rounded = expected[name].numpy().astype("float16").astype("float32")
                np.testing.assert_array_equal(tensor.numpy(), rounded, name)


def without(name):
    return lambda folder: (folder / name).unlink()


def with_a_variant(folder):
    (folder / "text_encoder" / "model.safetensors").rename(folder / "text_encoder" / "model.fp16.safetensors")


def in_bfloat16(folder):
    tensor = {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "conv_in.bias": tensor}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(2)
    (folder / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("unet/diffusion_pytorch_model.safetensors"), "AssertionError: .*no model files .* path .*/unet"),
        (without("unet/config.json"), r"config\.json .* directory .*/unet"),
        (without("tokenizer/vocab.json"), "TypeError: .*'vocab_file'"),
        (with_a_variant, "no file named .*/text_encoder"),
        (in_bfloat16, "TypeError: .*bfloat16"),
    ],
)
def test_what_a_folder_of_diffusers_lacks(change, message, diffusers_folder, tmp_path):
    """ppdiffusers raises the first error; what such a folder must have follows."""
    folder = tmp_path / "model"
    shutil.copytree(diffusers_folder, folder)
    (folder / "text_encoder" / "model_state.pdparams").unlink(missing_ok=True)
    change(folder)
    rule = r"\. It has diffusers' format, .* float32 or float16, .* no variant such as fp16\."
    with pytest.raises(ToMeExportError, match=f"^{folder} cannot be loaded: .*{message}.*{rule}"):
        load_eager_pipeline(str(folder))


def test_an_error_of_a_controlnet_names_its_folder(diffusers_folder, tmp_path):
    with pytest.raises(ToMeExportError, match=rf"^{tmp_path} cannot be loaded: .*config\.json"):
        load_eager_pipeline(str(diffusers_folder), str(tmp_path))
