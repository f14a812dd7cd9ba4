"""Host limits: read from files laid out as the kernel lays them out, both cgroup versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxhome.runtime.host_memory import read_host_limits


def write_group(directory: Path, files: dict[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text, encoding="ascii")


def test_cgroup_v2_binds_at_its_tightest_level(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("0::/outer/inner\n", encoding="ascii")
    write_group(root / "outer/inner", {"memory.max": "max\n", "memory.current": "5\n"})
    write_group(
        root / "outer", {"memory.max": "1000\n", "memory.current": "600\n", "memory.stat": "inactive_file 50\n"}
    )
    assert read_host_limits(cgroup_root=root, membership=membership).cgroup_available_bytes == 450


def test_cgroup_v1_reads_the_memory_controller_and_the_containers_own_root(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("5:cpu:/x\n4:memory:/docker/not-visible-here\n", encoding="ascii")
    write_group(
        root / "memory",
        {
            "memory.limit_in_bytes": "2000\n",
            "memory.usage_in_bytes": "1500\n",
            "memory.stat": "total_inactive_file 100\n",
        },
    )
    limits = read_host_limits(cgroup_root=root, membership=membership)
    assert limits.cgroup_available_bytes == 600
    assert limits.available_bytes == 600


@pytest.mark.parametrize("text", ["0::/\n", "4:memory:/\n", ""])
def test_no_limit_files_mean_no_limit(tmp_path: Path, text: str) -> None:
    membership = tmp_path / "membership"
    membership.write_text(text, encoding="ascii")
    limits = read_host_limits(cgroup_root=tmp_path / "absent", membership=membership)
    assert limits.cgroup_available_bytes is None
    assert limits.available_bytes == limits.machine_available_bytes > 0
