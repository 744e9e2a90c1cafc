"""Offline generation on Ray: actors with one engine each. Ray restarts dead actors; any actor runs their batches."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayTaskError

from ..errors import ToMeError
from .engine import Engine
from .offline import Failure, ImageBackend, ImageResult, generate_batch
from .prompt_file import Prompt
from .ray_session import DEATHS

ATTEMPTS = 3  # for a batch, each of which costs an actor; and for one actor to load its engine


class ActorStartError(ToMeError, RuntimeError):
    """Ray's actors cannot load the model."""


class EngineActor:
    """One engine in its own process."""

    def __init__(self, load: Callable[[], Engine]) -> None:
        self._load = load
        self._engine: Engine | None = None

    @ray.method(retry_exceptions=True)
    def generate(self, batch: Sequence[Prompt]) -> list[ImageResult]:
        """See `generate_batch`. An empty batch only loads the engine."""
        self._engine = self._engine or self._load()
        return generate_batch(self._engine, batch) if batch else []


def generate_on_actors(load: Callable[[], Engine], actors: int, cpus: float = 1.0, gpus: float = 0.0) -> ImageBackend:
    """A backend on the Ray that this process is connected to.

    Args:
        load: makes an engine; called in each actor, so its files must be on all machines.
        actors: number of engines; at most one for each batch is started.
        cpus, gpus: reserved by Ray for each actor; may be fractions.

    Raises (the backend):
        ActorStartError: no actor could load its engine, in three attempts each.
    """
    # Ray restarts an actor that died and loads its engine again, but does not repeat its batch: if no machine has room
    # for the actor any more, the batch would wait while other actors are idle.
    options = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": -1, "max_task_retries": ATTEMPTS - 1}
    make = ray.remote(**options)(EngineActor).remote

    def run(batches: Sequence[Sequence[Prompt]]) -> Iterator[ImageResult]:
        waiting = deque((batch, 1) for batch in batches)  # with the number of the attempt
        calls: dict[Any, tuple[Any, Sequence[Prompt], int]] = {}  # the batch of a starting actor is empty
        for actor in [make(load) for _ in range(min(actors, len(batches)))]:
            calls[actor.generate.remote(())] = actor, (), 0
        while waiting or any(batch for _, batch, _ in calls.values()):
            (call,), _ = ray.wait(list(calls), num_returns=1)
            actor, batch, attempt = calls.pop(call)
            try:
                yield from ray.get(call)
            except (*DEATHS, RayTaskError) as error:
                if not batch:
                    ray.kill(actor)  # frees its resources
                    if calls:
                        continue
                    reason = getattr(error, "cause", error)
                    message = f"no actor could load the model, in {ATTEMPTS} attempts each: {reason}"
                    raise ActorStartError(message) from None
                if isinstance(error, RayTaskError):
                    raise
                if attempt < ATTEMPTS:
                    waiting.appendleft((batch, attempt + 1))
                elif len(batch) > 1:  # one of its prompts may be the cause: find it
                    waiting.extendleft(([prompt], 1) for prompt in reversed(batch))
                else:
                    yield batch[0], Failure(f"{ATTEMPTS} actors died with this prompt")
                calls[actor.generate.remote(())] = actor, (), 0
            else:
                if waiting:
                    batch, attempt = waiting.popleft()
                    calls[actor.generate.options(max_task_retries=0).remote(batch)] = actor, batch, attempt

    return run
