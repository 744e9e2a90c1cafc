"""Arms: which there are, and that each computes what it should and leaves no trace."""

import os
import sys
from contextlib import closing
from importlib.util import find_spec
from unittest.mock import patch

import cuda_attention
import numpy as np
import paddle
import pytest
from conftest import Recorder, make_unet, run, traces
from ppdiffusers.models.attention_processor import XFormersAttnProcessor
from speed_results import config

from ppdiffusers_tome import ToMeConfig, ToMeConfigError, ToMeError
from ppdiffusers_tome.config import parse_settings
from ppdiffusers_tome.evaluation.free_merge import attach_free_merge
from ppdiffusers_tome.evaluation.speed.backends import (
    EagerBackend,
    OpenVinoBackend,
    PredictorBackend,
    PyTorchBackend,
    PyTorchBf16Backend,
)
from ppdiffusers_tome.evaluation.speed.cases import ARMS, Arm, make_arms, make_case, make_configs
from ppdiffusers_tome.evaluation.speed.workloads import open_workload
from ppdiffusers_tome.evaluation.torch_unet import TorchProcess, torch_versions, torch_weights
from ppdiffusers_tome.patch import attach, detach
from ppdiffusers_tome.positions import Grid

# An interpreter with torch, diffusers and tomesd.
TORCH_PYTHON = os.environ.get("TOME_TORCH_PYTHON") or (sys.executable if find_spec("tomesd") else None)


TOMESD = {"window": None, "proportional": False}


def tiny(**fields):
    return make_case("tiny", **{"size": 128, **fields})


def test_arms_are_backends_by_ratios_by_levels():
    arms = make_arms(tiny(), ARMS, ["eager", "predictor"], make_configs([0.5, 0.75], [None], [TOMESD]), "no torch")
    names = [arm.name for arm in arms]
    assert names[:4] == ["plain, eager", "memory-efficient, eager", "ToMe 0.5, eager", "ToMe 0.75, eager"]
    assert len({*names}) == len(names) and [arm.kept for arm in arms[:4]] == [256, 256, 128, 64]
    assert [arm.arm for arm in arms if arm.backend == "predictor"] == ["plain", "tome", "tome", "limit", "limit"]
    reasons = {arm.name: arm.reason for arm in arms if arm.status == "not measured"}
    assert "does not allow a ratio of 0.75" in reasons.pop("ppdiffusers' built-in ToMe 0.75, eager")
    torch = [
        f"{arm}, {name}" for name in ("PyTorch", "PyTorch-bf16") for arm in ("plain", "tomesd 0.5", "tomesd 0.75")
    ]
    assert reasons == dict.fromkeys(torch, "no torch")


def test_merging_arms_take_every_ratio_or_their_own():
    texts = ("window=8", "proportional,window=none", "merge_attn=kv,match=grid,ratio=0.75", "merge_attn=kv,ratio=0.75")
    base = "window=none,proportional=false"
    mergings = [parse_settings(base), *({**parse_settings(base), **parse_settings(text)} for text in texts)]
    configs = make_configs([0.5, 0.25, 0.5], [None], mergings)
    assert all(not config.use_rand for config in configs)
    arms = make_arms(tiny(), ["tome", "built-in", "limit", "torch"], ["eager"], configs, "no torch")
    assert [arm.name.removesuffix(", eager") for arm in arms if arm.arm == "tome" and arm.backend == "eager"] == [
        *("ToMe 0.5", "ToMe 0.5, windows of 8", "ToMe 0.5, proportional"),
        *("keys and values 0.75, 2×2 cells", "keys and values 0.75"),
        *("ToMe 0.25", "ToMe 0.25, windows of 8", "ToMe 0.25, proportional"),
    ]
    limits = [(arm.name, arm.kept) for arm in arms if arm.arm == "limit"]  # one for each number of tokens
    assert limits == [
        ("free-merge limit 0.5, eager", 128),
        ("free-merge limit of keys and values 0.75, eager", 64),
        ("free-merge limit 0.25, eager", 192),
    ]
    assert [arm.name for arm in arms if arm.backend == "PyTorch" and arm.config] == [
        f"tomesd {ratio}, PyTorch" for ratio in (0.5, 0.75, 0.25)
    ]
    assert len({arm.name for arm in arms}) == len(arms)


def test_random_dst_are_refused():
    with pytest.raises(ToMeConfigError, match="--merging use_rand is not allowed"):
        make_configs([0.5], [None], [parse_settings("use_rand")])


def test_methods_that_remove_as_many_tokens_share_a_limit():
    configs = make_configs([0.5], [None], [TOMESD, {**TOMESD, "sx": 4, "sy": 4}])
    arms = make_arms(tiny(), ["limit"], ["eager"], configs, None)
    assert [arm.name for arm in arms] == ["free-merge limit 0.5, eager"]


