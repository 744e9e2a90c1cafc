"""The pool loads, scales, replaces and watches its engines. Its calls come from a stand-in for the queue."""

import threading
from math import inf, nan
from time import monotonic
from types import SimpleNamespace

import pytest
from serving_support import FakeEngine, until

from ppdiffusers_tome import ToMeConfigError
from ppdiffusers_tome.errors import ExportChangedError, ParameterError
from ppdiffusers_tome.run.manifest import Size
from ppdiffusers_tome.serving import pool as pool_module
from ppdiffusers_tome.serving.jobs import AbandonedError, EngineLostError, GenerationError, Job, JobError
from ppdiffusers_tome.serving.pool import EnginePool
from ppdiffusers_tome.serving.prometheus import Metrics
from ppdiffusers_tome.serving.tickets import UnavailableError

JOB = Job("fox", Size(64, 64), 0.5, seed=0, steps=2)


class Call:
    """A call, and what has become of it."""

    def __init__(self, *jobs):
        self.jobs = self.tickets = [*jobs] or [JOB]
        self.outcomes = []

    def advance(self, step, steps):
        return False

    @property
    def is_done(self):
        return bool(self.outcomes)


class Calls:
    """The calls that a test gives, in place of a `JobQueue`. Repeated calls run again at once."""

    def __init__(self):
        self._changed = threading.Condition()
        self.waiting, self.running, self.events = [], [], []
        self.oldest_wait, self.oldest_call = 0.0, None
        self.idle = []  # the times that engines were idle

    def give(self, *calls):
        with self._changed:
            self.waiting += calls
            self._changed.notify_all()
        return calls[0]

    def next_call(self, idle_seconds=inf, is_over=lambda: False):
        with self._changed:
            end = monotonic() + idle_seconds
            while "closed" not in self.events and not is_over():
                if self.waiting:
                    self.running.append(self.waiting.pop(0))
                    return self.running[-1]
                if monotonic() >= end:
                    self.idle.append(idle_seconds)
                    return None
                self._changed.wait(min(0.01, max(0.0, end - monotonic())))
        return None

    def _end(self, call, outcome):
        self.running.remove(call)
        call.outcomes.append(outcome)

    def deliver(self, call, images):
        self._end(call, len(images))

    def fail(self, call, error):
        self._end(call, error)

    def repeat(self, call, engine_lost=False):
        self._end(call, "lost" if engine_lost else "repeated")
        if call.outcomes.count("lost") < 3:
            self.give(*(Call(job) for job in call.jobs) if len(call.jobs) > 1 else [call])

    @property
    def running_calls(self):
        return len(self.running)

    def open(self, can_batch):
        self.events.append(("open", can_batch))

    def refuse(self, reason):
        self.events.append(reason)

    def close(self, error=None):
        self.events.append("closed")
        self.wake()

    def wake(self):
        with self._changed:
            self._changed.notify_all()


class MortalEngine(FakeEngine):
    """Is lost with each job whose prompt says so, and when its attribute is set."""

    is_lost = False

    def generate(self, jobs, should_stop=None):
        if self.is_lost or any(job.prompt == "die" for job in jobs):
            raise EngineLostError("its process has ended")
        return super().generate(jobs, should_stop)

    def count_tokens(self, prompt):
        if self.is_lost:
            raise EngineLostError("its process has ended")
        return super().count_tokens(prompt)


@pytest.fixture
def start():
    """A function that starts a pool; all are closed at the end. `pool.made` has its engines so far."""
    pools = []

    def start(load=MortalEngine, **options):
        made = []

        def load_and_note(is_unwanted):
            number = len(made)
            made.append(None)
            made[number] = load()
            return made[number]

        pool = EnginePool(load_and_note, Calls(), metrics := Metrics(), **options)
        pool.made, pool.metrics = made, metrics
        pools.append(pool)
        pool.start()
        return pool

    yield start
    for pool in pools:
        for engine in filter(None, pool.made):
            engine.gate.set()
        assert pool.close(60)


def run(pool, *jobs):
    """Give one call, and return its last outcome when it has one."""
    call = pool.queue.give(Call(*jobs))
    until(lambda: call.is_done and call not in [*pool.queue.waiting, *pool.queue.running])
    return call.outcomes[-1]


def is_ready(pool):
    return pool.state == "ready"


