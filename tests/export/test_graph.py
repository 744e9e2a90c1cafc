"""Merging in plain ONNX programs: which keys new nodes choose, which blocks are found, and what is refused."""

import os
import re
import shutil
from functools import lru_cache, partial

import numpy as np
import onnx
import onnxruntime
import paddle
import pytest
from conftest import tiny_pipeline
from exporting import export_linked, unmerged_programs
from onnx import TensorProto, helper
from ppdiffusers import StableDiffusionControlNetPipeline
from zoo.adapters import Adapted, adapt, with_lora
from zoo.parts import ONE_LEVEL, SDXL, controlnet, sdxl, stable_diffusion, unet

from ppdiffusers_tome import Grid, ToMeConfig, ToMeExportError, tome_summary
from ppdiffusers_tome.attach.attach import attached_placements
from ppdiffusers_tome.cli import main
from ppdiffusers_tome.export import tracing
from ppdiffusers_tome.families.blocks import find_blocks
from ppdiffusers_tome.graph.indices import InterlacedKeys, KeysByTable
from ppdiffusers_tome.graph.model_files import read_program
from ppdiffusers_tome.graph.nodes import Nodes, TimestepNodes
from ppdiffusers_tome.graph.unet import plan_merging
from ppdiffusers_tome.inference import read_manifest
from ppdiffusers_tome.methods.interlace import remaining
from ppdiffusers_tome.methods.steps import PLAIN_STEPS
from ppdiffusers_tome.methods.turns import turns_of
from ppdiffusers_tome.run import openvino_runtime
from ppdiffusers_tome.run.folder import ExportedFolder
from ppdiffusers_tome.run.onnx_attention import fuse_attention
from ppdiffusers_tome.run.onnx_gpu import half_program, halve
from ppdiffusers_tome.run.onnx_graph import Graph, casts

# The first and the fifth keep all tokens; so do two of the last, which are noise levels.
TIMESTEPS = (999, 700.4, 501, 480.5, 51, 1, 1.3, 0.25, -0.4, -1.2)
# A timestep that float16 rounds to another turn's.
ROUNDED = next(n + 0.4 for n in range(512, 800) if turns_of([n]) != turns_of([n + 1]))
SIZE = (32, 40)  # px
LATENTS = (16, 20)


# Indices


