"""A measurement continues where it was killed, survives what it measures, and is written completely or not at all."""

import copy
import json
import signal
from types import SimpleNamespace

import pytest
from killed_worker import killed
from lab.speed import runner, worker
from lab.speed.backends import EagerBackend
from lab.speed.cases import Timing, make_case, make_configs, read_cases
from lab.speed.catalog import make_arms
from lab.speed.runner import WorkerEndedError, measure_all, worker_messages


def make(*arms, **fields):
    """A case with these arms."""
    case = make_case("tiny", **{"size": 64, **fields})
    case.arms = make_arms(arms, ["eager"], make_configs([0.5]))
    return case


def cases(**fields):
    return [make("plain", "tome", size=128, **fields)]


class Stub:
    """A worker that measures nothing: round i takes i + 0.5 s. The first ends as `end`, before round 2 of ToMe.

    `prepare` is called with its arguments, and yields messages or ends it.
    """

    def __init__(self, end=None, prepare=lambda stub, programs: ()):
        self.end, self.prepare, self.calls = end, prepare, []

    def __call__(self, case, timing, programs, skip):
        case = copy.deepcopy(case)
        self.calls.append((copy.deepcopy(case), programs, list(skip)))
        for arm in case.with_status("planned"):
            arm.macs, arm.peak_memory_bytes = 10, 20
        yield copy.deepcopy(case)
        yield from self.prepare(self, programs)
        while len(case.with_status("planned")[0].seconds) < timing.rounds:
            index = len(case.with_status("planned")[0].seconds)
            for arm in case.with_status("planned"):
                yield arm.name, f"round {index + 1}"
                if self.end and index == 1 and arm.arm.config and len(self.calls) == 1:
                    raise self.end
            for arm in case.with_status("planned"):
                arm.seconds.append(index + 0.5)
            yield copy.deepcopy(case)
        for arm in case.with_status("planned"):
            arm.status = "measured"
        yield case


@pytest.fixture
def stub(monkeypatch):
    """Makes the worker a stub, which it returns."""

    def set_up(*arguments, **named):
        monkeypatch.setattr(runner, "worker_messages", Stub(*arguments, **named))
        return runner.worker_messages

    return set_up


def measure(tmp_path, **changes):
    values = {"cases": cases(), "timing": Timing(rounds=3), "output": tmp_path / "new" / "speed.json"}
    (case,) = measure_all(**{**values, "command": "bench", **changes})
    return {"tome" if measured.arm.config else "plain": measured for measured in case.arms}


def test_result_has_what_was_measured(tmp_path, stub):
    stub()
    arms = measure(tmp_path)
    result = json.loads((tmp_path / "new" / "speed.json").read_text())
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["speed.json"]
    assert (result["kind"], result["format"], result["rounds"], result["command"]) == ("speed", 4, 3, "bench")
    assert result["commit"] and result["environment"]["memory_gb"] > 0 and result["environment"]["threads"] == "1"
    (case,) = read_cases(result, "speed.json")
    assert case.arms == [*arms.values()] and (case.latent, case.tokens) == ([16, 16], 256)
    tome = arms["tome"]
    assert (tome.seconds, tome.status) == ([0.5, 1.5, 2.5], "measured")


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (WorkerEndedError(-signal.SIGSEGV, ""), "round 2: the worker ended by SIGSEGV"),
        (WorkerEndedError(1, "terminate: std::bad_alloc"), "ended with status 1: terminate"),
    ],
)
def test_worker_that_dies_costs_only_its_arm(tmp_path, stub, end, reason):
    made = stub(end)
    arms = measure(tmp_path)
    tome = arms["tome"]
    assert tome.status == "error" and reason in tome.reason and tome.seconds == []
    assert arms["plain"].seconds == [0.5, 1.5, 2.5]
    (first, *_), (second, *_) = made.calls
    plain, failed = second.arms  # the incomplete round is timed again
    assert plain.seconds == [0.5] and (plain.macs, plain.peak_memory_bytes) == (10, 20)
    assert failed.status == "error" and first.arms[1].status == "planned"


def test_a_worker_that_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "run", killed)
    with pytest.raises(WorkerEndedError, match="SIGKILL"):
        list(worker_messages(None, SimpleNamespace(threads=3), tmp_path, []))  # without a case


