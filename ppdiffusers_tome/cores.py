"""How many CPU cores this process may use."""

import os
from collections.abc import Iterator
from contextlib import suppress
from math import ceil
from pathlib import Path

PROC = Path("/proc/self")  # what Linux reports about this process


def usable_cores() -> int:
    """The number of cores that this process may use, at least 1.

    These are the cores that it may run on, or fewer if its cgroup or a cgroup above it has a CPU quota, as containers
    have with `docker run --cpus` or a CPU limit of Kubernetes. A quota of 1.5 cores counts as 2.

    joblib's `cpu_count` reads the quota of the topmost cgroup only, which misses that of a service of systemd.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *map(ceil, _quotas())]))


def _quotas() -> Iterator[float]:
    """The CPU quotas of this process's cgroups and of those above them, in cores."""
    for folder in _cgroups():
        with suppress(OSError, ValueError):  # there is no file, or the quota is "max"
            quota, period = (folder / "cpu.max").read_text().split()
            yield int(quota) / int(period)
        with suppress(OSError, ValueError):
            quota = (folder / "cpu.cfs_quota_us").read_text()
            if int(quota) > 0:  # -1: no quota
                yield int(quota) / int((folder / "cpu.cfs_period_us").read_text())


def _cgroups() -> Iterator[Path]:
    """Folders that may have a CPU quota of this process: those of its cgroups, each followed by those above it.

    There are two kinds of cgroups, version 2 and version 1's for the CPU, and a machine may have both.
    """
    try:
        memberships = (PROC / "cgroup").read_text().splitlines()
        mounts = (PROC / "mountinfo").read_text().splitlines()
    except OSError:  # not Linux
        return
    paths = {}  # by the type of the file system
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if not controllers:
            paths["cgroup2"] = path
        elif "cpu" in controllers.split(","):
            paths["cgroup"] = path
    for mount in mounts:
        place, _, file_system = mount.partition(" - ")
        kind, *_, options = file_system.split()
        if kind not in paths or (kind == "cgroup" and "cpu" not in options.split(",")):
            continue
        root, mount_point = place.split()[3:5]
        path = os.path.relpath(paths[kind], root)  # a container may see only a part of the tree
        folder = Path(mount_point, "" if path.startswith("..") else path)
        yield folder
        yield from (above for above in folder.parents if above.is_relative_to(mount_point))