def prompt(text):
    return Job(text, Size(64, 64), 0.5, seed=0, steps=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("stuck_seconds", seconds) for seconds in (0.0, inf, nan)), ("min_engines", 0), ("max_engines", 0)],
)
def test_numbers_that_are_not_allowed_are_named(name, value):
    with pytest.raises(ParameterError, match=f"^{name}={value} is not allowed: it must be "):
        EnginePool(FakeEngine, Calls(), Metrics(), **{name: value})


@pytest.mark.parametrize("can_batch", [True, False])
def test_the_queue_opens_when_the_first_engine_is_loaded(start, can_batch):
    may_load = threading.Event()

    def load():
        assert may_load.wait(20)
        engine = MortalEngine()
        engine.can_batch = can_batch
        return engine

    pool = start(load)
    assert pool.state == "loading" and pool.queue.events == [] and pool.unhealthy_reason is None
    with pytest.raises(UnavailableError, match="no engine is loaded"):
        pool.count_tokens("fox")
    may_load.set()
    until(lambda: is_ready(pool))
    assert pool.queue.events == [("open", can_batch)] and run(pool) == 1
    assert pool.count_tokens("a red fox")[0] == 5
    pool.drain()
    assert pool.state == "draining" and pool.queue.events[1:] == ["the server is shutting down"]


def test_engines_run_at_the_same_time(start):
    pool = start(min_engines=2, max_engines=2)
    until(lambda: len(list(filter(None, pool.made))) == 2)
    for engine in pool.made:
        engine.gate.clear()
    calls = [Call() for _ in range(3)]
    pool.queue.give(*calls)
    until(lambda: pool.queue.running_calls == 2)
    pool.made[0].gate.set()  # it takes the third one too
    until(lambda: sum(call.is_done for call in calls) == 2)
    pool.made[1].gate.set()
    until(lambda: all(call.is_done for call in calls))
    assert [len(engine.calls) for engine in pool.made] == [2, 1]


def test_images_come_before_programs(start):
    engine = MortalEngine()
    first, second = engine.programs = [threading.Event(), threading.Event()]
    pool = start(lambda: engine)
    until(lambda: is_ready(pool))
    call = pool.queue.give(Call())
    first.set()
    until(lambda: call.is_done)
    assert engine.programs == [second]
    second.set()
    until(lambda: not engine.programs)
    engine.program_loads = 2
    assert pool.metrics.registry.get_sample_value("ppdiffusers_tome_program_loads") == 2


def test_a_program_that_cannot_be_loaded_ends_the_pool(start):
    class DamagedEngine(MortalEngine):
        def load_next(self):
            raise ToMeConfigError("unet_64x64.onnx is damaged")

    pool = start(DamagedEngine)
    until(lambda: pool.state == "failed")
    assert "is damaged" in str(pool.failure) and pool.queue.events[-1] == "closed"
    assert "could not be loaded" in pool.unhealthy_reason


# Failures


def test_a_failed_call_is_repeated_job_by_job(start):
    """A job that still fails is checked against a plain one, so that no client can make /health fail."""
    pool = start()
    call = pool.queue.give(Call(prompt("fox"), prompt("explode")))
    until(lambda: call.is_done and not pool.queue.waiting and not pool.queue.running)
    assert call.outcomes == ["repeated"]
    assert isinstance(run(pool, prompt("damaged")), GenerationError)
    for _ in range(6):
        assert isinstance(run(pool, prompt("explode")), RuntimeError)
    until(lambda: pool.made[0].calls[-1][0].prompt == "")
    check = pool.made[0].calls[-1][0]
    assert (check.size, check.ratio, check.steps) == (JOB.size, 0.5, 2) and pool.unhealthy_reason is None


def test_failures_of_the_model_in_a_row_are_unhealthy(start):
    class Broken(MortalEngine):
        is_broken = True

        def generate(self, jobs, should_stop=None):
            if self.is_broken:
                raise RuntimeError("secret reason")
            return super().generate(jobs, should_stop)

    pool = start(Broken)
    for failures in range(5):
        assert pool.unhealthy_reason is None, failures
        run(pool)
    until(lambda: pool.unhealthy_reason == "the last 5 images failed")
    pool.made[0].is_broken = False
    run(pool)
    until(lambda: pool.unhealthy_reason is None)


