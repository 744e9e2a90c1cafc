"""The apply_tome that ppdiffusers ships, beside ours: it computes the same, and leaves no trace."""

import numpy as np
import paddle
import pytest
from conftest import traces
from lab.arm import Arm
from lab.speed.architectures import ARCHITECTURES
from lab.speed.cases import Measurement, make_configs
from lab.speed.catalog import make_arms
from lab.speed.parity import check_parity
from lab.speed.workloads import Workload
from speed_results import config, open_backend, tiny
from top_block import build_transformer

from ppdiffusers_tome.families.blocks import find_blocks


def test_the_built_in_merges_as_tomesd_with_fixed_dst_at_the_ratios_that_it_allows():
    configs = make_configs([0.5, 0.75], [{"method": "tomesd"}, {"method": "interlace"}])
    arms = make_arms(["built-in"], ["eager", "onnxruntime"], configs)
    assert [measured.name for measured in arms] == ["tomesd 0.5 (built-in), eager"]
    assert not arms[0].arm.config.use_rand


def test_arms_compute_what_they_should_and_leave_no_trace(tmp_path):
    workload = Workload(tiny())
    eager = open_backend("eager", workload, tmp_path)
    before, plain = traces(workload.denoiser), workload.run().numpy()
    out = {by: eager.output(Arm(config(0.5), by)) for by in ("ours", "built-in")}
    np.testing.assert_allclose(out["built-in"], out["ours"], atol=1e-5)
    assert np.abs(out["built-in"] - plain).max() > 1e-3
    assert [type(part) for part in traces(workload.denoiser)] == [type(part) for part in before]
    np.testing.assert_array_equal(workload.run().numpy(), plain)
    assert eager.peak_memory(Arm(config(0.5))) > 0
    built_in = Measurement(Arm(config(0.5), "built-in"))
    check_parity([built_in], workload.set_inputs, eager.output)
    assert built_in.parity["against"] == "tomesd 0.5, eager" and built_in.parity["difference"] < 1e-5


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
