"""The same server on Ray Serve: the HTTP app in one replica, engines in others, on one machine or many.

Two applications, so that one can end before the other: "…-http" holds the app of `app.py`, and its service sends every
job to "…-engines", whose replicas have an engine each. A job is a function of its fields, so one whose replica died is
simply drawn again by another.
"""

import signal
import threading
from collections.abc import Callable
from time import monotonic, sleep
from types import FrameType
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.schema import LoggingConfig

from ..errors import ToMeConfigError
from .app import create_app
from .engine import Engine
from .jobs import Limits
from .metrics import Metrics
from .ray_session import RayError, ray_session
from .replicas import ENGINES, HTTP, Cluster, ClusterService, EngineReplica
from .settings import Settings

HTTP_REQUESTS = 1000  # at once, in the app; how many pictures wait is bounded by Cluster.capacity
END_SECONDS = 30.0  # for Ray Serve to end a replica that has finished


def serve_until_told(start: Callable[[], None], address: str | None, cluster: Cluster, host: str, port: int) -> None:
    """Serve on Ray until SIGTERM or SIGINT; the first finishes what was accepted, the second ends at once.

    Args:
        start: deploys; see `cluster.deploy`.
        address: as in `ray_session`.
        cluster: what `start` deploys.
        host, port: where Ray Serve listens, on every machine of the cluster that has replicas.

    Raises:
        RayError: see there.
    """
    told = threading.Event()

    def tell(number: int, frame: FrameType | None) -> None:
        if told.is_set():
            raise KeyboardInterrupt
        told.set()

    engines = cluster.max_replicas
    with ray_session(address, engines * cluster.cpus, engines * cluster.gpus, shows_logs=True):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, tell)
        try:
            serve.start(http_options={"host": host, "port": port})
            start()
            print(f"serving at http://{host}:{port} with {cluster.min_replicas} to {engines} engines", flush=True)
            told.wait()
            print("finishing what was accepted", flush=True)
        except RuntimeError as error:
            raise RayError(f"the engines cannot be started: {error}") from error
        finally:
            undeploy(cluster)
            if address is None:
                serve.shutdown()


def deploy(load: Callable[[], Engine], name: str, limits: Limits, settings: Settings, cluster: Cluster) -> None:
    """Start engines and app on the Ray that this process is connected to, and wait until they answer.

    Args:
        load: makes an engine; called in each of the engines' replicas, so what it reads must be on all machines.
        name, limits: of the model.
        settings: of the app.
        cluster: how many engines.

    Raises:
        ToMeConfigError: one request may ask for more pictures than may wait.
        RuntimeError: an engine could not be started; from Ray Serve, with the replica's last words.
    """
    if cluster.capacity < limits.images:
        raise ToMeConfigError(
            f"capacity={cluster.capacity} is not allowed: one request may ask for {limits.images} pictures"
        )
    quiet = LoggingConfig(enable_access_log=False)
    scale: dict[str, Any] = {"num_replicas": cluster.min_replicas}
    if cluster.max_replicas > cluster.min_replicas:
        scale = {
            "autoscaling_config": {
                "min_replicas": cluster.min_replicas,
                "max_replicas": cluster.max_replicas,
                "target_ongoing_requests": cluster.largest_batch,
            }
        }
    engines = serve.deployment(
        EngineReplica,
        **scale,
        max_ongoing_requests=cluster.ongoing,
        max_queued_requests=cluster.accepted,
        ray_actor_options={"num_cpus": cluster.cpus, "num_gpus": cluster.gpus},
        health_check_period_s=cluster.health_seconds,
        health_check_timeout_s=max(30.0, cluster.health_seconds),
        graceful_shutdown_timeout_s=cluster.drain_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=3,
        logging_config=quiet,
    )
    handle = serve.run(engines.bind(load, name, limits, cluster), name=ENGINES, route_prefix=None)
    sampler = handle.sampler.remote().result()

    def build() -> FastAPI:  # in the app's replica
        metrics = Metrics()
        return create_app(ClusterService(name, sampler, limits, metrics, cluster.accepted), settings, metrics)

    app = serve.deployment(
        serve.ingress(build)(),
        name="App",
        num_replicas=1,
        max_ongoing_requests=HTTP_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=cluster.health_seconds,
        graceful_shutdown_timeout_s=cluster.drain_seconds,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config=quiet,
    )
    serve.run(app.bind(), name=HTTP, route_prefix="/")


def undeploy(cluster: Cluster) -> None:
    """End the app, which finishes what it has accepted, and then the engines."""
    for name in (HTTP, ENGINES):
        if name in serve.status().applications:
            serve.delete(name, _blocking=False)  # blocking, Ray Serve gives up after a minute
        end = monotonic() + cluster.drain_seconds + END_SECONDS
        while name in serve.status().applications and monotonic() < end:
            sleep(0.1)
