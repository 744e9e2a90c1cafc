"""A bounded queue for one engine: compatible jobs share a pipeline call, and abandoned jobs are dropped."""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass, field
from math import ceil, inf, prod
from time import monotonic

from PIL.Image import Image

from ..errors import ToMeConfigError, ToMeError
from ..generation.engine import Engine
from ..generation.jobs import AbandonedError, GenerationError, Job, JobError, Limits
from .prometheus import Metrics
from .service import Progress, RequestProgress, State, with_image
from .service_errors import DrainingError, JobFailedError, NotReadyError, QueueFullError

logger = logging.getLogger(__name__)
LONGEST_WAIT = 60.0  # seconds for a batch to fill
FAILURES = 5  # images in a row that failed by the model's fault, after which it counts as broken


@dataclass(frozen=True, eq=False)
class _Ticket:
    """A job in the queue or in the pipeline. Its future is cancelled when no client waits for the image any more."""

    job: Job
    progress: RequestProgress  # of its request
    future: "Future[Image]" = field(default_factory=Future)
    arrived: float = field(default_factory=monotonic)


class ImageQueue:
    """The service of one process: a queue, and a thread that loads and runs the engine.

    Args:
        load: makes the engine; called once, in the thread.
        name: the model's name for clients.
        limits: the jobs that are accepted.
        capacity: most images that wait; images in the pipeline do not count.
        largest_batch: most images in one pipeline call.
        batch_wait: seconds, 0 to 60, that the oldest job waits for others to share its call. Time that it spent in the
            queue during an earlier call counts.
        metrics: counts images.
        stuck_seconds: duration of a pipeline call after which `trouble` reports it.

    Raises:
        ToMeConfigError: a number is not allowed, or one request may ask for more images than the queue holds.
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        name: str,
        limits: Limits,
        capacity: int = 64,
        largest_batch: int = 4,
        batch_wait: float = 0.02,
        metrics: Metrics | None = None,
        stuck_seconds: float = 600.0,
    ) -> None:
        if largest_batch < 1 or not 0 <= batch_wait <= LONGEST_WAIT:
            raise ToMeConfigError(
                f"{largest_batch=}, {batch_wait=} is not allowed: they must be 1 or more, and 0 to {LONGEST_WAIT:g} s"
            )
        if not 0 < stuck_seconds < inf:
            raise ToMeConfigError(f"{stuck_seconds=} is not allowed: it must be positive and finite")
        if capacity < limits.images:
            raise ToMeConfigError(f"{capacity=} is not allowed: one request may ask for {limits.images} images")
        self.name, self.limits, self.metrics = name, limits, metrics or Metrics()
        self._load, self._capacity = load, capacity
        self._largest_batch, self._batch_wait, self._stuck_seconds = largest_batch, batch_wait, stuck_seconds
        self._changed = threading.Condition()  # guards all attributes below
        self._state: State = "loading"
        self._waiting: list[_Ticket] = []
        self._running: list[_Ticket] = []
        self._running_since: float | None = None
        self._step = 0, 0  # finished and all steps of the current call
        self._reserved = 0  # places of jobs whose image is being decoded
        self._is_closed = False
        self._pace: dict[tuple[float, ...], float] = {}  # seconds per step, by _kind; the latest is last
        self._failures = 0  # in a row
        self.failure: BaseException | None = None  # why the state is "failed"
        self._engine: Engine | None = None
        self._thread = threading.Thread(target=self._work, name="images")
        self.metrics.waiting.set_function(lambda: self._count_live())
        self.metrics.running.set_function(lambda: len(self._running))
        self.metrics.ready.set_function(lambda: self._state == "ready")

    def start(self) -> None:
        """Start the thread, which loads the engine; then `state` becomes "ready"."""
        self._thread.start()

    @property
    def state(self) -> State:
        return self._state

    @property
    def sampler(self) -> str:
        return self._engine.sampler if self._engine else "not loaded"

    @property
    def methods(self) -> Mapping[float, str]:
        return self._engine.methods if self._engine else {}

    @property
    def is_idle(self) -> bool:
        """Whether there is no accepted job."""
        return not self._count_live() and not self._running and not self._reserved

    @property
    def running_since(self) -> float | None:
        """When the current pipeline call began, by time.monotonic(); None if none runs."""
        return self._running_since

    @property
    def trouble(self) -> str | None:
        """See `Service`."""
        if self._state == "failed":
            return "the model could not be loaded, or the image thread has ended"
        if (seconds := self.progress().seconds) > self._stuck_seconds:
            return f"one pipeline call has been running for {seconds:.0f} s"
        return f"the last {self._failures} images failed" if self._failures >= FAILURES else None

    def progress(self) -> Progress:
        """See `Service`."""
        with self._changed:
            if self._running_since is None:
                return Progress(waiting=self._count_live())
            return Progress(len(self._running), self._count_live(), *self._step, monotonic() - self._running_since)

    async def submit(
        self,
        jobs: Sequence[Job],
        load_image: Callable[[], Image] | None = None,
        progress: RequestProgress | None = None,
    ) -> list[Image]:
        """See `Service`."""
        self._reserve(len(jobs))
        try:
            jobs = await with_image(jobs, load_image)
        finally:
            with self._changed:
                self._reserved -= len(jobs)
        futures = self._enqueue(jobs, progress or RequestProgress())
        try:
            return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))
        finally:
            for future in futures:
                future.cancel()

    def drain(self) -> None:
        """Refuse all further jobs; accepted jobs are finished."""
        with self._changed:
            if self._state != "failed":
                self._state = "draining"

    def close(self, seconds: float | None = None) -> bool:
        """Abandon all jobs at the next step and wait for the thread; returns whether it ended in time."""
        with self._changed:
            self.drain()
            self._is_closed = True
            for ticket in (*self._waiting, *self._running):
                ticket.future.cancel()
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _reserve(self, images: int) -> None:
        """Reserve places for images until the image that they start from is decoded."""
        with self._changed:
            if self._state == "draining":
                raise DrainingError("the server is shutting down", retry_after=10)
            if self._state != "ready":
                raise NotReadyError(f"the server is not ready: {self._state}", retry_after=5)
            self._forget_abandoned()
            missing = len(self._waiting) + self._reserved + images - self._capacity
            if missing > 0:
                message = f"{len(self._waiting)} images wait, and the queue holds {self._capacity}"
                raise QueueFullError(message, max(1, ceil(self._seconds_until_free(missing))))
            self._reserved += images

    def _seconds_until_free(self, images: int) -> float:
        """The estimated time until this many waiting images have left the queue, by the latest seconds per step."""
        running, waiting = self.progress(), self._waiting
        if running.step:
            pace = running.seconds / running.step
            self._pace.setdefault(_kind(self._running[0].job, running.running), pace)
        else:
            pace = self._step_seconds(self._running) if running.running else 0.0
        seconds = pace * (running.steps - running.step)
        while waiting and images > len(batch := self._gather(waiting)[0]):
            images -= len(batch)
            seconds += self._step_seconds(batch) * batch[0].job.steps_to_run
            waiting = [ticket for ticket in waiting if ticket not in batch]
        return seconds

    def _step_seconds(self, batch: list[_Ticket]) -> float:
        """Seconds per step of a batch: measured, or in proportion to the pixels of another kind; 0 without any."""
        kind = _kind(batch[0].job, len(batch))
        measured = kind if kind in self._pace else next(reversed(self._pace), kind)
        return self._pace.get(measured, 0.0) * prod(kind[:3]) / prod(measured[:3])

    def _enqueue(self, jobs: Sequence[Job], progress: RequestProgress) -> "list[Future[Image]]":
        progress.images = len(jobs)
        tickets = [_Ticket(job, progress) for job in jobs]
        with self._changed:
            if self._state == "failed" or self._is_closed:
                raise NotReadyError(f"the server is not ready: {self._state}", retry_after=5)
            self._set_waiting([*self._waiting, *tickets])
            self._changed.notify_all()
        return [ticket.future for ticket in tickets]

    def _work(self) -> None:
        """The thread: load the engine, then run batch after batch until closed."""
        try:
            self._engine = self._load()
            with self._changed:
                if self._state == "loading":
                    self._state = "ready"
            while batch := self._next_batch():
                self._draw(batch)
                with self._changed:
                    self._running, self._running_since = [], None
        except BaseException as error:
            logger.error("the image thread has ended: %s", error, exc_info=not isinstance(error, ToMeError))
            with self._changed:
                self._state, self.failure = "failed", error
                for ticket in (*self._waiting, *self._running):
                    _fail(ticket, error)
                self._waiting, self._running = [], []

    def _next_batch(self) -> list[_Ticket]:
        """Wait for the next batch and mark it as running; an empty one if the queue was closed."""
        with self._changed:
            while True:
                self._forget_abandoned()
                if self._waiting:
                    batch, is_open = self._gather(self._waiting)
                    patience = batch[0].arrived + self._batch_wait - monotonic()
                    if not is_open or patience <= 0 or self._state == "draining":
                        for ticket in batch:
                            ticket.progress.position = 0
                        self._set_waiting([ticket for ticket in self._waiting if ticket not in batch])
                        self._running = batch
                        return batch
                    self._changed.wait(patience)
                elif self._is_closed:
                    return []
                else:
                    self._changed.wait()

    def _gather(self, waiting: list[_Ticket]) -> tuple[list[_Ticket], bool]:
        """The oldest job and those that share its call, and whether more could."""
        assert self._engine is not None
        oldest = waiting[0]
        key = self._engine.batch_key(oldest.job)
        if key is None:
            return [oldest], False
        compatible = [ticket for ticket in waiting if self._engine.batch_key(ticket.job) == key]
        return compatible[: self._largest_batch], len(compatible) < self._largest_batch

    def _draw(self, batch: list[_Ticket]) -> None:
        """Run a batch and deliver its images. If it fails, run job by job, so that one does not fail the others."""
        assert self._engine is not None
        live = [ticket for ticket in batch if not ticket.future.cancelled()]
        self.metrics.images.labels("abandoned").inc(len(batch) - len(live))
        if not live:
            return
        job = live[0].job
        requests = {id(ticket.progress): ticket.progress for ticket in live}
        shares = Counter(id(ticket.progress) for ticket in live)  # images of each request

        def should_stop(step: int = 0, steps: int = job.steps_to_run) -> bool:
            self._step = step, steps
            for key, progress in requests.items():
                progress.count(step, steps, shares[key])
            return all(ticket.future.cancelled() for ticket in live)

        with self._changed:
            self._step, self._running_since = (0, job.steps_to_run), monotonic()
        start = self._running_since
        try:
            images = self._engine.generate([ticket.job for ticket in live], should_stop)
        except AbandonedError:
            self.metrics.images.labels("abandoned").inc(len(live))
        except Exception as error:
            if not isinstance(error, JobError):
                logger.exception("generating %d images failed", len(live))
            if len(live) > 1:
                for ticket in live:
                    self._draw([ticket])
            else:
                self.metrics.images.labels("failed").inc()
                _fail(live[0], error if isinstance(error, JobError) else self._attribute(job, error))
        else:
            seconds, kind = monotonic() - start, _kind(job, len(live))
            with self._changed:
                self._failures = 0
                pace = seconds / max(1, self._step[1])
                self._pace[kind] = pace + 0.5 * (self._pace.pop(kind, pace) - pace)
            self.metrics.batch_seconds.observe(seconds)
            self.metrics.batch_images.observe(len(live))
            for key, progress in requests.items():
                progress.seconds, progress.batch = progress.seconds + seconds, len(live)
                progress.generated += shares[key]
            for ticket, image in zip(live, images, strict=True):
                is_wanted = ticket.future.set_running_or_notify_cancel()
                self.metrics.images.labels("drawn" if is_wanted else "abandoned").inc()
                if is_wanted:
                    ticket.future.set_result(image)

    def _attribute(self, job: Job, error: Exception) -> GenerationError:
        """The error for the client, a JobFailedError if its job is the cause, and not the model.

        Only the model's failures count, or any client could make /health ask for another process.
        """
        assert self._engine is not None
        plain = Job("", job.height, job.width, job.ratio, seed=0, steps=2)
        try:
            self._engine.generate([plain], lambda *step: self._is_closed)
        except Exception:
            self._failures += 1
            return _for_client(error)
        self._failures = 0
        return JobFailedError(str(_for_client(error)))

    def _count_live(self) -> int:
        with self._changed:
            self._forget_abandoned()
            return len(self._waiting)

    def _forget_abandoned(self) -> None:
        live = [ticket for ticket in self._waiting if not ticket.future.cancelled()]
        self.metrics.images.labels("abandoned").inc(len(self._waiting) - len(live))
        self._set_waiting(live)

    def _set_waiting(self, tickets: list[_Ticket]) -> None:
        self._waiting = tickets
        for position, ticket in enumerate(tickets, 1):
            ticket.progress.position = position


def _for_client(error: BaseException) -> GenerationError:
    if isinstance(error, GenerationError):
        return error
    # Other messages may be confidential.
    return GenerationError("the pipeline failed; the server's log has the reason")


def _fail(ticket: _Ticket, error: BaseException) -> None:
    error = error if isinstance(error, JobError) else _for_client(error)
    if not ticket.future.done() and ticket.future.set_running_or_notify_cancel():
        ticket.future.set_exception(error)


def _kind(job: Job, images: int) -> tuple[float, ...]:
    """What a step's duration depends on: images, height, width, ratio, whether there is guidance, the second pass."""
    second = () if job.second_pass is None else astuple(job.second_pass)
    return images, job.height, job.width, job.ratio, job.guidance_scale > 1, *second
