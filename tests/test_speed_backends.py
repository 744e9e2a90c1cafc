"""Arms: which there are, that each is put on and comes off, and that PyTorch computes the same."""

import os
import sys
from importlib.util import find_spec
from unittest.mock import patch

import cuda_attention
import numpy as np
import paddle
import pytest
from conftest import Recorder, make_unet, run, traces
from ppdiffusers.models.attention_processor import XFormersAttnProcessor

from ppdiffusers_tome import ToMeConfig, ToMeConfigError, ToMeError
from ppdiffusers_tome.evaluation.free_merge import attach_free_merge
from ppdiffusers_tome.evaluation.speed.arms import Arms
from ppdiffusers_tome.evaluation.speed.cases import ARMS, ArmPlan, Case, plan_arms
from ppdiffusers_tome.evaluation.speed.subjects import open_subject
from ppdiffusers_tome.evaluation.torch_arm import TorchArm, torch_weights, why_not
from ppdiffusers_tome.patch import attach, detach
from ppdiffusers_tome.positions import Grid

CASE = Case("tiny", size=128)
# An interpreter with torch, diffusers and tomesd, for the comparison with the real thing.
TORCH_PYTHON = os.environ.get("TOME_TORCH_PYTHON") or (sys.executable if find_spec("tomesd") else None)
WITHOUT_TORCH = pytest.mark.skipif(find_spec("torch") is not None, reason="this interpreter has torch")


def labels(plans):
    return [plan.label for plan in plans]


def test_arms_are_backends_by_ratios_by_levels():
    plans = plan_arms(CASE, ARMS, ["eager", "predictor"], [0.5, 0.75], [None], "no torch")
    assert labels(plans)[:4] == ["eager plain", "eager memory-efficient", "eager tome 0.5", "eager tome 0.75"]
    assert [plan.arm for plan in plans if plan.backend == "predictor"] == ["plain", "tome", "tome", "limit", "limit"]
    reasons = {plan.label: plan.reason for plan in plans if plan.reason}
    assert "refuses a ratio of 0.75" in reasons.pop("eager built-in 0.75")
    assert reasons == dict.fromkeys(["PyTorch plain", "PyTorch tome 0.5", "PyTorch tome 0.75"], "no torch")


@pytest.mark.parametrize(
    ("case", "ratio", "level", "message"),
    [
        (CASE, 0.8, None, r"ratio=0\.8 is not allowed"),
        (CASE, 0.001, None, "--ratio 0.001 merges no token"),
        (Case("sdxl", size=1024), 0.5, 1, "shallowest attention at level 2"),
        (Case("tiny", "block", 128), 0.5, 1, "not allowed with --scope block"),
    ],
)
def test_what_merges_nothing_is_told_before(case, ratio, level, message):
    with pytest.raises(ToMeConfigError, match=message):
        plan_arms(case, ["tome"], ["eager"], [ratio], [level], None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 130}, "--size 130 is not allowed: it must be a multiple of 8"),
        ({"size": 0}, "--size 0"),
        ({"batch": 0}, "--batch 0"),
        ({"dtype": "float16"}, "no kernels for it: pass float32"),
        ({"scope": "pipeline"}, "needs --model FOLDER"),
    ],
)
def test_case_is_checked(changes, message):
    with pytest.raises(ToMeConfigError, match=message):
        Case("tiny", **{"size": 128, **changes}).check()


@pytest.mark.parametrize("scope", ["unet", "block"])
def test_eager_arms_compute_what_they_say_and_leave_nothing(scope, tmp_path):
    subject = open_subject(Case("tiny", scope, 128))
    before, plain = traces(subject.denoiser), subject.output()
    with Arms(subject, None, 1, None, 0, tmp_path) as arms:
        out = {arm: arms[ArmPlan(arm, ratio=0.5)].output() for arm in ("tome", "both", "built-in", "limit")}
        sliced = arms[ArmPlan("memory-efficient")]
        np.testing.assert_allclose(sliced.output(), plain, atol=1e-5)
        assert sliced.peak_memory() < arms[ArmPlan("plain")].peak_memory() and sliced.seconds() > 0
    for name, each in out.items():
        assert np.abs(each - plain).max() > 1e-3, name
    np.testing.assert_allclose(out["both"], out["tome"], atol=1e-5)
    np.testing.assert_allclose(out["built-in"], out["tome"], atol=1e-5)
    assert np.abs(out["limit"] - out["tome"]).max() > 1e-3
    assert [type(each) for each in traces(subject.denoiser)] == [type(each) for each in before]
    np.testing.assert_array_equal(subject.output(), plain)


