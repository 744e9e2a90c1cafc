"""Models whose forward is a program: of `paddle.incubate.jit.inference`, or of `paddle.jit.to_static`."""

import numpy as np
import paddle
import pytest
from conftest import inputs, run
from zoo.parts import ONE_LEVEL
from zoo.parts import unet as unet_of_zoo

from ppdiffusers_tome import ToMeConfigError


def make_unet():
    paddle.seed(0)
    unet = unet_of_zoo(**{"cross_attention_dim": 24, **ONE_LEVEL})
    unet.eval()
    return unet


@paddle.no_grad()
def output(unet):
    arguments = inputs()
    out = unet(arguments["sample"], arguments["timestep"], arguments["encoder_hidden_states"], return_dict=False)
    return (out if paddle.is_tensor(out) else out[0]).numpy()


def with_inference(unet, folder):
    jit = pytest.importorskip("paddle.incubate.jit", reason="of Paddle 3")
    # Without it the process crashes: Paddle's issue 77340.
    return jit.inference(unet, save_model_dir=str(folder), delete_pass_lists=["onednn_placement_pass"])


def with_to_static(unet, folder):
    unet = paddle.jit.to_static(unet, full_graph=True)
    output(unet)
    return unet


COMPILERS = pytest.mark.parametrize("compile_", [with_inference, with_to_static])
pytestmark = pytest.mark.filterwarnings("ignore")  # of Paddle, for each argument that is None


@COMPILERS
def test_merge_first_and_compile_then(compile_, tmp_path):
    """On Paddle 3.3.1's CPU the outputs of `inference` differ from eager ones by up to 2 %, also without merging."""
    unet = make_unet()
    plain, merged = output(unet), output(unet.apply_tome())
    compiled = output(compile_(unet, tmp_path))
    limit = 0.03 * np.abs(merged).max()
    assert np.abs(compiled - merged).max() < limit < np.abs(compiled - plain).max()


@COMPILERS
def test_merging_of_a_compiled_model_cannot_change(compile_, tmp_path):
    unet = compile_(make_unet(), tmp_path / "plain")
    before = set(unet.__dict__)
    unet.remove_tome()  # which is off
    with pytest.raises(ToMeConfigError, match=r"paddle\.\S+\(\).*del UNet\S+\.forward"):
        unet.apply_tome()
    with pytest.raises(ToMeConfigError, match="runs a program"), unet.tome(0.25):
        pass
    assert set(unet.__dict__) == before and not unet.tome_summary(16, 16).blocks

    del unet.forward
    plain = run(unet)
    compile_(unet.apply_tome(), tmp_path / "merged")
    for change in (unet.remove_tome, unet.apply_tome, lambda: unet.apply_tome(0.25)):
        with pytest.raises(ToMeConfigError, match="merge first"):
            change()
    assert unet.tome_summary(16, 16).blocks
    del unet.forward
    np.testing.assert_array_equal(run(unet.remove_tome()), plain)
