"""Device profiles: measured once, cached, portable, refused clearly."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fxhome import device as device_module
from fxhome.device import DeviceProfile, cached_profile, keep_timed_graph, measure_profile, resolve_device
from fxhome.errors import DeviceError
from fxhome.host_costs import HostCosts, TimedGraph
from fxhome.runtime import probe
from tests.host_tools import host_costs

PROFILE = DeviceProfile(
    name="Some GPU",
    kind="cuda",
    d2h_bytes_per_s=55e9,
    h2d_bytes_per_s=55e9,
    duplex_bytes_per_s=75e9,
    copy_latency_us=20.0,
    memory_bytes_per_s=4e12,
    launch_us=5.0,
    flops_per_s=(("bfloat16", 7e14), ("float32", 5e13)),
    total_memory_bytes=140 * 1024**3,
    host_memory_bytes=128 * 1024**3,
    versions=(("torch", "2.14.1"), ("cuda", "13.0")),
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FXHOME_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(device_module, "_measured", {})
    monkeypatch.setattr(device_module, "_left_out", set())
    return tmp_path / "cache"


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the measurement by a counted, instant one."""
    made: list[str] = []

    def measure(device: torch.device | str) -> DeviceProfile:
        made.append(str(device))
        kind, name, versions = device_module.device_identity(torch.device("cpu"))
        return dataclasses.replace(PROFILE, kind=kind, name=name, versions=versions, launch_us=float(len(made)))

    monkeypatch.setattr(device_module, "measure_profile", measure)
    return made


def test_save_and_load_give_the_same_profile(tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    PROFILE.save(path)
    assert DeviceProfile.load(path) == PROFILE
    assert [entry.name for entry in tmp_path.iterdir()] == ["device.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[]",
        "{}",
        '{"schema": 4, "device_profile": {}}',
        '{"schema": 3, "device_profile": {}}',
        '{"schema": 2, "device_profile": {}}',
        '{"schema": 1, "device_profile": {}}',
        "\udce4",
    ],
)
def test_a_file_that_is_no_profile_is_refused_with_the_way_out(tmp_path: Path, text: str) -> None:
    path = tmp_path / "device.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DeviceError, match=r"device\.json.*fxhome profile -o device\.json"):
        DeviceProfile.load(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="No such file"):
        DeviceProfile.load(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [("d2h_bytes_per_s", 0.0), ("launch_us", -1.0), ("memory_bytes_per_s", float("nan")), ("kind", "tpu")],
)
def test_a_rate_that_cannot_be_is_refused(tmp_path: Path, field: str, value: object) -> None:
    document = json.loads(PROFILE.to_json())
    document["device_profile"][field] = value
    path = tmp_path / "device.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(DeviceError, match=field):
        DeviceProfile.load(path)


def test_fingerprint_names_the_device_and_not_the_measurement() -> None:
    assert dataclasses.replace(PROFILE, d2h_bytes_per_s=1.0).fingerprint() == PROFILE.fingerprint()
    assert dataclasses.replace(PROFILE, name="Another GPU").fingerprint() != PROFILE.fingerprint()
    assert dataclasses.replace(PROFILE, total_memory_bytes=1).fingerprint() != PROFILE.fingerprint()


def test_flops_of_knows_only_what_was_measured() -> None:
    assert PROFILE.flops_of(torch.bfloat16) == 7e14
    assert PROFILE.flops_of(torch.int8) is None


def test_measuring_the_cpu_gives_plausible_rates_even_under_fake_tensors() -> None:
    with FakeTensorMode():
        profile = measure_profile("cpu")
    assert profile.kind == "cpu"
    assert 1e8 < profile.d2h_bytes_per_s < 1e12
    assert {dtype for dtype, _ in profile.flops_per_s} == {"bfloat16", "float16", "float32"}
    assert profile.duplex_bytes_per_s <= profile.d2h_bytes_per_s + profile.h2d_bytes_per_s


