"""The queue keeps places, order, batches and waiting times of jobs. There is no thread and no engine."""

import asyncio
import threading
from contextlib import contextmanager
from dataclasses import replace
from math import nan

import pytest
from PIL import Image
from serving_support import Clock, until

from ppdiffusers_tome.errors import ParameterError
from ppdiffusers_tome.run.sizes import Size
from ppdiffusers_tome.serving import queue as queue_module
from ppdiffusers_tome.serving import tickets
from ppdiffusers_tome.serving.jobs import GenerationError, Job, JobError
from ppdiffusers_tome.serving.prometheus import Metrics
from ppdiffusers_tome.serving.queue import JobQueue
from ppdiffusers_tome.serving.tickets import QueueFullError, UnavailableError

JOB = Job("fox", Size(64, 64), 0.5, seed=0, steps=2)
START = Image.new("RGB", (64, 64))


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(queue_module, "monotonic", clock)
    monkeypatch.setattr(tickets, "monotonic", clock)
    return clock


def make(**options):
    """An open queue, which does not wait for its batches to fill."""
    queue = JobQueue(Metrics(), **{"batch_wait": 0, **options})
    queue.open()
    return queue


def images_of(call):
    return [Image.new("RGB", (8, 8), (job.seed, 0, 0)) for job in call.jobs]


@contextmanager
def requests(queue):
    """A function that submits jobs in an event loop that runs while it is called; abandons what is left at the end."""
    loop, tasks = asyncio.new_event_loop(), []

    def submit(*jobs, **options):
        tasks.append(loop.create_task(queue.submit(jobs, **options)))
        turn()
        return tasks[-1]

    async def steps():
        for _ in range(20):  # a task goes on in the next turn of its loop
            await asyncio.sleep(0)

    def turn():
        """Let the tasks run until all wait, for an image to be decoded too: `until` waits for what follows that."""
        loop.run_until_complete(steps())

    submit.turn = turn
    submit.until = lambda condition: until(lambda: turn() or condition())
    try:
        yield submit
    finally:
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()


def counted(queue, outcome):
    return queue._metrics.registry.get_sample_value("ppdiffusers_tome_images_total", {"outcome": outcome})


@pytest.mark.parametrize(
    ("name", "value"), [("max_batch", 0), *(("batch_wait", seconds) for seconds in (-0.1, 61.0, nan))]
)
def test_numbers_that_are_not_allowed_are_named(name, value):
    with pytest.raises(ParameterError, match=f"^{name}={value} is not allowed: it must be "):
        JobQueue(Metrics(), **{name: value})


def test_only_compatible_jobs_share_a_call():
    queue = make(max_batch=4)
    others = [{"steps": 3}, {"guidance_scale": 2.0}, {"size": Size(48, 64)}, {"ratio": 0.0}]
    with requests(queue) as submit:
        submit(*(replace(JOB, seed=seed) for seed in range(3)))
        for change in others:
            submit(replace(JOB, seed=10, **change))
        submit(*(replace(JOB, seed=seed) for seed in (20, 21)))
        calls = [queue.next_call(0) for _ in range(6)]
        assert [[job.seed for job in call.jobs] for call in calls] == [[0, 1, 2, 20], [10], [10], [10], [10], [21]]
        assert queue.next_call(0) is None and queue.running_calls == 6


def test_jobs_from_an_image_and_of_an_engine_that_cannot_batch_run_alone():
    for can_batch, image in ((True, START), (False, None)):
        queue = JobQueue(Metrics(), batch_wait=60)
        queue.open(can_batch)
        with requests(queue) as submit:
            load_image = (lambda: START) if image else None
            submit(JOB, replace(JOB, seed=1), load_image=load_image)
            submit.until(lambda queue=queue: queue.waiting == 2)
            assert [len(queue.next_call(0).jobs) for _ in range(2)] == [1, 1]


