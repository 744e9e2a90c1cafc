"""A measurement goes on where it was killed, survives what it measures, and is written whole or not at all."""

import json
import math
import sys

import pytest

from ppdiffusers_tome import ToMeConfigError
from ppdiffusers_tome.evaluation.speed import runner
from ppdiffusers_tome.evaluation.speed.cases import ArmPlan, Case
from ppdiffusers_tome.evaluation.speed.partial import Partial
from ppdiffusers_tome.evaluation.speed.progress import left
from ppdiffusers_tome.evaluation.speed.runner import Settings, measure_all

ARMS = [ArmPlan("plain"), ArmPlan("tome", ratio=0.5), ArmPlan("tome", "PyTorch", 0.5, reason="no torch here")]
CASES = [(Case("tiny", size=128), ARMS)]
SETTINGS = Settings(rounds=3)
# A worker that measures nothing: each round takes its index; what it is asked goes to the file ASKED. Its first start
# ends as the script says.
STUB = """
import json, os, signal, sys
from pathlib import Path
request = json.loads(sys.stdin.readline())
with open({asked!r}, "a") as file: file.write(json.dumps(request) + "\\n")
is_first = len(Path({asked!r}).read_text().splitlines()) == 1
def tell(event, **fields): print(json.dumps({{"event": event, **fields}}), flush=True)
arms = [f"eager {{arm['arm']}}" + (" 0.5" if arm["ratio"] else "") for arm in request["arms"]]
tell("about", macs={{arm: 10 for arm in arms}})
for arm in arms:
    if arm not in request["checked"]: tell("checked", arm=arm, parity=None)
    if arm not in request["weighed"]: tell("weighed", arm=arm, peak_memory_bytes=20)
for index in request["rounds"]:
    for arm in arms:
        tell("begin", arm=arm, what=f"round {{index + 1}}")
        if is_first and index == 1 and arm == arms[-1]: {end}
    tell("round", index=index, seconds={{arm: index + 0.5 for arm in arms}})
tell("shares", arm="eager tome 0.5", shares={{"matching": 0.1, "merge": 0.2, "unmerge": 0.3}})
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Makes the worker end as it says; returns a function that tells what the workers were asked."""

    def set_up(end="pass"):
        asked, script = tmp_path / "asked", tmp_path / "worker.py"
        script.write_text(STUB.format(asked=str(asked), end=end))
        monkeypatch.setattr(runner, "WORKER", [sys.executable, str(script)])
        return lambda: [json.loads(line) for line in asked.read_text().splitlines()]

    return set_up


def measure(tmp_path, **changes):
    given = {"cases": CASES, "settings": SETTINGS, "output": tmp_path / "new" / "speed.json", "command": "bench"}
    return measure_all(**{**given, **changes})


def by_arm(result):
    return {(arm["backend"], arm["arm"]): arm for arm in result["cases"][0]["arms"]}


def test_result_has_all_that_was_measured(tmp_path, stub):
    stub()
    result = measure(tmp_path)
    assert json.loads((tmp_path / "new" / "speed.json").read_text()) == result
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["speed.json"]
    assert (result["kind"], result["format"], result["rounds"], result["command"]) == ("speed", 1, 3, "bench")
    assert result["commit"] and result["environment"]["memory_gb"] > 0 and result["environment"]["threads"] == "1"
    (case,) = result["cases"]
    assert (case["model"], case["latent"], case["tokens"], case["memory_limit_gb"]) == ("tiny", [16, 16], 256, None)
    arms = by_arm(result)
    tome = arms["eager", "tome"]
    assert tome["seconds"] == [0.5, 1.5, 2.5] and (tome["kept"], tome["macs"]) == (128, 10)
    assert tome["shares"]["unmerge"] == 0.3 and tome["peak_memory_bytes"] == 20 and tome["attention"] == "plain"
    absent = arms["PyTorch", "tome"]
    assert (absent["status"], absent["reason"], absent["seconds"]) == ("not measured", "no torch here", [])


@pytest.mark.parametrize(
    ("end", "status", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "out of memory", "ended by SIGKILL at round 2"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "error", "ended by SIGSEGV at round 2"),
        ("sys.exit('terminate: std::bad_alloc')", "out of memory", "with status 1 at round 2: terminate"),
    ],
)
def test_worker_that_dies_costs_its_arm_alone(tmp_path, stub, end, status, reason):
    asked = stub(end)
    arms = by_arm(measure(tmp_path))
    tome = arms["eager", "tome"]
    assert tome["status"] == status and reason in tome["reason"] and tome["seconds"] == []
    assert arms["eager", "plain"]["seconds"] == [0.5, 1.5, 2.5]
    first, second = asked()
    assert first["rounds"] == [0, 1, 2] and second["rounds"] == [1, 2]  # the round that was not complete, again
    assert [arm["arm"] for arm in second["arms"]] == ["plain"] and second["failed"] == ["eager tome 0.5"]
    assert second["checked"] and second["weighed"]


def test_killed_run_goes_on_and_repeats_no_round(tmp_path, stub, monkeypatch):
    asked = stub()
    note = Partial.note

    def killed(self, case, event):
        if event["event"] == "round" and event["index"] == 2:
            raise KeyboardInterrupt
        note(self, case, event)

    monkeypatch.setattr(Partial, "note", killed)
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path)
    partial = tmp_path / "new" / "speed.json.partial.jsonl"
    with partial.open("a") as file:
        file.write('{"case": 0, "event": "rou')  # cut short, as by a kill
    monkeypatch.setattr(Partial, "note", note)
    result = measure(tmp_path, command="bench, once more")
    assert [each["rounds"] for each in asked()] == [[0, 1, 2], [2]]
    assert by_arm(result)["eager", "plain"]["seconds"] == [0.5, 1.5, 2.5]
    assert result["command"] == "bench" and not partial.exists()


def test_partial_file_of_another_plan_is_kept_unless_asked(tmp_path, stub, monkeypatch):
    asked = stub()
    partial = tmp_path / "new" / "speed.json.partial.jsonl"
    Partial(partial, {"format": 1, "cases": "others"}, {}, restart=False)
    with pytest.raises(
        ToMeConfigError, match=r"began with another cases, settings, versions, machine, sources: .* pass --restart"
    ):
        measure(tmp_path)
    assert "others" in partial.read_text()
    measure(tmp_path, restart=True)
    assert len(asked()) == 1 and not partial.exists()


def test_worker_that_cannot_begin_fails_all_arms(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "WORKER", [sys.executable, "-c", "raise OSError('no such model')"])
    arms = by_arm(measure(tmp_path))
    for name in (("eager", "plain"), ("eager", "tome")):
        assert arms[name]["status"] == "error" and "at starting: OSError: no such model" in arms[name]["reason"]


@pytest.mark.parametrize("value", [-1, 0, 10**23, math.nan, math.inf])
@pytest.mark.parametrize("name", ["rounds", "warm_up", "threads", "memory_limit_gb"])
def test_settings_are_checked(name, value):
    with pytest.raises(ToMeConfigError, match=r"--[a-z-]+ [-0-9a-z.e+]+ is not allowed: it must be (from 1|above 0)"):
        Settings(**{name: value})


def test_time_left():
    assert left(10, [1.0, 400.0, 500.0]) == "1:06:40"
