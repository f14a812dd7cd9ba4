"""The codec registry: names, lazy imports, static sizes without Numba, clear errors."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fxhome.cuda_kernels import CodecError, CodecUnavailableError, codec_by_name, codec_names
from fxhome.cuda_kernels.launch import KernelKey, build_kernel


def test_unknown_name_lists_the_allowed_ones() -> None:
    with pytest.raises(CodecError, match=r"unknown codec 'lz4'; allowed: zvc, csr, rle, bitpack"):
        codec_by_name("lz4")


@pytest.mark.parametrize("name", codec_names())
def test_sizes_are_consistent(name: str) -> None:
    codec = codec_by_name(name)

    for dtype in codec.dtypes:
        for numel in (0, 1, 4097, (1 << 31) + 7):
            worst = codec.worst_case_bytes(numel, dtype)
            assert worst == codec.head_bytes(numel, dtype) + codec.tail_bytes(numel, dtype)
            assert codec.fixed_rate == (codec.tail_bytes(4097, dtype) == 0)
            if codec.fixed_rate:
                assert codec.encoded_bytes(numel, dtype) == worst
    assert codec.name == name


def test_variable_rate_promises_no_size() -> None:
    with pytest.raises(CodecError, match="variable-rate"):
        codec_by_name("zvc").encoded_bytes(10, torch.float32)


def test_sizes_and_references_need_neither_numba_nor_cuda() -> None:
    """In a process of its own, because other tests import Numba."""
    script = """
import sys, torch
from fxhome.cuda_kernels import codec_by_name, codec_names
for name in codec_names():
    codec = codec_by_name(name)
    source = torch.zeros(100, dtype=codec.dtypes[0])
    encoded = torch.zeros(codec.worst_case_bytes(100, source.dtype), dtype=torch.uint8)
    codec.encode(source, encoded)
    codec.decode(encoded, source)
    codec.kernel_seconds("encode", 1 << 20, source.dtype, 4e12, 1 << 20)
assert not [module for module in sys.modules if module.split(".")[0] in ("numba", "numba_cuda", "llvmlite")]
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_missing_numba_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name == "fxhome.cuda_kernels.zvc.kernel"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "fxhome.cuda_kernels.simt", None)

    with pytest.raises(CodecUnavailableError, match=r"pip install 'numba-cuda\[cu13\]' 'numpy<2\.5'"):
        build_kernel(KernelKey("zvc.kernel", "make_encode", (4,)))
