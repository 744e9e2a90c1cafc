"""A bounded queue for engines: compatible jobs share a pipeline call, and abandoned jobs are dropped."""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from math import ceil, inf
from time import monotonic

from PIL.Image import Image

from ..errors import ExportChangedError, ParameterError, ToMeError
from .engine import Engine
from .jobs import (
    MAX_LOST_ENGINES,
    AbandonedError,
    EngineLostError,
    GenerationError,
    Job,
    JobError,
    Limits,
)
from .prometheus import Metrics
from .tickets import (
    Call,
    Progress,
    QueueFullError,
    RequestProgress,
    State,
    Ticket,
    UnavailableError,
    gather,
    wait_time,
)

logger = logging.getLogger(__name__)
MAX_BATCH_WAIT = 60.0  # seconds for a batch to fill
MAX_FAILURES = 5  # images in a row that failed because of the model, after which the process is unhealthy
SCALE_UP_SECONDS = 10.0  # waiting time of an image after which another engine is loaded
SCALE_DOWN_SECONDS = 600.0  # idle time of an engine after which it is ended, if it is not needed


class ImageQueue:
    """A queue, and a thread for each engine, which loads and runs it.

    Args:
        load: makes an engine; called once in each thread, and again if its engine is lost.
        name: the model's name for clients.
        limits: the jobs that are accepted.
        capacity: largest number of waiting images; images in the pipeline do not count.
        max_batch: largest number of images in one pipeline call.
        batch_wait: seconds, 0 to 60, that the oldest job waits for others to share its call. Time that it spent in the
            queue during an earlier call counts.
        stuck_seconds: duration of a pipeline call after which the queue is unhealthy.
        min_engines, max_engines: number of engines. Another one is loaded when an image has waited for ten seconds and
            all engines run calls, one after the other. It is ended when it has been idle for ten minutes.

    Raises:
        ParameterError: a number is not allowed, or one request may ask for more images than the queue holds.
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        name: str,
        limits: Limits,
        capacity: int = 64,
        max_batch: int = 4,
        batch_wait: float = 0.02,
        stuck_seconds: float = 600.0,
        min_engines: int = 1,
        max_engines: int = 1,
    ) -> None:
        if max_batch < 1:
            raise ParameterError("max_batch", max_batch, "it must be 1 or more")
        if not 0 <= batch_wait <= MAX_BATCH_WAIT:
            raise ParameterError("batch_wait", batch_wait, f"it must be 0 to {MAX_BATCH_WAIT:g} s")
        if not 0 < stuck_seconds < inf:
            raise ParameterError("stuck_seconds", stuck_seconds, "it must be positive and finite")
        if capacity < limits.images:
            raise ParameterError("capacity", capacity, f"one request may ask for {limits.images} images")
        if min_engines < 1:
            raise ParameterError("min_engines", min_engines, "it must be 1 or more")
        if max_engines < min_engines:
            raise ParameterError("max_engines", max_engines, f"it must be {min_engines} or more")
        self.name, self.limits, self.metrics = name, limits, Metrics()
        self._load, self._capacity, self._min_engines = load, capacity, min_engines
        self._max_batch, self._batch_wait, self._stuck_seconds = max_batch, batch_wait, stuck_seconds
        self._changed = threading.Condition()  # guards all attributes below
        self.state: State = "loading"  # jobs are accepted only while "ready"; "failed" is permanent
        self._waiting: list[Ticket] = []  # oldest first, without those whose client has gone
        self._calls: list[Call] = []  # oldest first
        self._reserved = 0  # places of jobs whose image is being decoded
        self.is_closed = False
        self._pace = 0.0  # seconds per cost of the latest calls
        self._failures = 0  # in a row
        self._has_changed = False  # whether the export is not the one that was loaded
        self.failure: BaseException | None = None  # why the state is "failed"
        self._engines: list[Engine] = []  # loaded, and not known to be lost; oldest first
        # Attributes that all engines share, copied from the first engine, which may go away.
        self.sampler = ""  # the scheduler's name in Stable Diffusion's user interfaces, once an engine is loaded
        self.methods: Mapping[float, str] = {}  # how tokens merge, in words, by ratio
        self._threads = [
            threading.Thread(target=self._work, args=(number >= min_engines,), name=f"images-{number}")
            for number in range(max_engines)
        ]
        self._busy_threads = min_engines  # those that load or run an engine
        self._spare_threads = max_engines - min_engines  # those that wait until they are needed
        self.metrics.waiting.set_function(lambda: len(self._waiting))
        self.metrics.running.set_function(lambda: self.progress().running)
        self.metrics.ready.set_function(lambda: self.state == "ready")
        self.metrics.program_loads.set_function(lambda: sum(getattr(e, "program_loads", 0) for e in [*self._engines]))

    def start(self) -> None:
        """Start the threads, which load their engines; after the first one `state` becomes "ready"."""
        for thread in self._threads:
            thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether there is no accepted job."""
        with self._changed:  # a batch moves from one list to the other
            return not (self._waiting or self._calls or self._reserved)

    @property
    def unhealthy_reason(self) -> str | None:
        """The reason to replace the process; None while it works."""
        if self._has_changed:
            return "the files of the model have changed since it was loaded"
        if self.state == "failed":
            return "the model could not be loaded, or the image thread has ended"
        if (seconds := self.progress().seconds) > self._stuck_seconds:
            return f"one pipeline call has been running for {seconds:.0f} s"
        return f"the last {self._failures} images failed" if self._failures >= MAX_FAILURES else None

    def progress(self) -> Progress:
        """The current progress."""
        with self._changed:
            return Progress.of(self._calls, len(self._waiting))

    def wait_seconds(self) -> float:
        """The estimated seconds until no image waits any more; 0 if none waits, or before anything is known."""
        with self._changed:
            images = len(self._waiting)
            return wait_time(images, self._waiting, self._calls, self._max_batch, self._pace) if images else 0.0

    def count_tokens(self, prompt: str) -> tuple[int, int, str]:
        """See `Engine.count_tokens`. If an engine is lost, another one counts and it is replaced.

        Raises:
            UnavailableError: no engine is loaded now.
        """
        for engine in [*self._engines]:
            try:
                return engine.count_tokens(prompt)
            except (EngineLostError, AbandonedError):
                self._remove(engine)
        raise UnavailableError("no engine is loaded at the moment", retry_after=5)

    async def submit(
        self, jobs: Sequence[Job], load_image: Callable[[], Image] | None, progress: RequestProgress
    ) -> list[Image]:
        """Generate the images of all jobs or of none. Cancelling the call abandons the jobs and frees their places.

        Args:
            jobs: of one request; without their image if `load_image` is given.
            load_image: decodes the image that all jobs start from. It is called once, in a thread, after the jobs
                have their places and before the pipeline runs.
            progress: a new one; it is updated from other threads.

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
        progress.images = len(jobs)
        arrived = monotonic()
        tickets = [Ticket(job, progress, arrived) for job in jobs]
        futures = [ticket.future for ticket in tickets]
        for ticket in tickets:
            ticket.future.add_done_callback(self._leave)  # without the ticket: a cycle would keep the image in memory
        with self._changed:
            if self.state == "failed" or self.is_closed:
                raise UnavailableError(f"the server is not ready: {self.state}", retry_after=5)
            self._set_waiting([*self._waiting, *tickets])
            self._changed.notify_all()
        try:
            return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))
        finally:
            for future in futures:
                future.cancel()

    def drain(self) -> None:
        """Refuse all further jobs; accepted jobs are finished."""
        with self._changed:
            if self.state != "failed":
                self.state = "draining"

    def close(self, seconds: float | None = None) -> bool:
        """Abandon all jobs at the next step and wait for the threads; returns whether they ended in time."""
        with self._changed:
            self.drain()
            self.is_closed = True
            for ticket in (*self._waiting, *(ticket for call in self._calls for ticket in call.tickets)):
                ticket.future.cancel()
            self._changed.notify_all()
        end = None if seconds is None else monotonic() + seconds
        for thread in self._threads:
            if thread.is_alive():
                thread.join(None if end is None else max(0.0, end - monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def check_ready(self) -> None:
        """Raise UnavailableError unless jobs are accepted."""
        if self.state == "draining":
            raise UnavailableError("the server is shutting down", retry_after=10)
        if self.state != "ready":
            raise UnavailableError(f"the server is not ready: {self.state}", retry_after=5)

    def _reserve(self, images: int) -> None:
        """Reserve places for images until the image that they start from is decoded."""
        with self._changed:
            self.check_ready()
            missing = len(self._waiting) + self._reserved + images - self._capacity
            if missing > 0:
                message = f"{len(self._waiting)} images wait, and the queue holds {self._capacity}"
                seconds = wait_time(missing, self._waiting, self._calls, self._max_batch, self._pace)
                raise QueueFullError(message, max(1, ceil(seconds)))
            self._reserved += images

    def _work(self, is_temporary: bool) -> None:
        """A thread: load an engine, run batch after batch until closed, and load another engine if it is lost."""
        try:
            while not self.is_closed and (not is_temporary or self._wait_until_needed()):
                engine = self._load()
                self._add(engine)
                try:
                    self._run(engine, SCALE_DOWN_SECONDS if is_temporary else inf)
                except EngineLostError as lost:
                    logger.error("an engine was lost and is replaced: %s", lost)
                finally:
                    self._remove(engine)
                del engine  # ends its process, if it has one
                if is_temporary:
                    with self._changed:
                        self._busy_threads -= 1
                        self._spare_threads += 1
        except BaseException as error:
            if self.is_closed:
                return
            self._note_change(error)
            logger.error("an image thread has ended: %s", error, exc_info=not isinstance(error, ToMeError))
            with self._changed:
                self._busy_threads -= 1
                # Before the first engine is loaded, the spare threads would fail too.
                if not self._busy_threads and not (self._spare_threads and self.state == "ready"):
                    self.state, self.failure = "failed", error
                    for ticket in self._waiting:
                        ticket.fail(error)
                self._changed.notify_all()

    def _wait_until_needed(self) -> bool:
        """Block until another engine is needed, and return True; return False if the queue was closed.

        It is needed if an image has waited more than SCALE_UP_SECONDS and no other thread will take it, because all
        run calls: one that loads an engine or a program, or waits for images to fill its batch, will. It is also
        needed if a thread has ended because it could not replace its engine.
        """
        with self._changed:
            while not self.is_closed:
                is_late = self._waiting and monotonic() - self._waiting[0].arrived > SCALE_UP_SECONDS
                all_run = self._busy_threads <= len(self._calls)
                if (is_late and all_run) or (self.state == "ready" and self._busy_threads < self._min_engines):
                    self._busy_threads += 1
                    self._spare_threads -= 1
                    return True
                self._changed.wait(1.0)
        return False

    def _add(self, engine: Engine) -> None:
        """Record that an engine is loaded."""
        with self._changed:
            self._engines.append(engine)
            self.sampler, self.methods = engine.sampler, engine.methods
            if not engine.can_batch:
                self._max_batch = 1
            if self.state == "loading":
                self.state = "ready"

    def _remove(self, engine: Engine) -> None:
        """Record that an engine is lost or was ended. The thread that runs it replaces it if it is lost."""
        with self._changed:
            if engine in self._engines:
                self._engines.remove(engine)
                self._changed.notify_all()

    def _run(self, engine: Engine, max_idle_seconds: float) -> None:
        """Run call after call until the queue is closed, or the engine is not needed after `max_idle_seconds` idle."""
        loads = True  # whether there are programs to load, which happens while no image waits
        while True:
            if call := self._next_call(engine, 0.0 if loads else max_idle_seconds):
                self._generate(engine, call)
            elif self.is_closed or (not loads and self._busy_threads > self._min_engines):
                return
            elif loads:
                loads = engine.load_next()

    def _next_call(self, engine: Engine, idle_seconds: float) -> Call | None:
        """Wait for the next call and mark it as running; None if the queue was closed, or idle for `idle_seconds`."""
        with self._changed:
            until = monotonic() + idle_seconds
            while True:
                if engine not in self._engines:
                    raise EngineLostError("its process has ended")
                if self._waiting:
                    batch, is_open = gather(self._waiting, self._max_batch)
                    patience = batch[0].arrived + self._batch_wait - monotonic()
                    if not is_open or patience <= 0 or self.state == "draining":
                        for ticket in batch:
                            ticket.progress.position = 0
                        self._set_waiting([ticket for ticket in self._waiting if ticket not in batch])
                        call = Call(batch, batch[0].job.steps_to_run, monotonic())
                        self._calls.append(call)
                        return call
                    self._changed.wait(patience)
                elif self.is_closed or monotonic() >= until:
                    return None
                else:
                    self._changed.wait(None if idle_seconds == inf else until - monotonic())

    def _generate(self, engine: Engine, call: Call) -> None:
        """Run a call and deliver its images.

        If its engine is lost, or it fails and had several jobs, they wait again and then run alone.

        Raises:
            EngineLostError: the engine is lost.
        """
        tickets = call.tickets
        jobs = [ticket.job for ticket in tickets]
        try:
            images = engine.generate(jobs, lambda *step: call.advance(*step or (0, call.steps)))
            self._deliver(call, images)
        except AbandonedError as error:
            for ticket in tickets:  # already cancelled, unless the engine stopped by itself
                ticket.fail(error)
        except EngineLostError:
            for ticket in tickets:
                ticket.lost_engines += 1
                if ticket.lost_engines == MAX_LOST_ENGINES:
                    ticket.fail(GenerationError(f"{MAX_LOST_ENGINES} engines died with this job"))
            self._repeat(tickets)
            raise
        except Exception as error:
            self._note_change(error)
            if not isinstance(error, JobError):
                logger.exception("generating %d images failed", len(tickets))
            if len(tickets) > 1:
                self._repeat(tickets)
            else:
                tickets[0].fail(error)
                if not isinstance(error, JobError):
                    self._check_model(engine, jobs[0])
        except BaseException as error:
            for ticket in tickets:
                ticket.fail(error)
            raise
        finally:
            with self._changed:
                self._calls.remove(call)

    def _note_change(self, error: BaseException) -> None:
        """Record an error that stays until the process is replaced, even if programs in memory still generate."""
        if isinstance(error, ExportChangedError):
            self._has_changed = True

    def _deliver(self, call: Call, images: Sequence[Image]) -> None:
        """Record the pace and the duration of a call that has ended, and hand over its images."""
        seconds = call.seconds
        pace = seconds / call.cost
        with self._changed:
            self._failures, self._pace = 0, (pace + (self._pace or pace)) / 2
        self.metrics.batch_seconds.observe(seconds)
        self.metrics.batch_images.observe(len(images))
        call.deliver(images, seconds)

    def _repeat(self, tickets: Sequence[Ticket]) -> None:
        """Put tickets that are not done back, to run alone, in front of all that may share a call."""
        with self._changed:
            for ticket in tickets:
                ticket.runs_alone = True
            self._set_waiting([*(ticket for ticket in tickets if not ticket.future.done()), *self._waiting])
            self._changed.notify_all()

    def _check_model(self, engine: Engine, job: Job) -> None:
        """Count a failure if the model fails on a plain job too, so that no client can make /health fail."""
        # Few steps, but as many as any scheduler needs: it has those of the job.
        plain = Job("", job.height, job.width, job.ratio, seed=0, steps=min(job.steps, 4))
        failures = 0
        try:
            engine.generate([plain], lambda *step: self.is_closed)
        except EngineLostError:
            raise
        except Exception:
            failures = self._failures + 1
        with self._changed:
            self._failures = failures

    def _leave(self, future: "Future[Image]") -> None:
        """Count the outcome of a job, and free its place if it still waits."""
        outcome = "abandoned" if future.cancelled() else "failed" if future.exception() else "generated"
        self.metrics.images.labels(outcome).inc()
        with self._changed:
            if any(ticket.future is future for ticket in self._waiting):
                self._set_waiting([ticket for ticket in self._waiting if ticket.future is not future])

    def _set_waiting(self, tickets: list[Ticket]) -> None:
        self._waiting = tickets
        for position, ticket in enumerate(tickets, 1):
            ticket.progress.position = position