@pytest.mark.parametrize("error", [JobError("steps", "there is no such schedule"), AbandonedError("stopped")])
def test_what_is_no_failure_is_not_checked(start, error):
    class Refusing(MortalEngine):
        def generate(self, jobs, should_stop=None):
            self.calls.append(jobs)
            raise error

    pool = start(Refusing)
    assert run(pool) is error and len(pool.made[0].calls) == 1
    if isinstance(error, AbandonedError):
        assert run(pool, JOB, JOB) is error, "an engine that stops unasked answers all jobs"


def test_a_call_that_takes_too_long_is_unhealthy(start):
    pool = start(stuck_seconds=600)
    pool.queue.oldest_call = SimpleNamespace(seconds=600)
    assert pool.unhealthy_reason is None
    pool.queue.oldest_call = SimpleNamespace(seconds=601)
    assert pool.unhealthy_reason == "one pipeline call has been running for 601 s"


def test_an_export_that_has_changed_stays_unhealthy(start):
    class Replaced(MortalEngine):
        def generate(self, jobs, should_stop=None):
            if jobs[0].ratio == 0:
                raise ExportChangedError("unet.onnx has changed")
            return super().generate(jobs, should_stop)

    pool = start(Replaced)
    run(pool, Job("fox", Size(64, 64), 0.0, seed=0, steps=1))
    assert run(pool) == 1 and "have changed" in pool.unhealthy_reason


def test_a_thread_that_ends_answers_its_call(start):
    class Dying(MortalEngine):
        def generate(self, jobs, should_stop=None):
            raise SystemExit

    pool = start(Dying)
    assert isinstance(run(pool), SystemExit)
    until(lambda: pool.state == "failed")
    assert isinstance(pool.failure, SystemExit)


# Lost engines


def test_lost_engines_are_replaced(start):
    pool = start()
    until(lambda: is_ready(pool))
    pool.made[0].is_lost = True
    assert run(pool) == 1 and len(pool.made) == 2
    assert run(pool, prompt("die")) == "lost" and pool.unhealthy_reason is None
    assert run(pool) == 1 and len(pool.made) == 5, "three died with the job"


def test_an_engine_that_is_lost_while_the_model_is_checked_is_no_failure(start):
    class DiesLater(MortalEngine):
        def generate(self, jobs, should_stop=None):
            if len(self.calls) == 1:  # the check of the model, after the job that has failed
                raise EngineLostError("its process has ended")
            return super().generate(jobs, should_stop)

    pool = start(DiesLater)
    assert isinstance(run(pool, prompt("explode")), RuntimeError)
    until(lambda: len(pool.made) == 2)
    assert pool._failures == 0


def test_tokens_are_counted_by_an_engine_that_lives(start):
    pool = start(min_engines=2, max_engines=2)
    until(lambda: len(list(filter(None, pool.made))) == len(pool._engines) == 2)
    pool._engines[0].is_lost = True
    assert pool.count_tokens("a red fox")[0] == 5, "by the other engine"
    until(lambda: len(pool.made) == 3)  # it was replaced, though no image has met it


def test_a_replacement_that_does_not_load_leaves_the_other_engines(start):
    pool = start(min_engines=2, max_engines=2)
    until(lambda: len(pool._engines) == 2)
    first, second = pool._engines
    pool._load = lambda is_unwanted: 1 / 0
    first.is_lost = True
    with pytest.raises(ZeroDivisionError):
        pool._load(None)
    pool.count_tokens("fox")
    until(lambda: pool._busy_threads == 1)
    assert run(pool) == 1 and is_ready(pool)
    second.is_lost = True
    pool.queue.give(Call())
    until(lambda: pool.state == "failed")


# Scaling


@pytest.fixture
def quick(monkeypatch):
    """Spare threads look a hundred times a second."""
    monkeypatch.setattr(pool_module, "POLL_SECONDS", 0.01)


def settle(pool):
    """Wait until the spare threads have looked twice."""
    waits, wait = [], pool._changed.wait
    pool._changed.wait = lambda seconds: waits.append(1) or wait(seconds)
    until(lambda: len(waits) >= 2 * max(1, pool._spare_threads) + 1)


