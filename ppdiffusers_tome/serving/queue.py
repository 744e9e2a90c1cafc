"""A bounded queue before one engine: jobs that agree are drawn together, and what nobody waits for is dropped."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from math import ceil
from time import monotonic

from PIL.Image import Image

from ..errors import ToMeConfigError
from .engine import Engine
from .errors import AbandonedError, DrainingError, DrawingError, NotReadyError, QueueFullError
from .jobs import Job, Limits
from .metrics import Metrics
from .service import Progress, State

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Ticket:
    """A job that waits or is drawn. Its future is cancelled when nobody wants the picture any more."""

    job: Job
    future: "Future[Image]" = field(default_factory=Future)
    arrived: float = field(default_factory=monotonic)


class PictureQueue:
    """The service of one process: a queue, and one thread that loads the engine and does all its work.

    Args:
        load: makes the engine; called once, in the thread.
        name: what clients call the model.
        limits: which jobs are taken.
        capacity: how many pictures may wait; those being drawn do not count.
        largest_batch: most pictures in one pipeline call.
        batch_wait: seconds that the oldest job waits for others to be drawn with. One that has waited that long
            already, because another batch was being drawn, does not wait again.

    Raises:
        ToMeConfigError: a number is not positive, or one request may ask for more pictures than may wait.
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
    ) -> None:
        if largest_batch < 1 or batch_wait < 0:
            raise ToMeConfigError(f"{largest_batch=}, {batch_wait=}: at least 1 and at least 0 seconds are allowed")
        if capacity < limits.images:
            raise ToMeConfigError(f"{capacity=} is not allowed: one request may ask for {limits.images} pictures")
        self.name, self.limits, self.metrics = name, limits, metrics or Metrics()
        self._load, self._capacity = load, capacity
        self._largest_batch, self._batch_wait = largest_batch, batch_wait
        self._changed = threading.Condition()  # guards all that follows
        self._state: State = "loading"
        self._waiting: list[_Ticket] = []
        self._running: list[_Ticket] = []
        self._running_since: float | None = None
        self._reserved = 0  # places for images whose start image is being decoded
        self._is_closed = False
        self._batch_seconds = 1.0  # of late, to tell how long a full queue takes
        self._engine: Engine | None = None
        self._thread = threading.Thread(target=self._work, name="pictures")
        self.metrics.waiting.set_function(lambda: self._count_live())
        self.metrics.running.set_function(lambda: len(self._running))
        self.metrics.ready.set_function(lambda: self._state == "ready")

    def start(self) -> None:
        """Start the thread, which loads the engine; `state` tells when it is ready."""
        self._thread.start()

    @property
    def state(self) -> State:
        return self._state

    @property
    def sampler(self) -> str:
        return self._engine.sampler if self._engine else "not loaded"

    @property
    def is_idle(self) -> bool:
        """Whether no accepted job is left."""
        return not self._count_live() and not self._running and not self._reserved

    @property
    def running_since(self) -> float | None:
        """When the batch that is drawn now was begun, by time.monotonic(); None while nothing is drawn."""
        return self._running_since

    @property
    def trouble(self) -> str | None:
        """See `Service`."""
        return "the model could not be loaded, or drawing has ended" if self._state == "failed" else None

    def progress(self) -> Progress:
        """See `Service`."""
        since = self._running_since
        seconds = 0.0 if since is None else monotonic() - since
        return Progress(len(self._running), self._count_live(), seconds=seconds)

    async def submit(self, jobs: Sequence[Job], load_image: Callable[[], Image] | None = None) -> list[Image]:
        """See `Service`."""
        self._reserve(len(jobs))
        try:
            if load_image is not None:
                image = await asyncio.to_thread(load_image)
                jobs = [replace(job, image=image) for job in jobs]
        finally:
            with self._changed:
                self._reserved -= len(jobs)
        futures = self._enqueue(jobs)
        try:
            return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))
        finally:
            for future in futures:
                future.cancel()

    def drain(self) -> None:
        """Refuse all further jobs; what was accepted is finished."""
        with self._changed:
            if self._state != "failed":
                self._state = "draining"

    def close(self) -> None:
        """Abandon what is left, at the next step, and wait for the thread to end."""
        with self._changed:
            self.drain()
            self._is_closed = True
            for ticket in (*self._waiting, *self._running):
                ticket.future.cancel()
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _reserve(self, images: int) -> None:
        """Hold places for so many images while the image that they start from is decoded."""
        with self._changed:
            if self._state == "draining":
                raise DrainingError("the server is shutting down", retry_after=10)
            if self._state != "ready":
                raise NotReadyError(f"the server is not ready: {self._state}", retry_after=5)
            self._forget_abandoned()
            if len(self._waiting) + self._reserved + images > self._capacity:
                batches = ceil(len(self._waiting) / self._largest_batch)
                retry_after = min(60, max(1, ceil(batches * self._batch_seconds)))
                raise QueueFullError(
                    f"{len(self._waiting)} pictures wait, and the queue holds {self._capacity}", retry_after
                )
            self._reserved += images

    def _enqueue(self, jobs: Sequence[Job]) -> "list[Future[Image]]":
        tickets = [_Ticket(job) for job in jobs]
        with self._changed:
            if self._state == "failed" or self._is_closed:
                raise NotReadyError(f"the server is not ready: {self._state}", retry_after=5)
            self._waiting += tickets
            self._changed.notify_all()
        return [ticket.future for ticket in tickets]

    def _work(self) -> None:
        """The thread: load, then draw batch after batch until closed."""
        try:
            self._engine = self._load()
            with self._changed:
                if self._state == "loading":
                    self._state = "ready"
            while batch := self._take():
                self._draw(batch)
                with self._changed:
                    self._running, self._running_since = [], None
        except BaseException:
            logger.exception("the thread that draws has ended")
            with self._changed:
                self._state = "failed"
                for ticket in (*self._waiting, *self._running):
                    _fail(ticket)
                self._waiting, self._running = [], []

    def _take(self) -> list[_Ticket]:
        """Wait for the next batch, which is then running; an empty one when the queue was closed."""
        with self._changed:
            while True:
                self._forget_abandoned()
                if self._waiting:
                    batch, is_open = self._gather()
                    patience = batch[0].arrived + self._batch_wait - monotonic()
                    if not is_open or patience <= 0 or self._state == "draining":
                        self._waiting = [ticket for ticket in self._waiting if ticket not in batch]
                        self._running, self._running_since = batch, monotonic()
                        return batch
                    self._changed.wait(patience)
                elif self._is_closed:
                    return []
                else:
                    self._changed.wait()

    def _gather(self) -> tuple[list[_Ticket], bool]:
        """The oldest job and those that may be drawn with it, and whether more could be."""
        assert self._engine is not None
        oldest = self._waiting[0]
        key = self._engine.batch_key(oldest.job)
        if key is None:
            return [oldest], False
        agreeing = [ticket for ticket in self._waiting if self._engine.batch_key(ticket.job) == key]
        return agreeing[: self._largest_batch], len(agreeing) < self._largest_batch

    def _draw(self, batch: list[_Ticket]) -> None:
        """Draw a batch and hand out its pictures; where that fails, job by job, so that one does not fail others."""
        assert self._engine is not None
        live = [ticket for ticket in batch if not ticket.future.cancelled()]
        self.metrics.pictures.labels("abandoned").inc(len(batch) - len(live))
        if not live:
            return
        start = monotonic()
        try:
            images = self._engine.generate(
                [ticket.job for ticket in live], lambda: all(ticket.future.cancelled() for ticket in live)
            )
        except AbandonedError:
            self.metrics.pictures.labels("abandoned").inc(len(live))
        except Exception:
            logger.exception("drawing %d pictures failed", len(live))
            if len(live) > 1:
                for ticket in live:
                    self._draw([ticket])
            else:
                self.metrics.pictures.labels("failed").inc()
                _fail(live[0])
        else:
            seconds = monotonic() - start
            self._batch_seconds += 0.2 * (seconds - self._batch_seconds)
            self.metrics.batch_seconds.observe(seconds)
            self.metrics.batch_pictures.observe(len(live))
            for ticket, image in zip(live, images, strict=True):
                is_wanted = ticket.future.set_running_or_notify_cancel()
                self.metrics.pictures.labels("drawn" if is_wanted else "abandoned").inc()
                if is_wanted:
                    ticket.future.set_result(image)

    def _count_live(self) -> int:
        with self._changed:
            self._forget_abandoned()
            return len(self._waiting)

    def _forget_abandoned(self) -> None:
        live = [ticket for ticket in self._waiting if not ticket.future.cancelled()]
        self.metrics.pictures.labels("abandoned").inc(len(self._waiting) - len(live))
        self._waiting = live


def _fail(ticket: _Ticket) -> None:
    if not ticket.future.done() and ticket.future.set_running_or_notify_cancel():
        ticket.future.set_exception(DrawingError("drawing failed; the log of the server has the reason"))
