"""One large block of host memory: huge pages where the kernel gives them, page-locked for CUDA when asked.

Page-locking a touched huge-page block costs about a sixth of pinning through the framework's allocator, and reads
from it by the device are faster; a block is therefore locked once and cut into slots by the pool.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from concurrent.futures import ThreadPoolExecutor

import torch

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 * 1024 * 1024
_TOUCH_THREADS = 8
_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device, not only the current one


class Slab:
    """`size_bytes` bytes of private anonymous memory from `address` on, aligned to a huge page.

    Neither touched nor page-locked at first. Forked children (data loaders) do not inherit the pages: page-locked
    memory shared by copy-on-write would be copied at the parent's next write.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        mapped_bytes = self.size_bytes + HUGE_PAGE_BYTES  # room to align
        self._mapping = mmap.mmap(-1, mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._mapping)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._skip_bytes = -start % HUGE_PAGE_BYTES
        self.address = start + self._skip_bytes
        self.registered = False
        self.huge_pages = self._advise(mmap.MADV_HUGEPAGE)
        self._advise(mmap.MADV_DONTFORK)

    def _advise(self, advice: int) -> bool:
        try:
            self._mapping.madvise(advice)
        except OSError:
            return False
        return True

    def view(self, address: int, size_bytes: int) -> memoryview:
        """The bytes [address, address + size_bytes) of this slab, writable."""
        begin = address - self.address + self._skip_bytes
        return self._view[begin : begin + size_bytes]

    def touch(self) -> None:
        """Make the kernel provide every page now, from several threads (one thread zeroes only some GB/s)."""
        step = -(-self.size_bytes // _TOUCH_THREADS // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        with ThreadPoolExecutor(_TOUCH_THREADS) as threads:
            list(threads.map(lambda begin: self._zero(begin, step), range(0, self.size_bytes, step)))

    def _zero(self, begin: int, step: int) -> None:
        ctypes.memset(self.address + begin, 0, min(step, self.size_bytes - begin))  # releases the GIL

    def register(self) -> str | None:
        """Page-lock the slab for CUDA. Contents are kept. None on success, otherwise CUDA's reason."""
        runtime = torch.cuda.cudart()
        status = runtime.cudaHostRegister(self.address, self.size_bytes, _REGISTER_PORTABLE)
        if int(status) != 0:
            _clear_pending_cuda_error()
            return str(runtime.cudaGetErrorString(status))
        self.registered = True
        return None

    def unregister(self) -> None:
        """Undo `register`; the caller has made sure that no copy is running."""
        if self.registered:
            torch.cuda.cudart().cudaHostUnregister(self.address)
            self.registered = False


def _clear_pending_cuda_error() -> None:
    """Take the failed call's error out of CUDA's last-error slot; otherwise the user's next kernel would report it."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        logger.debug("cleared a pending CUDA error: %s", error)