def program_of(keys, dtype=TensorProto.FLOAT, shape=(1,)):
    """A program that computes the indices of keys for a timestep and a feature map."""
    timestep = helper.make_tensor_value_info("timestep", dtype, shape)
    feature_map = helper.make_tensor_value_info("map", TensorProto.FLOAT, ["b", 1, "h", "w"])
    outputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["n"]) for name in ("indices", "shape")]
    graph = helper.make_graph([], "indices", [timestep, feature_map], outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    nodes = Nodes(model)
    name = keys.indices(nodes, TimestepNodes(nodes, timestep), "block")
    last = [helper.make_node("Identity", [name], ["indices"]), helper.make_node("Shape", ["map"], ["shape"])]
    model.graph.node.extend([*nodes.take(), *last])
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def in_onnxruntime(program):
    run = onnxruntime.InferenceSession(program).run
    return lambda **inputs: run(["indices"], inputs)[0].tolist()


def in_openvino(program):
    compiled = openvino_runtime.core().compile_model(openvino_runtime.core().read_model(program), "CPU")
    return lambda **inputs: compiled(inputs)["indices"].tolist()


def in_float16(program):
    """In a program for a GPU in float16, whose inputs stay in float32."""
    model = onnx.shape_inference.infer_shapes(onnx.load_model_from_string(program))
    return in_onnxruntime(halve(model).SerializeToString())


def feature_map(grid):
    return np.zeros([1, 1, *grid], "float32")


@pytest.mark.parametrize("load", [in_onnxruntime, in_openvino, in_float16])
@pytest.mark.parametrize("plain", [None, PLAIN_STEPS])
def test_nodes_choose_the_keys_of_the_method(load, plain):
    for grid, parts, block in ((Grid(8, 8), 4, 0), (Grid(9, 14), 2, 7), (Grid(4, 6), 15, 3)):
        table = remaining(grid, parts, block)
        ways = [KeysByTable(table, grid.tokens, plain), InterlacedKeys("map", parts, block, plain)]
        programs = [load(program_of(keys)) for keys in ways]
        for timestep in (*TIMESTEPS, ROUNDED):
            is_plain = plain is not None and plain.count([timestep])
            expected = [*range(grid.tokens)] if is_plain else table[turns_of([timestep])[0]].tolist()
            for program in programs:
                assert program(timestep=np.array([timestep], "float32"), map=feature_map(grid)) == expected


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64", "int32"])
@pytest.mark.parametrize("shape", [(), (1,), (3,), ("b",)], ids=str)
def test_timesteps_of_any_type_and_shape_are_those_of_the_first_row(dtype, shape):
    keys = InterlacedKeys("map", 4, 1, PLAIN_STEPS)
    run = in_onnxruntime(program_of(keys, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape))
    for timestep in (999, 501, 480.5, 51, 1):
        of_rows = np.full([2 if size == "b" else size for size in shape], 0, dtype)
        of_rows[...] = 700
        of_rows.reshape(-1)[:1] = timestep
        first, table = float(of_rows.reshape(-1)[0]), remaining(Grid(8, 8), 4, 1)
        expected = [*range(64)] if PLAIN_STEPS.count([first]) else table[turns_of([first])[0]].tolist()
        assert run(timestep=of_rows, map=feature_map((8, 8))) == expected


def test_keys_of_a_method_without_turns_are_constant():
    table = np.array([[0, 2, 8, 10]])
    run = in_onnxruntime(program_of(KeysByTable(table, 16, None)))
    assert run(timestep=np.array([7], "float32"), map=feature_map((4, 4))) == table[0].tolist()


def test_small_feature_maps_keep_all_keys():
    run = in_onnxruntime(program_of(InterlacedKeys("map", 4, 0, None, min_tokens=65)))
    counts = [len(run(timestep=np.array([1], "float32"), map=feature_map(grid))) for grid in ((8, 8), (8, 12))]
    assert counts == [64, 24]


# Exports


@lru_cache(maxsize=4)
def load_file(path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(str(path), options)


def run_file(path, **inputs):
    return load_file(path).run(None, inputs)[0]


def inputs_at(timestep, latents=LATENTS, text=32, **others):
    random = np.random.RandomState(int(abs(timestep)))
    return {
        "sample": random.standard_normal([2, 4, *latents]).astype("float32"),
        "timestep": np.array([timestep], "float32"),
        "encoder_hidden_states": random.standard_normal([2, 7, text]).astype("float32"),
        **others,
    }


def two_levels():
    """A pipeline whose UNet has self-attention at two levels and in its middle."""
    paddle.seed(0)
    return stable_diffusion()


@pytest.fixture(scope="module")
def write(onnx_folder):
    """`export_linked` as ONNX, which traces UNets alone."""
    return partial(export_linked, format="onnx", linked=unmerged_programs(onnx_folder))


@pytest.fixture(scope="module")
def export(tmp_path_factory, write):
    """An export at three ratios, with max_downsample=2, and which programs were traced for it."""
    folder, traced = tmp_path_factory.mktemp("graph") / "export", []
    trace = tracing.write_program

    def counting(traceable, target, *others):
        traced.append(target.name)
        return trace(traceable, target, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "write_program", counting)
        write(pipe_of_export(), folder, (0.75, 0.5, 0), [SIZE], max_downsample=2)
    return folder, traced


def pipe_of_export():
    from ppdiffusers import StableDiffusionPipeline

    return StableDiffusionPipeline(**two_levels())


def path_of(export, ratio):
    return export[0] / f"onnx/unet_40x32_{ratio}.onnx"


def test_the_unet_is_traced_once_for_all_ratios(export):
    assert export[1] == ["unet_40x32_0"]


@pytest.mark.parametrize("ratio", [0.75, 0.5])
def test_a_program_equals_eager_and_where_steps_are_plain_the_plain_one(export, ratio):
    model = pipe_of_export().unet
    model.apply_tome(ratio=ratio, max_downsample=2)
    for timestep in TIMESTEPS:
        inputs = inputs_at(timestep)
        actual, plain = (run_file(path_of(export, name), **inputs) for name in (ratio, 0))
        with paddle.no_grad():
            tensors = {name: paddle.to_tensor(array) for name, array in inputs.items()}
            expected = model(**tensors, return_dict=False)[0].numpy()
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
        if PLAIN_STEPS.count([timestep]):
            np.testing.assert_array_equal(actual, plain)
        else:
            assert np.abs(actual - plain).max() > 1e-3 * np.abs(plain).max()


def test_a_program_names_the_blocks_that_merge_in_the_order_of_placements(export, capsys):
    model = pipe_of_export().unet
    for ratio in (0.75, 0.5):
        model.apply_tome(ratio=ratio, max_downsample=2)
        paths = [f"unet.{block.path}" for block, placement in attached_placements(model) if placement.share < 1]
        (entry,) = read_program(path_of(export, ratio)).metadata_props
        assert entry.value.split(", ") == paths and len(paths) in (6, 7)


def test_an_edit_adds_one_gather_of_tokens_to_each_block_and_changes_no_other_node(export):
    plain, merged = (read_program(path_of(export, ratio)).graph.node for ratio in (0, 0.75))
    own = [node for node in merged if node.name.startswith("tome.")]
    assert [node.op_type for node in merged if node not in own] == [node.op_type for node in plain]
    gathers = [node for node in own if node.op_type == "Gather" and node.attribute[0].i == 1]
    assert len(gathers) == len(find_blocks(two_levels()["unet"])) == 7
    operators = {node.op_type for node in own}
    assert {"Gather", "Slice", "Where"} <= operators and not operators & {"Einsum", "MatMul", "NonZero", "TopK"}


def test_what_is_computed_of_the_timestep_is_never_rounded_to_float16(export, tmp_path):
    """Neither between two steps nor in a constant: turns, plain steps and angles would be others."""
    folder = shutil.copytree(export[0], tmp_path / "export")
    model = onnx.load(str(half_program(ExportedFolder(folder), folder / "onnx/unet_40x32_0.75.onnx")))
    makers = {name: node for node in model.graph.node for name in node.output}
    nodes = [node for node in model.graph.node if node.op_type != "Resize"]  # whose scales are exact
    used = [makers[name] for node in nodes for name in node.input if name in makers]
    in_float32 = [node.input[0] for node in used if casts(node, TensorProto.FLOAT)]
    assert in_float32 and not {makers[name].op_type for name in in_float32 if name in makers} & {"Cast", "Constant"}


def test_weights_are_shared_by_all_ratios(export):
    weights = export[0] / "onnx/unet.weights"
    tables = sum(path.stat().st_size for path in export[0].glob("onnx/unet_*.onnx"))
    parameters = sum(int(one.size) * 4 for one in two_levels()["unet"].parameters())
    assert parameters < weights.stat().st_size < 1.5 * parameters + tables


def test_a_controlnet_and_its_own_ratio(write, tmp_path):
    """Its blocks come before those of the UNet, whose ratio is another."""
    parts = {**stable_diffusion(unet=unet(**ONE_LEVEL)), "controlnet": controlnet(**ONE_LEVEL)}
    pipe = StableDiffusionControlNetPipeline(**parts)
    write(pipe, tmp_path / "export", 0.5, [SIZE], controlnet=0.75)
    (entry,) = read_program(tmp_path / "export/onnx/unet_40x32_0.5.onnx").metadata_props
    names = entry.value.split(", ")
    assert [name.partition(".")[0] for name in names] == ["controlnet"] * 2 + ["unet"] * 3
    assert not (tmp_path / "export/onnx/unet_40x32_0.onnx").exists()
    (file,) = read_manifest(tmp_path / "export").programs_of("unet")
    (files,) = file.files.values()
    assert max(files.parity.values()) < 1e-4 and files.program == "onnx/unet_40x32_0.5.onnx"


@pytest.mark.parametrize("adapter", [Adapted, with_lora])
def test_adapters_of_projections_are_exported(adapter, write, tmp_path):
    pipe = tiny_pipeline()
    adapt(pipe.unet, adapter)
    manifest = write(pipe, tmp_path / "export", 0.75, [SIZE])
    assert max(manifest.programs_of("unet")[0].files["onnx"].parity.values()) < 1e-5


def test_both_formats_and_a_method_without_turns(tmp_path):
    """The folder that ppdiffusers reads has its own weights, of the first ratio."""
    pipe = tiny_pipeline()
    ratios = (0.75, 0)
    manifest = export_linked(pipe, tmp_path / "export", ratios, [SIZE], method="todo", format="both")
    first, plain = (file.files for file in manifest.programs_of("unet"))
    assert first["paddle"].weights == plain["paddle"].weights == "unet/inference.pdiparams"
    assert all(max(files.parity.values()) <= 1e-5 for files in first.values())
    assert (tmp_path / "export" / "unet" / "inference.pdiparams").is_file()


# Models of other tools: here those of our own export without ratio, which differ in the names of nodes only


@pytest.fixture
def plain(export, tmp_path):
    """A folder as Optimum writes it: the plain UNet with its weights, and other files."""
    folder = tmp_path / "plain"
    (folder / "unet").mkdir(parents=True)
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    (folder / "vae_decoder").mkdir()
    (folder / "vae_decoder" / "model.onnx").write_bytes(bytes(1 << 21))
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").write_text("")
    shutil.copyfile(path_of(export, 0), folder / "unet" / "model.onnx")
    shutil.copyfile(export[0] / "onnx/unet.weights", folder / "unet" / "unet.weights")
    return folder


def merge(model, output, *options):
    return main(["merge-onnx", "--model", str(model), "--output", str(output), *options])


def test_a_merged_model_equals_our_own_export(export, plain, tmp_path, capsys):
    output = tmp_path / "merged"
    assert merge(plain, output, "--ratio", "0.75", "--max-downsample", "2") == 0
    for timestep in TIMESTEPS:
        inputs = inputs_at(timestep)
        expected = run_file(path_of(export, 0.75), **inputs)
        np.testing.assert_array_equal(run_file(output / "unet/model.onnx", **inputs), expected)
    printed = capsys.readouterr().out
    assert "7 of 7 blocks merge" in printed and "No image was generated" in printed
    assert re.search(r"self-attention 0 +1 +\d+ of 320\n", printed)
    assert "outputs differ from the model's by 0.0e+00" in printed


def test_files_are_copied_or_linked_and_nothing_else_is_written(plain, tmp_path):
    output = tmp_path / "merged"
    assert merge(plain, output, "--ratio", "0.75", "--no-check") == 0
    names = {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()}
    assert names == {
        *("scheduler/scheduler_config.json", "unet/model.onnx", "unet/unet.weights", "vae_decoder/model.onnx"),
    }
    is_linked = {name: os.path.samefile(plain / name, output / name) for name in names}
    assert is_linked == {name: name in ("unet/unet.weights", "vae_decoder/model.onnx") for name in names}
    assert [path.name for path in tmp_path.iterdir()].count("merged") == 1
    assert not list(tmp_path.glob(".merged*"))


def test_a_single_file_and_an_earlier_result(plain, tmp_path, capsys):
    output = tmp_path / "merged"
    program = plain / "unet" / "model.onnx"
    assert merge(program, output, "--no-check") == 0
    assert {path.name for path in output.iterdir()} == {"model.onnx", "unet.weights"}
    assert "interlace 0.75, 3 of 7 blocks merge" in capsys.readouterr().out
    assert merge(program, output, "--no-check") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert merge(program, output, "--no-check", "--overwrite", "--ratio", "0.5") == 0
    assert merge(output, tmp_path / "again") == 1
    assert "left out in this model already" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    assert merge(program, tmp_path / "other", "--overwrite") == 2
    assert "pass another folder" in capsys.readouterr().err


def test_weights_inside_the_program(plain, tmp_path):
    inside = tmp_path / "inside" / "model.onnx"
    inside.parent.mkdir()
    onnx.save(onnx.load(str(plain / "unet" / "model.onnx")), str(inside))
    assert merge(inside.parent, tmp_path / "merged") == 0
    assert [path.name for path in (tmp_path / "merged").iterdir()] == ["model.onnx"]


def test_merging_in_all_steps_and_small_images(plain, tmp_path, capsys):
    assert merge(plain, tmp_path / "merged", "--merging", "merge_steps=all,min_tokens=100", "--max-downsample=2") == 0
    printed = capsys.readouterr().out
    assert "3 of 7 blocks merge" in printed, "those at level 2 have 80 tokens"
    inputs = inputs_at(999)
    merged, before = (run_file(folder / "unet/model.onnx", **inputs) for folder in (tmp_path / "merged", plain))
    assert np.abs(merged - before).max() > 1e-3
    assert merge(plain, tmp_path / "none", "--merging", "min_tokens=9999") == 2
    assert "--min-tokens 9999 is not allowed: all feature maps have fewer tokens" in capsys.readouterr().err


@pytest.mark.parametrize("architecture", [SDXL])
def test_blocks_have_the_numbers_and_levels_of_eager_mode(architecture, write, tmp_path):
    """In SDXL, whose middle is at the level of the blocks before and after it."""
    from ppdiffusers import StableDiffusionXLPipeline

    paddle.seed(0)
    pipe = StableDiffusionXLPipeline(**sdxl(unet=unet(**architecture)))
    write(pipe, tmp_path / "export", (0.75, 0), [(64, 96)], max_downsample=4)
    plain = read_program(tmp_path / "export/onnx/unet_96x64_0.onnx")
    planned = plan_merging(plain, ToMeConfig(0.75, max_downsample=4))
    (entry,) = read_program(tmp_path / "export/onnx/unet_96x64_0.75.onnx").metadata_props
    blocks = find_blocks(pipe.unet)
    by_number = sorted(planned.blocks, key=lambda block: block.number)
    assert [block.level for block in by_number] == [block.level for block in blocks]
    pipe.apply_tome(ratio=0.75, max_downsample=4)
    summary = tome_summary(pipe.unet, 32, 48)
    assert len(planned.merging) == len(entry.value.split(", ")) == len(summary.blocks)
    kept = [f"{block.kept_keys} of {block.grid.tokens}" for block in summary.blocks]
    assert [planned.kept[block.attention.name] for block in by_number] == kept


# What is refused


def change_operator(model, old, new, **fields):
    for node in model.graph.node:
        if node.op_type == old:
            node.op_type = new
            for name, value in fields.items():
                setattr(node, name, value)


def rename_timestep(model):
    for value in model.graph.input:
        if value.name == "timestep":
            value.name = "t"
    for node in model.graph.node:
        node.input[:] = ["t" if name == "timestep" else name for name in node.input]


def drop_softmax(model):
    change_operator(model, "Softmax", "Sigmoid")
    for node in model.graph.node:
        if node.op_type == "Sigmoid":
            del node.attribute[:]


def lower_opset(model):
    model.opset_import[0].version = 12


def quantize(model):
    change_operator(model, "LayerNormalization", "DequantizeLinear")


def join_projections(model):
    """One product for queries, keys and values of each self-attention, which a Split divides."""
    products = {}
    weights = {tensor.name for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in weights:
            products.setdefault(node.input[0], []).append(node)
    for nodes in products.values():
        if len(nodes) == 3:
            names = [node.output[0] for node in nodes]
            nodes[0].output[0] = f"{names[0]}.joined"
            place = [*model.graph.node].index(nodes[0])
            for node in nodes[1:]:
                model.graph.node.remove(node)
            model.graph.node.insert(place + 1, helper.make_node("Split", [f"{names[0]}.joined"], names, axis=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename_timestep, "no input 'timestep'"),
        (lower_opset, "opset 12, and the new nodes need 13"),
        (drop_softmax, "no self-attention"),
        (quantize, r"quantized \(DequantizeLinear.*quantize it afterwards"),
        (fuse_attention, r"operator MultiHeadAttention.*optimize it afterwards"),
        (join_projections, "one product .*unfuse_qkv_projections"),
    ],
)
def test_a_model_that_cannot_be_merged_is_an_error_with_a_remedy(change, message, plain):
    model = read_program(plain / "unet" / "model.onnx")
    change(model)
    with pytest.raises(ToMeExportError, match=message):
        plan_merging(model, ToMeConfig(0.75))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ratio", "0"], "--ratio 0"),
        (["--ratio", "1.5"], "--ratio 1.5 is not allowed"),
        (["--merging", "method=tomesd"], "merges queries"),
        (["--model", "missing"], "missing is not a model as ONNX"),
        (["--output", "plain/unet/inside"], "is not allowed: it contains the model, or is inside it"),
    ],
)
def test_arguments_that_are_not_allowed(options, message, plain, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert merge("plain", "out", *options) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_model_is_read_once_and_its_graph_is_made_once(plain, tmp_path, monkeypatch):
    from ppdiffusers_tome.graph import model_files, self_attention
    from ppdiffusers_tome.graph import unet as unet_program

    files, graphs = [], []
    monkeypatch.setattr(model_files, "read_program", lambda path: files.append(path) or read_program(path))
    for module in (self_attention, unet_program):
        monkeypatch.setattr(module, "Graph", lambda model: graphs.append(model) or Graph(model))
    source = plain / "unet" / "model.onnx"
    assert merge(source, tmp_path / "merged", "--no-check") == 0
    assert files == [source] and len(graphs) == 1


def test_missing_weights_and_outputs_that_are_wrong(plain, tmp_path, capsys, monkeypatch):
    from ppdiffusers_tome.graph import model_files

    leave_out = model_files.leave_out_keys

    def wrong(model, blocks):
        leave_out(model, blocks)
        (output,) = model.graph.output
        last = next(node for node in model.graph.node if output.name in node.output)
        last.output[0] = "right"
        model.graph.node.append(helper.make_node("Sin", ["right"], [output.name]))

    monkeypatch.setattr(model_files, "leave_out_keys", wrong)
    assert merge(plain, tmp_path / "merged") == 1
    assert "with all keys the merged model differs" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()
    (plain / "unet" / "unet.weights").unlink()
    assert merge(plain, tmp_path / "merged") == 1
    assert "has its weights in unet.weights, which is missing" in capsys.readouterr().err
