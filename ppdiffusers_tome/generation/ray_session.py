"""Ray for one command: an existing cluster, or a Ray on this machine that other machines cannot reach."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil

# No usage reports. And Ray does not hide GPUs from processes that request none, because --device decides.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

# Ray after Paddle 2.6 crashes in inflateReset2, because Paddle exports its own copy of zlib's symbols, unless Python's
# zlib was loaded before Paddle, as the package's __init__ does.
import ray
from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError, WorkerCrashedError

from ..errors import ToMeError

# What the caller of a process gets if the process or its machine died.
DEATHS = (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError, ObjectLostError)
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
        "num_cpus": max(os.cpu_count() or 1, ceil(cpus)),
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
