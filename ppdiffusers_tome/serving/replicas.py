"""What runs in Ray Serve's replicas: engines, and the service that the app sends its jobs through."""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from time import monotonic, sleep

from PIL.Image import Image
from ray import serve
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from ..errors import ToMeConfigError
from .engine import Engine
from .errors import DrawingError, NotReadyError, QueueFullError
from .jobs import Job, Limits
from .metrics import Metrics
from .queue import PictureQueue
from .ray_session import DEATHS
from .service import Progress, State

logger = logging.getLogger(__name__)

HTTP, ENGINES = "ppdiffusers_tome-http", "ppdiffusers_tome-engines"  # Ray Serve's applications
ATTEMPTS = 3  # engines that one job may lose before it is taken to be what kills them
RETRY_SECONDS = 0.1  # until a job whose engine died is sent again, where all others are busy


@dataclass(frozen=True)
class Cluster:
    """How many engines there are, and what each may use.

    Args:
        min_replicas, max_replicas: engines; where they differ, Ray Serve starts and ends them with the load.
        cpus, gpus: what Ray sets aside for each engine, of what the machines have; may be fractions.
        largest_batch: most pictures in one pipeline call.
        batch_wait: seconds that a job waits for others to be drawn with.
        capacity: how many pictures may wait for an engine, besides the two batches that each engine holds.
        stuck_seconds: an engine that draws one batch for longer is taken to hang, and is replaced.
        health_seconds: time between two health checks of an engine.
        drain_seconds: how long an engine or the app may take to finish what it does when it is told to end.

    Raises:
        ToMeConfigError: a number is not positive, or there are more engines at least than at most.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    largest_batch: int = 4
    batch_wait: float = 0.02
    capacity: int = 64
    stuck_seconds: float = 600.0
    health_seconds: float = 5.0
    drain_seconds: float = 120.0

    def __post_init__(self) -> None:
        for name in ("min_replicas", "cpus", "largest_batch", "capacity", "stuck_seconds", "health_seconds"):
            if not getattr(self, name) > 0:
                raise ToMeConfigError(f"{name}={getattr(self, name)!r} is not allowed: it must be positive")
        for name in ("gpus", "batch_wait", "drain_seconds"):
            if not getattr(self, name) >= 0:
                raise ToMeConfigError(f"{name}={getattr(self, name)!r} is not allowed: it must not be negative")
        if self.max_replicas < self.min_replicas:
            raise ToMeConfigError(
                f"max_replicas={self.max_replicas} is not allowed: it must be min_replicas={self.min_replicas} or more"
            )

    @property
    def ongoing(self) -> int:
        """Jobs that one engine holds: a batch that is drawn, and the next."""
        return 2 * self.largest_batch

    @property
    def accepted(self) -> int:
        """Jobs that may be under way at once: what the engines hold, and what waits for them."""
        return self.capacity + self.max_replicas * self.ongoing


class EngineReplica:
    """One engine in a process of its own, behind the queue that the server of one process has too."""

    def __init__(self, load: Callable[[], Engine], name: str, limits: Limits, cluster: Cluster) -> None:
        capacity = max(cluster.ongoing, limits.images)
        # Batches gather in `_gather`, so the queue waits no second time; it only keeps apart what does not agree.
        self._queue = PictureQueue(load, name, limits, capacity, cluster.largest_batch, batch_wait=0)
        self._stuck_seconds = cluster.stuck_seconds
        self._gather.set_max_batch_size(cluster.largest_batch)
        self._gather.set_batch_wait_timeout_s(cluster.batch_wait)
        self._queue.start()
        while self._queue.state == "loading":
            sleep(0.05)
        self.check_health()

    async def draw(self, job: Job) -> Image:
        """Draw one job; cancelling the call abandons it."""
        drawing = await self._gather(job)
        return await drawing

    @serve.batch
    async def _gather(self, jobs: list[Job]) -> "list[asyncio.Task[Image]]":
        """Hand over what came together, and let the next batch gather while this one is drawn.

        Without that, `serve.batch` would hold each picture until all of its batch are there, compatible or not.
        """
        return [asyncio.ensure_future(self._draw(job)) for job in jobs]

    async def _draw(self, job: Job) -> Image:
        try:
            return (await self._queue.submit([job]))[0]
        except NotReadyError:  # it has been ready: the thread that draws has ended
            logger.error("this engine has failed and ends, so that another takes its place at once")
            os._exit(1)  # being quick to refuse, it would get most of the jobs until a health check

    async def sampler(self) -> str:
        return self._queue.sampler

    def check_health(self) -> None:
        """Ray Serve asks now and then, and replaces a replica that raises."""
        if self._queue.state == "failed":
            raise DrawingError("the thread that draws has ended; the log of this replica has the reason")
        since = self._queue.running_since
        if since is not None and monotonic() - since > self._stuck_seconds:
            raise DrawingError(f"one batch has been drawn for more than {self._stuck_seconds:g} s")

    def __del__(self) -> None:
        self._queue.close()


class ClusterService:
    """The service of the app's replica: sends each job to an engine, and again to another where that one died.

    Args:
        name, sampler: of the model, as `Service` has them.
        limits: which jobs are taken.
        metrics: counts pictures; waiting ones are those that were sent and have not come back.
        accepted: how many may be under way. Ray Serve's own bound counts what it has not yet given to an engine, idle
            or not, so that it would refuse a burst before the engines have anything to do.
    """

    # The app is there only while engines are: it is deployed after them, and ended before them. In between Ray Serve
    # replaces those that die, and jobs wait for it.
    state: State = "ready"

    def __init__(self, name: str, sampler: str, limits: Limits, metrics: Metrics, accepted: int) -> None:
        self.name, self.sampler, self.limits, self.metrics = name, sampler, limits, metrics
        self._accepted = accepted
        self._engines: DeploymentHandle = serve.get_deployment_handle(EngineReplica.__name__, ENGINES)
        self._under_way = 0
        self._seconds = 1.0  # that a picture took of late, to tell how long a full queue takes
        metrics.waiting.set_function(lambda: self._under_way)
        metrics.ready.set(1)

    @property
    def trouble(self) -> str | None:
        """See `Service`: engines that fail are replaced."""
        return None

    def progress(self) -> Progress:
        """See `Service`; the engines' steps are not known here."""
        return Progress(waiting=self._under_way)

    async def submit(self, jobs: Sequence[Job], load_image: Callable[[], Image] | None = None) -> list[Image]:
        """See `Service`."""
        if self._under_way + len(jobs) > self._accepted:
            raise QueueFullError(f"{self._under_way} pictures are under way, of {self._accepted}", self._retry_after())
        self._under_way += len(jobs)
        tasks: list[asyncio.Task[Image]] = []
        try:
            if load_image is not None:
                image = await asyncio.to_thread(load_image)
                jobs = [replace(job, image=image) for job in jobs]
            tasks = [asyncio.ensure_future(self._draw(job)) for job in jobs]
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            self._under_way -= len(jobs)

    def _retry_after(self) -> int:
        return min(60, max(1, ceil(self._seconds)))

    async def _draw(self, job: Job) -> Image:
        start = monotonic()
        outcome = "failed"
        try:
            image = await self._draw_somewhere(job)
            outcome = "drawn"
            self._seconds += 0.2 * (monotonic() - start - self._seconds)
            return image
        except asyncio.CancelledError:
            outcome = "abandoned"
            raise
        finally:
            self.metrics.pictures.labels(outcome).inc()

    async def _draw_somewhere(self, job: Job) -> Image:
        lost = 0
        while lost < ATTEMPTS:
            response = self._engines.draw.remote(job)
            try:
                return await response
            except asyncio.CancelledError:
                response.cancel()
                raise
            except BackPressureError:
                if not lost:
                    raise QueueFullError("as many pictures wait as the engines take", self._retry_after()) from None
                await asyncio.sleep(RETRY_SECONDS)  # it was accepted, so it is not refused now
            except DeploymentUnavailableError:
                raise NotReadyError("no engine could be started; Ray's logs have the reason", retry_after=30) from None
            except DEATHS as error:
                lost += 1
                logger.error("an engine died, and a job with it (%d of %d times): %s", lost, ATTEMPTS, error)
        raise DrawingError(f"{lost} engines died while they drew this")
