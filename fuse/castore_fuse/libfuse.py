"""libfuse 3's session interface through ctypes: the few functions and structures that `session` needs.

mfusepy finds and loads the library, and has the layouts that differ between libfuse versions
(`fuse_file_info`, `fuse_conn_info`). This module adds the low-level interface, which mfusepy does not wrap.

Functions that may wait for the kernel release the GIL. The others keep it, which saves each request two
hand-overs of the GIL between threads.

`load()` must run before any thread is started. `load()` never runs at import: this module imports without
libfuse.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from typing import Any, NamedTuple

from castore.errors import MissingDependencyError

INSTALL_HINT = "install it as root with: apt-get install fuse3"

# Capabilities of `fuse_conn_info.want` (fuse_common.h; unchanged since libfuse 3.5).
CAP_AUTO_INVAL_DATA = 1 << 12
CAP_ASYNC_READ = 1 << 0
CAP_SPLICE = 1 << 7 | 1 << 8 | 1 << 9
CAP_READDIRPLUS = 1 << 13
CAP_READDIRPLUS_AUTO = 1 << 14
CAP_PARALLEL_DIROPS = 1 << 18
CAP_EXPLICIT_INVAL_DATA = 1 << 25

# fuse_req_t, and pointers that are only passed on, are plain integers here: cheaper than pointer objects.
_REQ, _NODE, _OFFSET, _FILE_INFO = c_void_p, c_uint64, ctypes.c_int64, c_void_p
_UNUSED = c_void_p  # an operation that stays NULL; libfuse answers ENOSYS for it

InitCallback = CFUNCTYPE(None, c_void_p, c_void_p)
LookupCallback = CFUNCTYPE(None, _REQ, _NODE, c_char_p)
ForgetCallback = CFUNCTYPE(None, _REQ, _NODE, c_uint64)
NodeCallback = CFUNCTYPE(None, _REQ, _NODE)
FileCallback = CFUNCTYPE(None, _REQ, _NODE, _FILE_INFO)
ReadCallback = CFUNCTYPE(None, _REQ, _NODE, c_size_t, _OFFSET, _FILE_INFO)
GetXattrCallback = CFUNCTYPE(None, _REQ, _NODE, c_char_p, c_size_t)
ListXattrCallback = CFUNCTYPE(None, _REQ, _NODE, c_size_t)


class ForgetData(Structure):
    """`struct fuse_forget_data`."""

    _fields_ = [("ino", c_uint64), ("nlookup", c_uint64)]


ForgetMultiCallback = CFUNCTYPE(None, _REQ, c_size_t, POINTER(ForgetData))


class LowLevelOps(Structure):
    """`struct fuse_lowlevel_ops` up to the last operation set here. libfuse takes the rest as NULL."""

    _fields_ = [
        ("init", InitCallback),
        ("destroy", _UNUSED),
        ("lookup", LookupCallback),
        ("forget", ForgetCallback),
        ("getattr", FileCallback),
        *((name, _UNUSED) for name in ("setattr", "readlink", "mknod", "mkdir", "unlink", "rmdir")),
        *((name, _UNUSED) for name in ("symlink", "rename", "link")),
        ("open", FileCallback),
        ("read", ReadCallback),
        *((name, _UNUSED) for name in ("write", "flush")),
        ("release", FileCallback),
        ("fsync", _UNUSED),
        ("opendir", FileCallback),
        ("readdir", ReadCallback),
        ("releasedir", FileCallback),
        ("fsyncdir", _UNUSED),
        ("statfs", NodeCallback),
        ("setxattr", _UNUSED),
        ("getxattr", GetXattrCallback),
        ("listxattr", ListXattrCallback),
        *((name, _UNUSED) for name in ("removexattr", "access", "create", "getlk", "setlk", "bmap", "ioctl")),
        *((name, _UNUSED) for name in ("poll", "write_buf", "retrieve_reply")),
        ("forget_multi", ForgetMultiCallback),
        *((name, _UNUSED) for name in ("flock", "fallocate")),
        ("readdirplus", ReadCallback),
    ]


class Args(Structure):
    """`struct fuse_args`."""

    _fields_ = [("argc", c_int), ("argv", POINTER(c_char_p)), ("allocated", c_int)]


class Buf(Structure):
    """`struct fuse_buf`, with room at its end: libfuse 3.17 added `mem_size` there."""

    _fields_ = [
        ("size", c_size_t),
        ("flags", c_int),
        ("mem", c_void_p),
        ("fd", c_int),
        ("pos", ctypes.c_int64),
        ("mem_size", c_size_t),
        ("room", c_uint64 * 8),
    ]


class Libfuse(NamedTuple):
    """The library's functions, each named like its C function without `fuse_`, and two of its structures."""

    version: tuple[int, int]
    session_new: Callable[..., Any]
    session_mount: Callable[..., int]
    session_unmount: Callable[..., None]
    session_destroy: Callable[..., None]
    session_receive_buf: Callable[..., int]
    session_process_buf: Callable[..., None]
    notify_inval_entry: Callable[..., int]
    notify_inval_inode: Callable[..., int]
    reply_buf: Callable[..., int]
    reply_large_buf: Callable[..., int]
    reply_err: Callable[..., int]
    reply_none: Callable[..., None]
    file_info: Any
    conn_info: Any


