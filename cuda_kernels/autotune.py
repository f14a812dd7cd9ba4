"""Self-tuning of launch geometry: per GPU, codec, direction, element size and size class; kept on disk.

The search is Bayesian optimisation with a Gaussian process over (blocks, threads); `exhaustive` is there to compare
with. Of the geometries within 3 % of the fastest, the one with the fewest threads is kept: what a codec does not
need, other kernels can use. The tile is no parameter: it is part of the encoded format (4 KiB of source per warp).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from fxhome.cuda_kernels.codec import codec_by_name
from fxhome.cuda_kernels.errors import CodecError
from fxhome.cuda_kernels.gaussian_process import SearchResult, exhaustive, minimise
from fxhome.cuda_kernels.geometry import Geometry, GeometryKey, set_geometry
from fxhome.cuda_kernels.launch import cache_directory

BLOCKS = (66, 132, 264, 396, 528, 792, 1056, 1584, 2112, 3168, 4224, 8448)
THREADS = (64, 128, 256)
SLACK = 1.03
"""Geometries up to this much slower than the best count as equally fast."""
FORMAT_VERSION = 2

Timer = Callable[[GeometryKey, Geometry], float]
"""Seconds of one encode or decode under a geometry."""


def candidates(key: GeometryKey, max_threads: int = 256) -> list[Geometry]:
    """The geometries to choose from."""
    return [Geometry(count, threads) for count in BLOCKS for threads in THREADS if threads <= max_threads]


def pick(options: list[Geometry], result: SearchResult) -> Geometry:
    """The leanest of the geometries that were timed within SLACK of the fastest."""
    fast = [options[index] for index, cost in result.costs.items() if cost <= result.best_cost * SLACK]
    return min(fast, key=lambda geometry: (geometry.blocks * geometry.threads, geometry.blocks))


def search_geometry(
    key: GeometryKey,
    timer: Timer,
    *,
    method: str = "bayesian",
    max_evaluations: int = 16,
    seed: int = 0,
    out_of_time: Callable[[], bool] = lambda: False,
) -> tuple[Geometry, SearchResult]:
    """Best geometry for one key by "bayesian" or "exhaustive" search, with the search's record."""
    options = candidates(key)

    def cost_of(index: int) -> float:
        return timer(key, options[index])

    points = np.log2(np.array([(geometry.blocks, geometry.threads) for geometry in options], dtype=np.float64))
    if method == "exhaustive":
        result = exhaustive(points, cost_of)
    elif method == "bayesian":
        result = minimise(points, cost_of, max_evaluations, seed, out_of_time=out_of_time)
    else:
        raise CodecError(f"search_geometry: unknown method {method!r}; allowed: bayesian, exhaustive")
    return pick(options, result), result


@dataclass(frozen=True)
class TunedGeometry:
    key: GeometryKey
    geometry: Geometry
    seconds: float


def tune(
    keys: Iterable[GeometryKey],
    timer: Timer,
    *,
    seconds: float = 60.0,
    advance: Callable[[], object] = lambda: None,
) -> list[TunedGeometry]:
    """Tune every key within `seconds` in all; keys that the time does not reach keep their defaults.

    advance: called once per key.
    """
    pending = list(keys)
    start = time.monotonic()
    tuned: list[TunedGeometry] = []
    for position, key in enumerate(pending):
        share_ends = start + seconds * (position + 1) / len(pending)
        if time.monotonic() - start < seconds:
            geometry, result = search_geometry(key, timer, out_of_time=functools.partial(_is_past, share_ends))
            tuned.append(TunedGeometry(key, geometry, result.best_cost))
        advance()
    return tuned


def _is_past(moment: float) -> bool:
    return time.monotonic() >= moment


def cache_path(device_name: str) -> Path:
    """File of one GPU model's tuned geometries."""
    digest = hashlib.sha256(device_name.encode()).hexdigest()[:16]
    return cache_directory() / "geometry" / f"{digest}.json"


def save_tuned(device_name: str, tuned: list[TunedGeometry]) -> Path:
    """Merge into the cache file; the newest choice for a key wins."""
    merged = {entry.key: entry for entry in [*load_tuned(device_name), *tuned]}
    path = cache_path(device_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"version": FORMAT_VERSION, "device": device_name, "tuned": [asdict(entry) for entry in merged.values()]}
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(document, indent=1))
    temporary.replace(path)
    return path


