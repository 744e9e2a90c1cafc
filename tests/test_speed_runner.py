"""A measurement continues where it was killed, survives what it measures, and is written completely or not at all."""

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from ppdiffusers_tome import ToMeConfigError
from ppdiffusers_tome.evaluation.speed import runner
from ppdiffusers_tome.evaluation.speed.backends import EagerBackend
from ppdiffusers_tome.evaluation.speed.cases import Case, make_arms, make_case, make_configs, read_cases
from ppdiffusers_tome.evaluation.speed.runner import Settings, measure_all
from ppdiffusers_tome.evaluation.speed.worker import Worker

# A worker that measures nothing: round i takes i + 0.5 s. It writes its requests to a file. The first worker ends as
# `end` says, at the second round of its last arm.
STUB = """
import json, os, signal, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from worker_loop import answer_requests
requests = Path({requests!r})
case, is_first = None, not requests.exists()
def planned(): return [arm for arm in case["arms"] if arm["status"] == "planned"]
def name(arm): return "plain, eager" if arm["arm"] == "plain" else "ToMe 0.5, eager"
def answer(): return {{"case": case}}
def prepare(report, **request):
    global case
    case = request["case"]
    with requests.open("a") as file: file.write(json.dumps(request) + "\\n")
    for arm in planned(): arm.update(macs=10, peak_memory_bytes=20)
    report("case", case=case)
    {prepare}
    return answer()
def time_round(report):
    index = len(planned()[0]["seconds"])
    for arm in planned():
        report("begin", arm=name(arm), step=f"round {{index + 1}}")
        if is_first and index == 1 and arm is planned()[-1]: {end}
    for arm in planned(): arm["seconds"].append(index + 0.5)
    return answer()
def finish(report):
    for arm in planned(): arm["status"] = "measured"
    return answer()
answer_requests({{"prepare": prepare, "time_round": time_round, "finish": finish}})
"""


TOMESD = {"window": None, "proportional": False}


