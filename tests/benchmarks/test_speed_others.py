"""What `bench` compares this package with: its arms and backends compute what they should, and leave no trace."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import bench
import numpy as np
import paddle
import pytest
from conftest import Recorder, make_unet, run, traces
from lab.arm import Arm
from lab.free_merge import attach_free_merge
from lab.speed.architectures import ARCHITECTURES
from lab.speed.cases import Measurement, make_case, make_configs, read_cases
from lab.speed.catalog import make_arms
from lab.speed.parity import check_parity, reference_of
from lab.speed.workloads import Workload
from lab.torch_unet import TorchProcess, torch_weights
from speed_results import config, open_backend, tiny
from top_block import build_transformer

from ppdiffusers_tome import ToMeConfig, ToMeError
from ppdiffusers_tome.attach.attach import attach, detach
from ppdiffusers_tome.commands.merge_options import parse_settings
from ppdiffusers_tome.families.models import find_blocks
from ppdiffusers_tome.grid import Grid

SCRIPT = Path(bench.__file__)
TORCH_PYTHON = os.environ.get("TOME_TORCH_PYTHON") or (sys.executable if find_spec("tomesd") else None)


def test_arms_have_their_own_configs():
    texts = ("window=8", "proportional,window=none", "method=todo,ratio=0.75", "method=kv,ratio=0.75")
    symmetric = {"method": "symmetric", "window": None}
    mergings = [{"method": "tomesd"}, *({**symmetric, **parse_settings(text)} for text in texts)]
    mergings += [{"method": "default", "window": window} for window in (4, 8)]
    names, configs = ["plain", "tome", "built-in", "limit"], make_configs([0.5], mergings)
    arms = make_arms(tiny(), names, ["eager"], configs)
    assert [(one.name, one.kept) for one in arms if one.arm.by == "limit"] == [  # one for each number of tokens
        ("tomesd 0.5 (limit), eager", 128),
        ("todo 0.75 (limit), eager", 64),
        ("default 0.5 (limit), eager", 204),
    ]
    built_in = [measured.name for measured in arms if measured.arm.by == "built-in"]
    assert built_in == ["tomesd 0.5 (built-in), eager"]  # it does not allow 0.75
    configs = make_configs([0.75], [{"method": method} for method in ("tomesd", "symmetric", "kv", "todo")])
    case = make_case("tiny", size=72)  # 9×9 tokens: pairs may remove 60, todo removes all but 16
    arms = make_arms(case, ["limit"], ["eager"], configs)
    assert [(arm.name, arm.kept) for arm in arms] == [
        ("tomesd 0.75 (limit), eager", 21),
        ("kv 0.75 (limit), eager", 21),
        ("todo 0.75 (limit), eager", 16),
    ]


def test_arms_compute_what_they_should_and_leave_no_trace(tmp_path):
    workload = Workload(tiny())
    eager = open_backend("eager", workload, tmp_path)
    before, plain = traces(workload.denoiser), workload.run().numpy()
    out = {by: eager.output(Arm(config(0.5), by)) for by in ("ours", "built-in", "limit")}
    np.testing.assert_allclose(out["built-in"], out["ours"], atol=1e-5)
    assert np.abs(out["limit"] - out["ours"]).max() > 1e-3 and np.abs(out["limit"] - plain).max() > 1e-3
    assert [type(part) for part in traces(workload.denoiser)] == [type(part) for part in before]
    np.testing.assert_array_equal(workload.run().numpy(), plain)
    assert eager.peak_memory(Arm(config(0.5))) > 0
    built_in = Measurement(Arm(config(0.5), "built-in"))
    check_parity([built_in], workload.set_inputs, eager.output)
    assert built_in.parity["against"] == "tomesd 0.5, eager" and built_in.parity["difference"] < 1e-5
    assert reference_of(Arm(config(0.5), "limit", backend="predictor")) == Arm(config(0.5), "limit")


@pytest.mark.parametrize(
    ("ratio", "method", "kept"),
    [
        (0.5, "default", (204, 81)),
        (0.7, "default", (93, 64)),
        (0.5, "symmetric", (128, 128)),
        (0.7, "tomesd", (77, 77)),
        (0.5, "kv", (256, 128)),
        (0.75, "todo", (256, 64)),
    ],
)
@paddle.no_grad()
def test_free_merge_cuts_as_many_tokens_as_merging_and_comes_off(ratio, method, kept):
    unet = make_unet()
    unet.set_attn_processor(Recorder())
    plain, lengths = run(unet), []
    for attach_to, latent in ((attach, None), (attach_free_merge, Grid(16, 16))):
        attach_to(unet, ToMeConfig(ratio, method), latent)
        recorder = Recorder()
        unet.set_attn_processor(recorder)
        assert np.abs(run(unet) - plain).max() > 1e-3
        lengths.append((recorder.lengths, recorder.of_self))
    assert lengths[0] == lengths[1] and kept in lengths[0][1]
    detach(unet)
    np.testing.assert_array_equal(run(unet), plain)


def test_command_measures_the_arms_in_its_worker(tmp_path):
    out = tmp_path / "speed.json"
    options = ["--architecture", "tiny", "--size", "128", "--rounds", "1", "--threads", "1", "--output", str(out)]
    options += ["--arms", "plain", "tome", "built-in", "limit", "--merging", "proportional=false,window=none"]
    subprocess.run([sys.executable, SCRIPT, *options], check=True, capture_output=True)
    result = json.loads(out.read_text())
    (case,) = read_cases(result, out)
    assert [arm.status for arm in case.arms] == ["measured"] * 4
    assert result["command"] == f"python benchmarks/bench.py {' '.join(options)}"


@pytest.mark.parametrize(("name", "channels", "heads"), [("sd15", 320, 8), ("sdxl", 640, 10)])
def test_transformer_is_the_first_of_the_unet_with_one_block(name, channels, heads):
    architecture = ARCHITECTURES[name]
    with paddle.LazyGuard():
        unet, transformer = architecture.build(), build_transformer(architecture)
    first = next(block for block in find_blocks(unet) if block.level == architecture.first_level)
    (alone,) = transformer.transformer_blocks
    assert [list(p.shape) for p in alone.parameters()] == [list(p.shape) for p in first.block.parameters()]
    assert alone.attn1.heads == first.block.attn1.heads == heads and alone.norm1.weight.shape[0] == channels
    for around in ("norm", "proj_in", "proj_out"):
        layers = (getattr(layer, around) for layer in (transformer, first.transformer))
        own, of_unet = ([list(p.shape) for p in layer.parameters()] for layer in layers)
        assert own == of_unet


# PyTorch


def test_only_linear_weights_are_transposed_for_pytorch():
    unet = make_unet()
    weights, state = torch_weights(unet), unet.state_dict()
    assert weights.keys() == state.keys()
    name = "down_blocks.0.attentions.0.transformer_blocks.0.ff.net.0.proj"
    assert weights[f"{name}.weight"].shape == (256, 32) == tuple(state[f"{name}.weight"].shape[::-1])
    assert weights[f"{name}.weight"].flags.c_contiguous
    np.testing.assert_array_equal(weights["conv_in.weight"], state["conv_in.weight"].numpy())


def interpreter(folder, script):
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return str(python)


def test_pytorch_process_that_ends_is_an_error(tmp_path):
    with pytest.raises(ToMeError, match="PyTorch's process ended with status 3 at 'load'"):
        TorchProcess(interpreter(tmp_path, "exit 3"), tmp_path, make_unet(), threads=1)


# In place of the packages, for an interpreter without them: a pass adds 1, or 2 where tomesd merges.
STAND_INS = {
    "torch": """
