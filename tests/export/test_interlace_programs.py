"""Exports of interlace: they keep other tokens in each turn, as eager does, and a block moves them by one gather."""

import numpy as np
import onnx
import paddle
import pytest
from conftest import tiny_pipeline
from program_reader import read_program

from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.attach import passes
from ppdiffusers_tome.attach.attach import attach
from ppdiffusers_tome.cli import main
from ppdiffusers_tome.export import export as export_module
from ppdiffusers_tome.export import programs, tracing
from ppdiffusers_tome.export.conversion import Converter
from ppdiffusers_tome.families.models import find_blocks
from ppdiffusers_tome.inference import OnnxRuntime, OpenVinoRuntime, PaddleRuntime, ProgramFile, Size, read_manifest
from ppdiffusers_tome.methods.steps import PLAIN_STEPS
from ppdiffusers_tome.methods.turns import turn_table
from ppdiffusers_tome.run.folder import ExportedFolder
from ppdiffusers_tome.run.manifest import PlannedProgram
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
    """A folder with the program of a UNet, in all formats."""
    folder = tmp_path_factory.mktemp("interlace")
    dims = {"latent_height": SIDE, "latent_width": SIDE, "tokens": 7}
    with Converter() as converter:
        planned = PlannedProgram("unet", size=Size(SIDE, SIDE), ratio=CONFIG.effective_ratio)
        tracing.save(programs.denoiser(merged_unet(), None), planned, folder, "unet", dims, 1, converter)
    return folder


def load(folder, name, runtime):
    """A program of the folder in a runtime."""
    of_paddle = next(path for path in (folder / name).iterdir() if path.suffix in (".json", ".pdmodel"))
    params, (of_onnx,) = of_paddle.with_suffix(".pdiparams"), (folder / name).glob("*.onnx")
    paths = {"program": of_paddle, "params": params, "onnx": of_onnx}
    file = ProgramFile(name, **{key: path.relative_to(folder).as_posix() for key, path in paths.items()})
    return RUNTIMES[runtime].load(ExportedFolder(folder), file)


def inputs_at(timestep):
    random = np.random.RandomState(timestep)
    return {
        "sample": paddle.to_tensor(random.standard_normal([2, 4, SIDE, SIDE]).astype("float32")),
        "timestep": paddle.to_tensor([float(timestep)]),
        "encoder_hidden_states": paddle.to_tensor(random.standard_normal([2, 7, 32]).astype("float32")),
    }


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_program_equals_eager_in_every_turn(runtime, folder, monkeypatch):
    program, unet, plain = load(folder, "unet", runtime), merged_unet(), merged_unet().remove_tome()
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
    monkeypatch.setattr(passes, "turn_at", lambda timestep, table: paddle.zeros([1], "int64"))
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
        program = read_program(exported_folder / file.program)
        moving = [op for op in program if op.inputs and op.inputs[0].shape == tokens and op.name in MOVES]
        assert len(moving) == (sum(merging.values()) if file.ratio else 0), file.name
        assert all(op.outputs[0].shape[1] < tokens[1] for op in moving)
        assert not {"scatter_nd_add", "argsort", "arg_max", "argmax"} & {op.name for op in program}


MOVES = ("gather", "gather_nd", "index_select", "take_along_axis", "index_sample")


def test_an_onnx_program_has_a_gather_of_tokens_and_three_of_a_row_in_each_block(folder):
    """Those of rows read the turn's indices, these or all, and their count; once in a pass one reads the turn."""
    (path,) = (folder / "unet").glob("*.onnx")
    merged = onnx.load(str(path), load_external_data=False).graph
    constants = {tensor.name for tensor in merged.initializer}
    constants |= {node.output[0] for node in merged.node if node.op_type == "Constant"}
    gathers = [node for node in merged.node if node.op_type.startswith("Gather")]
    of_tables = [node for node in gathers if node.input[0] in constants and node.input[1] not in constants]
    of_turn = [node for node in of_tables if any(node.output[0] in other.input for other in of_tables)]
    blocks = len(find_blocks(tiny_pipeline().unet))
    others = [node for node in gathers if node not in of_tables and node.input[1] not in constants]
    moving = [
        node for node in others if any(attribute.name == "axis" and attribute.i == 1 for attribute in node.attribute)
    ]
    assert (len(of_turn), len(of_tables), len(others), len(moving)) == (1, 1 + 2 * blocks, 2 * blocks, blocks)


@pytest.mark.parametrize(("options", "ratios"), [([], [0.75]), (["--ratio", "0.5", "0"], [0.5, 0])])
def test_the_command_without_a_method_exports_interlace(options, ratios, tiny, tmp_path, monkeypatch):
    """At 0.75, or at the ratios that are named."""
    requested = []
    monkeypatch.setattr(export_module, "write_export", lambda pipe, request: requested.append(request) or exit())
    tiny.save_pretrained(str(tmp_path / "model"))
    with pytest.raises(SystemExit):
        main(["export", "--model", str(tmp_path / "model"), "--output", str(tmp_path / "out"), *options])
    assert [merging.ratio for merging in requested[0].merging] == ratios
    assert requested[0].merging[0].settings() == 2 * (ToMeConfig(ratios[0], "interlace").settings(),)
