"""CPU and memory limits are read from made-up /proc and cgroup trees of every layout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gristmill import resources

GIB = 1 << 30


class Machine:
    """A fake /proc with cgroup mounts below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.proc = root / "proc"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup: list[str] = []
        self.mounts: list[str] = []
        self.write("proc/meminfo", f"MemTotal: {8 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {6 * GIB // 1024} kB\n")
        self.flush()

    def write(self, path: str, text: str | int) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")

    def flush(self) -> None:
        self.write("proc/self/cgroup", "\n".join(self.cgroup))
        self.write("proc/self/mountinfo", "\n".join(self.mounts))

    def v2(self, path: str, root: str = "/") -> None:
        self.cgroup.append(f"0::{path}")
        self.mounts.append(f"30 20 0:26 {root} {self.root}/cg rw,nosuid - cgroup2 cgroup2 rw")
        self.flush()

    def v1(self, controllers: str, path: str, root: str = "/") -> None:
        self.cgroup.append(f"{len(self.cgroup) + 2}:{controllers}:{path}")
        self.mounts.append(f"31 20 0:27 {root} {self.root}/{controllers} rw - cgroup cgroup rw,{controllers}")
        self.flush()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)


def test_without_cgroups_the_machine_is_the_limit(machine: Machine) -> None:
    assert resources.cpu_count(machine.proc) == 4
    assert resources.memory_limit_bytes(machine.proc) is None
    assert resources.total_memory_bytes(machine.proc) == 8 * GIB
    assert resources.available_memory_bytes(machine.proc) == 6 * GIB


def test_v2_limits_of_a_parent_count(machine: Machine) -> None:
    machine.v2("/a/b")
    machine.write("cg/a/cpu.max", "250000 100000")
    machine.write("cg/a/b/cpu.max", "max 100000")
    machine.write("cg/a/memory.max", 2 * GIB)
    machine.write("cg/a/b/memory.max", "max")
    machine.write("cg/a/memory.current", 1 * GIB)
    machine.write("cg/a/memory.stat", f"anon 5\ninactive_file {GIB // 2}")
    assert resources.cpu_count(machine.proc) == 2
    assert resources.memory_limit_bytes(machine.proc) == 2 * GIB
    assert resources.total_memory_bytes(machine.proc) == 2 * GIB
    assert resources.available_memory_bytes(machine.proc) == GIB + GIB // 2


def test_v1_limits_in_a_container_whose_mount_shows_only_its_own_part(machine: Machine) -> None:
    machine.v1("cpu,cpuacct", "/docker/abc", root="/docker/abc")
    machine.v1("memory", "/docker/abc", root="/docker/abc")
    machine.write("cpu,cpuacct/cpu.cfs_quota_us", 50000)
    machine.write("cpu,cpuacct/cpu.cfs_period_us", 100000)
    machine.write("memory/memory.limit_in_bytes", 3 * GIB)
    machine.write("memory/memory.usage_in_bytes", GIB)
    machine.write("memory/memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB // 4}")
    assert resources.cpu_quota(machine.proc) == 0.5
    assert resources.cpu_count(machine.proc) == 1  # never 0
    assert resources.memory_limit_bytes(machine.proc) == 3 * GIB
    assert resources.available_memory_bytes(machine.proc) == 2 * GIB + GIB // 4


def test_v1_without_limits_writes_huge_and_negative_numbers(machine: Machine) -> None:
    machine.v1("cpu", "/")
    machine.v1("memory", "/")
    machine.write("cpu/cpu.cfs_quota_us", -1)
    machine.write("cpu/cpu.cfs_period_us", 100000)
    machine.write("memory/memory.limit_in_bytes", 9223372036854771712)
    assert resources.cpu_quota(machine.proc) is None
    assert resources.memory_limit_bytes(machine.proc) is None


def test_a_limit_above_the_machine_is_none(machine: Machine) -> None:
    machine.v2("/")
    machine.write("cg/memory.max", 99 * GIB)
    assert resources.memory_limit_bytes(machine.proc) is None


def test_garbage_in_the_files_is_not_a_limit(machine: Machine) -> None:
    machine.v2("/a")
    machine.write("cg/a/cpu.max", "a b c")
    machine.write("cg/a/memory.max", "lots")
    (machine.root / "proc/self/cgroup").write_text("nonsense\n0::/a\n")
    assert resources.cpu_count(machine.proc) == 4
    assert resources.memory_limit_bytes(machine.proc) is None


def test_the_real_machine_gives_possible_numbers() -> None:
    assert 1 <= resources.cpu_count() <= 4
    assert 0 < resources.available_memory_bytes() <= resources.total_memory_bytes()
