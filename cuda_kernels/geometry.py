"""Launch geometry: how many blocks of how many threads, by codec, direction and size.

Defaults use enough blocks to reach memory bandwidth; `autotune` replaces them by measured choices. No kernel encodes
straight to the host: it would hold its multiprocessors for as long as the link takes (other kernels were slowed 1.2 to
2.9 times by that), while a copy engine holds none.
"""

from __future__ import annotations

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
    size_class: int
    """floor(log2 of the tensor's bytes), clipped to 20..30."""


_tuned: dict[tuple[int, GeometryKey], Geometry] = {}
_changes: list[None] = []


def size_class(size_bytes: int) -> int:
    return min(30, max(20, size_bytes.bit_length() - 1))


def set_geometry(device_index: int, key: GeometryKey, geometry: Geometry) -> None:
    """Use `geometry` for `key` on that device from now on."""
    _tuned[(device_index, key)] = geometry
    _changes.append(None)


def clear_geometry() -> None:
    _tuned.clear()
    _changes.append(None)


def tuned_changes() -> int:
    """How often the table has changed: who remembers a choice looks here."""
    return len(_changes)


def choose_geometry(
    device_index: int, key: GeometryKey, multiprocessors: int, max_threads: int, warps_of_work: int
) -> Geometry:
    """Tuned geometry if there is one, else the default, cut down to the work there is."""
    tuned = _tuned.get((device_index, key))
    if tuned is not None:
        blocks, threads = tuned.blocks, min(tuned.threads, max_threads)
    else:
        blocks, threads = multiprocessors * 16, max_threads
    return Geometry(max(1, min(blocks, ceil_div(warps_of_work, threads // 32))), threads)
