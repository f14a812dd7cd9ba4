"""From a codec's call to a launch: addresses, geometry, kernel, arguments."""

from __future__ import annotations

import functools
import importlib
import logging
from dataclasses import dataclass

import torch

from fxhome.cuda_kernels.errors import CodecError
from fxhome.cuda_kernels.geometry import geometry_of
from fxhome.cuda_kernels.launch import KernelKey, loaded_kernel, multiprocessor_count
from fxhome.cuda_kernels.layout import Layout

log = logging.getLogger("fxhome.codecs")


@dataclass(frozen=True)
class KernelCall:
    """One encode or decode in plain integers (addresses and counts)."""

    device_index: int
    plain: int
    """Address of the source or target tensor."""
    numel: int
    dtype: torch.dtype
    head: int
    tail: int
    layout: Layout
    host_side: bool
    """Whether the kernel writes to (encode) or reads from (decode) host memory: it then wants another launch
    geometry."""


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel with its arguments, before a geometry is chosen."""

    kernel: KernelKey
    arguments: tuple[int, ...]
    warps_of_work: int
    """More warps than this would have nothing to do."""
    max_threads: int
    """Threads per block that the kernel's shared memory is laid out for."""


@functools.cache
def _use_tuned_geometry(device_index: int) -> None:
    """Take over what `autotune` measured on this GPU model before; a bad cache file costs the tuned choices only."""
    # Not imported above: the tuner imports the codecs, which import this module.
    autotune = importlib.import_module("fxhome.cuda_kernels.autotune")
    try:
        autotune.apply_tuned(device_index, autotune.load_tuned(torch.cuda.get_device_name(device_index)))
    except CodecError as error:
        log.warning("codecs run with their default launch geometry: %s", error)


def launch(codec: str, direction: str, call: KernelCall, prepared: KernelLaunch) -> None:
    """Launch on torch's current stream of the call's device."""
    _use_tuned_geometry(call.device_index)
    blocks, threads = geometry_of(
        call.device_index,
        codec,
        direction,
        call.dtype.itemsize,
        call.host_side,
        call.numel,
        multiprocessor_count(call.device_index),
        prepared.max_threads,
        prepared.warps_of_work,
    )
    loaded_kernel(prepared.kernel, call.device_index)(blocks, threads, *prepared.arguments)
