"""The server on Ray Serve: the HTTP app in one replica, engines in others, on one or several machines.

There are two applications, so that one can end before the other. "…-http" is the app of `app.py`; its service sends
each job to "…-engines", whose replicas have one engine each. An image depends only on its job's fields, so another
engine can generate it again if the first one dies.
"""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
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
from ..generation.engine import Engine
from ..generation.jobs import GenerationError, Job, Limits
from ..generation.ray_session import DEATHS, RayError, ray_session
from .app import create_app
from .app_config import AppConfig, url_of
from .prometheus import Metrics
from .queue import FAILURES, ImageQueue
from .service import Progress, RequestProgress, State, with_image
from .service_errors import DrainingError, JobFailedError, NotReadyError, QueueFullError

logger = logging.getLogger(__name__)

HTTP, ENGINES = "ppdiffusers_tome-http", "ppdiffusers_tome-engines"  # Ray Serve's applications
HTTP_REQUESTS = 1000  # at once in the app, besides those with accepted images
ATTEMPTS = 3  # engines that may die with one job before the job counts as the cause
HEALTH_SECONDS = 2.0  # between two health checks of a replica
END_SECONDS = 30.0  # for Ray Serve to end a replica without jobs
HEAD = "node:__internal_head__"  # a resource of the cluster's head node only