def test_killed_run_continues_and_repeats_no_round(tmp_path, stub, monkeypatch):
    def store(stub, programs):
        (programs / "program").mkdir(exist_ok=True)
        return ()

    made, output = stub(KeyboardInterrupt(), store), tmp_path / "new" / "speed.json"
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path)
    assert [path.name for path in output.parent.iterdir()] == [".speed.json.cache"]
    arms = measure(tmp_path, command="bench, continued")
    first, second = (programs for _, programs, _ in made.calls)
    assert first == second and first.is_relative_to(output.with_name(".speed.json.cache"))
    assert [case.arms[0].seconds for case, *_ in made.calls] == [[], [0.5]]
    assert arms["plain"].seconds == arms["tome"].seconds == [0.5, 1.5, 2.5]
    assert json.loads(output.read_text())["command"] == "bench"
    assert [path.name for path in output.parent.iterdir()] == ["speed.json"]


def messages_of(case, rounds, tmp_path):
    """What the real worker sends, in this process: to start one takes seconds."""
    messages = []
    worker.measure_case(lambda message: messages.append(copy.deepcopy(message)), case, Timing(rounds), tmp_path)
    return messages


def test_arm_that_fails_costs_no_other_arm(tmp_path, monkeypatch):
    """In the real worker: ToMe, the reference of both, has no memory; both fails later."""
    compute, passes, timed = EagerBackend.output, [], []

    def output(self, arm):
        passes.append(arm.pass_name)
        if arm.config and arm.attention == "plain":
            raise MemoryError("(ResourceExhausted) Fail to alloc")
        return compute(self, arm)

    def seconds(self, arm):
        timed.append(arm)
        if arm.attention == "slicing" and timed.count(arm) == 2:
            raise ValueError("no such luck")
        return 1.0

    monkeypatch.setattr(EagerBackend, "output", output)
    monkeypatch.setattr(EagerBackend, "seconds", seconds)
    *_, measured = messages_of(make("plain", "tome", "both"), 2, tmp_path)
    plain, tome, both = measured.arms
    memory = ("error", "check: MemoryError: (ResourceExhausted) Fail to alloc")
    assert (tome.status, tome.reason) == memory and passes.count(tome.name) == 1
    assert (both.status, both.reason) == ("error", "round 2: ValueError: no such luck")
    assert (plain.status, plain.seconds) == ("measured", [1.0, 1.0]) and plain.peak_memory_bytes > 0
    assert both.parity is None


def test_arms_take_turns_in_another_order_in_each_round(tmp_path, monkeypatch):
    monkeypatch.setattr(EagerBackend, "seconds", lambda self, arm: 1.0)
    case, orders = make("plain", "memory-efficient", "tome"), []
    for _ in range(2):
        timed = [m for m in messages_of(copy.deepcopy(case), 6, tmp_path) if isinstance(m, tuple) and "round" in m[1]]
        orders.append([[name for name, step in timed if step == f"round {index}"] for index in range(1, 7)])
        assert [step for _, step in timed] == [f"round {index}" for index in range(1, 7) for _ in case.arms]
    assert all(sorted(order) == sorted(arm.name for arm in case.arms) for order in orders[0])
    assert orders[0] == orders[1] and len({*map(tuple, orders[0])}) > 2


CHANGES = {"sources": "0" * 16, "versions": {"python": "2.7"}, "describe_environment": {"machine": "another"}}


@pytest.mark.parametrize("name", ["timing", "cases", "model_files", *CHANGES])
def test_an_incomplete_result_of_something_else_is_not_continued(tmp_path, stub, monkeypatch, capsys, name):
    changed = {"timing": Timing(4), "cases": cases(batch=3)}
    stub(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path)
    if name not in changed:
        monkeypatch.setattr(runner, name, lambda *_: CHANGES.get(name, "retrained"))
    made = stub(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, **{name: changed[name]} if name in changed else {})
    assert made.calls[0][0].arms[0].seconds == []
    assert "an incomplete result of other cases, models, settings, versions or code" in capsys.readouterr().err
    monkeypatch.undo()
    made = stub()
    measure(tmp_path)
    assert made.calls[0][0].arms[0].seconds == [0.5], "the first one is there until a run completes"
