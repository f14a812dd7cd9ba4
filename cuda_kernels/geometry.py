"""Launch geometry: how many blocks of how many threads, by codec, direction and where the encoded bytes lie.

Defaults: kernels that write or read host memory use few blocks, because the link is the limit and other kernels
should keep the multiprocessors; kernels between device buffers use enough to reach memory bandwidth. `autotune`
replaces defaults by measured choices.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from fxhome.cuda_kernels.layout import ceil_div


@dataclass(frozen=True)
class Geometry:
    blocks: int
    """Most blocks to launch; fewer where the tensor is small."""
    threads: int
    """Threads per block, a multiple of 32."""


@dataclass(frozen=True)
class GeometryKey:
    """What a geometry is tuned for; the device is the one of the table."""

    codec: str
    direction: str
    """"encode" or "decode"."""
    itemsize: int
    host_side: bool
    size_class: int
    """floor(log2 of the tensor's bytes), clipped to 20..30."""


HOST_ENCODE_BLOCKS = 32
HOST_DECODE_BLOCKS = 64

_tuned: dict[tuple[int, GeometryKey], Geometry] = {}


def size_class(size_bytes: int) -> int:
    return min(30, max(20, size_bytes.bit_length() - 1))


def set_geometry(device_index: int, key: GeometryKey, geometry: Geometry) -> None:
    """Use `geometry` for `key` on that device from now on."""
    _tuned[(device_index, key)] = geometry
    geometry_of.cache_clear()


def clear_geometry() -> None:
    _tuned.clear()
    geometry_of.cache_clear()


def choose_geometry(
    device_index: int, key: GeometryKey, multiprocessors: int, max_threads: int, warps_of_work: int
) -> Geometry:
    """Tuned geometry if there is one, else the default, cut down to the work there is."""
    tuned = _tuned.get((device_index, key))
    if tuned is not None:
        blocks, threads = tuned.blocks, min(tuned.threads, max_threads)
    elif key.host_side:
        blocks, threads = (HOST_ENCODE_BLOCKS if key.direction == "encode" else HOST_DECODE_BLOCKS), max_threads
    else:
        blocks, threads = multiprocessors * 16, max_threads
    return Geometry(max(1, min(blocks, ceil_div(warps_of_work, threads // 32))), threads)


@functools.lru_cache(maxsize=4096)
def geometry_of(
    device_index: int,
    codec: str,
    direction: str,
    itemsize: int,
    host_side: bool,
    numel: int,
    multiprocessors: int,
    max_threads: int,
    warps_of_work: int,
) -> tuple[int, int]:
    """(blocks, threads) of one call, remembered: a steady state pays one look-up."""
    key = GeometryKey(codec, direction, itemsize, host_side, size_class(numel * itemsize))
    geometry = choose_geometry(device_index, key, multiprocessors, max_threads, warps_of_work)
    return geometry.blocks, geometry.threads
