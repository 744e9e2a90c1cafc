"""Arms: which there are, and that each computes what it should and leaves no trace."""

from contextlib import closing
from dataclasses import replace
from unittest.mock import patch

import cuda_attention
import numpy as np
import pytest
from conftest import traces
from lab.arm import Arm
from lab.speed import backends
from lab.speed.cases import make_configs
from lab.speed.catalog import make_arms
from lab.speed.workloads import Workload
from ppdiffusers.models.attention_processor import XFormersAttnProcessor
from speed_results import config, open_backend, tiny

from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.commands.merge_options import parse_settings


def test_arms_are_backends_by_ratios_by_levels():
    configs = make_configs([0.5, 0.75])
    arms = make_arms(["plain", "memory-efficient", "tome", "both"], ["eager", "predictor"], configs)
    names = [arm.name for arm in arms]
    assert names[:4] == [
        *("plain, eager", "memory-efficient, eager"),
        *(f"interlace {ratio}, eager" for ratio in (0.5, 0.75)),
    ]
    assert len({*names}) == len(names)
    assert [one.arm.ratio for one in arms if one.arm.backend == "predictor"] == [0, 0.5, 0.75]
    assert {arm.status for arm in arms} == {"planned"}


def test_merging_arms_take_every_ratio_or_their_own():
    texts = ("method=interlace", "method=tomesd", "method=tomesd,sx=4", "method=todo,ratio=0.75")
    configs = make_configs([0.5, 0.25, 0.5], [parse_settings(text) for text in texts])
    arms = make_arms(["tome"], ["eager"], configs)
    assert [arm.name.removesuffix(", eager") for arm in arms] == [
        "interlace 0.5",
        "tomesd 0.5",
        "tomesd 0.5, sx=4",
        "todo 0.75",
        "interlace 0.25",
        "tomesd 0.25",
        "tomesd 0.25, sx=4",
    ]


def test_eager_arms_compute_what_they_should_and_leave_no_trace(tmp_path):
    workload = Workload(tiny())
    eager = open_backend("eager", workload, tmp_path)
    before, plain = traces(workload.denoiser), workload.run().numpy()
    arms = {"tome": Arm(config(0.5)), "both": Arm(config(0.5), attention="slicing")}
    out = {name: eager.output(arm) for name, arm in arms.items()}
    sliced = Arm(attention="slicing")
    np.testing.assert_allclose(eager.output(sliced), plain, atol=1e-5)
    assert eager.peak_memory(sliced) < eager.peak_memory(Arm()) and eager.seconds(sliced) > 0
    for name, values in out.items():
        assert np.abs(values - plain).max() > 1e-3, name
    np.testing.assert_allclose(out["both"], out["tome"], atol=1e-5)
    assert [type(part) for part in traces(workload.denoiser)] == [type(part) for part in before]
    np.testing.assert_array_equal(workload.run().numpy(), plain)


def test_xformers_saves_the_memory_of_a_gpu(tmp_path):
    case = tiny()
    with patch("paddle.get_device", return_value="gpu:0"):
        configs = make_configs([0.5])
        arms = make_arms(["memory-efficient", "both"], ["eager"], configs)
    efficient, both = (measured.arm for measured in arms)
    assert efficient.attention == both.attention == "xformers"
    workload, attend = Workload(case), XFormersAttnProcessor.__call__
    eager = open_backend("eager", workload, tmp_path)
    with (
        cuda_attention.available(),
        patch.object(XFormersAttnProcessor, "__call__", autospec=True, side_effect=attend) as processor,
    ):
        merged, fused = eager.output(both), eager.output(efficient)
    assert processor.called
    np.testing.assert_allclose(fused, workload.run().numpy(), atol=1e-5)
    np.testing.assert_allclose(merged, eager.output(Arm(configs[0])), atol=1e-5)


def test_a_predictor_computes_the_same_leaves_no_trace_and_uses_its_program_again(tmp_path):
    workload, merging = Workload(tiny()), ToMeConfig(0.75)
    eager, predictor = (open_backend(name, workload, tmp_path) for name in ("eager", "predictor"))
    plain = workload.run().numpy()
    expected = eager.output(Arm(merging))
    assert np.abs(expected - plain).max() > 1e-3
    actual = predictor.output(Arm(merging, backend="predictor"))
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    np.testing.assert_array_equal(workload.run().numpy(), plain)
    again = open_backend("predictor", workload, tmp_path)
    with patch.object(backends, "TracedProgram", side_effect=AssertionError("exported")):
        np.testing.assert_array_equal(again.output(Arm(merging, backend="predictor")), actual)
        with pytest.raises(AssertionError, match="exported"):
            again.output(Arm(ToMeConfig(0.5, "todo"), backend="predictor"))


def test_arms_as_onnx_compute_the_same_and_share_weights(tmp_path):
    workload, arms = Workload(tiny()), [Arm(backend="openvino"), Arm(config(0.5), backend="openvino")]
    eager, openvino, onnx = (open_backend(name, workload, tmp_path) for name in ("eager", "openvino", "onnxruntime"))
    with closing(openvino), closing(onnx):
        for arm in arms:
            expected = eager.output(replace(arm, backend="eager"))
            np.testing.assert_allclose(openvino.output(arm), expected, atol=1e-5 * np.abs(expected).max())
            assert openvino.seconds(arm) > 0 and openvino.peak_memory(arm) is None
            with patch.object(backends, "TracedProgram", side_effect=AssertionError("exported")):
                np.testing.assert_allclose(onnx.output(arm), expected, atol=1e-5 * np.abs(expected).max())
    assert {path.suffix for path in tmp_path.iterdir() if path.is_file()} == {".json", ".onnx", ".weights"}
    (weights,) = tmp_path.glob("*.weights")
    assert len(list(tmp_path.glob("*.onnx"))) == 2 and weights.stat().st_size < 1.1 * workload.weights
