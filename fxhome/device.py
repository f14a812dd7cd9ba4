"""What a device can do, as numbers: link bandwidth, memory bandwidth, launch cost, matrix rates.

Measured once per device and set of versions, cached on disk, and portable: a profile saved on the GPU machine plans on
a machine without one. Importing this module touches no device; measuring does (fxhome.runtime.probe).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from fxhome.errors import DeviceError
from fxhome.host_costs import HostCosts, TimedGraph, merge_hosts
from fxhome.json_codec import DecodeError, decode, encode
from fxhome.progress import progress

SCHEMA_VERSION = 4
log = logging.getLogger("fxhome")

_Identity = tuple[str, str, tuple[tuple[str, str], ...]]


@dataclasses.dataclass(frozen=True)
class DeviceProfile:
    """Rates of one device and its link to the host. Bandwidths in bytes per second, times in microseconds.

    `duplex_bytes_per_s` is the sum of both directions while both run. `copy_latency_us` is the fixed part of one copy,
    `launch_us` the cost of one small operator, `memory_bytes_per_s` what a pointwise kernel reads plus writes.
    `flops_per_s` has one entry per dtype name ("bfloat16", "float16", "float32"). On a CPU the "link" is memcpy.
    """

    name: str
    kind: str  # "cuda" or "cpu"
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    duplex_bytes_per_s: float
    copy_latency_us: float
    memory_bytes_per_s: float
    launch_us: float
    flops_per_s: tuple[tuple[str, float], ...]
    total_memory_bytes: int
    host_memory_bytes: int
    versions: tuple[tuple[str, str], ...]
    copy_slowdown: float = 1.0
    """How many times longer computing takes while a copy engine is busy: it shares memory and power."""
    kernel_us: float = 2.0
    """What a busy device takes for a kernel that has nothing to do: its start, its end, and the gap to the next."""
    host: tuple[HostCosts, ...] = ()
    """One entry per inner compiler for which they were measured; none on a CPU, where the host is the device."""

    def __post_init__(self) -> None:
        if self.kind not in ("cuda", "cpu"):
            raise ValueError(f"kind should be 'cuda' or 'cpu', got {self.kind!r}")
        numbers = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        numbers |= {f"flops_per_s[{dtype}]": rate for dtype, rate in self.flops_per_s}
        for name, number in numbers.items():
            if isinstance(number, (int, float)) and not (math.isfinite(number) and number > 0):
                raise ValueError(f"{name} should be positive and finite, got {number}")

    def flops_of(self, dtype: torch.dtype) -> float | None:
        """Measured matrix rate of `dtype` in operations per second; None where it was not measured."""
        return dict(self.flops_per_s).get(str(dtype).removeprefix("torch."))

    def host_costs(self, inner: str) -> HostCosts | None:
        """What the host spends under `inner`; None where that was not measured."""
        return next((costs for costs in self.host if costs.inner == inner), None)

    def fingerprint(self) -> str:
        """Which device this is: equal for every measurement of the same device, whatever the rates came out as."""
        memory = self.total_memory_bytes if self.kind == "cuda" else 0  # a CPU's share of memory varies by container
        return hashlib.sha256(f"{self.kind}|{self.name}|{memory}".encode()).hexdigest()

    def to_json(self) -> str:
        """The profile as a JSON document (schema 4)."""
        return json.dumps({"schema": SCHEMA_VERSION, "device_profile": encode(self)}, indent=2) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the profile to `path`; a reader never sees half a file."""
        _write_atomically(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> DeviceProfile:
        """Read a saved profile. Raises DeviceError for a file that is missing or is not one."""
        try:
            return _parse(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DeviceError(
                f"device profile {str(path)!r}: {error}; expected a file written by `fxhome profile -o device.json` "
                f"(schema {SCHEMA_VERSION}): write it again on the machine to plan for"
            ) from error


def measure_profile(device: torch.device | str) -> DeviceProfile:
    """Measure `device` now ("cpu", "cuda" or "cuda:1"): at most a few seconds, some hundred MiB of its memory.

    Raises DeviceError when the device is absent or of another kind.
    """
    from fxhome.runtime import probe  # only measuring needs the runtime: a plan for a saved profile does not

    return probe.measure(resolve_device(device))


def with_host_costs(profile: DeviceProfile, device: torch.device | str, inner: str) -> DeviceProfile:
    """The profile with what the host spends under `inner`, measured now where it is not told: some seconds.

    On a CPU there is nothing to measure. What cannot be compiled at all is warned about and left out: times of plans
    then leave out the host.
    """
    if profile.kind != "cuda" or profile.host_costs(inner) is not None:
        return profile
    from fxhome.runtime.host_probe import measure_host_costs

    resolved = resolve_device(device)
    try:
        with measuring_turn(resolved), progress(f"measuring the host under {inner}"):
            found = measure_host_costs(resolved, inner)
    except RuntimeError as error:
        warnings.warn(
            f"fxhome: what a step costs the host under inner={inner!r} cannot be measured "
            f"({str(error).splitlines()[0]}); predicted times leave it out",
            RuntimeWarning,
            stacklevel=2,
        )
        return profile
    return dataclasses.replace(profile, host=(*profile.host, found))


def cached_profile(device: torch.device | str, inner: str | None = None) -> DeviceProfile:
    """The profile of `device`, measured at its first use and then read from the cache directory.

    inner: the inner compiler whose host costs it must have ("aot_eager" or "inductor"); None: none. The directory is
    $FXHOME_CACHE_DIR or ~/.cache/fxhome; the key is the device's name and the versions. A file that cannot be read is
    measured again and one that cannot be written is not kept; both are warned about once.
    """
    resolved = resolve_device(device)
    path, identity = _place(resolved)
    key = (str(path), identity)
    if key not in _measured:
        _measured[key] = _read_cache(path, identity) or _measure_and_store(resolved, path)
    if inner is not None and (resolved.type, inner) not in _left_out:
        known = _measured[key]
        _measured[key] = with_host_costs(known, resolved, inner)
        if _measured[key].host_costs(inner) is None:
            _left_out.add((resolved.type, inner))
        elif _measured[key] is not known:
            _measured[key] = _store(_measured[key], path)
    return _measured[key]


def keep_timed_graph(device: torch.device | str, inner: str, found: TimedGraph) -> None:
    """Add what a graph's steps took of the host to the cached profile: the next plan here, or in a process that starts
    later, reckons with it. Nothing where the host was never measured under `inner`.
    """
    path, identity = _place(resolve_device(device))
    key = (str(path), identity)
    profile = _measured.get(key)
    costs = profile.host_costs(inner) if profile is not None else None
    if profile is None or costs is None or (added := costs.with_steps((found,))) is costs:
        return
    host = tuple(added if entry is costs else entry for entry in profile.host)
    _measured[key] = _store(dataclasses.replace(profile, host=host), path)


def allocatable_bytes(device: torch.device) -> int:
    """Bytes that this process could still take on a CUDA device: what is free, cached, and under its own cap."""
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - allocated
    capped = int(total * torch.cuda.get_per_process_memory_fraction(device)) - allocated
    return max(0, min(free + cached, capped))


@contextlib.contextmanager
def measuring_turn(device: torch.device) -> Iterator[None]:
    """Wait until no other process of this user measures `device`, and keep the others waiting meanwhile.

    Two processes that time operators on one device at a time would time each other. Where the cache directory cannot
    be locked, measuring goes on without a turn and says so.
    """
    path = lock_path("measuring", device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("w")
    except OSError as error:
        log.warning(
            "%s cannot be locked (%s); another process measuring this device would falsify the times", path, error
        )
        yield
        return
    with handle:  # closing it gives the turn to the next
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            log.warning("%s cannot be locked (%s); the times may be falsified by other processes", path, error)
        yield


_measured: dict[tuple[str, object], DeviceProfile] = {}
_left_out: set[tuple[str, str]] = set()
"""Kinds of device and inner compilers whose host costs are not to be had in this process."""


def resolve_device(device: torch.device | str) -> torch.device:
    """A device with its index. Raises DeviceError when it is absent or neither a CPU nor a CUDA device."""
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"device {device!r} is not one; allowed: 'cpu', 'cuda', 'cuda:N'") from error
    if wanted.type == "cpu":
        return torch.device("cpu")
    if wanted.type != "cuda":
        raise DeviceError(f"device {device!r}: only cpu and cuda are supported")
    if not torch.cuda.is_available():
        raise DeviceError(
            f"device {str(device)!r} was asked for and this machine has no usable CUDA device; use device='cpu', or "
            "plan with a profile saved on the GPU machine (`fxhome profile -o device.json`)"
        )
    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    if index >= torch.cuda.device_count():
        raise DeviceError(f"device {str(device)!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def device_identity(device: torch.device) -> _Identity:
    """(kind, name, versions): what a measurement depends on. Needs a resolved device."""
    versions = [("torch", torch.__version__)]
    if device.type == "cuda":
        return "cuda", torch.cuda.get_device_name(device), (*versions, ("cuda", str(torch.version.cuda)))
    return "cpu", _processor_name(), tuple(versions)


def lock_path(what: str, device: torch.device) -> Path:
    """The file by which processes of this user take turns at something on one device."""
    name = f"cuda-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else "cpu"
    return cache_directory() / f"{what}-{name}.lock"


def cache_directory() -> Path:
    """Where fxhome keeps what it measured."""
    given = os.environ.get("FXHOME_CACHE_DIR")
    return Path(given) if given else Path.home() / ".cache" / "fxhome"


def _place(device: torch.device) -> tuple[Path, _Identity]:
    """The file of a resolved device's cached profile, and what it must describe."""
    identity = device_identity(device)
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    return cache_directory() / f"device-{digest}.json", identity


def _read_cache(path: Path, identity: _Identity) -> DeviceProfile | None:
    try:
        return _read(path, identity)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warnings.warn(
            f"fxhome: cached device profile {str(path)!r}: {error}; measuring again", RuntimeWarning, stacklevel=2
        )
        return None


def _read(path: Path, identity: _Identity) -> DeviceProfile:
    profile = _parse(path.read_text(encoding="utf-8"))
    if (profile.kind, profile.name, profile.versions) != identity:
        raise ValueError("it describes another device")
    return profile


def _measure_and_store(device: torch.device, path: Path) -> DeviceProfile:
    with measuring_turn(device):
        profile = measure_profile(device)
    return _store(profile, path)


def _store(profile: DeviceProfile, path: Path) -> DeviceProfile:
    """Keep a profile together with what other processes have added to the file about the host; returns what is kept."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as turn:
            with contextlib.suppress(OSError):  # where nothing can be locked, what was added at once is timed again
                fcntl.flock(turn, fcntl.LOCK_EX)
            # A file that cannot be read was warned about when it was to be used; it is written anew.
            with contextlib.suppress(OSError, ValueError):
                stored = _read(path, (profile.kind, profile.name, profile.versions))
                profile = dataclasses.replace(profile, host=merge_hosts(profile.host, stored.host))
            profile.save(path)
    except OSError as error:
        warnings.warn(
            f"fxhome: the device profile cannot be kept in {str(path)!r} ({error}) and will be measured again by the "
            "next process; set FXHOME_CACHE_DIR to a writable directory",
            RuntimeWarning,
            stacklevel=2,
        )
    return profile


def _parse(text: str) -> DeviceProfile:
    document = json.loads(text)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA_VERSION or "device_profile" not in document:
        raise DecodeError("not a device profile of this schema")
    profile: DeviceProfile = decode(DeviceProfile, document["device_profile"], "device_profile")
    return profile


def _write_atomically(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "cpu"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(names, "cpu")
