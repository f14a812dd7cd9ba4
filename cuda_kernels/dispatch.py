"""From a codec's call to a launch: kernel, arguments, geometry, all prepared once per codec, size and dtype."""

from __future__ import annotations

import functools
import importlib
import logging
from dataclasses import dataclass

import torch

from fxhome.cuda_kernels.errors import CodecError
from fxhome.cuda_kernels.geometry import GeometryKey, choose_geometry, size_class, tuned_changes
from fxhome.cuda_kernels.launch import KernelKey, LoadedKernel, loaded_kernel, multiprocessor_count
from fxhome.cuda_kernels.layout import Layout

log = logging.getLogger("fxhome.codecs")

FIXED, PLAIN, ENCODED = 0, 1, 2
Argument = tuple[int, int]
"""(base, offset): a constant, or a distance from the address of the plain tensor or of the encoded buffer."""


@dataclass(frozen=True)
class KernelCall:
    """One encode or decode, whatever the addresses."""

    numel: int
    dtype: torch.dtype
    layout: Layout


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel with its arguments, before addresses and geometry are chosen."""

    kernel: KernelKey
    arguments: tuple[Argument, ...]
    warps_of_work: int
    """More warps than this would have nothing to do."""
    max_threads: int
    """Threads per block that the kernel's shared memory is laid out for."""
    clears_offset: int | None = None
    """Where in the encoded buffer a 32-bit counter is to be zeroed before the kernel runs."""

    def at(self, plain: int, encoded: int) -> list[int]:
        """The arguments for these addresses."""
        bases = (0, plain, encoded)
        return [bases[base] + offset for base, offset in self.arguments]


@functools.cache
def _use_tuned_geometry(device_index: int) -> None:
    """Take over what `autotune` measured on this GPU model before; a bad cache file costs the tuned choices only."""
    # Not imported above: the tuner imports the codecs, which import this module.
    autotune = importlib.import_module("fxhome.cuda_kernels.autotune")
    try:
        autotune.apply_tuned(device_index, autotune.load_tuned(torch.cuda.get_device_name(device_index)))
    except CodecError as error:
        log.warning("codecs run with their default launch geometry: %s", error)


class PreparedKernel:
    """A launch that lacks only its addresses and its stream: what is paid per call is a few integers and one or two
    driver calls."""

    __slots__ = ("_blocks", "_clears", "_device_index", "_kernel", "_key", "_launch", "_seen_changes", "_threads")

    def __init__(self, launch: KernelLaunch, key: GeometryKey, device_index: int) -> None:
        _use_tuned_geometry(device_index)
        self._launch = launch
        self._key = key
        self._device_index = device_index
        self._kernel: LoadedKernel = loaded_kernel(launch.kernel, device_index)
        self._clears = launch.clears_offset
        self._seen_changes = -1
        self._blocks = self._threads = 0

    def __call__(self, stream: int, plain: int, encoded: int) -> None:
        """Launch on `stream`, a raw handle of the device's."""
        if self._seen_changes != tuned_changes():
            self._choose_geometry()
        cleared = 0 if self._clears is None else encoded + self._clears
        self._kernel(self._blocks, self._threads, self._launch.at(plain, encoded), stream, cleared)

    def _choose_geometry(self) -> None:
        self._seen_changes = tuned_changes()
        geometry = choose_geometry(
            self._device_index,
            self._key,
            multiprocessor_count(self._device_index),
            self._launch.max_threads,
            self._launch.warps_of_work,
        )
        self._blocks, self._threads = geometry.blocks, geometry.threads


def prepare(codec: str, direction: str, call: KernelCall, launch: KernelLaunch, device_index: int) -> PreparedKernel:
    """The launch, bound to a device."""
    itemsize = call.dtype.itemsize
    key = GeometryKey(codec, direction, itemsize, size_class(call.numel * itemsize))
    return PreparedKernel(launch, key, device_index)
