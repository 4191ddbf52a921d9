"""Buffers of shared memory that one process fills, another one reads, and the first one then fills again.

The kernel clears each page of new memory, which takes longer than to fill it. So a `BufferPool` keeps its
buffers: a receiver says by a word in the buffer that it has finished, and the pool looks at the word before
it fills the buffer again. Neither waits for the other. A pool without a free buffer makes one.

The memory has no name (``memfd_create``): it ends with the last process that has it, and the size of
``/dev/shm`` is no limit. A buffer's file travels with its first message, and the receiver keeps the mapping.

Must never: give out memory for new bytes while a receiver, or a process that a receiver has forked meanwhile,
may read the former ones.
"""

from __future__ import annotations

import mmap
import os
import uuid
import weakref
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

from castore.errors import SegmentError
from castore.system.temporary import is_running, process_started

# In front of a buffer's bytes, which begin where a tensor may lie: the number of the message whose bytes they
# are (0 for none, _RETIRED if they are never to be written again), and whether it was received.
_HEADER = 64
_MESSAGE, _RECEIVED = 0, 1
_RETIRED = 2**64 - 1
_SMALLEST = 4096
# A free buffer goes after so many rounds in which it was not needed.
_IDLE_ROUNDS = 16
_NOT_HERE = (
    "a buffer of shared memory was received twice, or by a process that it was not sent to, and may have"
    " other bytes by now; receive each message once"
)


class Buffer:
    """Shared memory for the bytes of one message at a time.

    Args:
        file: the descriptor of its memory; the caller closes it.
        size: bytes that it takes.
    """

    def __init__(self, file: int, size: int) -> None:
        self.size = size
        self._memory = mmap.mmap(file, _HEADER + size)
        self.words = memoryview(self._memory)[:16].cast("Q")

    def bytes(self, size: int) -> memoryview:
        """The first bytes, to be written and read; the memory lives as long as the view."""
        return memoryview(self._memory)[_HEADER : _HEADER + size]


class Message(NamedTuple):
    """A buffer on its way to a receiver, in which form it can be pickled once.

    Attributes:
        pool: tells a pool from all others.
        process, started: the pool's process.
        buffer: the buffer's number in the pool.
        number: of the message; each has another one.
        size: bytes that the buffer takes.
        file: the buffer's memory, in its first message; None in later ones.
    """

    pool: str
    process: int
    started: int | None
    buffer: int
    number: int
    size: int
    file: Any


class _Own:
    """A buffer of a pool: its memory, its file until that has travelled, and the round of its latest use."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.round = number, 0
        self.file: int | None = os.memfd_create("castore-buffer", os.MFD_CLOEXEC)
        os.ftruncate(self.file, _HEADER + size)
        self.buffer = Buffer(self.file, size)

    def close_file(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None


class BufferPool:
    """The buffers that a process fills. Of one thread and one process: a forked child needs its own."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.name, self._started = uuid.uuid4().hex, process_started(self.process)
        self._own: dict[int, _Own] = {}
        self._taken: dict[int, _Own] = {}  # since the latest round began; not sent yet
        self._count, self._messages, self._round = 0, 0, 0

    def begin_round(self) -> list[int]:
        """Begin the next batch of messages; returns the numbers of buffers that are no longer used."""
        self._round += 1
        dropped = []
        for number, own in list(self._own.items()):
            state = own.buffer.words[_MESSAGE]
            if state == _RETIRED or (state == 0 and self._round - own.round > _IDLE_ROUNDS):
                own.close_file()
                del self._own[number]
                dropped.append(number)
        return dropped

    def take(self, size: int) -> tuple[int, Buffer]:
        """A free buffer for so many bytes, with its number."""
        least = max(_SMALLEST, 1 << (size - 1).bit_length())  # pages that nobody writes take no memory
        free = (
            own for own in self._own.values() if own.buffer.size == least and not own.buffer.words[_MESSAGE]
        )
        own = next(free, None)
        if own is None:
            self._count += 1
            own = self._own[self._count] = _Own(self._count, least)
        self._messages += 1
        own.round = self._round
        own.buffer.words[_MESSAGE], own.buffer.words[_RECEIVED] = self._messages, 0
        self._taken[own.number] = own
        return own.number, own.buffer

    def send(self, number: int) -> Message:
        """The message that gives a taken buffer to a receiver."""
        own = self._taken.pop(number)
        file = None if own.file is None else DupFd(own.file)
        own.close_file()
        message = own.buffer.words[_MESSAGE]
        return Message(self.name, self.process, self._started, number, message, own.buffer.size, file)

    def give_up(self) -> None:
        """Free the buffers that were taken in this round and not sent."""
        while self._taken:
            _, own = self._taken.popitem()
            own.buffer.words[_MESSAGE] = 0


class _Loan:
    """Bytes of a message that somebody in this process may still read."""

    def __init__(self, buffer: Buffer, loans: dict[int, _Loan]) -> None:
        self._buffer, self._loans, self._process = buffer, loans, os.getpid()
        self.has_heirs = False
        loans[id(self)] = self

    def end(self) -> None:
        """Give the buffer back. A forked child gives nothing back, since its parent may read on."""
        if self._process == os.getpid():
            self._loans.pop(id(self), None)
            self._buffer.words[_MESSAGE] = _RETIRED if self.has_heirs else 0


class BufferReceiver:
    """The buffers that a process has received from pools in other processes. May be used by any thread."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, int, int | None], dict[int, Buffer]] = {}
        self._loans: dict[int, _Loan] = {}
        _receivers.add(self)

    def receive(self, message: Message, size: int) -> memoryview:
        """The first bytes of a message. Once the view is gone the pool may fill the buffer again.

        Raises:
            SegmentError: the message was received before, or is for another receiver.
        """
        sender = message.pool, message.process, message.started
        if sender not in self._pools:
            self._forget_ended()
        pool = self._pools.setdefault(sender, {})
        if message.file is not None:
            file = message.file.detach()
            try:
                pool[message.buffer] = Buffer(file, message.size)
            finally:
                os.close(file)
        buffer = pool.get(message.buffer)
        if buffer is None or [*buffer.words] != [message.number, 0]:
            raise SegmentError(_NOT_HERE)
        buffer.words[_RECEIVED] = 1
        view = buffer.bytes(size)
        loan = _Loan(buffer, self._loans)
        weakref.finalize(view, self._give_back, loan).atexit = False
        return view

    def drop(self, pool: str, buffers: list[int]) -> None:
        """Forget buffers that their pool no longer uses."""
        for (name, *_), known in list(self._pools.items()):
            if name == pool:
                for number in buffers:
                    known.pop(number, None)

    def _give_back(self, loan: _Loan) -> None:
        loan.end()
        if not self._loans:
            self._forget_ended()

    def _forget_ended(self) -> None:
        """Forget the buffers of processes that have ended; what somebody reads stays readable."""
        for pool in list(self._pools):
            if not is_running(pool[1], pool[2]):
                self._pools.pop(pool, None)

    def keep_for_child(self) -> None:
        """Have nobody write to what this process reads now: a child that it forks may read on."""
        for loan in list(self._loans.values()):
            loan.has_heirs = True


_receivers: weakref.WeakSet[BufferReceiver] = weakref.WeakSet()


def _keep_for_child() -> None:
    for receiver in list(_receivers):
        receiver.keep_for_child()


os.register_at_fork(before=_keep_for_child, after_in_parent=_keep_for_child)