@functools.cache
def load() -> Libfuse:
    """Find and load libfuse 3.

    Raises:
        MissingDependencyError: mfusepy or libfuse 3 is not installed.
    """
    # Without this, mfusepy loads libfuse 2 where both are installed.
    os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")
    try:
        import mfusepy

        if mfusepy.fuse_version_major != 3:  # somebody else has imported it before, with libfuse 2
            mfusepy = _import_again("mfusepy")
    except ImportError as error:
        raise MissingDependencyError('Mounting needs mfusepy: pip install "castore[fuse]"') from error
    except (OSError, AttributeError) as error:
        raise MissingDependencyError(f"Mounting needs libfuse 3 ({error}); {INSTALL_HINT}") from error
    if mfusepy.fuse_version_major != 3:
        raise MissingDependencyError(
            f"Mounting needs libfuse 3, found {mfusepy._libfuse._name}; {INSTALL_HINT}"
        )
    # Own handles on the same library: other users of mfusepy do not see the argument types set here.
    name = mfusepy._libfuse._name
    return _declare(ctypes.CDLL(name), ctypes.PyDLL(name), mfusepy)


def _import_again(name: str) -> Any:
    """A module of one's own, beside the one that others have imported."""
    spec = importlib.util.find_spec(name)
    assert spec is not None, "the module has just been imported"
    assert spec.loader is not None, "the module is a file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _declare(waiting: ctypes.CDLL, quick: ctypes.PyDLL, mfusepy: Any) -> Libfuse:
    """The functions with their types.

    Those of `waiting` release the GIL while they run; those of `quick` keep it.
    """

    def function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        # A prototype makes a new function object, where library.name is one object shared by all users. PyDLL
        # derives from CDLL, so the check is for PyDLL.
        prototype = ctypes.PYFUNCTYPE if isinstance(library, ctypes.PyDLL) else CFUNCTYPE
        return prototype(result, *arguments)((name, library))

    session, buf = c_void_p, POINTER(Buf)
    return Libfuse(
        version=(mfusepy.fuse_version_major, mfusepy.fuse_version_minor),
        # Since libfuse 3.17 this is a macro in C; the symbol stays for programs built before that.
        session_new=function(
            waiting, "fuse_session_new", session, POINTER(Args), POINTER(LowLevelOps), c_size_t, c_void_p
        ),
        session_mount=function(waiting, "fuse_session_mount", c_int, session, c_char_p),
        session_unmount=function(waiting, "fuse_session_unmount", None, session),
        session_destroy=function(waiting, "fuse_session_destroy", None, session),
        session_receive_buf=function(waiting, "fuse_session_receive_buf", c_int, session, buf),
        session_process_buf=function(quick, "fuse_session_process_buf", None, session, buf),
        notify_inval_entry=function(
            waiting, "fuse_lowlevel_notify_inval_entry", c_int, session, _NODE, c_char_p, c_size_t
        ),
        notify_inval_inode=function(
            waiting, "fuse_lowlevel_notify_inval_inode", c_int, session, _NODE, _OFFSET, _OFFSET
        ),
        reply_buf=function(quick, "fuse_reply_buf", c_int, _REQ, c_char_p, c_size_t),
        reply_large_buf=function(waiting, "fuse_reply_buf", c_int, _REQ, c_void_p, c_size_t),
        reply_err=function(quick, "fuse_reply_err", c_int, _REQ, c_int),
        reply_none=function(quick, "fuse_reply_none", None, _REQ),
        file_info=mfusepy.fuse_file_info,
        conn_info=mfusepy.fuse_conn_info,
    )


class _PyBuffer(Structure):
    """CPython's `Py_buffer`, up to `len`, with room for the rest."""

    _fields_ = [("buf", c_void_p), ("obj", c_void_p), ("len", ctypes.c_ssize_t), ("rest", c_uint64 * 8)]


_get_buffer = ctypes.PYFUNCTYPE(c_int, ctypes.py_object, POINTER(_PyBuffer), c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release_buffer = ctypes.PYFUNCTYPE(None, POINTER(_PyBuffer))(("PyBuffer_Release", ctypes.pythonapi))


class BufferAddress:
    """The address of any object with a contiguous buffer, which stays in place for the `with` block.

    Of read-only memory, ctypes gives the address of a `bytes` object's start only. Copying the 128 KiB of
    each read to get an address would cost more than all other work on that read.
    """

    __slots__ = ("_view",)

    def __init__(self, data: object) -> None:
        self._view = _PyBuffer()
        _get_buffer(data, self._view, 0)

    def __enter__(self) -> tuple[int, int]:
        return self._view.buf or 0, self._view.len

    def __exit__(self, *exc: object) -> None:
        _release_buffer(self._view)
