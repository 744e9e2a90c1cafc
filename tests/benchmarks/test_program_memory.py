"""benchmarks/program_memory.py measures programs in processes and in a server, and reports one that fails."""

import program_memory


def test_memory_of_programs(onnx_folder):
    row = program_memory.measured(onnx_folder, "onnxruntime", 2, most=1)
    assert (row["programs"], row["processes"], row["max_programs"]) == (2, 1, 1)
    assert row["bytes"] > -(2**26), "a tiny model; libraries count less once other tests' processes map them too"
    assert 0 < row["loading_seconds"] < row["seconds"]


def test_a_process_that_fails_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(program_memory.sys, "executable", "/bin/false")
    assert "ended with status [1]" in program_memory.measured(tmp_path, "onnxruntime", 1)["error"]


def test_a_server_is_measured_once_each_program_has_been_used(onnx_folder):
    measured = program_memory.serve(onnx_folder, "onnxruntime")
    assert 0 < measured["seconds"] < 300 and measured["bytes"] > 2**26