from contextlib import nullcontext as inference_mode
from_numpy, set_num_threads = lambda x: x, lambda n: None
""",
    "diffusers": """
from types import SimpleNamespace
import numpy as np
class Output(np.ndarray):
    def numpy(self): return np.asarray(self)
class UNet2DConditionModel:
    def __init__(self, sample_size=None): self.added = 1
    def eval(self): return self
    def modules(self): return []
    def load_state_dict(self, weights, strict): assert "conv_in.weight" in weights and strict
    def __call__(self, sample, timestep, text, added_cond_kwargs):
        return SimpleNamespace(sample=(sample + self.added).view(Output))
""",
    "tomesd": """
def remove_patch(unet): unet.added = 1
def apply_patch(unet, ratio): assert ratio == 0.5; unet.added = 2
""",
}


def test_pytorch_process_exchanges_weights_inputs_and_outputs(tmp_path, monkeypatch):
    for name, source in STAND_INS.items():
        (tmp_path / f"{name}.py").write_text(source)
        (tmp_path / f"{name}-1.dist-info").mkdir()
        (tmp_path / f"{name}-1.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with TorchProcess(sys.executable, tmp_path, make_unet(), threads=1) as process:
        assert process.versions == {"torch": "1", "diffusers": "1", "tomesd": "1"}
        for seed in (0, 1):
            inputs = inputs_of(seed)
            process.set_inputs(inputs)
            for merging, added in ((None, 1), ({"ratio": 0.5}, 2)):
                np.testing.assert_array_equal(process.output(merging), inputs["sample"] + added)


def inputs_of(seed):
    """Of `make_unet`."""
    workload = Workload(tiny())
    workload.set_inputs(seed)
    return {name: value.numpy() for name, value in workload.inputs.items()}


@pytest.mark.skipif(TORCH_PYTHON is None, reason="TOME_TORCH_PYTHON names no interpreter with torch and tomesd")
def test_pytorch_computes_what_eager_does(tmp_path):
    workload = Workload(tiny())
    eager = open_backend("eager", workload, tmp_path)
    inputs = {name: value.numpy() for name, value in workload.inputs.items()}
    with TorchProcess(TORCH_PYTHON, tmp_path, workload.denoiser, threads=1) as process:
        process.set_inputs(inputs)
        for ratio in (0.0, 0.5, 0.0):
            expected = eager.output(Arm(config(ratio)))
            merging = {"ratio": ratio, "use_rand": False} if ratio else None
            assert np.abs(process.output(merging) - expected).max() / np.abs(expected).max() <= 1e-5