def test_oldest_job_waits_at_most_batch_wait(clock):
    """The time in which it waits is not slept: the clock moves, and whoever waits is woken."""
    queue, asked = make(batch_wait=5), []

    def is_over():  # after the first wait, which `wake` ends here
        asked.append(clock.now)
        clock.now += 3
        queue.wake()
        return False

    with requests(queue) as submit:
        submit(JOB)
        queue._changed.wait = lambda seconds: asked.append(seconds)
        assert len(queue.next_call(0, is_over).jobs) == 1
        assert asked == [0, 2, 3], "it waits for the two seconds that are left of five"
        submit(*(replace(JOB, seed=seed) for seed in range(4)))
        assert len(queue.next_call(0).jobs) == 4, "a full batch does not wait"
        submit(JOB)
        queue.refuse("the server is shutting down")
        assert len(queue.next_call(0).jobs) == 1, "no other job comes while the server shuts down"


def test_places_are_those_of_waiting_images():
    queue = make(capacity=3)
    with requests(queue) as submit:
        running = submit(JOB)
        call = queue.next_call(0)
        waiting = submit(JOB, replace(JOB, steps=3))
        refused = submit(JOB, JOB)
        assert isinstance(refused.exception(), QueueFullError)
        assert "2 images wait, and the queue holds 3" in str(refused.exception())
        loaded = []
        full = submit(JOB, JOB, load_image=lambda: loaded.append(1))
        assert isinstance(full.exception(), QueueFullError) and not loaded, "an image is decoded when it has a place"
        waiting.cancel()
        submit.turn()
        assert not submit(JOB, JOB, JOB).done(), "places of abandoned jobs are free"
        assert counted(queue, "abandoned") == 2
        queue.deliver(call, images_of(call))
        submit.turn()
        assert running.result()[0].getpixel((0, 0)) == (0, 0, 0)


def test_an_image_that_is_decoded_has_its_place():
    queue, may_load = make(capacity=2), threading.Event()
    with requests(queue) as submit:
        decoding = submit(JOB, load_image=lambda: may_load.wait(20) and START)
        refused = submit(JOB, JOB).exception()
        assert isinstance(refused, QueueFullError) and "1 images wait" in str(refused) and not queue.is_idle
        assert queue.next_call(0) is None and not decoding.done()
        may_load.set()
        submit.until(lambda: queue.waiting)
        assert queue.next_call(0).jobs[0].image is START


def test_an_image_that_cannot_be_decoded_frees_its_place():
    queue = make(capacity=1)

    def broken():
        raise JobError("image", "it is broken")

    with requests(queue) as submit:
        for _ in range(2):
            failing = submit(JOB, load_image=broken)
            submit.until(failing.done)
            assert isinstance(failing.exception(), JobError)
        assert queue.is_idle and not submit(JOB).done()


def test_jobs_are_refused_until_it_opens_and_after_it_is_closed():
    queue = JobQueue(Metrics())
    with requests(queue) as submit:
        for change, message in (
            (lambda: None, "loading"),
            (lambda: (queue.open(), queue.refuse("the server is shutting down")), "shutting down"),
        ):
            change()
            error = submit(JOB).exception()
            assert isinstance(error, UnavailableError) and message in str(error)
        queue.open()

        def close():
            queue.refuse("the server is not ready: failed")
            queue.close()
            return START

        decoding = submit(JOB, load_image=close)
        submit.until(decoding.done)
        assert isinstance(decoding.exception(), UnavailableError), "while its image is decoded"


def test_closing_abandons_jobs_or_lets_them_fail():
    for error, outcome in ((None, "abandoned"), (OSError("a secret path"), "failed")):
        queue = make(max_batch=1)
        with requests(queue) as submit:
            both = submit(JOB, replace(JOB, seed=1))
            queue.next_call(0)
            queue.close(error)
            submit.turn()
            assert both.cancelled() or "the pipeline failed" in str(both.exception())
            assert counted(queue, outcome) == 2 and queue.next_call() is None


def test_what_a_call_becomes():
    """Its images, an error, or calls of each job alone, which come first; a job that costs three engines fails."""
    queue = make()
    with requests(queue) as submit:
        first, second = submit(JOB), submit(replace(JOB, seed=1))
        third = submit(replace(JOB, steps=9))
        queue.repeat(queue.next_call(0))
        for task, seed in ((first, 0), (second, 1)):
            call = queue.next_call(0)
            assert [job.seed for job in call.jobs] == [seed]
            queue.deliver(call, images_of(call))
            submit.turn()
            assert task.result()[0].getpixel((0, 0))[0] == seed
        queue.fail(queue.next_call(0), GenerationError("an image has values that are not finite"))
        submit.turn()
        assert "not finite" in str(third.exception())
        lost = submit(JOB)
        for _ in range(3):
            queue.repeat(queue.next_call(0), engine_lost=True)
        submit.turn()
        assert "3 engines died with this job" in str(lost.exception()) and queue.is_idle
        assert (counted(queue, "generated"), counted(queue, "failed")) == (2, 2)


