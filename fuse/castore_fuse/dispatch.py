"""Between C and a `LowLevel` file system: requests become calls of its methods, and results become replies.

Every reply is sent at one place, `Dispatcher._answer`, after the method has returned or raised. So no request
is answered twice (libfuse frees a request with its first answer), and no exception reaches C. Callbacks run
on the thread that took the request from the kernel, several at once. This module holds no state of its own.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from castore_fuse import libfuse, wire
from castore_fuse.lowlevel import BytesLike, LowLevel

log = logging.getLogger("castore.fuse")

MAX_BACKGROUND = 64
"""Read-ahead requests the kernel may have under way at once, over all files of the mount (its default is 12).

One sequential reader gains nothing from more; the limit is for many readers, who share it."""

SMALL_REPLY = 32 * 1024
"""Replies up to here are copied to the kernel without releasing the GIL.

Where the line lies made no measurable difference; longer copies release it so that other threads \
can decode."""

_Reply = TypeVar("_Reply")


class Dispatcher:
    """Turns C callbacks into calls of a `LowLevel`, and their results into replies."""

    def __init__(self, ops: LowLevel, lib: libfuse.Libfuse) -> None:
        self._ops = ops
        self._lib = lib

    def table(self) -> libfuse.LowLevelOps:
        """The operations for `fuse_session_new`."""
        lf, ops, answer = libfuse, self._ops, self._answer
        return libfuse.LowLevelOps(
            init=lf.InitCallback(self._init),
            lookup=lf.LookupCallback(answer(ops.lookup, wire.pack_entry, self._undo_lookup)),
            forget=lf.ForgetCallback(self._forget),
            getattr=lf.FileCallback(answer(lambda node, info: ops.getattr(node), wire.pack_attr)),
            open=lf.FileCallback(answer(self._open, wire.pack_open, self._undo_open)),
            read=lf.ReadCallback(answer(self._read, _unchanged)),
            release=lf.FileCallback(answer(self._release, _unchanged)),
            opendir=lf.FileCallback(answer(self._opendir, wire.pack_open, self._undo_opendir)),
            readdir=lf.ReadCallback(answer(self._readdir, _unchanged)),
            releasedir=lf.FileCallback(answer(self._releasedir, _unchanged)),
            statfs=lf.NodeCallback(answer(lambda node: ops.statfs(), wire.pack_statfs)),
            getxattr=lf.GetXattrCallback(answer(self._getxattr, _unchanged)),
            listxattr=lf.ListXattrCallback(answer(self._listxattr, _unchanged)),
            forget_multi=lf.ForgetMultiCallback(self._forget_multi),
            readdirplus=lf.ReadCallback(answer(self._readdirplus, _packed_lines, self._undo_readdirplus)),
        )

    def _answer(
        self,
        handle: Callable[..., _Reply],
        pack: Callable[[_Reply], BytesLike],
        undo: Callable[[_Reply, int], None] | None = None,
    ) -> Callable[..., None]:
        """A C callback that calls `handle(node, ...)` and sends what `pack` makes of the result.

        The kernel takes no reply of a request that was interrupted meanwhile. It then counts no reference and
        no handle, and `undo` gives back those that `handle` made.
        """
        send, reply_err = self._send, self._lib.reply_err

        def callback(request: int, node: int, *arguments: Any) -> None:
            try:
                reply = handle(node, *arguments)
                payload = pack(reply)
            except OSError as error:
                reply_err(request, error.errno or errno.EIO)
            except BaseException:
                log.exception("a request for node %d failed", node)
                reply_err(request, errno.EIO)
            else:
                if send(request, payload) and undo is not None:
                    undo(reply, node)

        return callback

    def _send(self, request: int, payload: BytesLike) -> int:
        size = len(payload)
        if type(payload) is bytes:
            if size <= SMALL_REPLY:
                return self._lib.reply_buf(request, payload, size)
            return self._lib.reply_large_buf(request, payload, size)
        with libfuse.BufferAddress(payload) as (address, size):
            return self._lib.reply_large_buf(request, address, size)

    def _init(self, userdata: int | None, conn_address: int) -> None:
        conn = self._lib.conn_info.from_address(conn_address)
        wanted = libfuse.CAP_ASYNC_READ | libfuse.CAP_PARALLEL_DIROPS | libfuse.CAP_EXPLICIT_INVAL_DATA
        wanted |= libfuse.CAP_READDIRPLUS | libfuse.CAP_READDIRPLUS_AUTO
        # A node's bytes never change, so its pages stay valid when its times change: no AUTO_INVAL_DATA.
        conn.want = (conn.want | wanted) & conn.capable & ~libfuse.CAP_AUTO_INVAL_DATA & ~libfuse.CAP_SPLICE
        conn.max_background = MAX_BACKGROUND
        conn.congestion_threshold = MAX_BACKGROUND * 3 // 4

    def _forget(self, request: int, node: int, count: int) -> None:
        self._forget_all(((node, count),))
        self._lib.reply_none(request)

    def _forget_multi(self, request: int, count: int, forgets: Any) -> None:
        self._forget_all((forgets[n].ino, forgets[n].nlookup) for n in range(count))
        self._lib.reply_none(request)

    def _forget_all(self, forgets: Iterable[tuple[int, int]]) -> None:
        for node, count in forgets:
            try:
                self._ops.forget(node, count)
            except Exception:
                log.exception("forgetting node %d failed", node)

    def _open(self, node: int, info: int) -> wire.OpenReply:
        return self._ops.open(node, self._lib.file_info.from_address(info).flags)

    def _read(self, node: int, size: int, offset: int, info: int) -> BytesLike:
        data = self._ops.read(node, self._handle(info), size, offset)
        if len(data) > size:  # the kernel would refuse a longer reply with a less helpful error
            raise ValueError(f"read gave {len(data)} bytes where {size} were asked for")
        return data

    def _release(self, node: int, info: int) -> bytes:
        self._ops.release(node, self._handle(info))
        return b""  # an empty reply means success

    def _opendir(self, node: int, info: int) -> wire.OpenReply:
        return self._ops.opendir(node)

    def _releasedir(self, node: int, info: int) -> bytes:
        self._ops.releasedir(node, self._handle(info))
        return b""

    def _readdir(self, node: int, size: int, offset: int, info: int) -> bytes:
        lines, room = [], size
        for line in self._ops.readdir(node, self._handle(info), offset):
            room -= len(line)
            if room < 0:
                break
            lines.append(line)
        return b"".join(lines)

    def _readdirplus(self, node: int, size: int, offset: int, info: int) -> tuple[bytes, list[int]]:
        """The packed lines, and the nodes that each got a reference through them."""
        lines, nodes, room = [], [], size
        for entry in self._ops.readdirplus(node, self._handle(info), offset):
            line = wire.pack_direntry_plus(entry)
            room -= len(line)
            if room < 0:
                self._undo_references([entry.entry.node])
                break
            lines.append(line)
            nodes.append(entry.entry.node)
        return b"".join(lines), nodes

    def _getxattr(self, node: int, name: bytes, size: int) -> bytes:
        if not name.startswith(b"user."):
            # ls and cp ask for ACLs and SELinux labels of every file, until a file system answers ENOTSUP.
            raise OSError(errno.ENOTSUP, "only user attributes are supported")
        return _sized(self._ops.getxattr(node, name), size)

    def _listxattr(self, node: int, size: int) -> bytes:
        return _sized(b"".join(name + b"\0" for name in self._ops.listxattr(node)), size)

    def _handle(self, info: int) -> int:
        handle: int = self._lib.file_info.from_address(info).fh
        return handle

    def _undo_lookup(self, reply: wire.EntryReply, parent: int) -> None:
        self._undo_references([reply.node])

    def _undo_readdirplus(self, reply: tuple[bytes, list[int]], parent: int) -> None:
        self._undo_references(reply[1])

    def _undo_references(self, nodes: Iterable[int]) -> None:
        self._forget_all((node, 1) for node in nodes if node)

    def _undo_open(self, reply: wire.OpenReply, node: int) -> None:
        self._ops.release(node, reply.fh)

    def _undo_opendir(self, reply: wire.OpenReply, node: int) -> None:
        self._ops.releasedir(node, reply.fh)


def _unchanged(payload: BytesLike) -> BytesLike:
    """The packer of replies that are bytes already."""
    return payload


def _packed_lines(reply: tuple[bytes, list[int]]) -> bytes:
    return reply[0]


def _sized(value: bytes, size: int) -> bytes:
    """The answer to getxattr and listxattr. With size 0 the caller asks for the length of the value only."""
    if size == 0:
        return wire.pack_xattr_size(len(value))
    if len(value) > size:
        raise OSError(errno.ERANGE, "the attribute is longer than the buffer")
    return value
