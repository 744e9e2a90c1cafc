"""The same server on Ray Serve: the HTTP app in one replica, engines in others, on one machine or many.

Two applications, so that one can end before the other: "…-http" holds the app of `app.py`, and its service sends every
job to "…-engines", whose replicas have an engine each. A job is a function of its fields, so one whose engine died is
drawn again by another.
"""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from time import monotonic, sleep
from types import FrameType
from typing import Any

from fastapi import FastAPI
from PIL.Image import Image
from ray import serve
from ray.exceptions import RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from ..errors import ToMeConfigError, ToMeError
from .app import create_app
from .engine import Engine
from .errors import DrainingError, DrawingError, NotReadyError, QueueFullError
from .jobs import Job, Limits
from .metrics import Metrics
from .queue import FAILURES, PictureQueue
from .ray_session import DEATHS, RayError, ray_session
from .service import Progress, State, with_image
from .settings import Settings

logger = logging.getLogger(__name__)

HTTP, ENGINES = "ppdiffusers_tome-http", "ppdiffusers_tome-engines"  # Ray Serve's applications
HTTP_REQUESTS = 1000  # at once, in the app, besides those whose images are under way
ATTEMPTS = 3  # engines that one job may lose before it counts as the cause
HEALTH_SECONDS = 2.0  # between two health checks of a replica
END_SECONDS = 30.0  # for Ray Serve to end a replica that has finished
HEAD = "node:__internal_head__"  # a resource that only the cluster's head node has