def test_other_images_of_a_failed_request_are_abandoned():
    queue = make(max_batch=1)
    with requests(queue) as submit:
        three = submit(*(replace(JOB, seed=seed) for seed in range(3)))
        queue.fail(queue.next_call(0), RuntimeError("secret reason"))
        submit.turn()
        assert "secret" not in str(three.exception()) and queue.is_idle
        assert (counted(queue, "failed"), counted(queue, "abandoned")) == (1, 2)


def test_a_call_stops_when_no_client_waits_for_any_image():
    queue = make()
    with requests(queue) as submit:
        leaves, stays = submit(JOB), submit(replace(JOB, seed=1))
        call = queue.next_call(0)
        assert not call.advance(0, 2)
        leaves.cancel()
        submit.turn()
        assert not call.advance(1, 2), "it continues for the other client"
        queue.deliver(call, images_of(call))
        submit.turn()
        assert stays.result() and counted(queue, "abandoned") == 1
        submit(JOB).cancel()
        submit.turn()
        assert queue.next_call(0) is None, "an abandoned job never runs"


def test_next_call_ends_when_it_is_woken():
    queue = make()
    assert queue.next_call(is_over=lambda: True) is None


def test_what_waits_and_runs(clock):
    """The progress is that of the oldest call."""
    queue = make(max_batch=2)
    with requests(queue) as submit:
        assert (queue.running, queue.waiting, queue.oldest_call, queue.oldest_wait) == (0, 0, None, 0)
        submit(*(replace(JOB, steps=50, seed=seed) for seed in range(5)))
        oldest, newest = queue.next_call(0), queue.next_call(0)
        clock.now += 0.6
        oldest.advance(20, 50)
        newest.advance(10, 50)
        assert (queue.running, queue.waiting, queue.accepted, queue.running_calls) == (4, 1, 5, 2)
        progress = queue.oldest_call
        assert (progress.step, progress.steps, progress.seconds) == (20, 50, pytest.approx(0.6))
        assert queue.oldest_wait == pytest.approx(0.6)
        queue.deliver(oldest, images_of(oldest))
        assert queue.oldest_call is newest.progress and queue.accepted == 3


def test_progress_of_a_job(clock):
    """Its place, the steps of its call, and their duration without waiting."""
    queue, tickets = make(), []
    with requests(queue) as submit:
        submit(replace(JOB, steps=9))
        first = queue.next_call(0)
        submit(replace(JOB, steps=8))
        submit(replace(JOB, steps=3), on_accepted=tickets.extend)
        (ticket,) = tickets
        assert ticket.place == 2 and ticket.progress is None
        clock.now += 1000
        queue.deliver(first, images_of(first))
        queue.next_call(0)
        assert ticket.place == 1
        call, progress = queue.next_call(0), ticket.progress
        assert ticket.place == 0 and not call.advance(0, 3)
        for step in (1, 2, 3):
            clock.now += 0.5
            call.advance(step, 3)
            assert (progress.step, progress.steps) == (step, 3)
        queue.deliver(call, images_of(call))
        clock.now += 1000
        assert (progress.seconds, progress.images, progress.step_seconds) == (1.5, 1, [0.5, 0.5, 0.5])


def test_steps_that_an_engine_does_not_report_have_no_times():
    """An engine in another process is polled: it reports a step several times, or skips one."""
    queue, tickets = make(), []
    with requests(queue) as submit:
        submit(JOB, on_accepted=tickets.extend)
        call = queue.next_call(0)
        for step in (0, 0, 1, 2):
            call.advance(step, 4)
        call.advance(2, 4)
        queue.deliver(call, images_of(call))
        progress = tickets[0].progress
        assert progress.step_seconds == [] and progress.seconds > 0 and progress.step == 4


def test_jobs_that_are_refused_have_no_tickets():
    queue, tickets = make(capacity=1), []
    with requests(queue) as submit:
        assert submit(JOB, JOB, on_accepted=tickets.extend).exception() and not tickets
