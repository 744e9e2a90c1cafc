"""A bounded queue of jobs: compatible ones share a pipeline call, and those that no client waits for are dropped.

It knows no engine and starts no thread. Whoever has an engine takes the next call, and hands over its images.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from math import inf
from time import monotonic

from PIL import Image

from ..errors import ParameterError
from .jobs import MAX_LOST_ENGINES, GenerationError, Job
from .prometheus import Metrics
from .tickets import Call, Progress, QueueFullError, Ticket, UnavailableError, next_batch

MAX_BATCH_WAIT = 60.0  # seconds for a batch to fill
LOADING = "the server is not ready: loading"


class JobQueue:
    """Waiting jobs and running calls. Jobs are refused until `open`. All methods but `submit` may run in any thread.

    Args:
        metrics: counts the images.
        capacity: largest number of waiting images; images in a call do not count.
        max_batch: largest number of images in one pipeline call.
        batch_wait: seconds, 0 to 60, that the oldest job waits for further jobs to share its call. Time that it spent
            in the queue during an earlier call counts.

    Raises:
        ParameterError: a number is not allowed.
    """

    def __init__(self, metrics: Metrics, capacity: int = 64, max_batch: int = 4, batch_wait: float = 0.02) -> None:
        if max_batch < 1:
            raise ParameterError("max_batch", max_batch, "it must be 1 or more")
        if not 0 <= batch_wait <= MAX_BATCH_WAIT:
            raise ParameterError("batch_wait", batch_wait, f"it must be 0 to {MAX_BATCH_WAIT:g} s")
        self.capacity = capacity
        self._metrics, self._max_batch, self._batch_wait = metrics, max_batch, batch_wait
        self._changed = threading.Condition()  # guards all attributes below
        self._waiting: list[Ticket] = []  # oldest first, without those whose client has gone
        self._calls: list[Call] = []  # oldest first
        self._reserved = 0  # places of jobs whose image is being decoded
        self._refusal: str | None = LOADING  # why jobs are refused, while they are
        self._is_closed = False  # accepted jobs are not generated any more
        metrics.waiting.set_function(lambda: self.waiting)
        metrics.running.set_function(lambda: self.running)

    # Admission

    def open(self, can_batch: bool = True) -> None:
        """Accept jobs; without `can_batch` each has a call of its own."""
        with self._changed:
            self._refusal = None
            self._max_batch = self._max_batch if can_batch else 1

    def refuse(self, reason: str) -> None:
        """Refuse all further jobs; accepted jobs are still generated, and wait no longer for their batch to fill."""
        with self._changed:
            self._refusal = reason
            self._changed.notify_all()

    def close(self, error: BaseException | None = None) -> None:
        """Abandon all jobs, or let them fail with the error, and end `next_call`. `refuse` comes before it."""
        with self._changed:
            self._is_closed = True
            tickets = [*self._waiting, *(ticket for call in self._calls for ticket in call.tickets)]
            self._changed.notify_all()
        for ticket in tickets:
            if error is None:
                ticket.future.cancel()
            else:
                ticket.fail(error)

    async def submit(
        self,
        jobs: Sequence[Job],
        load_image: Callable[[], Image.Image] | None = None,
        on_accepted: Callable[[list[Ticket]], object] = lambda tickets: None,
    ) -> list[Image.Image]:
        """Generate the images of all jobs or of none. Cancelling the call abandons the jobs and frees their places.

        Args:
            jobs: of a request; without their image if `load_image` is given.
            load_image: decodes the image that all jobs start from. It is called once, in a thread, after the jobs
                have their places and before the pipeline runs.
            on_accepted: called with the jobs' tickets, which show their progress, when the jobs are accepted.

        Returns:
            The images, in the order of the jobs.

        Raises:
            UnavailableError: the jobs are not accepted now; a QueueFullError if there is no room for them.
            JobError: from `load_image`, or the model's scheduler does not support the number of steps.
            GenerationError: the pipeline failed on one of the jobs.
        """
        self._reserve(len(jobs))
        try:
            if load_image is not None:
                image = await asyncio.to_thread(load_image)
                jobs = [replace(job, image=image) for job in jobs]
        finally:
            with self._changed:
                self._reserved -= len(jobs)
        tickets = self._add(jobs)
        try:
            on_accepted(tickets)
            return list(await asyncio.gather(*(asyncio.wrap_future(ticket.future) for ticket in tickets)))
        finally:
            for ticket in tickets:
                ticket.future.cancel()

    def _reserve(self, images: int) -> None:
        """Reserve places for images until the image that they start from is decoded."""
        with self._changed:
            if self._refusal is not None:
                raise UnavailableError(self._refusal)
            taken = len(self._waiting) + self._reserved
            if taken + images > self.capacity:
                raise QueueFullError(f"{taken} images wait, and the queue holds {self.capacity}")
            self._reserved += images

    def _add(self, jobs: Sequence[Job]) -> list[Ticket]:
        """Let accepted jobs wait."""
        arrived = monotonic()
        tickets = [Ticket(job, arrived) for job in jobs]
        for ticket in tickets:
            ticket.future.add_done_callback(self._leave)  # without the ticket: a cycle would keep the image in memory
        with self._changed:
            if self._is_closed:
                raise UnavailableError(self._refusal or LOADING)
            self._set_waiting([*self._waiting, *tickets])
            self._changed.notify_all()
        return tickets

    def _leave(self, future: "Future[Image.Image]") -> None:
        """Count the outcome of a job, and free its place if it still waits."""
        outcome = "abandoned" if future.cancelled() else "failed" if future.exception() else "generated"
        self._metrics.images.labels(outcome).inc()
        with self._changed:
            if any(ticket.future is future for ticket in self._waiting):
                self._set_waiting([ticket for ticket in self._waiting if ticket.future is not future])

    # Calls

    def next_call(self, idle_seconds: float = inf, is_over: Callable[[], bool] = lambda: False) -> Call | None:
        """Wait for the next call, which then counts as running until `deliver`, `repeat` or `fail`.

        Args:
            idle_seconds: how long to wait for a job.
            is_over: asked before each wait, and after `wake`; when it returns True, there is no call.

        Returns:
            None if no job came, if the queue was closed, or if `is_over`.
        """
        with self._changed:
            until = monotonic() + idle_seconds
            while not self._is_closed and not is_over():
                if self._waiting:
                    tickets, is_open = next_batch(self._waiting, self._max_batch)
                    patience = tickets[0].arrived + self._batch_wait - monotonic()
                    if not is_open or patience <= 0 or self._refusal is not None:
                        return self._begin(tickets)
                    self._changed.wait(patience)
                elif monotonic() >= until:
                    return None
                else:
                    self._changed.wait(None if idle_seconds == inf else until - monotonic())
        return None

    def wake(self) -> None:
        """Let all waits of `next_call` ask `is_over`."""
        with self._changed:
            self._changed.notify_all()

    def _begin(self, tickets: list[Ticket]) -> Call:
        call = Call(tickets, Progress(len(tickets), tickets[0].job.steps_to_run, monotonic()))
        for ticket in tickets:
            ticket.place, ticket.progress = 0, call.progress
        self._set_waiting([ticket for ticket in self._waiting if ticket not in tickets])
        self._calls.append(call)
        return call

    def deliver(self, call: Call, images: Sequence[Image.Image]) -> None:
        """Hand over the images of a call."""
        call.progress.end()
        self._metrics.batch_seconds.observe(call.progress.seconds)
        self._metrics.batch_images.observe(len(images))
        for ticket, image in zip(call.tickets, images, strict=True):
            if ticket.future.set_running_or_notify_cancel():
                ticket.future.set_result(image)
        self._end(call)

    def repeat(self, call: Call, engine_lost: bool = False) -> None:
        """Let the jobs of a call wait again, in front of all jobs that wait. Each then has a call of its own.

        A job with which MAX_LOST_ENGINES engines were lost fails.
        """
        for ticket in call.tickets:
            ticket.runs_alone = True
            ticket.lost_engines += engine_lost
            if ticket.lost_engines == MAX_LOST_ENGINES:
                ticket.fail(GenerationError(f"{MAX_LOST_ENGINES} engines died with this job"))
        with self._changed:
            self._end(call)
            self._set_waiting([*(ticket for ticket in call.tickets if not ticket.future.done()), *self._waiting])
            self._changed.notify_all()

    def fail(self, call: Call, error: BaseException) -> None:
        """Let the jobs of a call fail, except those that were abandoned."""
        for ticket in call.tickets:
            ticket.fail(error)
        self._end(call)

    def _end(self, call: Call) -> None:
        with self._changed:
            self._calls.remove(call)

    # Progress

    @property
    def is_idle(self) -> bool:
        """Whether there is no job: none waits, runs, or has its image decoded."""
        with self._changed:
            return not (self.accepted or self._reserved)

    @property
    def accepted(self) -> int:
        """The number of images that wait or run."""
        with self._changed:  # a batch moves between two lists
            return self.waiting + self.running

    @property
    def waiting(self) -> int:
        """The number of images that wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """The number of images in the pipeline."""
        with self._changed:
            return sum(len(call.tickets) for call in self._calls)

    @property
    def running_calls(self) -> int:
        """The number of calls that run."""
        return len(self._calls)

    @property
    def oldest_call(self) -> Progress | None:
        """The progress of the call that has been running longest; None if none runs."""
        with self._changed:
            return self._calls[0].progress if self._calls else None

    @property
    def oldest_wait(self) -> float:
        """Seconds since the oldest waiting job arrived; 0 if none waits."""
        with self._changed:
            return monotonic() - self._waiting[0].arrived if self._waiting else 0.0

    def _set_waiting(self, tickets: list[Ticket]) -> None:
        self._waiting = tickets
        for place, ticket in enumerate(tickets, 1):
            ticket.place = place
