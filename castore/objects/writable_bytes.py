"""A new bytes object that its maker fills: saves one copy of a large blob.

Large reads alone import this module: ctypes takes a fortieth of the time that castore's import takes.
"""

from __future__ import annotations

import ctypes
import mmap

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
_address_of = ctypes.pythonapi.PyBytes_AsString
_address_of.restype = ctypes.c_void_p
_address_of.argtypes = [ctypes.py_object]
_libc = ctypes.CDLL(None)
_HUGE_PAGE = 2 * 1024 * 1024


def writable_bytes(size: int) -> tuple[bytes, memoryview]:
    """Return a new bytes object and a writable view of it. The caller fills it before other code sees it.

    ``PyBytes_FromStringAndSize(NULL, n)`` is documented for this use.
    """
    data: bytes = _new_bytes(None, size)
    if size >= 2 * _HUGE_PAGE:
        # Page faults on 4 KiB pages would take half the time of a large read.
        start = -(-_address_of(data) // _HUGE_PAGE) * _HUGE_PAGE
        end = (_address_of(data) + size) // _HUGE_PAGE * _HUGE_PAGE
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)
    return data, memoryview((ctypes.c_char * size).from_address(_address_of(data))).cast("B")
