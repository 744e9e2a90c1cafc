"""Offline generation on Ray: actors with an engine each. One that dies is replaced, and its batch is drawn again."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray

from ..errors import ToMeError
from .engine import Engine
from .offline import Drawer, Drawn, Failure, draw_batch
from .prompts import Prompt
from .ray_session import DEATHS

ATTEMPTS = 3  # actors that one batch may lose; actors in a row that may fail to start


class ActorStartError(ToMeError, RuntimeError):
    """Ray's actors cannot load the model."""


class EngineActor:
    """One engine in a process of its own."""

    def __init__(self, load: Callable[[], Engine]) -> None:
        self._engine = load()

    def wait(self) -> None:
        """Return when the engine is loaded."""

    def draw(self, batch: Sequence[Prompt]) -> list[Drawn]:
        """See `draw_batch`."""
        return draw_batch(self._engine, batch)


def draw_on_actors(load: Callable[[], Engine], actors: int, cpus: float = 1.0, gpus: float = 0.0) -> Drawer:
    """Draw on the Ray that this process is connected to.

    Args:
        load: makes an engine; called in each actor, so what it reads must be on all machines.
        actors: how many engines; fewer are started where there are fewer batches.
        cpus, gpus: what Ray sets aside for each; may be fractions.

    Raises (the drawer):
        ActorStartError: three actors in a row could not load their engine, and no other works.
    """
    make = ray.remote(max_restarts=0, num_cpus=cpus, num_gpus=gpus)(EngineActor).remote

    def draw(batches: Sequence[Sequence[Prompt]]) -> Iterator[Drawn]:
        waiting = deque((batch, 0) for batch in batches)
        running: dict[Any, tuple[Any, Sequence[Prompt], int]] = {}  # by the promise of their pictures
        starting: dict[Any, Any] = {}  # actors, by the promise that they are there
        failed_starts = 0

        def start() -> None:
            actor = make(load)
            starting[actor.wait.remote()] = actor

        def give_work(actor: Any) -> None:
            """The next batch, or leave to go."""
            if waiting:
                batch, lost = waiting.popleft()
                running[actor.draw.remote(batch)] = actor, batch, lost

        for _ in range(min(actors, len(batches))):
            start()
        while waiting or running:
            (promise,), _ = ray.wait([*running, *starting], num_returns=1)
            if promise in starting:
                actor = starting.pop(promise)
                try:
                    ray.get(promise)
                except DEATHS as error:
                    failed_starts += 1
                    if failed_starts < ATTEMPTS:
                        start()
                    elif not running:
                        message = f"{ATTEMPTS} actors in a row could not load the model: {error}"
                        raise ActorStartError(message) from None
                else:
                    failed_starts = 0
                    give_work(actor)
                continue
            actor, batch, lost = running.pop(promise)
            try:
                drawn = ray.get(promise)
            except DEATHS:
                if lost + 1 < ATTEMPTS:
                    waiting.appendleft((batch, lost + 1))
                elif len(batch) > 1:  # one of them may be what kills the actors: find out which
                    waiting.extendleft(([prompt], 0) for prompt in reversed(batch))
                else:
                    yield batch[0], Failure(f"{ATTEMPTS} actors died while they drew it")
                if waiting:
                    start()
            else:
                give_work(actor)
                yield from drawn

    return draw
