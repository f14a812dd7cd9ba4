"""Compile a kernel once per device and launch it on a stream in a few microseconds.

Numba compiles the Python function to PTX; the driver turns that into machine code; the launch is one driver call with
a pre-built argument pack. Every kernel parameter is one 64-bit integer, so a launch fills a few integers and
allocates nothing. PTX is cached on disk, keyed by the kernel's sources, the compute capability and Numba's version.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import inspect
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxhome.cuda_kernels.errors import CodecError, CodecUnavailableError

KernelFactory = Callable[..., Callable[..., None]]

_STATUS_MEANINGS = {
    1: "the header names another codec, dtype or element count",
    2: "a tile's counts contradict its contents",
    3: "a value does not fit the narrowed index width",
}


@dataclass(frozen=True)
class KernelKey:
    """A kernel and its compile-time constants."""

    module: str
    """Module under fxhome.cuda_kernels that holds the factory, e.g. "zvc.kernel"."""
    factory: str
    constants: tuple[Any, ...]
    max_registers: int = 0
    """Registers per thread that the assembler may use, so that more warps fit; 0 leaves it free."""


def cache_directory() -> Path:
    """Where compiled PTX and tuned geometry are kept: $FXHOME_CACHE_DIR, else the user's cache directory."""
    configured = os.environ.get("FXHOME_CACHE_DIR")
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fxhome"


def unavailable(error: Exception) -> str:
    """One line: what is missing and how to install it."""
    return (
        f"compression kernels need Numba-CUDA, which cannot be imported here ({type(error).__name__}: {error}); "
        "install it with: pip install 'numba-cuda[cu13]' 'numpy<2.5' (cu12 for a CUDA 12 driver)"
    )


def build_kernel(key: KernelKey) -> Callable[..., None]:
    """The Python function of a kernel; imports Numba, and says in one line what to install if it cannot."""
    try:
        module = importlib.import_module(f"fxhome.cuda_kernels.{key.module}")
    except (ImportError, AttributeError) as error:
        raise CodecUnavailableError(unavailable(error)) from error
    kernel: Callable[..., None] = getattr(module, key.factory)(*key.constants)
    return kernel


def compile_ptx(key: KernelKey, compute_capability: tuple[int, int]) -> str:
    """PTX of a kernel whose parameters are all int64; needs no GPU.

    Compiled in a thread of its own: Numba leaves exceptions behind in cycles, and each keeps the frames of its whole
    thread until it is collected, that of a step with everything it has saved.
    """
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(_compile_ptx, key, compute_capability).result()


def _compile_ptx(key: KernelKey, compute_capability: tuple[int, int]) -> str:
    kernel = build_kernel(key)
    cuda: Any = importlib.import_module("numba.cuda")
    types = cuda.types
    parameters = [types.int64] * len(inspect.signature(kernel).parameters)
    ptx, _ = cuda.compile(kernel, types.void(*parameters), device=False, abi="numba", cc=compute_capability)
    if not key.max_registers:
        return str(ptx)
    before, entry, body = str(ptx).partition(".entry")
    parameter_list, _, body = body.partition("{")
    return f"{before}{entry}{parameter_list}.maxnreg {key.max_registers}\n{{{body}"


@functools.cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cached_ptx(key: KernelKey, compute_capability: tuple[int, int]) -> str:
    """PTX of a kernel, from the disk cache if it is there; safe to call in many processes at once."""
    from importlib.metadata import version

    identity = repr((key, compute_capability, _sources_digest(), version("numba-cuda")))
    path = cache_directory() / "ptx" / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.ptx"
    try:
        return path.read_text()
    except OSError:
        pass  # not cached yet, or the cache cannot be read: compile
    ptx = compile_ptx(key, compute_capability)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(ptx)
        temporary.replace(path)
    except OSError:
        pass  # a read-only home costs a compile per process, nothing else
    return ptx


