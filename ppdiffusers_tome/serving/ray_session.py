"""Ray for one command: somebody's cluster, or one of this machine's own that nobody else can reach."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil

# Nothing is reported to Ray's makers. And Ray hides no GPU from processes that ask for none: --device decides.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

# After the package itself, which __init__ has imported: Ray and Paddle 2.6 go together in either order only if zlib's
# own library was loaded before Paddle's copy of it. Paddle, then Ray, in a bare interpreter ends in inflateReset2.
import ray
from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError, WorkerCrashedError

from ..errors import ToMeError

# What a process that died, or its whole machine, looks like to its caller.
DEATHS = (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError, ObjectLostError)
OBJECT_STORE_BYTES = 200 * 2**20  # jobs and images pass through it; Ray's default is a third of the machine's memory


class RayError(ToMeError, RuntimeError):
    """Ray cannot be started or reached, or an engine cannot be started on it."""


@contextmanager
def ray_session(address: str | None, cpus: float, gpus: float, shows_logs: bool) -> Iterator[None]:
    """Be connected to Ray.

    Args:
        address: of a cluster that this machine is a node of, as `ray.init` takes it; None: start Ray on this machine,
            at 127.0.0.1, and end it.
        cpus, gpus: how many the work needs together. A Ray that is started here has so many CPUs at least.
        shows_logs: whether what the actors print is printed here too.

    Raises:
        RayError: there is no Ray at that address, it did not start, or this machine has not so many GPUs.
    """
    own = {
        "num_cpus": max(os.cpu_count() or 1, ceil(cpus)),
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
    }
    try:
        # "local": never a cluster that happens to run here
        ray.init(address or "local", log_to_driver=shows_logs, logging_level="warning", **({} if address else own))
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise RayError(f"Ray at {address or 'this machine'} cannot be reached or started: {error}") from error
    try:
        found = ray.cluster_resources().get("GPU", 0)
        if address is None and gpus > found:  # Ray would wait for them for ever
            raise RayError(f"{gpus:g} GPUs are needed, one for each engine, and this machine has {found:g}")
        yield
    finally:
        ray.shutdown()
