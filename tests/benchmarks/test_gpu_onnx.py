"""benchmarks/gpu_onnx.py: the programs that it carries to a GPU, and how it measures them."""

import json
import sys

import gpu_onnx
import numpy as np
import onnx
import paddle
import pytest
from lab.arm import Arm

from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.run.runtime import load_module


def test_programs_have_no_weights_but_their_statistics(monkeypatch, tmp_path):
    arguments = ["export", str(tmp_path), "--architecture", "tiny", "--size", "128"]
    monkeypatch.setattr(sys, "argv", ["gpu_onnx.py", *arguments])
    gpu_onnx.main()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "128 interlace 0.75.onnx",
        "128 plain.onnx",
        "origin.json",
    ]
    for path in tmp_path.glob("*.onnx"):
        tensors = onnx.load(str(path), load_external_data=False).graph.initializer
        outside = [tensor for tensor in tensors if tensor.data_location == onnx.TensorProto.EXTERNAL]
        assert sum(np.prod(tensor.dims) for tensor in outside) > 170_000
        for tensor in outside:
            places = {entry.key: float(entry.value) for entry in tensor.external_data if entry.key != "location"}
            assert tensor.data_type == onnx.TensorProto.FLOAT16 and {*places} == {"mean", "std"}
            if tensor.name.endswith("norm1.weight"):
                assert places == {"mean": 1, "std": 0}


def test_a_block_for_gpus_has_few_operators_more_than_plain(monkeypatch):
    """As many as the bound, whatever the width; the two ratios of a method differ in constants alone.

    The bound is that of Paddle 3's programs; those of Paddle 2.6 have two more for the turn.
    """
    bounds = {arm: gpu_onnx.BOUNDS[arm] for arm in ("interlace 0.75", "todo 0.75")}
    monkeypatch.setattr(gpu_onnx, "BOUNDS", bounds)
    added = gpu_onnx.operators_added("tiny")
    of_interlace = (22, 19) if paddle.__version__.startswith("2.") else (bounds["interlace 0.75"], 18)
    assert added["interlace 0.75"] == of_interlace, "a gather of tokens, one of indices, the turn"
    assert added["todo 0.75"] == (bounds["todo 0.75"], 1)


def test_names_of_arms_are_those_of_every_benchmark():
    """`measure` runs without this package, so the script writes them out."""
    all_steps = ", merge_steps='all'"  # in a step that merges there is no difference
    names = [Arm(ToMeConfig(**settings)).name.removesuffix(all_steps) for settings in gpu_onnx.MERGED.values()]
    assert names == [*gpu_onnx.MERGED] and Arm().name == gpu_onnx.PLAIN


def test_arms_take_turns():
    order = []
    arms = {name: (lambda name=name: order.append(name), lambda: None) for name in ("a", "b")}
    times = gpu_onnx.in_turns(arms, lambda: None)
    assert order == ["a", "b"] * (1 + gpu_onnx.ROUNDS)
    assert all(len(rounds) == gpu_onnx.ROUNDS and min(rounds) > 0 for rounds in times.values())


def test_result_has_all_cells():
    rows = json.loads(gpu_onnx.RESULT.read_text(encoding="utf-8"))["rows"]
    assert {(row["size"], row["batch"]) for row in rows} == {*gpu_onnx.CELLS}
    known = {gpu_onnx.PLAIN, *gpu_onnx.MERGED, *(f"tomesd {ratio}" for ratio in gpu_onnx.TOMESD_RATIOS[2])}
    assert {row["arm"].partition(",")[0].partition(" ")[2] for row in rows} <= known


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_provider_that_is_missing_is_an_error(tmp_path):
    graph = onnx.parser.parse_graph("main (float[1] sample) => (float[1] y) { y = Identity(sample) }")
    program = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)]).SerializeToString()
    feed = {"sample": np.zeros(1, "float32"), "encoder_hidden_states": np.zeros([1, 1, 1], "float32")}
    if "CUDAExecutionProvider" in load_module("onnxruntime").get_available_providers():
        pytest.skip("this machine has it")
    with pytest.raises(SystemExit, match="CUDAExecutionProvider"):
        gpu_onnx.Session(program, tmp_path, feed, "cuda")
