"""What precedes every timing: kernels compiled by many processes, and each one checked against its reference."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch

from benchmarks.codec_report import Report
from benchmarks.codec_timing import DEVICE, synchronize
from fxhome.cuda_kernels import codec_by_name, codec_names, raise_if_corrupt
from fxhome.cuda_kernels.codec import as_unsigned
from fxhome.cuda_kernels.flat import FlatCodec
from fxhome.cuda_kernels.launch import KernelKey, cached_ptx
from fxhome.cuda_kernels.overflow import KERNEL as OVERFLOW
from fxhome.cuda_kernels.tiled import TiledCodec

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def random_tensor(numel: int, dtype: torch.dtype, zeros: float = 0.0) -> torch.Tensor:
    """Device tensor of `dtype`; a share `zeros` of it is zero (bool: False)."""
    if dtype == torch.bool:
        return torch.rand(numel, device=DEVICE) >= 0.5
    if dtype == torch.int64:
        return torch.randint(0, 256, (numel,), device=DEVICE)
    values = torch.randn(numel, device=DEVICE) * 3
    if zeros:
        values[torch.rand(numel, device=DEVICE) < zeros] = 0
    return values.to(dtype)


def kernel_keys(name: str) -> set[KernelKey]:
    codec = codec_by_name(name)
    assert isinstance(codec, TiledCodec | FlatCodec)
    dtypes = [dtype for dtype in codec.dtypes if dtype in (*FLOATS, torch.bool, torch.int64)]
    return {OVERFLOW} | {codec.kernel_key(direction, dtype) for direction in ("encode", "decode") for dtype in dtypes}


def compile_all() -> None:
    """Fill the PTX cache from many processes, so that no timing below waits for Numba."""
    if DEVICE.type != "cuda":
        return
    capability = torch.cuda.get_device_capability()
    keys = sorted(set().union(*map(kernel_keys, codec_names())), key=str)
    workers = max(1, min(16, os.cpu_count() or 1))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(cached_ptx, key, capability) for key in keys]:
            future.result()


def check_codec(name: str, dtype: torch.dtype, report: Report) -> None:
    """The kernel's decode equals the reference's, and both parts of the encoding are interchangeable between them."""
    codec = codec_by_name(name)
    for numel in (1, 4097, 300_007):
        source = random_tensor(numel, dtype, 0.5 if name == "zvc" else 0.1)
        if (codec.lossless or name.endswith("_mask")) and dtype.is_floating_point and numel > 100:
            source[5:9] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-42], device=DEVICE).to(dtype)
        size_bytes = codec.worst_case_bytes(numel, dtype)
        encoded = torch.full((size_bytes,), 0xA5, dtype=torch.uint8, device=DEVICE)
        decoded = torch.full_like(source, 1)
        codec.encode(source, encoded)
        codec.decode(encoded, decoded)
        reference = torch.zeros(size_bytes, dtype=torch.uint8)
        expected = torch.zeros(numel, dtype=dtype)
        codec.encode(source.cpu(), reference)
        codec.decode(reference, expected)
        synchronize()
        raise_if_corrupt()
        assert raw_equal(decoded.cpu(), expected), f"{name} {dtype} {numel}: kernel decode differs from the reference"
        if codec.lossless:
            assert raw_equal(decoded.cpu(), source.cpu()), f"{name} {dtype} {numel}: not lossless"
        crossed = torch.zeros(numel, dtype=dtype)
        codec.decode(encoded.cpu(), crossed)
        assert raw_equal(crossed, expected), f"{name} {dtype} {numel}: reference cannot read the kernel's encoding"
        codec.decode(reference.to(DEVICE), decoded.fill_(1))
        synchronize()
        assert raw_equal(decoded.cpu(), expected), (
            f"{name} {dtype} {numel}: kernel cannot read the reference's encoding"
        )
        again = torch.full_like(encoded, 0x5A)
        codec.encode(source, again)
        codec.decode(again, decoded.fill_(1))
        assert raw_equal(decoded.cpu(), expected), f"{name} {dtype} {numel}: a second encoding differs"
    report.add("correct", f"{name} {dtype}", ok=True)


def raw_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    size = left.dtype.itemsize
    to_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    numpy_left, numpy_right = left.view(to_int).numpy(), right.view(to_int).numpy()
    return bool(
        np.array_equal(as_unsigned(numpy_left.view(np.uint8), size), as_unsigned(numpy_right.view(np.uint8), size))
    )