@dataclass(frozen=True)
class Cluster:
    """The number of engines and their resources.

    Args:
        min_replicas, max_replicas: engines; if they differ, Ray Serve starts and ends engines with the load.
        cpus, gpus: reserved by Ray for each engine; may be fractions.
        largest_batch: most images in one pipeline call.
        batch_wait: seconds that a job waits for others to share its call.
        capacity: most images that wait for an engine, besides the two batches in each engine.
        request_seconds: longest time of a request, and of the shutdown. An engine whose pipeline call takes twice as
            long counts as hung and is replaced.

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
        """Most accepted images at once: two batches in each engine, and those that wait."""
        return self.capacity + self.max_replicas * 2 * self.largest_batch


class EngineReplica:
    """One engine in its own process, behind the same queue as in the server of one process."""

    def __init__(self, load: Callable[[], Engine], name: str, limits: Limits, cluster: Cluster) -> None:
        self._queue = ImageQueue(
            load,
            name,
            limits,
            capacity=cluster.accepted,  # never reached, because `ClusterService` accepts no more
            largest_batch=cluster.largest_batch,
            batch_wait=cluster.batch_wait,
            stuck_seconds=2 * cluster.request_seconds,
        )
        self._queue.start()
        while self._queue.state == "loading":
            sleep(0.05)
        self.check_health()

    async def generate(self, job: Job) -> tuple[Image, RequestProgress]:
        """Generate one image, and report its time; cancelling the call abandons it."""
        progress = RequestProgress()
        try:
            return (await self._queue.submit([job], progress=progress))[0], progress
        except NotReadyError:  # it was ready before, so its thread has ended
            logger.error("this engine has failed and exits, so that Ray Serve replaces it at once")
            os._exit(1)  # it refuses jobs fast, so it would get most of them until the next health check

    async def sampler(self) -> str:
        return self._queue.sampler

    async def methods(self) -> Mapping[float, str]:
        return self._queue.methods

    def check_health(self) -> None:
        """Called by Ray Serve every few seconds; a replica that raises is replaced."""
        if trouble := self._queue.trouble:
            raise GenerationError(f"{trouble}; the replica's log has the reason")

    def __del__(self) -> None:
        self._queue.close()


class ClusterService:
    """The service of the app's replica: sends each job to an engine, and to another one if that one dies.

    Args:
        name, sampler, methods: of the model, see `Service`.
        limits: the jobs that are accepted.
        metrics: counts images.
        cluster: the number of engines and of accepted images. The latter is counted here, because Ray Serve's own
            limit counts jobs that are not yet assigned to an engine, and would refuse a burst while engines are idle.
    """

    def __init__(
        self,
        name: str,
        sampler: str,
        methods: Mapping[float, str],
        limits: Limits,
        metrics: Metrics,
        cluster: Cluster,
    ) -> None:
        self.name, self.sampler, self.methods, self.limits, self.metrics = name, sampler, methods, limits, metrics
        # The app is deployed after the engines and deleted before them. Meanwhile Ray Serve replaces engines that die,
        # and jobs wait.
        self.state: State = "ready"
        self._cluster = cluster
        self._engines: DeploymentHandle = serve.get_deployment_handle(EngineReplica.__name__, ENGINES)
        # Of every accepted image the time and the progress of its request, oldest first
        self._accepted: list[tuple[float, RequestProgress]] = []
        self._failures = 0  # images in a row that failed or reached the time limit
        self._image_seconds = 1.0 / cluster.min_replicas  # of late, per image of all engines together
        metrics.waiting.set_function(lambda: self.progress().waiting)
        metrics.running.set_function(lambda: self.progress().running)
        metrics.ready.set_function(lambda: self.state == "ready")

    @property
    def trouble(self) -> str | None:
        """See `Service`. Ray Serve replaces single engines; this is about all engines."""
        if self._accepted and self._failures >= FAILURES:
            return f"the last {self._failures} images failed or reached the time limit"
        return None

    def progress(self) -> Progress:
        """See `Service`. As many images as fit all engines count as running; their steps are not known here."""
        accepted = len(self._accepted)
        running = min(accepted, self._at_once)
        seconds = monotonic() - self._accepted[0][0] if accepted else 0.0
        return Progress(running, accepted - running, seconds=seconds)

    async def submit(
        self,
        jobs: Sequence[Job],
        load_image: Callable[[], Image] | None = None,
        progress: RequestProgress | None = None,
    ) -> list[Image]:
        """See `Service`."""
        if self.state != "ready":
            raise DrainingError("the server is shutting down", retry_after=10)
        accepted = len(self._accepted)
        if accepted + len(jobs) > self._cluster.accepted:
            retry_after = max(1, ceil(accepted * self._image_seconds))
            raise QueueFullError(f"{accepted} of at most {self._cluster.accepted} images are accepted", retry_after)
        own = RequestProgress() if progress is None else progress
        self._set_accepted([*self._accepted, *[(monotonic(), own)] * len(jobs)])
        tasks: list[asyncio.Task[Image]] = []
        try:
            jobs = await with_image(jobs, load_image)
            tasks = [asyncio.ensure_future(self._generate(job, own)) for job in jobs]
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            self._set_accepted([entry for entry in self._accepted if entry[1] is not own])

    async def drain(self) -> None:
        """Refuse all further jobs; return when all accepted jobs are finished."""
        self.state = "draining"
        while self._accepted:
            await asyncio.sleep(0.1)

    @property
    def _at_once(self) -> int:
        """The images that fit all engines."""
        return self._cluster.max_replicas * self._cluster.largest_batch

    def _set_accepted(self, accepted: list[tuple[float, RequestProgress]]) -> None:
        self._accepted = accepted
        for place, (_, progress) in enumerate(accepted, 1):
            progress.position = max(0, place - self._at_once)

    async def _generate(self, job: Job, progress: RequestProgress) -> Image:
        start, before = monotonic(), len(self._accepted)
        outcome = "failed"
        try:
            image, of_engine = await self._generate_on_any_engine(job)
            progress.seconds, progress.batch = progress.seconds + of_engine.seconds, of_engine.batch
            outcome = "drawn"
            self._failures = 0
            # Little's law: seconds of one image over the images at the same time.
            concurrent = max(before, len(self._accepted), self._cluster.min_replicas)
            self._image_seconds += 0.2 * ((monotonic() - start) / concurrent - self._image_seconds)
            return image
        except asyncio.CancelledError:
            outcome = "abandoned"
            self._failures += monotonic() - start > 0.9 * self._cluster.request_seconds
            raise
        except JobFailedError:  # its engine works
            self._failures = 0
            raise
        except GenerationError:
            self._failures += 1
            raise
        finally:
            self.metrics.images.labels(outcome).inc()

    async def _generate_on_any_engine(self, job: Job) -> tuple[Image, RequestProgress]:
        for attempt in range(1, ATTEMPTS + 1):
            response = self._engines.generate.remote(job)
            try:
                return await response
            except asyncio.CancelledError:
                response.cancel()
                raise
            except DeploymentUnavailableError:
                raise NotReadyError("no engine could be started; see Ray's logs", retry_after=30) from None
            except DEATHS as error:
                logger.error("an engine died with a job (attempt %d of %d): %s", attempt, ATTEMPTS, error)
            except RayTaskError as error:  # the engine raised: the original error, without the remote traceback
                raise error.cause if isinstance(error.cause, ToMeError) else error from None
        raise GenerationError(f"{ATTEMPTS} engines died with this job")


class App:
    """The HTTP app's replica; Ray Serve's `ingress` adds `app`."""

    app: FastAPI

    async def drain(self) -> None:
        """See `ClusterService`."""
        await self.app.state.service.drain()


def serve_on_ray(
    load: Callable[[], Engine],
    name: str,
    limits: Limits,
    config: AppConfig,
    cluster: Cluster,
    address: str | None,
    host: str,
    port: int,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT: the first signal finishes accepted requests, the second ends the server at once.

    Args:
        load: makes an engine; called in each engine's replica, so its files must be on all machines.
        name, limits: of the model.
        config: of the app.
        cluster: the number of engines and their resources.
        address: as for `ray_session`.
        host, port: address of Ray Serve on the cluster's head node.
        on_ready: called with the address for a browser on this machine when the engines are loaded.

    Raises:
        ToMeConfigError: one request may ask for more images than may wait.
        RayError: Ray cannot be reached, or an engine cannot be started; the message contains the engine's error.
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
            _deploy(load, name, limits, config, cluster)
            print(f"serving at http://{host}:{port} with {cluster.min_replicas} to {engines} engines", flush=True)
            if on_ready is not None:
                on_ready(url_of(host, port))
            end.wait()
            print("finishing accepted requests", flush=True)
        except RuntimeError as error:
            raise RayError(f"the engines cannot be started: {error}") from error
        finally:
            _undeploy(cluster)
            if address is None:
                serve.shutdown()


def _deploy(load: Callable[[], Engine], name: str, limits: Limits, config: AppConfig, cluster: Cluster) -> None:
    """Start the engines and the app, and wait until they answer."""
    common: dict[str, Any] = {
        "health_check_period_s": HEALTH_SECONDS,
        "graceful_shutdown_timeout_s": cluster.request_seconds,
        "logging_config": LoggingConfig(log_level="WARNING"),  # no line for each request
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
    sampler, methods = handle.sampler.remote().result(), handle.methods.remote().result()

    def build() -> FastAPI:  # in the app's replica
        metrics = Metrics()
        service = ClusterService(name, sampler, methods, limits, metrics, cluster)
        app = create_app(service, config, metrics)
        app.state.service = service
        return app

    # On the head node, which the cluster needs anyway, so that the loss of another node loses no request.
    app = serve.deployment(
        serve.ingress(build)(App),
        **common,
        num_replicas=1,
        max_ongoing_requests=HTTP_REQUESTS + cluster.accepted,
        ray_actor_options={"num_cpus": 0, "resources": {HEAD: 0.001}},
    )
    serve.run(app.bind(), name=HTTP, route_prefix="/")


def _undeploy(cluster: Cluster) -> None:
    """End the app, which refuses new requests and finishes accepted ones, and then the engines."""
    deadline = monotonic() + cluster.request_seconds
    if HTTP in serve.status().applications:
        try:  # first, because Ray Serve answers 404 as soon as an application is deleted
            serve.get_app_handle(HTTP).drain.remote().result(timeout_s=cluster.request_seconds)
        except (*DEATHS, TimeoutError, RayServeException) as error:
            logger.error("the app did not finish its accepted requests: %r", error)
    for name in (HTTP, ENGINES):
        if name in serve.status().applications:
            serve.delete(name, _blocking=False)  # blocking, Ray Serve gives up after a minute
        while name in serve.status().applications and monotonic() < deadline + END_SECONDS:
            sleep(0.1)
