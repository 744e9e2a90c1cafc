"""Exports of interlace: they keep other tokens in each turn, as eager does, and a block moves them by one gather."""

import numpy as np
import paddle
import pytest
from conftest import tiny_pipeline
from exporting import export_linked
from program_reader import read_program

from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.attach import outer
from ppdiffusers_tome.attach.attach import attach
from ppdiffusers_tome.cli import main
from ppdiffusers_tome.export import export as export_module
from ppdiffusers_tome.families.pipelines import vae_factor
from ppdiffusers_tome.inference import OnnxRuntime, OpenVinoRuntime, PaddleRuntime, read_manifest
from ppdiffusers_tome.methods.steps import PLAIN_STEPS
from ppdiffusers_tome.methods.turns import turn_table
from ppdiffusers_tome.run.folder import ExportedFolder
from ppdiffusers_tome.run.formats import RUNTIME_FORMATS
from ppdiffusers_tome.summary import tome_summary

RUNTIMES = {
    "paddle": PaddleRuntime(threads=1, onednn=False),
    "onnxruntime": OnnxRuntime(threads=1),
    "openvino": OpenVinoRuntime(threads=1),
}
TIMESTEPS = (999, 501, 481, 51, 1)  # the first and the fourth keep all tokens
SIDE = 16  # of the latents, which are the tokens
CHANNELS = 32  # of tiny_pipeline's one level
CONFIG = ToMeConfig(0.75)


def merged_unet(config=CONFIG):
    unet = tiny_pipeline().unet
    unet.eval()
    attach(unet, config, None)
    return unet


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An export in both formats: as Paddle's the program is traced, as ONNX it is the plain one with new nodes."""
    folder = tmp_path_factory.mktemp("interlace") / "export"
    pipe = tiny_pipeline()
    size = SIDE * vae_factor(pipe)
    export_linked(pipe, folder, CONFIG.effective_ratio, [(size, size)], format="both")
    return folder


def inputs_at(timestep):
    random = np.random.RandomState(timestep)
    return {
        "sample": paddle.to_tensor(random.standard_normal([2, 4, SIDE, SIDE]).astype("float32")),
        "timestep": paddle.to_tensor([float(timestep)]),
        "encoder_hidden_states": paddle.to_tensor(random.standard_normal([2, 7, 32]).astype("float32")),
    }


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_program_equals_eager_in_every_turn(runtime, folder, monkeypatch):
    (file,) = read_manifest(folder).programs_of("unet")
    program = RUNTIMES[runtime].load(ExportedFolder(folder), file.files[RUNTIME_FORMATS[runtime]])
    unet, plain = merged_unet(), merged_unet().remove_tome()
    assert len({int(turn_table()[timestep]) for timestep in TIMESTEPS}) == 4
    for timestep in TIMESTEPS:
        inputs = inputs_at(timestep)
        with paddle.no_grad():
            expected = unet(**inputs, return_dict=False)[0].numpy()
        (actual,) = program(**inputs)
        np.testing.assert_allclose(actual.numpy(), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
        with paddle.no_grad():
            of_plain = plain(**inputs, return_dict=False)[0].numpy()
        difference = np.abs(actual.numpy() - of_plain).max() / np.abs(of_plain).max()
        assert difference < 1e-5 if PLAIN_STEPS.count([timestep]) else difference > 1e-4
    monkeypatch.setattr(outer, "turn_at", lambda *_: paddle.zeros([1], "int64"))
    with paddle.no_grad():
        in_another_turn = unet(**inputs, return_dict=False)[0].numpy()
    assert np.abs(in_another_turn - expected).max() > 1e-4 * np.abs(expected).max(), "far more than the tolerance"


def test_a_block_moves_its_tokens_by_one_gather(exported_folder):
    """The keys and values of each block that merges, which at 0.5 is not the last one; the plain program has none."""
    manifest = read_manifest(exported_folder)
    summary = tome_summary(merged_unet(ToMeConfig(0.5)), SIDE, SIDE)
    merging = {block.path: block.kept_keys < block.grid.tokens for block in summary.blocks}
    (last,) = (path for path, merges in merging.items() if not merges)
    assert len(merging) > 2 and last == max(path for path in merging if path.startswith("up_blocks."))
    for file in manifest.programs_of("unet"):
        tokens = (-1, (file.size.height // manifest.vae_factor) * (file.size.width // manifest.vae_factor), CHANNELS)
        program = read_program(exported_folder / file.files["paddle"].program)
        moving = [op for op in program if op.inputs and op.inputs[0].shape == tokens and op.name in MOVES]
        assert len(moving) == (sum(merging.values()) if file.ratio else 0), file.name
        assert all(op.outputs[0].shape[1] < tokens[1] for op in moving)
        assert not {"scatter_nd_add", "argsort", "arg_max", "argmax"} & {op.name for op in program}


MOVES = ("gather", "gather_nd", "index_select", "take_along_axis", "index_sample")


@pytest.mark.parametrize(("options", "ratios"), [([], [0.75]), (["--ratio", "0.5", "0"], [0.5, 0])])
def test_the_command_without_a_method_exports_interlace(options, ratios, tiny, tmp_path, monkeypatch):
    """At 0.75, or at the ratios that are named."""
    requested = []
    monkeypatch.setattr(export_module, "write_export", lambda pipe, request: requested.append(request) or exit())
    tiny.save_pretrained(str(tmp_path / "model"))
    with pytest.raises(SystemExit):
        main(["export", "--model", str(tmp_path / "model"), "--output", str(tmp_path / "out"), *options])
    assert [merging.ratio for merging in requested[0].merging] == ratios
    expected = ToMeConfig(ratios[0], "interlace").settings()
    assert [config.settings() for config in requested[0].merging[0].configs] == 2 * [expected]