def test_one_late_image_loads_one_engine_at_a_time(start, quick):
    may_load = [threading.Event() for _ in range(5)]
    may_load[0].set()
    order = iter(may_load)

    def load():
        assert next(order).wait(60)
        engine = MortalEngine()
        engine.gate.clear()
        return engine

    pool = start(load, max_engines=5)
    until(lambda: is_ready(pool))
    pool.queue.oldest_wait = pool_module.SCALE_UP_SECONDS + 1
    settle(pool)
    assert len(pool.made) == 1, "the engine that is idle will take the image"
    pool.queue.give(Call())
    until(lambda: len(pool.made) == 2)
    settle(pool)
    assert len(pool.made) == 2, "the engine that loads will take the image"
    pool.queue.give(Call())
    may_load[1].set()
    until(lambda: len(pool.made) == 3)
    pool.queue.oldest_wait = 0.0
    pool.queue.give(Call())
    may_load[2].set()
    until(lambda: pool.queue.running_calls == 3)
    settle(pool)
    assert len(pool.made) == 3, "no image is late"


def test_an_idle_engine_is_ended_except_the_last(start, quick, monkeypatch):
    monkeypatch.setattr(pool_module, "SCALE_DOWN_SECONDS", 0.05)
    pool = start(max_engines=2)
    until(lambda: is_ready(pool))
    pool.made[0].gate.clear()
    call = pool.queue.give(Call())
    pool.queue.oldest_wait = pool_module.SCALE_UP_SECONDS + 1
    until(lambda: len(pool.made) == 2)
    pool.queue.oldest_wait = 0.0
    pool.made[0].gate.set()
    until(lambda: call.is_done and pool._engines == pool.made[:1])
    assert run(pool) == 1


def test_the_last_engine_is_not_ended(start, quick, monkeypatch):
    """Not even one of a spare thread, after the threads that always have one could not load it."""
    monkeypatch.setattr(pool_module, "SCALE_DOWN_SECONDS", 0.01)
    tried = []

    def load():
        tried.append(1)
        if len(tried) == 2:
            raise ToMeConfigError("no room for this engine")
        return MortalEngine()

    pool = start(load, min_engines=2, max_engines=3)
    until(lambda: len(tried) == 3 and pool.queue.idle.count(0.01) >= 5)
    assert run(pool) == 1 and len(pool._engines) == 2


@pytest.mark.parametrize("number", [1, 2])
def test_a_model_that_cannot_be_loaded_is_not_tried_by_spare_threads(start, number):
    def load():
        raise ToMeConfigError("no such model")

    pool = start(load, min_engines=number, max_engines=4)
    until(lambda: pool.state == "failed")
    assert "no such model" in str(pool.failure) and len(pool.made) == number
    assert pool.queue.events[-2:] == ["the server is not ready: failed", "closed"]


@pytest.mark.parametrize("failing_loads", [1, 9])
def test_a_spare_thread_takes_over_from_one_that_cannot_replace_its_engine(start, quick, failing_loads):
    """If no thread can, the pool has failed."""
    tried = []

    def load():
        tried.append(1)
        if 1 < len(tried) <= 1 + failing_loads:
            raise ToMeConfigError("no room for this engine")
        return MortalEngine()

    pool = start(load, max_engines=3)
    until(lambda: is_ready(pool))
    pool.made[0].is_lost = True
    pool.queue.give(call := Call())
    if failing_loads == 1:
        until(lambda: call.outcomes[-1:] == [1])
        assert len(tried) == 3 and pool.unhealthy_reason is None
    else:
        until(lambda: pool.state == "failed")
        assert len(tried) == 4, "the first one, and one try of each thread"


def test_closing_does_not_wait_for_an_engine_that_is_stuck():
    engine = MortalEngine()
    pool = EnginePool(lambda is_unwanted: engine, Calls(), Metrics())
    pool.start()
    engine.gate.clear()
    pool.queue.give(Call())
    until(lambda: pool.queue.running_calls == 1)
    assert not pool.close(0.05)
    engine.gate.set()
    assert pool.close(60)


def test_an_engine_that_loads_is_told_when_the_pool_is_closed():
    loading = threading.Event()

    def load(is_unwanted):
        loading.set()
        until(is_unwanted)
        raise AbandonedError("the engine was stopped")

    pool = EnginePool(load, Calls(), Metrics())
    pool.start()
    assert loading.wait(20) and pool.close(60)
    assert pool.failure is None