@dataclass(frozen=True)
class Cluster:
    """How many engines there are, and what each may use.

    Args:
        min_replicas, max_replicas: engines; where they differ, Ray Serve starts and ends them with the load.
        cpus, gpus: what Ray sets aside for each engine, of what the machines have; may be fractions.
        largest_batch: most images in one pipeline call.
        batch_wait: seconds that a job waits for others to be drawn with.
        capacity: how many images may wait for an engine, besides the two batches that each engine holds.
        request_seconds: longest time of a request, and for what was accepted when the server is to end. An engine that
            draws one batch for twice as long counts as hung, and is replaced.

    Raises:
        ToMeConfigError: a number is too small.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    largest_batch: int = 4
    batch_wait: float = 0.02
    capacity: int = 64
    request_seconds: float = 120.0

    def __post_init__(self) -> None:
        smallest = {"min_replicas": 1, "max_replicas": self.min_replicas, "cpus": 0.01, "gpus": 0, "largest_batch": 1}
        for name, least in {**smallest, "batch_wait": 0, "capacity": 1, "request_seconds": 0}.items():
            if not getattr(self, name) >= least:
                raise ToMeConfigError(f"{name}={getattr(self, name)!r} is not allowed: it must be {least} or more")

    @property
    def accepted(self) -> int:
        """Images that may be under way at once: the two batches that each engine holds, and what waits for them."""
        return self.capacity + self.max_replicas * 2 * self.largest_batch


class EngineReplica:
    """One engine in a process of its own, behind the queue that the server of one process has too."""

    def __init__(self, load: Callable[[], Engine], name: str, limits: Limits, cluster: Cluster) -> None:
        # `ClusterService` bounds what is under way, so this queue is never full.
        most, stuck_seconds = cluster.largest_batch, 2 * cluster.request_seconds
        self._queue = PictureQueue(
            load, name, limits, cluster.accepted, most, cluster.batch_wait, stuck_seconds=stuck_seconds
        )
        self._queue.start()
        while self._queue.state == "loading":
            sleep(0.05)
        self.check_health()

    async def draw(self, job: Job) -> Image:
        """Draw one job; cancelling the call abandons it."""
        try:
            return (await self._queue.submit([job]))[0]
        except NotReadyError:  # it has been ready: the thread that draws has ended
            logger.error("this engine has failed and ends, so that another takes its place at once")
            os._exit(1)  # being quick to refuse, it would get most of the jobs until a health check

    async def sampler(self) -> str:
        return self._queue.sampler

    def check_health(self) -> None:
        """Ray Serve asks every few seconds, and replaces a replica that raises."""
        if trouble := self._queue.trouble:
            raise DrawingError(f"{trouble}; the log of this replica has the reason")

    def __del__(self) -> None:
        self._queue.close()


class ClusterService:
    """The service of the app's replica: sends each job to an engine, and again to another where that one died.

    Args:
        name, sampler: of the model, as `Service` has them.
        limits: which jobs are taken.
        metrics: counts images.
        cluster: how many engines there are, and how many images may be under way. That is counted here: Ray Serve's
            own bound counts what it has not yet given to an engine, idle or not, and would refuse a burst too early.
    """

    def __init__(self, name: str, sampler: str, limits: Limits, metrics: Metrics, cluster: Cluster) -> None:
        self.name, self.sampler, self.limits, self.metrics = name, sampler, limits, metrics
        # The app is there only while engines are: it is deployed after them, and ended before them. In between Ray
        # Serve replaces those that die, and jobs wait for it.
        self.state: State = "ready"
        self._cluster = cluster
        self._engines: DeploymentHandle = serve.get_deployment_handle(EngineReplica.__name__, ENGINES)
        self._accepted_at: list[float] = []  # of every image under way, the oldest first
        self._undrawn = 0  # images in a row that failed or were not drawn in time
        self._image_seconds = 1.0 / cluster.min_replicas  # for one image, of late, all engines together
        metrics.waiting.set_function(lambda: self.progress().waiting)
        metrics.running.set_function(lambda: self.progress().running)
        metrics.ready.set_function(lambda: self.state == "ready")

    @property
    def trouble(self) -> str | None:
        """See `Service`. Ray Serve replaces single engines; this is about all of them."""
        if self._accepted_at and self._undrawn >= FAILURES:
            return f"the last {self._undrawn} images failed or were not drawn in time"
        return None

    def progress(self) -> Progress:
        """See `Service`. What the engines can draw at once counts as running; their steps are not known here."""
        under_way = len(self._accepted_at)
        running = min(under_way, self._cluster.max_replicas * self._cluster.largest_batch)
        seconds = monotonic() - self._accepted_at[0] if under_way else 0.0
        return Progress(running, under_way - running, seconds=seconds)

    async def submit(self, jobs: Sequence[Job], load_image: Callable[[], Image] | None = None) -> list[Image]:
        """See `Service`."""
        if self.state != "ready":
            raise DrainingError("the server is shutting down", retry_after=10)
        under_way = len(self._accepted_at)
        if under_way + len(jobs) > self._cluster.accepted:
            retry_after = max(1, ceil(under_way * self._image_seconds))
            raise QueueFullError(f"{under_way} images are under way, of {self._cluster.accepted}", retry_after)
        now = monotonic()
        self._accepted_at += [now] * len(jobs)
        tasks: list[asyncio.Task[Image]] = []
        try:
            jobs = await with_image(jobs, load_image)
            tasks = [asyncio.ensure_future(self._draw(job)) for job in jobs]
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            for _ in jobs:
                self._accepted_at.remove(now)

    async def drain(self) -> None:
        """Refuse all further jobs; return when what was accepted is finished."""
        self.state = "draining"
        while self._accepted_at:
            await asyncio.sleep(0.1)

    async def _draw(self, job: Job) -> Image:
        start, before = monotonic(), len(self._accepted_at)
        outcome = "failed"
        try:
            image = await self._draw_somewhere(job)
            outcome = "drawn"
            self._undrawn = 0
            # Little's law: so many images were under way, and each took so long.
            together = max(before, len(self._accepted_at), self._cluster.min_replicas)
            self._image_seconds += 0.2 * ((monotonic() - start) / together - self._image_seconds)
            return image
        except asyncio.CancelledError:
            outcome = "abandoned"
            self._undrawn += monotonic() - start > 0.9 * self._cluster.request_seconds
            raise
        except DrawingError:
            self._undrawn += 1
            raise
        finally:
            self.metrics.pictures.labels(outcome).inc()

    async def _draw_somewhere(self, job: Job) -> Image:
        for lost in range(1, ATTEMPTS + 1):
            response = self._engines.draw.remote(job)
            try:
                return await response
            except asyncio.CancelledError:
                response.cancel()
                raise
            except DeploymentUnavailableError:
                raise NotReadyError("no engine could be started; Ray's logs have the reason", retry_after=30) from None
            except DEATHS as error:
                logger.error("an engine died, and a job with it (%d of %d times): %s", lost, ATTEMPTS, error)
            except RayTaskError as error:  # the engine raised: its error as it was, without the other process's trace
                raise error.cause if isinstance(error.cause, ToMeError) else error from None
        raise DrawingError(f"{ATTEMPTS} engines died while they drew this")


class App:
    """The HTTP app's replica; Ray Serve's `ingress` adds the app."""

    app: FastAPI

    async def drain(self) -> None:
        """See `ClusterService`."""
        await self.app.state.service.drain()


def serve_on_ray(
    load: Callable[[], Engine],
    name: str,
    limits: Limits,
    settings: Settings,
    cluster: Cluster,
    address: str | None,
    host: str,
    port: int,
) -> None:
    """Serve until SIGTERM or SIGINT; the first finishes what was accepted, the second ends at once.

    Args:
        load: makes an engine; called in each of the engines' replicas, so what it reads must be on all machines.
        name, limits: of the model.
        settings: of the app.
        cluster: how many engines.
        address: as in `ray_session`.
        host, port: where Ray Serve listens, on the cluster's head node.

    Raises:
        ToMeConfigError: one request may ask for more images than may wait.
        RayError: there is no Ray, or an engine could not be started; with its last words.
    """
    if cluster.capacity < limits.images:
        raise ToMeConfigError(
            f"capacity={cluster.capacity} is not allowed: a request may ask for {limits.images} images"
        )
    end = threading.Event()

    def end_or_interrupt(number: int, frame: FrameType | None) -> None:
        if end.is_set():
            raise KeyboardInterrupt
        end.set()

    engines = cluster.max_replicas
    with ray_session(address, engines * cluster.cpus, engines * cluster.gpus, shows_logs=True):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end_or_interrupt)
        try:
            serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
            _deploy(load, name, limits, settings, cluster)
            print(f"serving at http://{host}:{port} with {cluster.min_replicas} to {engines} engines", flush=True)
            end.wait()
            print("finishing what was accepted", flush=True)
        except RuntimeError as error:
            raise RayError(f"the engines cannot be started: {error}") from error
        finally:
            _undeploy(cluster)
            if address is None:
                serve.shutdown()


def _deploy(load: Callable[[], Engine], name: str, limits: Limits, settings: Settings, cluster: Cluster) -> None:
    """Start engines and app, and wait until they answer."""
    common: dict[str, Any] = {
        "health_check_period_s": HEALTH_SECONDS,
        "graceful_shutdown_timeout_s": cluster.request_seconds,
        "logging_config": LoggingConfig(log_level="WARNING"),  # without a line for each request
    }
    scale = {name: getattr(cluster, name) for name in ("min_replicas", "max_replicas")}
    engines = serve.deployment(
        EngineReplica,
        **common,
        autoscaling_config={**scale, "target_ongoing_requests": cluster.largest_batch},
        max_ongoing_requests=2 * cluster.largest_batch,
        ray_actor_options={"num_cpus": cluster.cpus, "num_gpus": cluster.gpus},
        max_constructor_retry_count=3,
    )
    handle = serve.run(engines.bind(load, name, limits, cluster), name=ENGINES, route_prefix=None)
    sampler = handle.sampler.remote().result()

    def build() -> FastAPI:  # in the app's replica
        metrics = Metrics()
        service = ClusterService(name, sampler, limits, metrics, cluster)
        app = create_app(service, settings, metrics)
        app.state.service = service
        return app

    # On the head node, which the cluster needs anyway: no other node that is lost takes requests with it.
    app = serve.deployment(
        serve.ingress(build)(App),
        **common,
        num_replicas=1,
        max_ongoing_requests=HTTP_REQUESTS + cluster.accepted,
        ray_actor_options={"num_cpus": 0, "resources": {HEAD: 0.001}},
    )
    serve.run(app.bind(), name=HTTP, route_prefix="/")


def _undeploy(cluster: Cluster) -> None:
    """End the app, which refuses what comes and finishes what it has accepted, and then the engines."""
    deadline = monotonic() + cluster.request_seconds
    if HTTP in serve.status().applications:
        try:  # first, because Ray Serve answers 404 from the moment on that an application is deleted
            serve.get_app_handle(HTTP).drain.remote().result(timeout_s=cluster.request_seconds)
        except (*DEATHS, TimeoutError, RayServeException) as error:
            logger.error("the app did not finish what it had accepted: %r", error)
    for name in (HTTP, ENGINES):
        if name in serve.status().applications:
            serve.delete(name, _blocking=False)  # blocking, Ray Serve gives up after a minute
        while name in serve.status().applications and monotonic() < deadline + END_SECONDS:
            sleep(0.1)