def test_xformers_saves_the_memory_of_a_gpu(tmp_path):
    with patch("paddle.get_device", return_value="gpu:0"):
        assert ArmPlan("memory-efficient").attention == ArmPlan("both").attention == "xformers"
    subject, attend = open_subject(CASE), XFormersAttnProcessor.__call__
    with (
        cuda_attention.found(),
        patch.object(ArmPlan, "attention", "xformers"),
        patch.object(XFormersAttnProcessor, "__call__", autospec=True, side_effect=attend) as processor,
        Arms(subject, None, 1, None, 0, tmp_path) as arms,
    ):
        merged = arms[ArmPlan("both", ratio=0.5)].output()
        fused = arms[ArmPlan("memory-efficient")].output()
    assert processor.called
    np.testing.assert_allclose(fused, subject.output(), atol=1e-5)
    with Arms(subject, None, 1, None, 0, tmp_path) as arms:
        np.testing.assert_allclose(merged, arms[ArmPlan("tome", ratio=0.5)].output(), atol=1e-5)


def test_limit_costs_as_much_as_merging_without_the_matching():
    subject = open_subject(CASE)
    config = ArmPlan("tome", ratio=0.5).config
    matching = 192 * 64 * 32  # src × dst × channels, in each of three blocks, for two images
    assert subject.macs(config) - subject.macs(config, matching=False) == 2 * 3 * matching
    assert subject.macs(None) > subject.macs(config)


@pytest.mark.parametrize("ratio", [0.5, 0.7])
@paddle.no_grad()
def test_free_merge_cuts_as_many_tokens_as_merging_and_comes_off(ratio):
    unet = make_unet()
    unet.set_attn_processor(Recorder())
    plain, lengths = run(unet), []
    for put_on in (attach, attach_free_merge):
        more = (None,) if put_on is attach else (Grid(16, 16),)
        put_on(unet, ToMeConfig(ratio=ratio), *more)
        recorder = Recorder()
        unet.set_attn_processor(recorder)
        assert np.abs(run(unet) - plain).max() > 1e-3
        lengths.append(recorder.lengths)
    assert lengths[0] == lengths[1] and (256 - int(256 * ratio), None) in lengths[0]
    detach(unet)
    np.testing.assert_array_equal(run(unet), plain)


def test_only_linear_weights_are_turned_for_pytorch():
    unet = make_unet()
    turned, state = torch_weights(unet), unet.state_dict()
    assert turned.keys() == state.keys()
    name = "down_blocks.0.attentions.0.transformer_blocks.0.ff.net.0.proj"
    assert turned[f"{name}.weight"].shape == (256, 32) == tuple(state[f"{name}.weight"].shape[::-1])
    assert turned[f"{name}.weight"].flags.c_contiguous
    np.testing.assert_array_equal(turned["conv_in.weight"], state["conv_in.weight"].numpy())


@WITHOUT_TORCH
def test_failing_worker_says_what_is_wrong(tmp_path):
    with pytest.raises(ToMeError, match="PyTorch's process failed at 'load': ModuleNotFoundError"):
        TorchArm(sys.executable, tmp_path, make_unet(), 1)


def test_worker_that_ends_is_an_error(tmp_path):
    stub = tmp_path / "python"
    stub.write_text("#!/bin/sh\nexit 3\n")
    stub.chmod(0o755)
    with pytest.raises(ToMeError, match="PyTorch's process ended at 'load', with status 3"):
        TorchArm(str(stub), tmp_path, make_unet(), 1)


def test_interpreter_that_is_not_there_is_told(tmp_path):
    assert "cannot be run" in why_not(str(tmp_path / "python"))


@pytest.mark.skipif(TORCH_PYTHON is None, reason="TOME_TORCH_PYTHON names no interpreter with torch and tomesd")
def test_pytorch_computes_what_eager_does(tmp_path):
    subject = open_subject(CASE)
    with Arms(subject, None, 1, TORCH_PYTHON, 0, tmp_path) as arms:
        for arm, ratio in (("plain", 0.0), ("tome", 0.5), ("plain", 0.0)):
            wanted = arms[ArmPlan(arm, ratio=ratio)].output()
            theirs = arms[ArmPlan(arm, "PyTorch", ratio)]
            np.testing.assert_allclose(theirs.output(), wanted, atol=1e-5 * np.abs(wanted).max())
            assert theirs.seconds() > 0 and theirs.peak_memory() is None
