"""Kernels compile to PTX without a GPU, for every supported compute capability, free of 64-bit floats and local
memory."""

from __future__ import annotations

import dataclasses
import gc
import re
import weakref
from typing import Any

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


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, Any]]]:
    """What NVVM is given, in order: modules and options. A kernel is the same for it whatever the capability, and all
    but a fiftieth of a compilation is over by then.
    """
    from numba.cuda.cudadrv import nvvm

    given: list[tuple[list[str], dict[str, Any]]] = []
    compile_ir = nvvm.compile_ir

    def keep(modules: list[str], **options: Any) -> bytes:
        given.append((modules, options))
        return bytes(compile_ir(modules, **options))

    monkeypatch.setattr(nvvm, "compile_ir", keep)
    return given


def for_capability(modules: list[str], options: dict[str, Any], capability: tuple[int, int]) -> str:
    from numba.cuda.cudadrv import nvvm

    arch = f"compute_{capability[0]}{capability[1]}"
    return bytes(nvvm.compile_ir(modules, **options | {"arch": arch})).decode()


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize("direction", ["encode", "decode"])
def test_kernel_compiles_clean(name: str, direction: str, lowered: list[tuple[list[str], dict[str, Any]]]) -> None:
    """A 64-bit float in the PTX means that integer types were mixed up; .local means an array was not kept in
    registers. The kernels of SWEPT are compiled for the other capabilities as well.
    """
    from numba.cuda.cudadrv.error import NvvmError, NvvmSupportError

    ptx = compile_ptx(kernel_key(name, direction), (9, 0))

    parameters = ptx.split(".entry", 1)[1].split(")", 1)[0]
    assert not re.search(r"\.f64\b", ptx)
    assert not re.search(r"\.local\b", ptx)
    assert parameters.count(".param .u64") == parameters.count(".param") > 0
    unknown = []
    for capability in CAPABILITIES if (name, direction) in SWEPT else []:
        try:
            other = for_capability(*lowered[0], capability)
        except (NvvmSupportError, NvvmError) as error:
            unknown.append(f"{capability}: {error}")
            continue
        assert f".target sm_{capability[0]}{capability[1]}" in other
    if unknown:
        pytest.skip(f"this toolchain does not know every compute capability: {unknown}")


def test_a_kernel_is_the_same_for_nvvm_whatever_the_capability(
    lowered: list[tuple[list[str], dict[str, Any]]],
) -> None:
    """So that one compilation tells of them all."""
    key = kernel_key("zvc", "encode")
    compile_ptx(key, (9, 0))

    from_source, from_another = compile_ptx(key, (7, 5)), for_capability(*lowered[0], (7, 5))
    # Names count the compilations of a process.
    from_source, from_another = (re.sub(r"_ZN\w+", "NAME", ptx).strip("\0\n ") for ptx in (from_source, from_another))
    assert from_source == from_another
    assert ".target sm_75" in from_source
    assert len(lowered) == 3


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


def test_compiling_a_kernel_keeps_nothing_of_its_caller() -> None:
    """Numba's leftovers hold frames until they are collected; a step that compiles a kernel is not among them."""

    class Saved:
        pass

    def step() -> weakref.ref[Saved]:
        saved = Saved()
        compile_ptx(kernel_key("zvc", "encode"), (8, 0))
        return weakref.ref(saved)

    gc.collect()
    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()
