"""benchmarks/bench.py, from the command line to the file."""

import json
import re

import bench
import pytest
import speed_results as stored
from lab.speed.cases import read_cases

TINY = ["--architecture", "tiny", "--size", "128", "--threads", "1"]


def test_bench_measures_every_kind_of_arm(tmp_path, capsys):
    """The merging of ppdiffusers and every program equal ours in eager mode; an arm that differs is not timed."""
    out = tmp_path / "new" / "speed.json"
    options = [*TINY, "--rounds", "2", "--arms", "plain", "tome", "both", "built-in", "--output", str(out)]
    options += ["--merging", "method=tomesd,ratio=0.5", "method=todo,ratio=0.75"]
    options += ["--backend", "eager", "predictor", "onnxruntime", "openvino"]
    assert bench.main(options) == 0
    printed, result = capsys.readouterr().out, json.loads(out.read_text())
    assert "tiny, one UNet pass, 128 px, batch 2: 256 tokens" in printed
    assert re.search(r"tomesd 0\.5, eager +\d\.\d{4} +too few rounds to tell +\d\.\d\n", printed)
    assert result["command"] == f"python benchmarks/bench.py {' '.join(options)}"
    (case,) = read_cases(result, out)
    arms = {measured.name: measured for measured in case.with_status("measured")}
    assert len(arms) == len(case.arms) == 6 + 3 * 3 and all(len(arm.seconds) == 2 for arm in arms.values())
    built_in = arms["tomesd 0.5 (built-in), eager"]
    sliced = next(arm for name, arm in arms.items() if arm.arm.attention == "slicing" and name.startswith("tomesd"))
    program = arms["todo 0.75, openvino"]
    assert built_in.parity["against"] == sliced.parity["against"] == "tomesd 0.5, eager"
    assert program.parity["against"] == "todo 0.75, eager" and program.parity["difference"] < 1e-4
    plain, merged = arms["plain, eager"], arms["todo 0.75, eager"]
    assert max(sliced.peak_memory_bytes, merged.peak_memory_bytes) < plain.peak_memory_bytes
    assert program.macs == merged.macs < plain.macs


REFUSED = {  # options, and what the error names
    **{
        option: option
        for option in ("--rounds 0", "--warm-up 0", "--threads 0", "--batch 0", "--size 0", "--size 130")
    },
    "--ratio 0.95": "ratio=0.95",
    "--merging max_downsample=3": "max_downsample=3",
    "--merging max_downsampel=2": "max_downsampel",
}


@pytest.mark.parametrize(("options", "named"), REFUSED.items())
def test_bad_option_is_an_error_of_one_line_before_anything_is_measured(options, named, capsys, tmp_path):
    assert bench.main([*TINY, "--output", str(tmp_path / "speed.json"), *options.split()]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_report_is_printed_and_written(tmp_path, capsys):
    """A gain is the median of the ratios within the rounds, 2.00×, not the quotient of the medians, 1.6×."""
    arms = [stored.arm([2.0, 9.0, 4.0]), stored.arm([1.0, 3.0, 2.5], 0.5), stored.arm([], 0.75, status="error")]
    file, out = stored.write(tmp_path / "new.json", stored.result([stored.case(arms)])), tmp_path / "new" / "speed.md"
    report = ["report", "--output", str(out.parent)]
    assert bench.main([*report, str(file)]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == out.read_text().strip() and f"written to {out}" in printed.err
    assert "| 2.50 s, 2.00× [1.60–3.00] |" in printed.out and "the allocator failed" in printed.out
    assert bench.main([*report, str(tmp_path / "no.json")]) == 2
    assert "no.json cannot be read as a result" in capsys.readouterr().err
