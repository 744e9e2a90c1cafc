"""Engines in their own processes, on this machine or more machines: Ray actors."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from queue import SimpleQueue
from threading import Event, Thread
from time import monotonic
from typing import Any

# No usage reports. And Ray does not hide GPUs from processes that request none, because --device decides.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

# Ray after Paddle 2.6 crashes in inflateReset2, because Paddle exports its own copy of zlib's symbols, unless Python's
# zlib was loaded before Paddle, as the package's __init__ does.
import ray
from PIL import Image
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from ..cores import usable_cores
from ..errors import ToMeError
from .image_engine import ImageEngine
from .jobs import MAX_LOST_ENGINES, AbandonedError, EngineLostError, Job
from .offline import ImageBackend, ImageResult, ImageResults, generate_batch
from .prompt_file import Prompt

# Errors that the caller of a process gets if the process or its machine died.
DEATHS = (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError, ObjectLostError)
POLL_SECONDS = 0.1  # between two looks at the progress of a call
OBJECT_STORE_BYTES = 200 * 2**20  # for jobs and images; Ray's default is a third of the machine's memory


class RayError(ToMeError, RuntimeError):
    """Ray cannot be started or reached, or cannot start an engine."""


@contextmanager
def ray_session(address: str | None, cpus: float, gpus: float, shows_logs: bool) -> Iterator[None]:
    """Connect to Ray, or start it on this machine, as long as the context runs.

    Args:
        address: of a cluster that this machine is a node of, as for `ray.init`; None starts Ray on this machine, at
            127.0.0.1, and ends it.
        cpus, gpus: how many all processes need together. A Ray that is started here has at least this many CPUs.
        shows_logs: whether to print what the actors print.

    Raises:
        RayError: there is no Ray at that address, it did not start, or this machine has fewer GPUs.
    """
    own = {
        "num_cpus": max(usable_cores(), ceil(cpus)),
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
    }
    try:
        # "local": a new Ray, even if a cluster runs on this machine
        ray.init(address or "local", log_to_driver=shows_logs, logging_level="warning", **({} if address else own))
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise RayError(f"Ray at {address or 'this machine'} cannot be reached or started: {error}") from error
    try:
        available = ray.cluster_resources().get("GPU", 0)
        if address is None and gpus > available:  # Ray would wait for them forever
            raise RayError(f"{gpus:g} GPUs are needed, one for each engine, and this machine has {available:g}")
        yield
    finally:
        ray.shutdown()


class EngineProcess:
    """The actor. Its engine runs in a thread; `progress` and `count_tokens` are answered in a second thread."""

    def __init__(self, load: Callable[[], ImageEngine]) -> None:
        self._load = load
        self._call, self._should_stop = 0, False
        self._step = 0, 0

    def load(self) -> tuple[str, str, Mapping[float, str], bool, int]:
        """Load the engine; returns its name, sampler, methods, `can_batch` and `program_loads`."""
        self._engine = engine = self._load()
        return engine.name, engine.sampler, engine.methods, engine.can_batch, engine.program_loads

    def load_next(self) -> tuple[bool, int]:
        """See `ImageEngine.load_next`; also returns `program_loads`."""
        return self._engine.load_next(), self._engine.program_loads

    def generate(self, call: int, jobs: Sequence[Job]) -> tuple[list[Image.Image], int]:
        """See `ImageEngine.generate`; also returns `program_loads`. `progress` reports and stops the call."""
        self._call, self._step, self._should_stop = call, (0, jobs[0].steps_to_run), False

        def should_stop(step: int, steps: int) -> bool:
            self._step = step, steps
            return self._should_stop

        return self._engine.generate(jobs, should_stop), self._engine.program_loads

    @ray.method(concurrency_group="control")
    def progress(self, call: int, should_stop: bool) -> tuple[int, int]:
        """Finished and all steps of the current call, which ends at its next step if `should_stop` is true."""
        self._should_stop = self._should_stop or (should_stop and call == self._call)
        return self._step

    @ray.method(concurrency_group="control")
    def count_tokens(self, prompt: str) -> tuple[int, int, str]:
        """See `ImageEngine.count_tokens`."""
        return self._engine.count_tokens(prompt)


class RemoteEngine:
    """An `ImageEngine` whose work an actor does.

    Args:
        load: makes the engine; called in the actor, so its files must be on all machines.
        cpus, gpus: reserved by Ray; may be fractions.
        hung_seconds: duration of a call after which the actor counts as hung and is ended.
        should_stop: called while the actor works; when it returns True, the actor is ended, whatever it does.

    Raises:
        AbandonedError: should_stop returned True; all methods may raise it.
        RayError: the engine could not be loaded, or three processes have ended while they loaded it.
    """

    def __init__(
        self,
        load: Callable[[], ImageEngine],
        cpus: float,
        gpus: float,
        hung_seconds: float,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        make = ray.remote(num_cpus=cpus, num_gpus=gpus, concurrency_groups={"control": 1})(EngineProcess).remote
        self._hung_seconds, self._should_stop, self._calls = hung_seconds, should_stop, 0
        for attempt in range(MAX_LOST_ENGINES):
            self._actor = make(load)
            try:
                described = self._result(self._actor.load.remote())
                self.name, self.sampler, self.methods, self.can_batch, self.program_loads = described
                return
            except EngineLostError as error:
                if attempt == MAX_LOST_ENGINES - 1:
                    message = f"{MAX_LOST_ENGINES} processes ended while they loaded the model: {error}"
                    raise RayError(message) from None
            except BaseException:
                ray.kill(self._actor)  # frees its resources
                raise

    def count_tokens(self, prompt: str) -> tuple[int, int, str]:
        """See `ImageEngine.count_tokens`; raises EngineLostError as `generate` does."""
        return self._result(self._actor.count_tokens.remote(prompt), self._hung_seconds)

    def load_next(self) -> bool:
        """See `ImageEngine.load_next`."""
        has_more, self.program_loads = self._result(self._actor.load_next.remote())
        return has_more

    def generate(
        self, jobs: Sequence[Job], should_stop: Callable[[int, int], bool] | None = None
    ) -> list[Image.Image]:
        """See `ImageEngine.generate`; should_stop is called several times a second, with the last step known here.

        Raises:
            EngineLostError: the actor has died, or its call took too long. This engine must not be used afterwards.
        """
        self._calls += 1
        is_stopped = False
        progress = self._actor.progress.remote(self._calls, False)

        def poll() -> None:
            nonlocal progress, is_stopped
            if should_stop is not None and ray.wait([progress], timeout=0)[0]:
                is_stopped = should_stop(*ray.get(progress)) or is_stopped
                progress = self._actor.progress.remote(self._calls, is_stopped)

        call = self._actor.generate.remote(self._calls, jobs)
        images, self.program_loads = self._result(call, self._hung_seconds, poll)
        return images

    def _result(self, call: Any, max_seconds: float = inf, poll: Callable[[], None] = lambda: None) -> Any:
        """Wait for the actor and return its result, or raise its error; `poll` is called meanwhile.

        Raises:
            EngineLostError: the actor has died, or the call took too long.
            AbandonedError: should_stop returned True.
        """
        end = monotonic() + max_seconds
        try:
            while not ray.wait([call], timeout=POLL_SECONDS)[0]:
                if self._should_stop():
                    raise AbandonedError("the engine was stopped")
                if monotonic() > end:
                    raise EngineLostError(f"its call took longer than {max_seconds:g} s")
                poll()
            return ray.get(call)
        except RayTaskError as error:  # the original error, without the remote traceback
            if isinstance(error.cause, ToMeError):
                raise error.cause from None
            raise
        except (*DEATHS, EngineLostError, AbandonedError) as error:
            ray.kill(self._actor)  # frees its resources
            if isinstance(error, AbandonedError):
                raise
            raise EngineLostError(str(error)) from None


def generate_on_ray(
    load: Callable[[], ImageEngine], engines: int, cpus: float = 1.0, gpus: float = 0.0
) -> ImageBackend:
    """A backend of several engines, on the Ray that this process is connected to.

    An engine that is lost is replaced, and its batch runs again on any engine. The prompts of a batch that has lost
    three engines run alone. A prompt that then loses three engines has failed.

    Args:
        load: makes an engine; called in each process, so its files must be on all machines.
        engines: number of engines; not more than there are batches are started.
        cpus, gpus: reserved by Ray for each engine; may be fractions.

    Raises (the backend):
        RayError: no engine could be loaded.
        Exception: anything else that a batch meets outside of its pipeline call.
    """

    def run(batches: Sequence[Sequence[Prompt]]) -> ImageResults:
        work = _Work(batches, partial(RemoteEngine, load, cpus, gpus, inf))
        yield from work.run_in_threads(min(engines, len(batches)))

    return run


class _Work:
    """Batches that threads share, each thread with an engine of its own.

    Args:
        batches: all of them.
        make_engine: makes an engine, given a function that returns True when the engine must end.
    """

    def __init__(self, batches: Sequence[Sequence[Prompt]], make_engine: Callable[..., RemoteEngine]) -> None:
        self._make_engine = make_engine
        self._missing = sum(map(len, batches))  # images
        # Batches with the number of the attempt; None wakes a thread at the end.
        self._waiting: SimpleQueue[tuple[Sequence[Prompt], int] | None] = SimpleQueue()
        self._done: SimpleQueue[Sequence[ImageResult] | BaseException | _NotLoaded] = SimpleQueue()
        self._is_over = Event()
        for batch in batches:
            self._waiting.put((batch, 1))

    def run_in_threads(self, count: int) -> ImageResults:
        """Run all batches. The threads and their engines end with the generator, also during a batch.

        Raises: as the backend of `generate_on_ray` does.
        """
        threads = [Thread(target=self._run_batches, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            yield from self._results(count)
        finally:
            self._is_over.set()
            for _ in threads:
                self._waiting.put(None)
            for thread in threads:  # a thread that outlives the session would start Ray again
                thread.join()

    def _results(self, threads: int) -> ImageResults:
        not_loaded = 0
        while self._missing:
            results = self._done.get()
            if isinstance(results, _NotLoaded):
                not_loaded += 1
                if not_loaded == threads:
                    cause = getattr(results.error, "cause", results.error)
                    raise RayError(f"no engine could be loaded: {cause}")
            elif isinstance(results, BaseException):
                raise results
            else:
                self._missing -= len(results)
                yield from results

    def _run_batches(self) -> None:
        """In a thread: run batches until none is needed, and replace an engine that is lost."""
        engine: ImageEngine | None = None
        while not self._is_over.is_set():
            try:
                engine = engine or self._make_engine(self._is_over.is_set)
            except BaseException as error:
                self._done.put(_NotLoaded(error))
                return
            if (item := self._waiting.get()) is None or self._is_over.is_set():
                return
            try:
                self._done.put(generate_batch(engine, item[0]))
            except EngineLostError:
                engine = None
                self._repeat(*item)
            except BaseException as error:  # every batch is answered, or the consumer would wait for it
                self._done.put(error)
                return

    def _repeat(self, batch: Sequence[Prompt], attempt: int) -> None:
        """Let a batch whose engine was lost run again, or report its prompt as failed."""
        if attempt < MAX_LOST_ENGINES:
            self._waiting.put((batch, attempt + 1))
        elif len(batch) > 1:  # one of its prompts may be the cause
            for prompt in batch:
                self._waiting.put(([prompt], 1))
        else:
            self._done.put([(batch[0], f"{MAX_LOST_ENGINES} engines died with this prompt")])


@dataclass(frozen=True)
class _NotLoaded:
    """A thread of `generate_on_ray` has ended, because it could not load an engine."""

    error: BaseException
