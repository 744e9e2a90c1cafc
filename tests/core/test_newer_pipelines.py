"""Pipelines that ppdiffusers 0.29.0 does not have, over tiny models of its own classes, up to their latents."""

import numpy as np
import paddle
import pytest
from ppdiffusers import FlowMatchEulerDiscreteScheduler
from ppdiffusers_source import newer_class
from test_rotary import COG_2B, COG_5B, OF_FLUX, OF_WAN, STATES
from zoo.noise import noise

from ppdiffusers_tome import ToMeExportError
from ppdiffusers_tome.inference import export_pipeline

WITHOUT = {"tokenizer": None, "text_encoder": None, "vae": None}


def texts():
    """Embeddings of a prompt and of a negative one, for classifier-free guidance."""
    return {"prompt_embeds": noise(1, 5, STATES, seed=5), "negative_prompt_embeds": noise(1, 5, STATES, seed=6)}


def cogvideox(family):
    pipe = newer_class("CogVideoXPipeline")(
        **WITHOUT, transformer=family.real(), scheduler=newer_class("CogVideoXDDIMScheduler")()
    )
    return pipe, {**texts(), "num_frames": 9}


def wan(family):
    pipe = newer_class("WanPipeline")(
        **WITHOUT, transformer=family.real(), scheduler=FlowMatchEulerDiscreteScheduler()
    )
    return pipe, {**texts(), "num_frames": 9}


def flux_with_negative_prompt(family):
    pooled = {"pooled_prompt_embeds": noise(1, STATES), "negative_pooled_prompt_embeds": noise(1, STATES, seed=1)}
    call = {**texts(), **pooled, "true_cfg_scale": 2.0}
    second = {"tokenizer_2": None, "text_encoder_2": None}
    pipe = newer_class("FluxPipeline")(
        **WITHOUT, **second, transformer=family.real(), scheduler=FlowMatchEulerDiscreteScheduler()
    )
    if "true_cfg_scale" not in type(pipe).__call__.__code__.co_varnames:  # before 2025-05
        call = {name: value for name, value in call.items() if not name.startswith(("negative", "true"))}
    return pipe, call


CASES = {
    "CogVideoX-2b": (cogvideox, COG_2B),
    "CogVideoX-5b": (cogvideox, COG_5B),
    "Wan": (wan, OF_WAN),
    "FLUX": (flux_with_negative_prompt, OF_FLUX),
}


@pytest.mark.parametrize("method", ["interlace", "todo"])
@pytest.mark.parametrize("name", CASES)
def test_pipeline(name, method, tmp_path):
    make, family = CASES[name]
    pipe, call = make(family)
    pipe.set_progress_bar_config(disable=True)

    def generate():
        paddle.seed(0)
        size = {"height": 96, "width": 128, "num_inference_steps": 4}  # of two, Wan's both keep all keys
        return pipe(**call, **size, output_type="latent", return_dict=False)[0].numpy()

    plain = generate()
    merged = pipe.apply_tome(method=method) and generate()
    assert merged.shape == plain.shape and np.isfinite(merged).all()
    assert not np.allclose(merged, plain, atol=1e-3)
    summary = pipe.tome_summary(96, 128, frames=3)
    assert {block.grid for block in summary.blocks} == {(6, 8)}
    keys = {"interlace": 24, "todo": 12}[method]  # interlace keeps tokens outside of its cells of 4×4
    assert {(block.kept_queries, block.kept_keys) for block in summary.blocks} == {(48, keys)}
    assert 0 < summary.saved_share < 1
    with pytest.raises(ToMeExportError, match=f"{type(pipe).__name__} .*StableDiffusion"):
        export_pipeline(pipe, tmp_path / "exported")
    pipe.remove_tome()
    np.testing.assert_array_equal(generate(), plain)