def test_cells_that_remove_more_than_matching_have_their_own_limit():
    configs = make_configs([0.75], [None], [{**TOMESD, "match": match} for match in ("similarity", "grid")])
    case = make_case("tiny", size=72)  # 9×9 tokens: matching may remove 60, cells remove all but 16
    arms = make_arms(case, ["limit"], ["eager"], configs, None)
    limits = [("free-merge limit 0.75, eager", 21), ("free-merge limit 0.75, 2×2 cells, eager", 16)]
    assert [(arm.name, arm.kept) for arm in arms] == limits


@pytest.mark.parametrize(
    ("model", "fields", "ratio", "level", "message"),
    [
        ("tiny", {"size": 128}, 0.001, None, "--ratio 0.001 merges no token"),
        ("sdxl", {"size": 1024}, 0.5, 1, "the shallowest attention of sdxl is at level 2"),
        ("tiny", {"size": 128, "scope": "block"}, 0.5, 1, "not allowed with --scope block"),
    ],
)
def test_arms_that_merge_nothing_are_refused(model, fields, ratio, level, message):
    with pytest.raises(ToMeConfigError, match=message):
        make_arms(make_case(model, **fields), ["tome"], ["eager"], make_configs([ratio], [level]), None)


@pytest.mark.parametrize("scope", ["unet", "block"])
def test_eager_arms_compute_what_they_should_and_leave_no_trace(scope, tmp_path):
    workload = open_workload(tiny(scope=scope))
    eager = EagerBackend(workload, 1, tmp_path, None)
    before, plain = traces(workload.denoiser), workload.run().numpy()
    out = {name: eager.output(Arm(name, config=config(0.5))) for name in ("tome", "built-in", "limit")}
    out["both"] = eager.output(Arm("both", config=config(0.5), attention="slicing"))
    sliced = Arm("memory-efficient", attention="slicing")
    np.testing.assert_allclose(eager.output(sliced), plain, atol=1e-5)
    assert eager.peak_memory(sliced) < eager.peak_memory(Arm("plain")) and eager.seconds(sliced) > 0
    for name, values in out.items():
        assert np.abs(values - plain).max() > 1e-3, name
    np.testing.assert_allclose(out["both"], out["tome"], atol=1e-5)
    np.testing.assert_allclose(out["built-in"], out["tome"], atol=1e-5)
    assert np.abs(out["limit"] - out["tome"]).max() > 1e-3
    assert [type(part) for part in traces(workload.denoiser)] == [type(part) for part in before]
    np.testing.assert_array_equal(workload.run().numpy(), plain)


def test_memory_limit_is_that_of_the_case(tmp_path):
    eager = EagerBackend(open_workload(tiny(size=512, batch=8, memory_limit_gb=0.05)), 1, tmp_path, None)
    with pytest.raises(MemoryError):
        eager.output(Arm("plain"))


def test_xformers_saves_the_memory_of_a_gpu(tmp_path):
    case = tiny()
    with patch("paddle.get_device", return_value="gpu:0"):
        efficient, both = make_arms(
            case, ["memory-efficient", "both"], ["eager"], make_configs([0.5], [None], [TOMESD]), None
        )
    assert efficient.attention == both.attention == "xformers"
    workload, attend = open_workload(case), XFormersAttnProcessor.__call__
    eager = EagerBackend(workload, 1, tmp_path, None)
    with (
        cuda_attention.available(),
        patch.object(XFormersAttnProcessor, "__call__", autospec=True, side_effect=attend) as processor,
    ):
        merged, fused = eager.output(both), eager.output(efficient)
    assert processor.called
    np.testing.assert_allclose(fused, workload.run().numpy(), atol=1e-5)
    np.testing.assert_allclose(merged, eager.output(Arm("tome", config=config(0.5))), atol=1e-5)


def test_limit_has_the_macs_of_merging_without_matching():
    workload, merging = open_workload(tiny()), config(0.5)
    matching = 192 * 64 * 32  # src × dst × channels, in each of three blocks, for two images
    assert workload.macs(merging) - workload.macs(merging, matching=False) == 2 * 3 * matching
    assert workload.macs(None) > workload.macs(merging)


@pytest.mark.parametrize(
    "settings", [{}, {"window": 8, "proportional": True}, {"merge_attn": "kv", "match": "grid", "blend": 0.0}]
)
def test_other_methods_compute_the_same_in_a_predictor_and_leave_no_trace(settings, tmp_path):
    workload, merging = open_workload(tiny()), config(0.75, **settings)
    eager, predictor = (kind(workload, 1, tmp_path, None) for kind in (EagerBackend, PredictorBackend))
    plain = workload.run().numpy()
    expected = eager.output(Arm("tome", config=merging))
    assert np.abs(expected - plain).max() > 1e-3
    np.testing.assert_allclose(predictor.output(Arm("tome", "predictor", merging)), expected, atol=1e-5)
    np.testing.assert_array_equal(workload.run().numpy(), plain)


