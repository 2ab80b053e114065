"""How much CPU and memory this process may really use: affinity mask and cgroup v1/v2 limits, not what the machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")


def cpu_count(proc: Path = _PROC) -> int:
    """Cores this process may use: the affinity mask cut by the tightest cgroup CPU quota, rounded down, at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # macOS has no affinity
        cores = os.cpu_count() or 1
    quota = cpu_quota(proc)
    return max(1, min(cores, int(quota))) if quota is not None else cores


def cpu_quota(proc: Path = _PROC) -> float | None:
    """The tightest cgroup CPU quota in cores, or None when there is none."""
    quotas = []
    for folder in _cgroup_folders("cpu", proc):
        fields = _read(folder / "cpu.max").split()
        if not fields:
            fields = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        if len(fields) == 2 and _positive(fields[0]) and _positive(fields[1]):
            quotas.append(int(fields[0]) / int(fields[1]))
    return min(quotas, default=None)


def memory_limit_bytes(proc: Path = _PROC) -> int | None:
    """The tightest cgroup memory limit, or None when there is none below the machine's memory."""
    total = _meminfo(proc).get("MemTotal")
    limits = [limit for folder in _cgroup_folders("memory", proc) if (limit := _limit(folder)) is not None]
    limit = min(limits, default=None)
    return None if limit is None or (total is not None and limit >= total) else limit


def total_memory_bytes(proc: Path = _PROC) -> int:
    """Memory of the machine, or the cgroup limit when that is lower."""
    limit = memory_limit_bytes(proc)
    if limit is not None:
        return limit
    return _meminfo(proc).get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory_bytes(proc: Path = _PROC) -> int:
    """Memory that can still be taken without swapping or being killed: what the machine has free, and what each cgroup has left."""
    free = _meminfo(proc).get("MemAvailable")
    candidates = [free if free is not None else total_memory_bytes(proc) // 2]
    for folder in _cgroup_folders("memory", proc):
        limit = _limit(folder)
        used = _first_number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            candidates.append(limit - used + _reclaimable(folder))
    return max(0, min(candidates))


def _limit(folder: Path) -> int | None:
    limit = _first_number(folder / "memory.max", folder / "memory.limit_in_bytes")
    return limit if limit is not None and limit < 1 << 60 else None  # v1 writes 2**63 rounded to pages for "no limit"


def _reclaimable(folder: Path) -> int:
    """Page cache of the cgroup: it counts as used but is given back under pressure."""
    stat = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    for key in ("total_inactive_file", "inactive_file"):
        if stat.get(key, "").isdigit():
            return int(stat[key])
    return 0


def _cgroup_folders(controller: str, proc: Path) -> Iterator[Path]:
    """The folders that limit this process for `controller`, from its own cgroup up to the top of each mount (v1 and v2)."""
    paths: dict[str, str] = {}  # controller, or "" for v2 -> cgroup of this process
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        for name in controllers.split(","):
            paths[name] = path
    for line in _read(proc / "self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        mount, kind = left.split(), right.split()
        if len(mount) < 5 or len(kind) < 1 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        if kind[0] == "cgroup" and controller not in kind[-1].split(","):
            continue
        key = "" if kind[0] == "cgroup2" else controller
        if key not in paths:
            continue
        path = paths[key]
        top = Path(mount[4].replace("\\040", " "))
        # in a container the mount shows only the part of the hierarchy below its root field
        root = mount[3].rstrip("/")
        relative = path[len(root) :] if path == root or path.startswith(root + "/") else ""
        folder = top / relative.strip("/")
        while True:
            if folder.is_dir():
                yield folder
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent


def _meminfo(proc: Path) -> dict[str, int]:
    """/proc/meminfo in bytes; empty where there is none."""
    result = {}
    for line in _read(proc / "meminfo").splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if fields and fields[0].isdigit():
            result[name] = int(fields[0]) * 1024
    return result


def _first_number(*paths: Path) -> int | None:
    for path in paths:
        text = _read(path)
        if text.isdigit():
            return int(text)
    return None


def _positive(text: str) -> bool:
    return text.isdigit() and int(text) > 0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
