"""benchmarks/bench.py, from the command line to the file."""

import json
import re

import bench
import numpy as np
import pytest
import speed_results as stored
from lab.arm import Arm
from lab.speed.cases import Measurement, read_cases
from lab.speed.parity import check_parity

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


def test_a_bad_option_is_an_error_of_one_line_before_anything_is_measured(capsys, tmp_path):
    assert bench.main([*TINY, "--output", str(tmp_path / "speed.json"), "--size", "130"]) == 2
    error = capsys.readouterr().err
    assert "--size 130" in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("added", "merges", "reason"),
    [(0.0, True, None), (1e-3, True, r"by 1\.0e-03"), (np.nan, True, "contains NaN"), (0.0, False, "does not change")],
)
def test_an_arm_that_differs_from_its_reference_or_merges_nothing_is_not_timed(added, merges, reason):
    plain, merged = np.array([1.0, -2.0]), np.array([1.0, -1.0])
    arms = [Measurement(Arm(stored.config(ratio), backend=backend)) for ratio, backend in
            ((0.0, "eager"), (0.5, "eager"), (0.5, "predictor"))]  # fmt: skip

    def output(arm):
        if arm.config is None or not merges:
            return plain
        return merged + (added if arm.backend == "predictor" else 0)

    check_parity(arms, lambda seed: None, output)
    failed = [measured for measured in arms if measured.status == "error"]
    assert bool(failed) == (reason is not None)
    assert all(re.search(reason, measured.reason) for measured in failed)
    assert arms[0].status == "planned"


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
