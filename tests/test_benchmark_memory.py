"""benchmarks/program_memory.py: what it measures, and that its page is that of the committed results."""

import argparse
import shutil
from pathlib import Path

import program_memory

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_memory_of_programs(onnx_folder):
    row = program_memory.measured(onnx_folder, "onnxruntime", 2, most=1, processes=2)
    assert (row["programs"], row["processes"], row["max_programs"]) == (2, 2, 1)
    assert row["bytes"] > 0 and 0 < row["loading_seconds"] < row["seconds"]


def test_a_process_that_fails_is_a_row(tmp_path):
    assert "ended with status [1]" in program_memory.measured(tmp_path, "onnxruntime", 1)["error"]


def test_a_server_is_measured_once_each_program_has_been_used(onnx_folder):
    measured = program_memory.serve(onnx_folder, "onnxruntime")
    assert 0 < measured["seconds"] < 300 and measured["bytes"] > 2**26


def test_page_is_that_of_the_results(tmp_path):
    results = sorted((BENCHMARKS / "results").glob("program_memory_*.json"))
    assert results
    (tmp_path / "results").mkdir()
    for path in results:
        shutil.copy(path, tmp_path / "results")
    program_memory.report(argparse.Namespace(output=tmp_path / "results"))
    page = (BENCHMARKS / "program_memory.md").read_text(encoding="utf-8")
    assert (tmp_path / "program_memory.md").read_text(encoding="utf-8") == page
