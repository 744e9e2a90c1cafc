"""Offline generation on Ray: actors with an engine each. Ray restarts one that dies; any of them draws its batch."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayTaskError

from ..errors import ToMeError
from ..serving.engine import Engine
from ..serving.ray_session import DEATHS
from .offline import Drawer, Drawn, Failure, draw_batch
from .prompts import Prompt

ATTEMPTS = 3  # to draw a batch, each of which costs an actor; of one actor to load its engine


class ActorStartError(ToMeError, RuntimeError):
    """Ray's actors cannot load the model."""


class EngineActor:
    """One engine in a process of its own."""

    def __init__(self, load: Callable[[], Engine]) -> None:
        self._load = load
        self._engine: Engine | None = None

    @ray.method(retry_exceptions=True)
    def draw(self, batch: Sequence[Prompt]) -> list[Drawn]:
        """See `draw_batch`. An empty batch loads the engine and draws nothing."""
        self._engine = self._engine or self._load()
        return draw_batch(self._engine, batch) if batch else []


def draw_on_actors(load: Callable[[], Engine], actors: int, cpus: float = 1.0, gpus: float = 0.0) -> Drawer:
    """Draw on the Ray that this process is connected to.

    Args:
        load: makes an engine; called in each actor, so what it reads must be on all machines.
        actors: how many engines; fewer are started where there are fewer batches.
        cpus, gpus: what Ray sets aside for each; may be fractions.

    Raises (the drawer):
        ActorStartError: no actor could load its engine, in three attempts each.
    """
    # Ray restarts an actor that died and tries again to load its engine, but not to draw its batch: where there is no
    # room for the actor any more, it would wait while others have nothing to do.
    options = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": -1, "max_task_retries": ATTEMPTS - 1}
    make = ray.remote(**options)(EngineActor).remote

    def draw(batches: Sequence[Sequence[Prompt]]) -> Iterator[Drawn]:
        waiting = deque((batch, 1) for batch in batches)  # each with its attempt
        calls: dict[Any, tuple[Any, Sequence[Prompt], int]] = {}  # an actor that starts has an empty batch
        for actor in [make(load) for _ in range(min(actors, len(batches)))]:
            calls[actor.draw.remote(())] = actor, (), 0
        while waiting or any(batch for _, batch, _ in calls.values()):
            (call,), _ = ray.wait(list(calls), num_returns=1)
            actor, batch, attempt = calls.pop(call)
            try:
                yield from ray.get(call)
            except (*DEATHS, RayTaskError) as error:
                if not batch:
                    ray.kill(actor)  # so that what Ray has set aside for it is free
                    if calls:
                        continue
                    reason = getattr(error, "cause", error)
                    message = f"no actor could load the model, in {ATTEMPTS} attempts each: {reason}"
                    raise ActorStartError(message) from None
                if isinstance(error, RayTaskError):
                    raise
                if attempt < ATTEMPTS:
                    waiting.appendleft((batch, attempt + 1))
                elif len(batch) > 1:  # one of them may be what kills the actors: find out which
                    waiting.extendleft(([prompt], 1) for prompt in reversed(batch))
                else:
                    yield batch[0], Failure(f"{ATTEMPTS} actors died while they drew it")
                calls[actor.draw.remote(())] = actor, (), 0
            else:
                if waiting:
                    batch, attempt = waiting.popleft()
                    calls[actor.draw.options(max_task_retries=0).remote(batch)] = actor, batch, attempt

    return draw
