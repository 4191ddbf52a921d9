"""A run of addresses in which files are mapped side by side, so that one tensor covers them all.

Addresses are reserved first, which costs no memory; unmapped parts read as zeros. Files are mapped shared and
read-only: all processes of a machine use the same pages of the page cache. Must never be written through. The
addresses are unmapped when the last tensor over them is freed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import torch

from castore.errors import StoreError

PAGE = mmap.PAGESIZE
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAX_BYTES = 1 << 46  # half of a process's address space on x86-64
_MREMAP_TO = 3  # MREMAP_MAYMOVE and MREMAP_FIXED
_MADV_POPULATE_READ = 22
# Populated in pieces, so that a process that ends does not wait for the whole.
_PIECE = 64 * 1024 * 1024

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def round_to_pages(size: int) -> int:
    """``size`` in bytes, rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


class Region:
    """Reserved addresses.

    Args:
        size: in bytes.
        random: advise the kernel not to read ahead in the mapped files.

    Raises:
        StoreError: the process may not have so many addresses.
    """

    def __init__(self, size: int, *, random: bool = False) -> None:
        self.size = round_to_pages(size)
        self._random = random
        if self.size > _MAX_BYTES:
            raise StoreError(
                f"cannot map the shards of an embedding cache: a process cannot address {size} bytes"
            )
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._base = _mmap(None, self.size, mmap.PROT_READ, anonymous, -1, 0)
        self._buffer = (ctypes.c_char * self.size).from_address(self._base)
        # A tensor keeps the buffer, and the buffer keeps the addresses. At exit the kernel unmaps them
        # faster.
        weakref.finalize(self._buffer, _libc.munmap, self._base, self.size).atexit = False

    def map(self, at: int, fd: int, offset: int, size: int) -> None:
        """Map ``size`` bytes of a file from ``offset`` on; ``at`` and ``offset`` are page boundaries."""
        _mmap(self._base + at, round_to_pages(size), mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
        if self._random:
            _libc.madvise(self._base + at, round_to_pages(size), mmap.MADV_RANDOM)

    def copy(self, at: int, data: memoryview) -> None:
        """Copy bytes without a mappable file to ``at``, a page boundary, in this process's memory."""
        size = round_to_pages(data.nbytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _mmap(self._base + at, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        place = (ctypes.c_char * data.nbytes).from_address(self._base + at)
        memoryview(place).cast("B")[:] = data
        if _libc.mprotect(self._base + at, size, mmap.PROT_READ):
            raise _mapping_error("protect")

    def take_over(self, other: Region, start: int, end: int) -> None:
        """Map another region's range here too, from page boundary ``start``; its files may be unlinked."""
        old, new, size = other._base + start, self._base + start, round_to_pages(end - start)
        # An old size of 0 asks for a second mapping of the same shared pages: see mremap(2).
        if size and _libc.mremap(old, 0, size, _MREMAP_TO, new) == ctypes.c_void_p(-1).value:
            self.copy(start, memoryview((ctypes.c_char * (end - start)).from_address(old)).cast("B"))

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The first bytes as a tensor. It must not be written to, which would end the process."""
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(self._buffer, dtype=dtype, count=count).view(shape)

    def populate(self, start: int, end: int) -> None:
        """Read a range into memory, and into this process's page table."""
        for at in range(start // PAGE * PAGE, end, _PIECE):
            size = round_to_pages(min(_PIECE, end - at))
            if _libc.madvise(self._base + at, size, _MADV_POPULATE_READ):  # fails before Linux 5.14
                _libc.madvise(self._base + at, size, mmap.MADV_WILLNEED)


def _mmap(at: int | None, size: int, protection: int, flags: int, fd: int, offset: int) -> int:
    got: int = _libc.mmap(at, size, protection, flags, fd, offset)
    if got == ctypes.c_void_p(-1).value:
        raise _mapping_error("map")
    return got


def _mapping_error(what: str) -> StoreError:
    reason = os.strerror(ctypes.get_errno())
    return StoreError(
        f"cannot {what} the shards of an embedding cache ({reason}); see `ulimit -v` and vm.max_map_count"
    )