def cases():
    case = make_case("tiny", size=128)
    case.arms = make_arms(
        case, ["plain", "tome", "torch"], ["eager"], make_configs([0.5], [None], [TOMESD]), "no torch here"
    )
    return [case]


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Makes the worker a stub; returns a function that reads the requests."""

    def set_up(end="pass", prepare="pass"):
        requests, script = tmp_path / "requests", tmp_path / "worker.py"
        folder = str(runner.worker.__file__.replace("speed/worker.py", ""))
        script.write_text(STUB.format(requests=str(requests), folder=folder, end=end, prepare=prepare))
        monkeypatch.setattr(runner, "WORKER", [sys.executable, "-S", str(script)])
        return lambda: [json.loads(line) for line in requests.read_text().splitlines()]

    return set_up


def measure(tmp_path, **changes):
    values = {"cases": cases(), "settings": Settings(rounds=3), "output": tmp_path / "new" / "speed.json"}
    (case,) = measure_all(**{**values, "command": "bench", **changes})
    return {f"{arm.arm}, {arm.backend}": arm for arm in case.arms}


def test_result_has_what_was_measured(tmp_path, stub):
    stub()
    arms = measure(tmp_path)
    result = json.loads((tmp_path / "new" / "speed.json").read_text())
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["speed.json"]
    assert (result["kind"], result["format"], result["rounds"], result["command"]) == ("speed", 3, 3, "bench")
    assert result["commit"] and result["environment"]["memory_gb"] > 0 and result["environment"]["threads"] == "1"
    (case,) = read_cases(result, "speed.json")
    assert case.arms == [*arms.values()] and (case.latent, case.tokens) == ([16, 16], 256)
    tome, absent = arms["tome, eager"], arms["tome, PyTorch"]
    assert (tome.seconds, tome.status, tome.kept) == ([0.5, 1.5, 2.5], "measured", 128)
    assert (absent.status, absent.reason, absent.seconds) == ("not measured", "no torch here", [])


@pytest.mark.parametrize(
    ("end", "status", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "error", "round 2: the worker ended by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "error", "round 2: the worker ended by SIGSEGV"),
        (
            "sys.exit('terminate: std::bad_alloc')",
            "out of memory",
            "round 2: the worker ended with status 1: terminate",
        ),
    ],
)
def test_worker_that_dies_costs_only_its_arm(tmp_path, stub, end, status, reason):
    requests = stub(end)
    arms = measure(tmp_path)
    tome = arms["tome, eager"]
    assert tome.status == status and reason in tome.reason and tome.seconds == []
    assert arms["plain, eager"].seconds == [0.5, 1.5, 2.5]
    first, second = requests()
    plain, failed = second["case"]["arms"][:2]  # the incomplete round is timed again
    assert plain["seconds"] == [0.5] and (plain["macs"], plain["peak_memory_bytes"]) == (10, 20)
    assert failed["status"] == status and first["case"]["arms"][1]["status"] == "planned"


def test_process_that_the_system_ends_is_out_of_memory(tmp_path, stub, monkeypatch):
    stub("os.kill(os.getpid(), signal.SIGKILL)")
    counts = iter([4, 5, 5])  # before the first worker, after its end, before the second
    monkeypatch.setattr(runner, "count_ended_processes", lambda: next(counts))
    assert measure(tmp_path)["tome, eager"].status == "out of memory"


def test_definition_that_ends_the_worker_is_skipped(tmp_path, stub):
    requests = stub(prepare='report("begin", arm="a definition", step="check")\n    if is_first: sys.exit(3)')
    assert measure(tmp_path)["tome, eager"].status == "measured"
    assert [request["skip"] for request in requests()] == [[], ["a definition"]]


def test_worker_that_ends_at_the_same_definition_again_fails_all_arms(tmp_path, stub):
    requests = stub(prepare='report("begin", arm="a definition", step="check"); sys.exit(3)')
    assert {arm.status for arm in measure(tmp_path).values()} == {"error", "not measured"}
    assert len(requests()) == 2


def test_killed_run_continues_and_repeats_no_round(tmp_path, stub, monkeypatch):
    keep = 'Path(request["programs"], "program").mkdir(parents=True, exist_ok=True)'
    requests, output = stub(prepare=keep), tmp_path / "new" / "speed.json"
    save = runner.IncompleteResult.save

    def save_until_round_2(self, index, case):
        if len(case["arms"][0]["seconds"]) == 3:
            raise KeyboardInterrupt
        save(self, index, case)

    monkeypatch.setattr(runner.IncompleteResult, "save", save_until_round_2)
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path)
    assert {path.name for path in output.parent.iterdir()} == {"speed.json.partial", ".speed.json.programs"}
    monkeypatch.setattr(runner.IncompleteResult, "save", save)
    arms = measure(tmp_path, command="bench, continued")
    first, second = (request["programs"] for request in requests())
    assert first == second and first.startswith(str(output.with_name(".speed.json.programs")))
    assert [request["case"]["arms"][0]["seconds"] for request in requests()] == [[], [0.5, 1.5]]
    assert arms["plain, eager"].seconds == [0.5, 1.5, 2.5]
    assert json.loads(output.read_text())["command"] == "bench"
    assert [path.name for path in output.parent.iterdir()] == ["speed.json"]


def test_programs_are_kept_in_a_folder_of_the_caller(tmp_path, stub):
    requests = stub(prepare='Path(request["programs"], "program").mkdir(parents=True)')
    measure(tmp_path, programs=tmp_path / "cached")
    (request,) = requests()
    assert list((tmp_path / "cached").glob("*/program")) == [Path(request["programs"]) / "program"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["speed.json"]


def test_restart_forgets_programs(tmp_path, stub):
    stub(prepare='assert not Path(request["programs"]).parent.exists()')
    (tmp_path / "new" / ".speed.json.programs").mkdir(parents=True)
    assert measure(tmp_path, restart=True)["plain, eager"].status == "measured"


def test_arm_that_fails_costs_no_other_arm(tmp_path, monkeypatch):
    """In the real worker: the built-in ToMe, the definition of ours, has no memory; ours fails later."""
    compute, passes = EagerBackend.output, []

    def output(self, arm):
        passes.append(arm.name)
        if arm.arm == "built-in":
            raise MemoryError("(ResourceExhausted) Fail to alloc\nmore lines")
        return compute(self, arm)

    def seconds(self, arm):
        if arm.arm == "tome" and len(arm.seconds) == 1:
            raise ValueError("no such luck")
        return 1.0

    monkeypatch.setattr(EagerBackend, "output", output)
    monkeypatch.setattr(EagerBackend, "seconds", seconds)
    case, events = make_case("tiny", size=64), []
    case.arms = make_arms(case, ["plain", "tome", "built-in"], ["eager"], make_configs([0.5], [None], [TOMESD]), None)
    worker = Worker()
    arguments = {"warm_up": 1, "threads": 1, "torch_python": None, "folder": str(tmp_path)}
    worker.prepare(lambda event, **fields: events.append(event), asdict(case), **arguments)
    for _ in range(2):
        worker.time_round(lambda *event, **fields: None)
    plain, tome, built_in = Case.from_json(worker.finish(lambda *event, **fields: None)["case"]).arms
    assert (built_in.status, built_in.reason) == (
        "out of memory",
        "check: MemoryError: (ResourceExhausted) Fail to alloc",
    )
    assert passes.count(built_in.name) == 1
    assert (tome.status, tome.reason) == ("error", "round 2: ValueError: no such luck")
    assert (plain.status, plain.seconds) == ("measured", [1.0, 1.0]) and plain.peak_memory_bytes > 0
    assert "case" in events and tome.parity is None


def test_worker_continues_a_case(tmp_path, monkeypatch):
    """Arms with seconds are not checked again; arms that failed before do not run."""
    monkeypatch.setattr(EagerBackend, "seconds", lambda self, arm: 2.0)
    case, passes = make_case("tiny", size=64), []
    case.arms = make_arms(case, ["plain", "tome", "built-in"], ["eager"], make_configs([0.5], [None], [TOMESD]), None)
    plain, tome, built_in = case.arms
    plain.seconds, tome.seconds = [1.0], [1.0]
    built_in.fail("error", "before")
    worker = Worker()

    def report(event, arm=None, step=None, case=None):
        passes.append((arm, step))

    worker.prepare(report, asdict(case), warm_up=1, threads=1, torch_python=None, folder=str(tmp_path))
    arms = Case.from_json(worker.time_round(report)["case"]).arms
    assert [arm.seconds for arm in arms] == [[1.0, 2.0], [1.0, 2.0], []]
    steps = [(arm, step) for arm, step in passes if arm]
    assert sorted(steps) == [(arm.name, step) for arm in (tome, plain) for step in ("round 2", "warm-up")]


def interrupt(folder, rounds):
    """Leave an incomplete result."""
    partial = runner.IncompleteResult(folder / "new" / "speed.json", cases(), Settings(rounds), "bench", restart=False)
    partial.save(0, asdict(cases()[0]))


def test_incomplete_result_of_other_settings_is_kept_without_restart(tmp_path, stub):
    stub()
    interrupt(tmp_path, rounds=9)
    with pytest.raises(ToMeConfigError, match=r"is an incomplete result with other settings: .* pass --restart"):
        measure(tmp_path)
    assert measure(tmp_path, restart=True)["plain, eager"].seconds == [0.5, 1.5, 2.5]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["speed.json"]


@pytest.mark.parametrize("name", ["sources", "versions", "describe_environment", "model_files"])
def test_incomplete_result_of_other_sources_versions_machine_or_model_is_refused(tmp_path, stub, monkeypatch, name):
    stub()
    interrupt(tmp_path, rounds=3)
    others = {"sources": "0" * 16, "versions": {"python": "2.7"}, "describe_environment": {"machine": "another"}}
    monkeypatch.setattr(runner, name, lambda *_: others.get(name, "retrained"))
    with pytest.raises(ToMeConfigError, match="an incomplete result with other"):
        measure(tmp_path)


def test_worker_that_cannot_start_fails_all_arms(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "WORKER", [sys.executable, "-c", "raise OSError('no such model')"])
    arms = measure(tmp_path)
    for name in ("plain, eager", "tome, eager"):
        assert arms[name].status == "error" and arms[name].reason.startswith("starting: the worker ended")
        assert "OSError: no such model" in arms[name].reason


@pytest.mark.parametrize("value", [0, 10**23, math.nan])
@pytest.mark.parametrize("name", ["rounds", "warm_up", "threads"])
def test_settings_are_checked(name, value):
    with pytest.raises(ToMeConfigError, match=r"--[a-z-]+ [-0-9a-z.e+]+ is not allowed: it must be from 1"):
        Settings(**{name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda result: result.update(kind="load"), "speed.json is not a speed result"),
        (lambda result: result.update(format=1), "speed.json has format 1"),
        (lambda result: result.pop("rounds"), r"speed.json is not a complete speed result \(KeyError\('rounds'\)\)"),
        (lambda result: result["cases"][0]["arms"][0].update(seconds=[1.0]), "3 positive values are expected"),
        (lambda result: result["cases"][0]["arms"][0].update(seconds=[1.0, 2.0, 0]), "3 positive values are expected"),
        (lambda result: result["cases"][0]["arms"][0].update(guess=1), "is not a complete speed result"),
    ],
)
def test_damaged_result_is_refused(tmp_path, stub, change, message):
    stub()
    measure(tmp_path)
    result = json.loads((tmp_path / "new" / "speed.json").read_text())
    change(result)
    with pytest.raises(ToMeConfigError, match=message):
        read_cases(result, "speed.json")
