"""`bench inference`: what is timed is what it says, and what cannot be measured is said."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import paddle
import pytest
from conftest import Recorder, make_unet, run

from ppdiffusers_tome import ToMeConfig, ToMeConfigError, ToMeError
from ppdiffusers_tome.cli import main
from ppdiffusers_tome.evaluation import inference
from ppdiffusers_tome.evaluation.free_merge import attach_free_merge
from ppdiffusers_tome.evaluation.inference_arms import Arm
from ppdiffusers_tome.evaluation.inference_cases import Measurement, cases, draw
from ppdiffusers_tome.evaluation.inference_report import format_inference, summarize
from ppdiffusers_tome.evaluation.torch_arm import TorchArm, torch_weights, why_not
from ppdiffusers_tome.patch import attach, detach
from ppdiffusers_tome.positions import Grid

TINY = cases(Path("nowhere"))["tiny"]
NAMES = [f"{backend} {kind}" for backend in ("eager", "predictor") for kind in ("plain", "ToMe", "free merge")]
# An interpreter with torch, diffusers and tomesd, for the comparison with the real thing.
TORCH_PYTHON = os.environ.get("TOME_TORCH_PYTHON") or (sys.executable if find_spec("tomesd") else None)
WITHOUT_TORCH = pytest.mark.skipif(find_spec("torch") is not None, reason="this interpreter has torch")


@pytest.fixture
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else the command starts itself again


@WITHOUT_TORCH
@pytest.mark.filterwarnings(r"ignore:(.|\n)*(Attribute [ns] is|ast\.\w+ is) deprecated:DeprecationWarning")
@pytest.mark.filterwarnings(r"ignore:(.|\n)*Tensor do not have 'place' interface:UserWarning")
def test_quick_run_prints_a_table_and_writes_what_was_measured(one_thread, tmp_path, capsys):
    out = tmp_path / "new" / "inference.json"
    assert main(["bench", "inference", "--quick", "--threads", "1", "--json", str(out)]) == 0
    printed, result = capsys.readouterr().out, json.loads(out.read_text())
    assert "256 → 128 tokens" in printed and all(name in printed for name in NAMES)
    assert f"PyTorch: not measured, {sys.executable}: ModuleNotFoundError" in printed
    assert result["command"].startswith("python -m ppdiffusers_tome bench inference --quick")
    assert result["commit"] and result["threads"] == 1 and not result["use_rand"]
    (case,) = result["cases"]
    assert sorted(case["seconds"]) == sorted(NAMES)
    assert all(len(each) == 3 and min(each) > 0 for each in case["seconds"].values())
    assert set(case["parity"]) == {name for name in NAMES if name.startswith("predictor")}
    assert max(case["parity"].values()) < 1e-4 and case["torch"] is None
    assert result["peak_memory_gb"]["this process"] > 0.1


def fake_arms(predictor_error=0.0):
    outputs = {"plain": np.array([1.0, -2.0]), "ToMe": np.array([1.0, -1.0]), "free merge": np.array([0.5, 2.0])}
    arms = [Arm(f"eager {kind}", lambda: 1.0, lambda out=out: out) for kind, out in outputs.items()]
    for kind, out in outputs.items():
        arms.append(Arm(f"predictor {kind}", lambda: 0.5, lambda out=out: out + predictor_error))
    return arms


def test_arms_that_compute_something_else_are_not_timed():
    taken = []
    with pytest.raises(ToMeError, match=r"tiny: not timing arms .* on 5 draws .*predictor plain by 5\.0e-04"):
        inference._agree(TINY, fake_arms(predictor_error=1e-3), taken.append)
    assert len(taken) == inference.TRIES


def test_nan_is_no_parity():
    with pytest.raises(ToMeError, match="predictor ToMe by nan"):
        inference._agree(TINY, fake_arms(predictor_error=np.nan), lambda inputs: None)


def test_arms_that_do_not_merge_are_not_timed():
    arms = [arm._replace(output=lambda: np.ones(2)) for arm in fake_arms()]
    with pytest.raises(ToMeError, match="ToMe does not change the output"):
        inference._agree(TINY, arms, lambda inputs: None)


def test_arms_that_agree_are_timed_on_the_first_draw():
    given = []
    seed, parity = inference._agree(TINY, fake_arms(), given.append)
    assert seed == 0 and len(given) == 1 and set(parity.values()) == {0.0}
    np.testing.assert_array_equal(given[0]["sample"], draw(TINY, 0)["sample"])


def test_every_arm_has_every_round_and_none_is_always_first():
    order = []
    arms = [Arm(name, lambda name=name: order.append(name) or 0.25, lambda: None) for name in "abc"]
    seconds = inference._take_turns(arms, 6, 0.0, "test")
    assert seconds == {name: [0.25] * 6 for name in "abc"}
    assert len(order) == 3 * (6 + inference.WARM_UP) and len(set(order[::3])) > 1


def test_ratios_are_taken_within_rounds():
    # The machine is three times slower in the second round: ratios do not see it.
    speeds = {"eager plain": 8.0, "eager ToMe": 4.0, "eager free merge": 2.0}
    speeds |= {"predictor plain": 2.0, "predictor ToMe": 1.0, "predictor free merge": 0.8}
    speeds |= {"PyTorch plain": 3.0, "PyTorch ToMe": 1.5}
    found = summarize({name: [speed, 3 * speed] for name, speed in speeds.items()})
    assert found["milliseconds"]["eager ToMe"] == {"median": 8000.0, "lowest": 4000.0, "highest": 12000.0}
    assert found["speed-up"]["eager ToMe"] == {"median": 2.0, "quartile 1": 2.0, "quartile 3": 2.0}
    assert found["times the limit"]["predictor ToMe"]["median"] == pytest.approx(1.25)
    assert found["times faster than"]["eager plain"]["predictor ToMe"]["median"] == 8.0
    assert found["times faster than"]["PyTorch ToMe"]["predictor ToMe"]["median"] == 1.5
    about = {"case": TINY.describe(ToMeConfig()), "rounds": 2, **found}
    lines = format_inference({"cases": [about], "not_measured": {"PyTorch": "no such thing"}}).splitlines()
    assert "2.00× (2.00–2.00)" in lines[3] and "+100.0%" in lines[3]
    assert "is below eager's limit, 4.00×" in lines[-3] and "1.50× as fast as PyTorch" in lines[-2]
    assert lines[-1] == "PyTorch: not measured, no such thing"


@pytest.mark.parametrize("ratio", [0.5, 0.7])
@paddle.no_grad()
def test_free_merge_cuts_as_many_tokens_as_merging_and_comes_off(ratio):
    unet = make_unet()
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


def test_interpreters_that_are_of_no_use_are_told(one_thread, capsys, tmp_path):
    absent = str(tmp_path / "python")
    assert "cannot be run" in why_not(absent)
    assert main(["bench", "inference", "--quick", "--threads", "1", "--torch-python", absent]) == 2
    assert f"--torch-python {absent} is of no use" in capsys.readouterr().err


@WITHOUT_TORCH
def test_failing_worker_says_what_is_wrong(tmp_path):
    with pytest.raises(ToMeError, match="PyTorch's process failed at 'load': ModuleNotFoundError"):
        TorchArm(sys.executable, tmp_path, make_unet(), 1, {"ratio": 0.5})


def test_worker_that_ends_is_an_error(tmp_path):
    stub = tmp_path / "python"
    stub.write_text("#!/bin/sh\nexit 3\n")
    stub.chmod(0o755)
    with pytest.raises(ToMeError, match="PyTorch's process ended at 'load', with status 3"):
        TorchArm(str(stub), tmp_path, make_unet(), 1, {"ratio": 0.5})


@pytest.mark.skipif(TORCH_PYTHON is None, reason="TOME_TORCH_PYTHON names no interpreter with torch and tomesd")
@paddle.no_grad()
def test_pytorch_computes_what_eager_does(tmp_path):
    paddle.seed(0)
    unet = TINY.build()
    unet.eval()
    given = draw(TINY, 0)
    wanted = {}
    for name, ratio in (("plain", 0.0), ("tomesd", 0.5)):
        if ratio:
            attach(unet, ToMeConfig(ratio=ratio, use_rand=False), None)
        tensors = (paddle.to_tensor(given[key]) for key in ("sample", "timestep", "text"))
        wanted[name] = unet(*tensors, return_dict=False)[0].numpy()
    detach(unet)
    with TorchArm(TORCH_PYTHON, tmp_path, unet, 1, {"ratio": 0.5, "use_rand": False}) as arm:
        arm.take(given)
        for name, out in wanted.items():
            np.testing.assert_allclose(arm.output(name), out, atol=1e-5 * np.abs(out).max())
            assert arm.seconds(name) > 0
    assert arm.about["blocks"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cases", "sd99"], "--cases sd99 is not allowed: it must be some of tiny, emoji-32"),
        (["--rounds", "0"], "rounds=0 is not allowed"),
        (["--threads", "0"], "threads=0 is not allowed"),
        (["--ratio", "0"], "ratio=0 merges nothing"),
        (["--cases", "emoji-32", "--model", "nowhere"], "model='nowhere' has no folder unet"),
    ],
)
def test_bad_option_is_told_in_one_line(one_thread, options, message, capsys):
    assert main(["bench", "inference", "--threads", "1", *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_measurement_is_checked():
    with pytest.raises(ToMeConfigError, match=r"ratio=1\.5"):
        Measurement(ratio=1.5)
