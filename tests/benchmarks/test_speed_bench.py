"""benchmarks/bench.py, from the command line to the file."""

import json
import re

import bench
import pytest
import speed_results as stored
from lab.speed.cases import read_cases

from ppdiffusers_tome import ToMeConfig

TINY = ["--architecture", "tiny", "--size", "128", "--threads", "1"]


def read(file):
    """The only case of a result."""
    (case,) = read_cases(json.loads(file.read_text()), file)
    return case


def test_bench_prints_a_table_and_writes_what_was_measured(tmp_path, capsys):
    out = tmp_path / "new" / "speed.json"
    options = [*TINY, "--rounds", "2", "--arms", "plain", "tome", "both", "built-in", "--output", str(out)]
    options += ["--merging", "method=tomesd,ratio=0.5,sx=4", "method=todo,ratio=0.75"]
    assert bench.main(options) == 0
    printed, case = capsys.readouterr().out, read(out)
    assert "tiny, one UNet pass, 128 px, batch 2: 256 tokens" in printed
    assert re.search(r"tomesd 0\.5, sx=4, eager +\d\.\d{4} +too few rounds to tell +\d\.\d\n", printed)
    assert json.loads(out.read_text())["command"] == f"python benchmarks/bench.py {' '.join(options)}"
    arms = [measured.arm for measured in case.with_status("measured")]
    assert [(arm.config is not None, arm.attention) for arm in arms] == [
        (False, "plain"), *2 * [(True, "plain")], *2 * [(True, "slicing")], (True, "plain")
    ]  # fmt: skip
    plain, tome, cells, both, *_ = case.arms
    assert cells.name == "todo 0.75, eager"
    assert all(len(arm.seconds) == 2 for arm in case.arms)
    assert both.parity["against"] == "tomesd 0.5, sx=4, eager" and both.parity["difference"] < 1e-4
    assert max(both.peak_memory_bytes, tome.peak_memory_bytes) < plain.peak_memory_bytes
    assert both.macs == tome.macs < plain.macs


def test_a_settings_file_is_a_way_to_merge(tmp_path, monkeypatch):
    """At its own ratio."""
    measured = []
    monkeypatch.setattr(bench, "measure_all", lambda cases, *_, **__: measured.extend(cases) or cases)
    ToMeConfig(0.6, "tomesd", sx=4).save(tmp_path / "tuned.json")
    options = ["--config", str(tmp_path / "tuned.json"), "--merging", "method=tomesd", "method=interlace"]
    options += ["--ratio", "0.25", "--arms", "tome"]
    assert bench.main([*TINY, *options, "--output", str(tmp_path / "speed.json")]) == 1, "nothing was measured"
    (case,) = measured
    configs = [ToMeConfig(0.6, "tomesd", sx=4), ToMeConfig(0.25, "tomesd"), ToMeConfig(0.25, "interlace")]
    assert [measured.arm.config for measured in case.arms] == configs


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


def test_sizes_are_squares(tmp_path, monkeypatch, capsys):
    measured = []
    monkeypatch.setattr(bench, "measure_all", lambda cases, *_, **__: measured.extend(cases) or cases)
    assert bench.main([*TINY[:2], "--size", "128", "64x64", "--output", str(tmp_path / "speed.json")]) == 1
    assert [case.size for case in measured] == [128, 64]
    with pytest.raises(SystemExit):
        bench.main([*TINY[:2], "--size", "128x64"])
    assert "--size: 128x64 is not a square, and only squares are measured" in capsys.readouterr().err


def test_report_is_printed_and_written(tmp_path, capsys):
    arms = [stored.arm([4.0] * 3), stored.arm([2.0] * 3, 0.5)]
    file, out = stored.write(tmp_path / "new.json", stored.result([stored.case(arms)])), tmp_path / "new" / "speed.md"
    report = ["report", "--output", str(out.parent)]
    assert bench.main([*report, str(file)]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == out.read_text().strip() and f"written to {out}" in printed.err
    assert bench.main([*report, str(tmp_path / "no.json")]) == 2
    assert "no.json cannot be read as a result" in capsys.readouterr().err
