"""Kernels compile to PTX without a GPU, for every supported compute capability, free of 64-bit floats and local
memory."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from fxhome.cuda_kernels import codec_by_name, codec_names
from fxhome.cuda_kernels.flat import FlatCodec
from fxhome.cuda_kernels.launch import KernelKey, compile_ptx
from fxhome.cuda_kernels.overflow import KERNEL as OVERFLOW
from fxhome.cuda_kernels.tiled import TiledCodec

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (10, 0)]
SWEPT = [("zvc", "encode"), ("exponent", "decode"), ("fp8_e4m3", "encode")]
"""Between them these use every intrinsic whose instruction depends on the architecture."""


def kernel_key(name: str, direction: str) -> KernelKey:
    """The kernel of a codec for fp16 where it has that, else for its first dtype."""
    codec = codec_by_name(name)
    assert isinstance(codec, TiledCodec | FlatCodec)
    return codec.kernel_key(direction, torch.float16 if torch.float16 in codec.dtypes else codec.dtypes[0])


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize("direction", ["encode", "decode"])
def test_kernel_compiles_clean(name: str, direction: str) -> None:
    """A 64-bit float in the PTX means that integer types were mixed up; .local means an array was not kept in
    registers."""
    ptx = compile_ptx(kernel_key(name, direction), (9, 0))

    parameters = ptx.split(".entry", 1)[1].split(")", 1)[0]
    assert not re.search(r"\.f64\b", ptx)
    assert not re.search(r"\.local\b", ptx)
    assert parameters.count(".param .u64") == parameters.count(".param") > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direction", ["encode", "decode"])
def test_rectified_floats_compile_clean(direction: str, dtype: torch.dtype) -> None:
    """Each float format is a kernel of its own."""
    codec = codec_by_name("zvc_exponent")
    assert isinstance(codec, TiledCodec)

    ptx = compile_ptx(codec.kernel_key(direction, dtype), (9, 0))

    assert not re.search(r"\.(f64|local)\b", ptx)


@pytest.mark.parametrize("direction", ["encode", "decode"])
def test_a_bound_on_registers_reaches_the_assembler(direction: str) -> None:
    """As a directive between the entry's parameters and its body."""
    key = kernel_key("zvc_exponent", direction)
    assert key.max_registers == 48

    entry = compile_ptx(key, (9, 0)).split(".entry", 1)[1]

    assert re.match(r"\s*\w+\([^)]*\)\s*\.maxnreg 48\s*\{", entry)
    assert ".maxnreg" not in compile_ptx(dataclasses.replace(key, max_registers=0), (9, 0))


def test_what_moves_the_rest_of_a_buffer_compiles_clean() -> None:
    ptx = compile_ptx(OVERFLOW, (9, 0))

    assert not re.search(r"\.(f64|local)\b", ptx)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda capability: f"sm_{capability[0]}{capability[1]}")
def test_kernels_compile_for_other_capabilities(capability: tuple[int, int]) -> None:
    from numba.cuda.cudadrv.error import NvvmError, NvvmSupportError

    for name, direction in SWEPT:
        try:
            ptx = compile_ptx(kernel_key(name, direction), capability)
        except (NvvmSupportError, NvvmError) as error:
            pytest.skip(f"this toolchain does not know compute capability {capability}: {error}")
        assert f".target sm_{capability[0]}{capability[1]}" in ptx
