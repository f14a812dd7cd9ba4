"""What the host can really give: machine, cgroup (v1 and v2) and the locked-memory limit.

A container's share is usually far below what the machine reports, and going over it kills the process instead of
raising, so every large host allocation is checked against the smallest of these numbers first.
"""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes a huge number where v2 writes "max"


@dataclasses.dataclass(frozen=True)
class HostLimits:
    """Host memory of this process. All in bytes; None where no such limit is set.

    `memlock_bytes` is the soft RLIMIT_MEMLOCK. CUDA's own pinning does not go through mlock, so a low value is
    worth reporting when pinning is refused and is no reason to refuse beforehand.
    """

    machine_available_bytes: int
    cgroup_available_bytes: int | None
    memlock_bytes: int | None

    @property
    def available_bytes(self) -> int:
        """What may still be allocated without swapping or being killed."""
        if self.cgroup_available_bytes is None:
            return self.machine_available_bytes
        return min(self.machine_available_bytes, self.cgroup_available_bytes)


def read_host_limits(
    *, cgroup_root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> HostLimits:
    """Read the three limits now. Files that are absent or unreadable mean: no such limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    frees = list(_cgroup_available(cgroup_root, membership))
    return HostLimits(
        machine_available_bytes=int(psutil.virtual_memory().available),
        cgroup_available_bytes=min(frees) if frees else None,
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
    )


def _cgroup_available(root: Path, membership: Path) -> Iterator[int]:
    """Free bytes at each level of this process's memory cgroup, both versions; the tightest level binds."""
    try:
        lines = membership.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_name, usage_name, cache_key = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit_name, usage_name = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache_key = "total_inactive_file"
        else:
            continue
        level = base / path.lstrip("/")
        # Inside a container the path is often the host's and absent here: then only the root's files count.
        for directory in (level, *level.parents):
            limit = _read_number(directory / limit_name)
            usage = _read_number(directory / usage_name)
            if limit is not None and usage is not None and limit < _UNLIMITED_BYTES:
                # Clean page cache is charged to the group but given back before anything is killed.
                yield max(0, limit - usage + _read_stat(directory / "memory.stat", cache_key))
            if directory == base:
                break


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # absent, or "max"
        return None


def _read_stat(path: Path, key: str) -> int:
    try:
        rows = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(row.split()[1]) for row in rows if row.split()[:1] == [key]), 0)