def load_tuned(device_name: str) -> list[TunedGeometry]:
    """What the cache file holds for this GPU model; empty if there is none or another version wrote it."""
    path = cache_path(device_name)
    if not path.exists():
        return []
    try:
        document = json.loads(path.read_text())
        if document["version"] != FORMAT_VERSION or document["device"] != device_name:
            return []
        return [
            TunedGeometry(GeometryKey(**entry["key"]), Geometry(**entry["geometry"]), entry["seconds"])
            for entry in document["tuned"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise CodecError(
            f"the geometry cache {path} cannot be read ({type(error).__name__}: {error}); delete it and tune again"
        ) from error


def apply_tuned(device_index: int, tuned: Iterable[TunedGeometry]) -> None:
    for entry in tuned:
        set_geometry(device_index, entry.key, entry.geometry)


class DeviceTimer:
    """Times a codec call on the GPU under a geometry; buffers are kept from call to call of the same key."""

    def __init__(self, device_index: int, dtypes: dict[int, torch.dtype], repeats: int = 3) -> None:
        self._device_index = device_index
        self._dtypes = dtypes
        """Dtype to use for an element size (codecs without it use their first dtype of that size)."""
        self._repeats = repeats
        self._key: GeometryKey | None = None
        self._call: Callable[[], None] = lambda: None

    def __call__(self, key: GeometryKey, geometry: Geometry) -> float:
        if key != self._key:
            self._call = self._prepare(key)
            self._key = key
        set_geometry(self._device_index, key, geometry)
        self._call()
        seconds = []
        for _ in range(self._repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            self._call()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        return float(np.median(seconds))

    def _prepare(self, key: GeometryKey) -> Callable[[], None]:
        codec = codec_by_name(key.codec)
        preferred = self._dtypes.get(key.itemsize)
        fitting = [dtype for dtype in codec.dtypes if dtype.itemsize == key.itemsize]
        dtype = preferred if preferred in fitting else fitting[0]
        numel = (1 << key.size_class) // key.itemsize
        device = torch.device("cuda", self._device_index)
        values = torch.randn(numel, device=device)
        values[torch.rand(numel, device=device) < 0.5] = 0
        source = (values != 0) if dtype == torch.bool else (values.abs() * 40).to(dtype)
        size_bytes = codec.worst_case_bytes(numel, dtype)
        encoded = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        codec.encode(source, encoded)
        if key.direction == "encode":
            return lambda: codec.encode(source, encoded)
        target = torch.empty_like(source)
        return lambda: codec.decode(encoded, target)


def tune_device(
    device_index: int,
    keys: Iterable[GeometryKey],
    *,
    seconds: float = 60.0,
    advance: Callable[[], object] = lambda: None,
) -> Path:
    """Tune the keys on a GPU, use the result from now on and keep it on disk; returns the cache file."""
    timer = DeviceTimer(device_index, {4: torch.float32, 2: torch.bfloat16, 1: torch.bool, 8: torch.int64})
    tuned = tune(keys, timer, seconds=seconds, advance=advance)
    apply_tuned(device_index, tuned)
    return save_tuned(torch.cuda.get_device_name(device_index), tuned)


TUNED = {
    "zvc": (2, 4),
    "zvc_exponent": (2, 4), "exponent": (2, 4), "bitpack": (1,), "narrow8": (8,), "narrow16": (8,), "int8": (2, 4),
    "fp8_e4m3": (2, 4), "int4": (2, 4), "relu_mask": (2, 4), "relu6_mask": (2, 4),
}  # fmt: skip
"""Codec -> element sizes that the planner gives it."""
STAGED_CLASSES, WHOLE_CLASSES = (22, 24), (22, 24, 26, 28)
"""Size classes of what variable-rate codecs encode at a time, and fixed-rate ones."""


def tuning_keys() -> list[GeometryKey]:
    """What `tune_codecs` tunes, the largest tensors of each first: they matter most if the time runs out."""
    classes = {name: WHOLE_CLASSES if codec_by_name(name).fixed_rate else STAGED_CLASSES for name in TUNED}
    keys = [
        GeometryKey(name, direction, itemsize, size)
        for name, itemsizes in TUNED.items()
        for itemsize in itemsizes
        for direction in ("encode", "decode")
        for size in classes[name]
    ]
    return sorted(keys, key=lambda key: -key.size_class)


def tune_codecs(device: torch.device, advance: Callable[[], object] = lambda: None, *, seconds: float = 60.0) -> Path:
    """Tune all that the planner may use on a CUDA device, within a minute; returns the cache file.

    advance: called `len(tuning_keys())` times, to move a progress bar. Raises CodecUnavailableError without Numba-CUDA.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return tune_device(index, tuning_keys(), seconds=seconds, advance=advance)
