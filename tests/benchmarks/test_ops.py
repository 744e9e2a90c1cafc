"""benchmarks/ops.py: what it times is equal, and its page has what was measured."""

import json

import ops
import pytest

from ppdiffusers_tome import ToMeError

CASE = {"batch": 1, "height": 6, "width": 8, "channels": 5, "ratio": 0.5}


def test_page_has_what_was_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ops, "CASE", CASE)
    options = ["--rounds", "2", "--growth", "4", "16", "--memory-limit", "2e-5", "--output", str(tmp_path / "results")]
    ops.main(options)
    result = json.loads((tmp_path / "results" / "ops.json").read_text())
    assert (result["kind"], result["rounds"]) == ("operations", 2)
    assert result["command"] == f"python benchmarks/ops.py {' '.join(options)}"
    assert [row["method"] for row in result["methods"]] == [*ops.make_configs(0.5), ops.BUILT_IN]
    for row in result["methods"]:
        assert list(row["milliseconds"]) == ["plan", "merge", "unmerge", "merge + unmerge"]
        assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in row["milliseconds"].values())
    plans = {(plan["method"], plan["side"]): plan for plan in result["growth"]["plans"]}
    not_timed = [key for key, plan in plans.items() if plan["milliseconds"] is None]
    assert not_timed == [("symmetric, window=None", 16), ("symmetric, window=16", 16)]
    assert plans["symmetric, window=None", 16]["scores_gb"] == pytest.approx(192 * 64 * 4e-9)  # src × dst, in float32
    assert plans["symmetric, window=8", 16]["scores_gb"] == pytest.approx(4 * 48 * 16 * 4e-9)
    page = (tmp_path / "ops.md").read_text()
    assert capsys.readouterr().out.strip() == page.strip() and "does not fit: 4.92e-05 GB" in page
    assert "B=1, 6×8 tokens, C=5, ratio 0.5; medians" in page


def test_nothing_is_timed_where_results_differ(monkeypatch):
    monkeypatch.setattr(ops, "merge", lambda x, plan: x[:, : plan.kept] * 2)
    with pytest.raises(ToMeError, match="they are not timed"):
        ops.time_operations(CASE, rounds=1)