def test_arms_in_openvino_compute_the_same_and_share_weights(tmp_path):
    workload, arms = open_workload(tiny()), [Arm("plain", "openvino"), Arm("tome", "openvino", config(0.5))]
    eager, openvino = (kind(workload, 1, tmp_path, None) for kind in (EagerBackend, OpenVinoBackend))
    with closing(openvino):
        for arm in arms:
            expected = eager.output(Arm(arm.arm, config=arm.config))
            np.testing.assert_allclose(openvino.output(arm), expected, atol=1e-5 * np.abs(expected).max())
            assert openvino.seconds(arm) > 0 and openvino.peak_memory(arm) is None
    assert {path.suffix for path in tmp_path.iterdir()} == {".onnx", ".weights"}
    assert len(list(tmp_path.glob("*.onnx"))) == 2 and len(list(tmp_path.glob("*.weights"))) == 1


@pytest.mark.parametrize("ratio", [0.5, 0.7])
@paddle.no_grad()
def test_free_merge_cuts_as_many_tokens_as_merging_and_comes_off(ratio):
    unet = make_unet()
    unet.set_attn_processor(Recorder())
    plain, lengths = run(unet), []
    for attach_to, latent in ((attach, None), (attach_free_merge, Grid(16, 16))):
        attach_to(unet, ToMeConfig(ratio=ratio), latent)
        recorder = Recorder()
        unet.set_attn_processor(recorder)
        assert np.abs(run(unet) - plain).max() > 1e-3
        lengths.append(recorder.lengths)
    assert lengths[0] == lengths[1] and (256 - int(256 * ratio), None) in lengths[0]
    detach(unet)
    np.testing.assert_array_equal(run(unet), plain)


def test_only_linear_weights_are_transposed_for_pytorch():
    unet = make_unet()
    weights, state = torch_weights(unet), unet.state_dict()
    assert weights.keys() == state.keys()
    name = "down_blocks.0.attentions.0.transformer_blocks.0.ff.net.0.proj"
    assert weights[f"{name}.weight"].shape == (256, 32) == tuple(state[f"{name}.weight"].shape[::-1])
    assert weights[f"{name}.weight"].flags.c_contiguous
    np.testing.assert_array_equal(weights["conv_in.weight"], state["conv_in.weight"].numpy())


@pytest.mark.skipif(find_spec("torch") is not None, reason="this interpreter has torch")
def test_pytorch_process_reports_its_error(tmp_path):
    with pytest.raises(ToMeError, match="PyTorch's process failed at 'load': ModuleNotFoundError"):
        TorchProcess(sys.executable, tmp_path, make_unet(), 1)
    assert not list(tmp_path.iterdir())


def interpreter(folder, script):
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return str(python)


def test_pytorch_process_that_ends_is_an_error(tmp_path):
    with pytest.raises(ToMeError, match="PyTorch's process ended with status 3: no torch today"):
        TorchProcess(interpreter(tmp_path, "echo no torch today >&2; exit 3"), tmp_path, make_unet(), 1)


def test_versions_of_pytorch_are_read_from_its_interpreter(tmp_path):
    versions = '{"torch": "9.9", "diffusers": "8.8", "tomesd": "7.7"}'
    python = interpreter(tmp_path, f"echo '{versions}'")
    assert torch_versions(python) == {"torch": "9.9", "diffusers": "8.8", "tomesd": "7.7"}
    with pytest.raises(ToMeConfigError, match=r"--torch-python \S+ cannot be used: no such package"):
        torch_versions(interpreter(tmp_path, "echo no such package >&2; exit 1"))
    with pytest.raises(ToMeConfigError, match=r"cannot be used: .*No such file"):
        torch_versions(str(tmp_path / "nothing"))


@pytest.mark.skipif(TORCH_PYTHON is None, reason="TOME_TORCH_PYTHON names no interpreter with torch and tomesd")
@pytest.mark.parametrize(("kind", "smallest", "largest"), [(PyTorchBackend, 0, 1e-5), (PyTorchBf16Backend, 1e-3, 0.1)])
def test_pytorch_computes_what_eager_does(tmp_path, kind, smallest, largest):
    workload = open_workload(tiny())
    eager = EagerBackend(workload, 1, tmp_path, None)
    pytorch = kind(workload, 1, tmp_path, TORCH_PYTHON)
    for name, ratio in (("plain", 0.0), ("tome", 0.5), ("plain", 0.0)):
        expected, arm = eager.output(Arm(name, config=config(ratio))), Arm(name, "PyTorch", config(ratio))
        assert smallest <= np.abs(pytorch.output(arm) - expected).max() / np.abs(expected).max() <= largest
        assert pytorch.seconds(arm) > 0 and pytorch.peak_memory(arm) is None
    pytorch.close()
