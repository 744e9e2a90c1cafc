"""An engine in a process of its own, on this machine or another one: a Ray actor with the interface of `Engine`."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from time import monotonic
from typing import Any

import ray
from PIL.Image import Image
from ray.exceptions import RayTaskError

from ..errors import ToMeError
from .engine import Engine
from .jobs import AbandonedError, EngineLostError, Job
from .ray_session import DEATHS, RayError

ATTEMPTS = 3  # for a process to load its engine without ending
POLL_SECONDS = 0.1  # between two looks at the progress of a call


class EngineProcess:
    """The actor. Its engine runs in one thread; `progress` is answered in another one."""

    def __init__(self, load: Callable[[], Engine]) -> None:
        self._load = load
        self._call, self._should_stop = 0, False
        self._step: tuple[int, ...] = 0, 0

    def load(self) -> tuple[str, str, Mapping[float, str], bool]:
        """Load the engine; returns its name, sampler and methods, and whether jobs may share a call."""
        self._engine = engine = self._load()
        plain = Job("", 64, 64, 0.0, seed=0)
        return engine.name, engine.sampler, engine.methods, engine.batch_key(plain) is not None

    def generate(self, call: int, jobs: Sequence[Job]) -> list[Image]:
        """See `Engine.generate`; `progress` reports and stops the call of this number."""
        self._call, self._step, self._should_stop = call, (0, jobs[0].steps_to_run), False

        def should_stop(*step: int) -> bool:
            self._step = step or self._step
            return self._should_stop

        return self._engine.generate(jobs, should_stop)

    @ray.method(concurrency_group="control")
    def progress(self, call: int, should_stop: bool) -> tuple[int, ...]:
        """Finished and all steps of the current call, which ends at its next step if `should_stop` is true."""
        self._should_stop = self._should_stop or (should_stop and call == self._call)
        return self._step

    @ray.method(concurrency_group="control")
    def count_tokens(self, prompt: str) -> tuple[int, int, str]:
        """See `Engine.count_tokens`."""
        return self._engine.count_tokens(prompt)


class RemoteEngine:
    """The interface of `Engine` to an actor.

    Args:
        load: makes the engine; called in the actor, so its files must be on all machines.
        cpus, gpus: reserved by Ray; may be fractions.
        hung_seconds: duration of a call after which the actor is ended.
        should_stop: called while the engine loads.

    Raises:
        AbandonedError: should_stop returned True.
        RayError: the engine could not be loaded, or three processes have ended while they loaded it.
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        cpus: float,
        gpus: float,
        hung_seconds: float,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        make = ray.remote(num_cpus=cpus, num_gpus=gpus, concurrency_groups={"control": 1})(EngineProcess).remote
        self._hung_seconds, self._calls = hung_seconds, 0
        for attempt in range(ATTEMPTS):
            self._actor = make(load)
            try:
                described = self._result(self._actor.load.remote(), lambda: _raise_if(should_stop()))
                self.name, self.sampler, self.methods, self._shares_calls = described
                return
            except EngineLostError as error:
                if attempt == ATTEMPTS - 1:
                    raise RayError(f"{ATTEMPTS} processes ended while they loaded the model: {error}") from None

    def batch_key(self, job: Job) -> Hashable | None:
        """See `Engine.batch_key`."""
        is_plain = job.image is None and job.second_pass is None
        return job.batch_key if is_plain and self._shares_calls else None

    def count_tokens(self, prompt: str) -> tuple[int, int, str]:
        """See `Engine.count_tokens`."""
        return ray.get(self._actor.count_tokens.remote(prompt), timeout=self._hung_seconds)

    def generate(self, jobs: Sequence[Job], should_stop: Callable[..., bool] | None = None) -> list[Image]:
        """See `Engine.generate`; should_stop is called several times a second, with the last step known here.

        Raises:
            EngineLostError: the actor has died, or its call took too long. This engine must not be used afterwards.
        """
        self._calls += 1
        start, is_stopped = monotonic(), False
        progress = self._actor.progress.remote(self._calls, False)

        def poll() -> None:
            nonlocal progress, is_stopped
            if monotonic() - start > self._hung_seconds:
                raise EngineLostError(f"its pipeline call took longer than {self._hung_seconds:g} s")
            if should_stop is not None and ray.wait([progress], timeout=0)[0]:
                is_stopped = should_stop(*ray.get(progress)) or is_stopped
                progress = self._actor.progress.remote(self._calls, is_stopped)

        return self._result(self._actor.generate.remote(self._calls, jobs), poll)

    def _result(self, call: Any, poll: Callable[[], None]) -> Any:
        """What the actor returns or raises; `poll` is called meanwhile."""
        try:
            while not ray.wait([call], timeout=POLL_SECONDS)[0]:
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


def _raise_if(should_stop: bool) -> None:
    if should_stop:
        raise AbandonedError("stopped while the engine was loading")