def test_the_cache_is_read_by_the_next_process(
    cache: Path, measurements: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cached_profile("cpu")
    assert cached_profile("cpu") is first
    monkeypatch.setattr(device_module, "_measured", {})  # what a new process starts with
    assert cached_profile("cpu") == first
    assert measurements == ["cpu"]


@pytest.mark.parametrize("damage", ["{", "another device"])
def test_a_bad_cache_file_is_measured_again_with_a_warning(
    cache: Path, measurements: list[str], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    cached_profile("cpu")
    (path,) = cache.glob("device-*.json")
    path.write_text(PROFILE.to_json() if damage == "another device" else damage, encoding="utf-8")
    monkeypatch.setattr(device_module, "_measured", {})
    with pytest.warns(RuntimeWarning, match="measuring again"):
        assert cached_profile("cpu").launch_us == 2.0
    assert DeviceProfile.load(path).launch_us == 2.0


def test_a_cache_that_cannot_be_written_is_announced_and_the_profile_used(cache: Path, measurements: list[str]) -> None:
    cache.write_text("a file where the directory should be", encoding="ascii")
    with pytest.warns(RuntimeWarning) as caught:
        assert cached_profile("cpu").launch_us == 1.0
    assert any("FXHOME_CACHE_DIR" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("name", ["mps", "nonsense"])
def test_other_devices_are_refused(name: str) -> None:
    with pytest.raises(DeviceError, match=name):
        resolve_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the machine without CUDA")
def test_cuda_without_cuda_is_refused_with_the_way_out() -> None:
    with pytest.raises(DeviceError, match=r"fxhome profile -o device\.json"):
        cached_profile("cuda")


def test_importing_device_touches_neither_cuda_nor_the_runtime() -> None:
    code = (
        "import sys, fxhome.device, torch; "
        "assert not torch.cuda.is_initialized(); "
        "assert not any(m.startswith(('fxhome.runtime', 'numba')) for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_device_without_room_to_be_measured_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that a large model has filled: Dynamo must not get to see an out-of-memory error."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")

    monkeypatch.setattr(probe, "_measure_cpu", full)
    with pytest.raises(DeviceError, match="run `fxhome profile` before the model is built"):
        measure_profile("cpu")


A_STEP = TimedGraph("a graph", 2000.0, 1000.0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU that is not there; collects the inner compilers whose host was measured on it."""
    asked: list[str] = []

    def measure(device: torch.device, inner: str) -> HostCosts:
        asked.append(inner)
        return host_costs(inner=inner)

    monkeypatch.setattr(device_module, "resolve_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setattr(device_module, "device_identity", lambda _: ("cuda", PROFILE.name, PROFILE.versions))
    monkeypatch.setattr(device_module, "measuring_turn", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(device_module, "measure_profile", lambda _: PROFILE)
    monkeypatch.setattr("fxhome.runtime.host_probe.measure_host_costs", measure)
    return asked


def test_a_hosts_costs_are_measured_once_for_each_inner_compiler(
    cache: Path, gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cached_profile("cuda").host == ()
    assert cached_profile("cuda", "inductor").host == (host_costs(inner="inductor"),)
    monkeypatch.setattr(device_module, "_measured", {})  # what a new process starts with
    found = cached_profile("cuda", "aot_eager")
    assert found.host == (host_costs(inner="inductor"), host_costs(inner="aot_eager"))
    assert (found.host_costs("inductor"), found.host_costs("other")) == (host_costs(inner="inductor"), None)
    assert cached_profile("cuda", "inductor") is found
    assert gpu == ["inductor", "aot_eager"]


def test_a_host_that_cannot_be_measured_is_announced_once_and_left_out(
    cache: Path, gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: torch.device, inner: str) -> HostCosts:
        gpu.append(inner)
        raise RuntimeError("no compiler")

    monkeypatch.setattr("fxhome.runtime.host_probe.measure_host_costs", fail)
    with pytest.warns(RuntimeWarning, match="inner='inductor' cannot be measured .no compiler.; predicted times"):
        assert cached_profile("cuda", "inductor").host == ()
    assert cached_profile("cuda", "inductor").host == ()
    assert gpu == ["inductor"]


def test_a_cpu_has_no_host_of_its_own(cache: Path, measurements: list[str]) -> None:
    assert cached_profile("cpu", "inductor").host_costs("inductor") is None


def test_a_profile_with_a_host_is_saved_and_loaded(tmp_path: Path) -> None:
    profile = dataclasses.replace(PROFILE, host=(host_costs(inner="aot_eager"), host_costs(A_STEP, wait_us=0.0)))
    profile.save(tmp_path / "device.json")
    assert DeviceProfile.load(tmp_path / "device.json") == profile


@pytest.mark.parametrize("figure", [-1.0, float("nan"), float("inf")])
def test_a_cost_that_cannot_be_is_refused(figure: float) -> None:
    with pytest.raises(ValueError, match="kernel_us should be finite and not negative"):
        host_costs(kernel_us=figure)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a new process starts with."""
    monkeypatch.setattr(device_module, "_measured", {})


def test_what_steps_told_of_the_host_is_known_here_and_in_a_later_process(
    cache: Path, gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cached_profile("cuda", "inductor").host == (host_costs(),)
    keep_timed_graph("cuda", "inductor", A_STEP)
    assert cached_profile("cuda", "inductor").host == (host_costs(A_STEP),)
    forget(monkeypatch)
    assert cached_profile("cuda", "inductor").host == (host_costs(A_STEP),)
    assert gpu == ["inductor"]
    assert [path.suffix for path in sorted(cache.iterdir())] == [".json", ".lock"]


def test_two_processes_lose_nothing_of_each_other(cache: Path, gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has read the file before this one has written what it timed."""
    cached_profile("cuda", "inductor")
    others = dict(device_module._measured)
    keep_timed_graph("cuda", "inductor", A_STEP)
    monkeypatch.setattr(device_module, "_measured", others)
    cached_profile("cuda", "aot_eager")
    second = TimedGraph("another", 300.0, 200.0)
    keep_timed_graph("cuda", "inductor", second)
    forget(monkeypatch)
    known = cached_profile("cuda", "inductor")
    assert known.host == (host_costs(A_STEP, second), host_costs(inner="aot_eager"))


def test_what_is_known_is_not_written_again(cache: Path, gpu: list[str]) -> None:
    cached_profile("cuda", "inductor")
    keep_timed_graph("cuda", "inductor", A_STEP)
    (path,) = cache.glob("*.json")
    path.unlink()
    keep_timed_graph("cuda", "inductor", TimedGraph("a graph", 1950.0, 1000.0))
    assert not path.exists()


def test_steps_are_not_kept_where_the_host_was_never_measured(cache: Path, gpu: list[str]) -> None:
    keep_timed_graph("cuda", "inductor", A_STEP)
    assert not cache.exists() or list(cache.iterdir()) == []
    cached_profile("cuda")
    keep_timed_graph("cuda", "inductor", A_STEP)
    assert cached_profile("cuda").host == ()


def test_a_file_that_was_spoilt_meanwhile_is_written_anew(
    cache: Path, gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_profile("cuda", "inductor")
    (path,) = cache.glob("*.json")
    path.write_text("{")
    keep_timed_graph("cuda", "inductor", A_STEP)
    forget(monkeypatch)
    assert cached_profile("cuda", "inductor").host == (host_costs(A_STEP),)
