"""benchmarks/gpu_onnx.py: the programs that it carries to a GPU, and how it measures them."""

import json
import sys

import gpu_onnx
import numpy as np
import onnx
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


def test_a_block_for_gpus_has_few_operators_more_than_plain():
    added = gpu_onnx.operators_added("sd15")
    assert {arm: operators <= gpu_onnx.BOUNDS[arm] for arm, (operators, _) in added.items()} == dict.fromkeys(
        added, True
    )
    assert added["interlace 0.75"] == added["interlace 0.5"] == (10, 8), "a gather of tokens, one of indices, the turn"
    assert added["todo 0.75"] == added["todo 0.5"] == (1, 1)


def test_names_of_arms_are_those_of_every_benchmark():
    """`measure` runs without this package, so the script writes them out."""
    names = [Arm(ToMeConfig(**settings)).name for settings in gpu_onnx.MERGED.values()]
    assert names == [*gpu_onnx.MERGED] and Arm().name == gpu_onnx.PLAIN


def test_the_checkerboard_is_predicted_only_where_it_was_not_measured():
    def row(arm, milliseconds, size):
        return {"size": size, "batch": 2, "turn": 0, "arm": f"onnxruntime {arm}", "ms": [milliseconds] * 3}

    rows = [row(arm, ms, size) for size in (512, 768) for arm, ms in (("plain", 30), ("todo 0.75", 24))]
    rows.append(row("todo 0.5", 27, 512))
    *_, note = gpu_onnx.predictions(rows)  # 30 / (30 - 6·2/3)
    assert "Predicted, not measured" in note and "todo 0.5 gains 1.15× at 768 px, batch 2, if" in note
    assert not any("todo 0.5" in note for note in gpu_onnx.predictions([*rows, row("todo 0.5", 26, 768)]))


def test_interlace_is_predicted_by_the_keys_that_it_removes():
    def rows_of(**arms):
        return [
            {"size": 512, "batch": 2, "turn": 0, "arm": f"onnxruntime {a}", "ms": [ms] * 3} for a, ms in arms.items()
        ]

    rows = rows_of(**{"plain": 30, "todo 0.75": 24, "todo 0.5": 27})
    as_many, two_thirds = gpu_onnx.predictions(rows)
    assert "interlace 0.75 gains 1.25× at 512 px, batch 2, if it saves the time that todo 0.75 saves." in as_many
    assert "interlace 0.5 gains 1.15× at 512 px, batch 2, if it saves two thirds of the time" in two_thirds
    assert gpu_onnx.predictions(rows + rows_of(**{"interlace 0.75": 24, "interlace 0.5": 27})) == []


def test_what_was_not_measured_is_listed():
    rows = [
        {"size": size, "batch": batch, "arm": f"onnxruntime {name}"}
        for (size, batch), names in gpu_onnx.CELLS.items()
        for name in names
    ]
    assert gpu_onnx.lacking(rows) == []
    (note,) = gpu_onnx.lacking([row for row in rows if (row["size"], row["arm"][12:]) != (768, "todo 0.5")])
    assert note == "**Not measured** in ONNX Runtime: todo 0.5 (768 px, batch 2)."


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
    with pytest.raises(SystemExit, match="cannot use CUDAExecutionProvider"):
        gpu_onnx.Session(program, tmp_path, feed, "cuda")
