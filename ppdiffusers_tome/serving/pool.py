"""Engines and their threads: each thread loads an engine, and generates the images of a queue's calls with it.

The number of engines follows the load. Engines that are lost are replaced.
"""

import logging
import threading
from math import inf
from time import monotonic

from ..errors import ExportChangedError, ParameterError, ToMeError
from .image_engine import ImageEngine, LoadEngine
from .jobs import AbandonedError, EngineLostError, Job, JobError
from .prometheus import Metrics
from .queue import JobQueue
from .tickets import Call, State, UnavailableError

logger = logging.getLogger(__name__)
MAX_FAILURES = 5  # images in a row that failed because of the model, after which the process is unhealthy
POLL_SECONDS = 1.0  # between two looks of a spare thread at whether it is needed
SCALE_UP_SECONDS = 10.0  # waiting time of an image after which a further engine is loaded
RETRY_SECONDS = 30.0  # after which an engine that could not be loaded is tried again, if there are further engines
SCALE_DOWN_SECONDS = 600.0  # idle time of an engine after which it is ended, if it is not needed


class EnginePool:
    """Engines for the calls of a queue, which accepts jobs as soon as the first engine is loaded.

    Args:
        load: makes an engine, which is wanted until the pool is closed; called once in each thread, and again if its
            engine is lost or cannot be loaded.
        queue: the calls.
        metrics: shows whether the pool is ready, and the programs that engines load.
        min_engines, max_engines: number of engines. A further engine is loaded when an image has waited for ten
            seconds and all engines run calls, one engine at a time. It is ended when it has been idle for ten minutes.
            An engine that cannot be loaded is tried again; the pool fails if it has no engine and no thread can load
            one.
        stuck_seconds: duration of a pipeline call after which the pool is unhealthy.

    Raises:
        ParameterError: a number is not allowed.
    """

    def __init__(
        self,
        load: LoadEngine,
        queue: JobQueue,
        metrics: Metrics,
        min_engines: int = 1,
        max_engines: int = 1,
        stuck_seconds: float = 600.0,
    ) -> None:
        if not 0 < stuck_seconds < inf:
            raise ParameterError("stuck_seconds", stuck_seconds, "it must be positive and finite")
        if min_engines < 1:
            raise ParameterError("min_engines", min_engines, "it must be 1 or more")
        if max_engines < min_engines:
            raise ParameterError("max_engines", max_engines, f"it must be {min_engines} or more")
        self._load, self.queue = load, queue
        self._min_engines, self._stuck_seconds = min_engines, stuck_seconds
        self._changed = threading.Condition()  # guards all attributes below
        self.state: State = "loading"
        self.failure: BaseException | None = None  # why the state is "failed"
        self.is_closed = False  # loading ends, and calls end at their next step
        self._engines: list[ImageEngine] = []  # loaded, and not known to be lost; oldest first
        self._failures_to_load = 0  # in a row, of engines or their programs
        self._next_load = 0.0  # by time.monotonic(); see RETRY_SECONDS
        self._failures = 0  # images in a row that failed because of the model
        self._has_changed = False  # whether the export is not the export that was loaded
        self._threads = [
            threading.Thread(target=self._work, args=(number >= min_engines,), name=f"images-{number}")
            for number in range(max_engines)
        ]
        self._busy_threads = min_engines  # those that load or run an engine
        self._spare_threads = max_engines - min_engines  # those that wait until they are needed
        metrics.ready.set_function(lambda: self.state == "ready")
        metrics.program_loads.set_function(lambda: sum(engine.program_loads for engine in [*self._engines]))

    def start(self) -> None:
        """Start the threads, which load their engines; after the first engine `state` becomes "ready"."""
        for thread in self._threads:
            thread.start()

    @property
    def engines(self) -> int:
        """The number of engines that are loaded."""
        return len(self._engines)

    @property
    def unhealthy_reason(self) -> str | None:
        """The reason to replace the process; None while it works."""
        if self._has_changed:
            return "the files of the model have changed since it was loaded"
        if self.state == "failed":
            return "the model could not be loaded, or the image thread has ended"
        call = self.queue.oldest_call
        if call is not None and call.seconds > self._stuck_seconds:
            return f"one pipeline call has been running for {call.seconds:.0f} s"
        return f"the last {self._failures} images failed" if self._failures >= MAX_FAILURES else None

    def count_tokens(self, prompt: str) -> tuple[int, int, str]:
        """See `ImageEngine.count_tokens`. A different engine counts in place of a lost engine, which is replaced.

        Raises:
            UnavailableError: no engine is loaded now.
        """
        for engine in [*self._engines]:
            try:
                return engine.count_tokens(prompt)
            except (EngineLostError, AbandonedError):
                self._remove(engine)
        raise UnavailableError("no engine is loaded at the moment")

    def drain(self) -> None:
        """Refuse all further jobs; accepted jobs are finished."""
        with self._changed:
            if self.state != "failed":
                self.state = "draining"
                self.queue.refuse("the server is shutting down")

    def close(self, seconds: float | None = None) -> bool:
        """Abandon all jobs at the next step and wait for the threads; returns whether they ended in time."""
        with self._changed:
            self.drain()
            self.is_closed = True
            self._changed.notify_all()
        self.queue.close()
        end = None if seconds is None else monotonic() + seconds
        for thread in self._threads:
            if thread.is_alive():
                thread.join(None if end is None else max(0.0, end - monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, is_temporary: bool) -> None:
        """A thread: load an engine, run call after call until closed, and load a new engine if it is lost.

        A thread that fails is temporary from then on: it waits until it is needed.
        """
        while not self.is_closed and (not is_temporary or self._wait_until_needed()):
            try:
                self._run_engine(SCALE_DOWN_SECONDS if is_temporary else inf)
            except BaseException as error:  # whatever it is: requests must not wait for this thread
                is_temporary = True
                self._stand_by(error)
            else:
                if is_temporary:
                    self._stand_by()

    def _run_engine(self, max_idle_seconds: float) -> None:
        """Load an engine, and run it as `_run` until it is lost."""
        engine = self._load(lambda: self.is_closed)
        self._add(engine)
        try:
            self._run(engine, max_idle_seconds)
        except EngineLostError as lost:
            logger.error("an engine was lost and is replaced: %s", lost)
        finally:
            self._remove(engine)

    def _stand_by(self, error: BaseException | None = None) -> None:
        """Count a thread as spare. If no thread has or loads an engine, and each has failed, the pool has failed.

        Args:
            error: why the thread could not load its engine or run it; None if the engine is not needed.
        """
        with self._changed:
            self._busy_threads -= 1
            self._spare_threads += 1
            if error is None or self.is_closed:
                return
            self._note_change(error)
            self._failures_to_load += 1
            self._next_load = monotonic() + RETRY_SECONDS
            # Before the first engine is loaded, the spare threads would fail too.
            is_last = self.state != "ready" or self._failures_to_load >= self._spare_threads
            has_failed = is_last and not self._busy_threads
            if has_failed:
                self.state, self.failure = "failed", error
                self.queue.refuse("the server is not ready: failed")
                self.queue.close(error)
            self._changed.notify_all()
        rest = "no other is left" if has_failed else "it is loaded again when it is needed"
        logger.error("an engine has failed, %s: %s", rest, error, exc_info=not isinstance(error, ToMeError))

    def _wait_until_needed(self) -> bool:
        """Block until a further engine is needed, and return True; return False if the pool was closed.

        It is needed if an image has waited more than SCALE_UP_SECONDS and no other thread will take it, because all
        run calls: one that loads an engine or a program, or waits for images to fill its batch, will. It is also
        needed if a thread could not replace its engine. After a failure it is tried again in RETRY_SECONDS, or at once
        if there is no other.
        """
        with self._changed:
            while not self.is_closed:
                all_run = self._busy_threads <= self.queue.running_calls
                is_late = all_run and self.queue.oldest_wait > SCALE_UP_SECONDS
                is_missing = self.state == "ready" and self._busy_threads < self._min_engines
                may_load = not self._busy_threads or monotonic() >= self._next_load
                if (is_late or is_missing) and may_load:
                    self._busy_threads += 1
                    self._spare_threads -= 1
                    return True
                self._changed.wait(POLL_SECONDS)
        return False

    def _add(self, engine: ImageEngine) -> None:
        """Record that an engine is loaded."""
        with self._changed:
            self._engines.append(engine)
            if self.state == "loading":
                self.state = "ready"
                self.queue.open(engine.can_batch)

    def _remove(self, engine: ImageEngine) -> None:
        """Record that an engine is lost or was ended. The thread that runs it replaces it if it is lost."""
        with self._changed:
            if engine in self._engines:
                self._engines.remove(engine)
        self.queue.wake()

    def _run(self, engine: ImageEngine, max_idle_seconds: float) -> None:
        """Run call after call until the pool is closed, or the engine is not needed after `max_idle_seconds` idle.

        Raises:
            EngineLostError: the engine is lost.
        """
        loads = True  # whether there are programs to load, which happens while no image waits
        while True:
            if call := self.queue.next_call(0.0 if loads else max_idle_seconds, lambda: engine not in self._engines):
                self._generate(engine, call)
            elif engine not in self._engines:
                raise EngineLostError("its process has ended")
            elif self.is_closed or (not loads and self._busy_threads > self._min_engines):
                return
            elif loads:
                loads = engine.load_next()
                if not loads:
                    self._failures_to_load = 0

    def _generate(self, engine: ImageEngine, call: Call) -> None:
        """Run a call and deliver its images.

        If its engine is lost, or it fails and had several jobs, they wait again and then run alone.

        Raises:
            EngineLostError: the engine is lost.
        """
        try:
            images = engine.generate(call.jobs, call.advance)
        except (
            AbandonedError,
            JobError,
        ) as error:  # abandoned: cancelled already, unless the engine stopped by itself
            self._fail(call, error)
        except EngineLostError:
            self.queue.repeat(call, engine_lost=True)
            raise
        except Exception as error:  # anything from Paddle
            self._note_change(error)
            logger.exception("generating %d images failed", len(call.tickets))
            if self._fail(call, error):
                self._check_model(engine, call.jobs[0])
        except BaseException as error:  # ends the thread
            self.queue.fail(call, error)
            raise
        else:
            self._count_failures(0)
            self.queue.deliver(call, images)

    def _fail(self, call: Call, error: Exception) -> bool:
        """Let the job of a call fail, or several jobs run again; returns whether it was a single job."""
        if len(call.tickets) > 1 and not isinstance(error, AbandonedError):
            self.queue.repeat(call)
            return False
        self.queue.fail(call, error)
        return True

    def _note_change(self, error: BaseException) -> None:
        """Record an error that stays until the process is replaced, even if programs in memory still generate."""
        if isinstance(error, ExportChangedError):
            self._has_changed = True

    def _check_model(self, engine: ImageEngine, job: Job) -> None:
        """Count a failure if the model fails on a plain job too, so that no client can make /health fail."""
        # Few steps, but as many as any scheduler needs: it has those of the job.
        plain = Job("", job.size, job.ratio, seed=0, steps=min(job.steps, 4))
        failures = 0
        try:
            engine.generate([plain], lambda step, steps: self.is_closed)
        except EngineLostError:
            raise
        except Exception:  # anything from Paddle
            failures = self._failures + 1
        self._count_failures(failures)

    def _count_failures(self, failures: int) -> None:
        with self._changed:
            self._failures = failures