class LoadedKernel:
    """Machine code of one kernel on one device, with its argument pack."""

    def __init__(self, key: KernelKey, device_index: int) -> None:
        driver: Any = importlib.import_module("cuda.bindings.driver")

        self._driver = driver
        self._lock = threading.Lock()
        self._device_index = device_index
        self._ready_threads = threading.local()
        with torch.cuda.device(device_index):
            torch.cuda.current_stream().synchronize()  # makes the primary context current in this thread
            properties = torch.cuda.get_device_properties(device_index)
            ptx = cached_ptx(key, (properties.major, properties.minor))
            self._module = _checked(driver.cuModuleLoadData(ptx.encode() + b"\0"), f"loading {key}")
            name = ptx.split(".entry", 1)[1].split("(", 1)[0].strip()
            self._function = _checked(driver.cuModuleGetFunction(self._module, name.encode()), f"finding {name}")
        parameters = ptx.split(".entry", 1)[1].split(")", 1)[0].count(".param")
        self._values = (ctypes.c_int64 * parameters)()
        base = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * parameters)(*(base + 8 * index for index in range(parameters)))
        self._pack = ctypes.addressof(self._pointers)

    def __call__(self, blocks: int, threads: int, arguments: list[int], stream: int, cleared: int = 0) -> None:
        """Launch on `stream`, a raw handle; zero the 32-bit word at `cleared` first, if that is an address."""
        if torch.cuda.current_device() != self._device_index or not getattr(self._ready_threads, "done", False):
            with torch.cuda.device(self._device_index):
                torch.cuda.set_device(self._device_index)
                self._launch(blocks, threads, arguments, stream, cleared)
            self._ready_threads.done = True
            return
        self._launch(blocks, threads, arguments, stream, cleared)

    def _launch(self, blocks: int, threads: int, arguments: list[int], stream: int, cleared: int) -> None:
        if cleared:
            (result,) = self._driver.cuMemsetD32Async(cleared, 0, 1, stream)
            if result != 0:
                raise CodecError(f"clearing a counter before a kernel launch failed: {result.name}")
        with self._lock:
            self._values[:] = [*arguments]
            (result,) = self._driver.cuLaunchKernel(
                self._function, blocks, 1, 1, threads, 1, 1, 0, stream, self._pack, 0
            )
        if result != 0:
            raise CodecError(f"kernel launch of {blocks} blocks x {threads} threads failed: {result.name}")


@functools.cache
def _memory_copies() -> tuple[Callable[..., Any], Callable[..., Any]]:
    driver: Any = importlib.import_module("cuda.bindings.driver")
    return driver.cuMemcpyDtoHAsync, driver.cuMemcpyHtoDAsync


def copy_to_host(target: int, source: int, size_bytes: int, stream: int) -> None:
    """Queue a copy from a device address to a page-locked host address on a raw stream handle."""
    (result,) = _memory_copies()[0](target, source, size_bytes, stream)
    if result != 0:
        raise CodecError(f"a copy of {size_bytes} encoded bytes to the host failed: {result.name}")


def copy_to_device(target: int, source: int, size_bytes: int, stream: int) -> None:
    """Queue a copy from a page-locked host address to a device address on a raw stream handle."""
    (result,) = _memory_copies()[1](target, source, size_bytes, stream)
    if result != 0:
        raise CodecError(f"a copy of {size_bytes} encoded bytes from the host failed: {result.name}")


def _checked(answer: tuple[Any, ...], what: str) -> Any:
    if answer[0] != 0:
        raise CodecUnavailableError(f"{what}: the CUDA driver says {answer[0].name}; a newer driver may be needed")
    return answer[1]


@functools.cache
def loaded_kernel(key: KernelKey, device_index: int) -> LoadedKernel:
    return LoadedKernel(key, device_index)


@functools.cache
def status_flag() -> torch.Tensor:
    """One pinned int32 that kernels set when an encoded buffer is bad; the host reads it without asking the device."""
    return torch.zeros(1, dtype=torch.int32, pin_memory=True)


@functools.cache
def status_address() -> int:
    return status_flag().data_ptr()


@functools.cache
def _status_word() -> ctypes.c_int32:
    return ctypes.c_int32.from_address(status_address())


def raise_if_corrupt() -> None:
    """Raise CodecError if any kernel that has finished so far met a bad buffer or value; clears the flag."""
    if status_flag.cache_info().currsize == 0:
        return
    code = _status_word().value
    if code:
        _status_word().value = 0
        raise CodecError(
            f"a codec kernel found a bad buffer or value: {_STATUS_MEANINGS.get(code, f'status {code}')}; "
            "the tensors decoded since the last check must not be used"
        )


@functools.cache
def multiprocessor_count(device_index: int) -> int:
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)
