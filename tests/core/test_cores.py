"""The number of cores that this process may use: affinity and the CPU quotas of its cgroups."""

import argparse
import ast
import os
from pathlib import Path

import pytest

import ppdiffusers_tome
from ppdiffusers_tome import cores
from ppdiffusers_tome.commands import image_options
from ppdiffusers_tome.comparison import environment
from ppdiffusers_tome.run.paddle_runtime import PaddleRuntime

PACKAGE = Path(ppdiffusers_tome.__file__).parent


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that describes a machine on which this process may run on 16 cores, and counts the usable ones."""

    def count(memberships, mounts, files=None):
        (tmp_path / "cgroup").write_text("".join(f"{line}\n" for line in memberships))
        lines = [f"31 23 0:28 {root} {tmp_path}{place} rw,relatime shared:1 - {kind}" for root, place, kind in mounts]
        (tmp_path / "mountinfo").write_text("".join(f"{line}\n" for line in lines))
        for name, content in (files or {}).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
        return cores.usable_cores()

    monkeypatch.setattr(cores, "PROC", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    return count


DISK = ("/", "/", "ext4 /dev/sda1 rw")
VERSION_2 = [DISK, ("/", "/fs", "cgroup2 cgroup2 rw,nsdelegate")]
VERSION_1 = [("/", "/fs/cpu,cpuacct", "cgroup cgroup rw,cpu,cpuacct"), ("/", "/fs/pids", "cgroup cgroup rw,pids")]
OF_VERSION_1 = ["5:pids:/docker/1f", "3:cpu,cpuacct:/docker/1f"]


@pytest.mark.parametrize(
    ("quota", "usable"),
    [("max 100000", 16), ("200000 100000", 2), ("150000 100000", 2), ("1000 100000", 1), ("9900000 100000", 16)],
)
def test_quota_of_a_container(machine, quota, usable):
    assert machine(["0::/"], VERSION_2, {"fs/cpu.max": quota}) == usable


def test_the_smallest_quota_on_the_way_up_counts(machine):
    files = {"fs/pods/cpu.max": "300000 100000", "fs/pods/a/cpu.max": "max 100000", "fs/other/cpu.max": "1 100000"}
    assert machine(["0::/pods/a"], VERSION_2, files) == 3
    assert machine(["0::/pods/a"], VERSION_2, {"fs/pods/a/cpu.max": "500000 100000"}) == 3
    assert machine(["0::/pods/a"], VERSION_2, {"fs/pods/a/cpu.max": "100000 100000"}) == 1
    assert machine(["0::/"], VERSION_2) == 16


@pytest.mark.parametrize(("quota", "usable"), [("-1", 16), ("400000", 4)])
def test_quota_of_version_1(machine, quota, usable):
    folder = "fs/cpu,cpuacct/docker"
    files = {f"{folder}/1f/cpu.cfs_quota_us": quota, f"{folder}/1f/cpu.cfs_period_us": "100000"}
    files |= {"fs/pids/docker/1f/cpu.cfs_quota_us": "1", "fs/pids/docker/1f/cpu.cfs_period_us": "1"}
    unified = ("/", "/fs/unified", "cgroup2 cgroup2 rw")
    assert machine([*OF_VERSION_1, "0::/"], [*VERSION_1, unified], files) == usable
    above = {f"{folder}/cpu.cfs_quota_us": "200000", f"{folder}/cpu.cfs_period_us": "100000"}
    assert machine(OF_VERSION_1, VERSION_1, above) == 2


def test_a_container_that_sees_a_part_of_the_tree(machine):
    mount = ("/docker/1f", "/fs/cpu", "cgroup cgroup rw,cpu")
    files = {"fs/cpu/cpu.cfs_quota_us": "300000", "fs/cpu/cpu.cfs_period_us": "100000"}
    assert machine(["3:cpu:/docker/1f"], [mount], files) == 3
    files = {"fs/cpu/sub/cpu.cfs_quota_us": "200000", "fs/cpu/sub/cpu.cfs_period_us": "100000"}
    assert machine(["3:cpu:/docker/1f/sub"], [mount], files) == 2
    assert machine(["3:cpu:/elsewhere"], [mount]) == 3


def test_without_cgroups_the_affinity_counts(machine, tmp_path, monkeypatch):
    assert machine([], [DISK]) == 16
    (tmp_path / "mountinfo").unlink()
    assert cores.usable_cores() == 16
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores.usable_cores() == 64


def test_all_that_use_cores_ask_for_the_usable_ones(machine):
    machine(["0::/"], VERSION_2, {"fs/cpu.max": "300000 100000"})
    assert PaddleRuntime().cores() == 3 and PaddleRuntime(threads=5).cores() == 5
    about = environment.describe_environment()
    assert (about["cores"], about["usable cores"]) == (64, 3), "of the machine, and of this process"
    parser = argparse.ArgumentParser()
    image_options.add_worker_options(parser)
    assert image_options.threads_per_process(parser.parse_args(["--ray", "--actors", "3"])) == 1
    assert image_options.threads_per_process(parser.parse_args(["--ray", "--actors", "1"])) == 3


def test_no_other_module_counts_cores():
    """Except for the number of the machine's cores, which results name."""
    counting = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("cpu_count", "sched_getaffinity")
    }
    assert counting == {"cores.py", "comparison/environment.py"}
