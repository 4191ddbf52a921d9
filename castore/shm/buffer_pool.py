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

import ctypes
import mmap
import os
import resource
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
_IDLE_ROUNDS = 8
# Such a part of the files that a process may open yet is for buffers on their way.
_FILES = 4
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value
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
        self._memory = memoryview(_mapped(file, _HEADER + size)).cast("B")
        self.words = self._memory[:16].cast("Q")

    def bytes(self, size: int) -> memoryview:
        """The first bytes, to be written and read; the memory lives as long as the view."""
        return self._memory[_HEADER : _HEADER + size]


def _mapped(file: int, size: int) -> Any:
    """Shared memory, until nothing refers to it.

    Python's `mmap` keeps a descriptor for each mapping, and a process may have 1,024 of them.
    """
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return memory


def _files_left() -> int:
    """How many more files this process may open."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(0, most - len(os.listdir("/proc/self/fd")))


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
    """A buffer of a pool: its memory, the file until a receiver has it, and the round of its latest use."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.round = number, 0
        file = os.memfd_create("castore-buffer", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, _HEADER + size)
            self.buffer = Buffer(file, size)
            self.file: Any = DupFd(file)
        finally:
            os.close(file)


class BufferPool:
    """The buffers that a process fills. Of one thread and one process: a forked child needs its own.

    Messages are made in rounds: `begin_round`, then `take` and `send`, then `end_round`.
    """

    def __init__(self) -> None:
        self.name, self.process = uuid.uuid4().hex, os.getpid()
        self._started = process_started(self.process)
        self._own: dict[int, _Own] = {}
        self._taken: dict[int, _Own] = {}
        self._sent: set[int] = set()
        self._count, self._messages, self._round = 0, 0, 0
        # Buffers whose file is still open here, for its first message was not received.
        self._on_the_way: list[_Own] = []
        self._most_files = _files_left() // _FILES

    def begin_round(self) -> list[int]:
        """Begin the next messages; returns the numbers of buffers that are no longer used."""
        self._round += 1
        dropped = []
        for number, own in list(self._own.items()):
            state = own.buffer.words[_MESSAGE]
            if state == _RETIRED or (state == 0 and self._round - own.round > _IDLE_ROUNDS):
                del self._own[number]
                dropped.append(number)
        return dropped

    def take(self, size: int) -> tuple[int, Buffer] | None:
        """A free buffer for so many bytes, with its number; None if that would need another file too many.

        Raises:
            OSError: this process may open no more files, or the memory is used up.
        """
        self._on_the_way = [own for own in self._on_the_way if not own.buffer.words[_RECEIVED]]
        least = max(_SMALLEST, 1 << (size - 1).bit_length())  # pages that nobody writes take no memory
        free = (
            own for own in self._own.values() if own.buffer.size == least and not own.buffer.words[_MESSAGE]
        )
        own = next(free, None)
        if own is None:
            if len(self._on_the_way) >= self._most_files:
                return None
            self._count += 1
            own = self._own[self._count] = _Own(self._count, least)
            self._on_the_way.append(own)
        self._messages += 1
        own.round = self._round
        own.buffer.words[_MESSAGE], own.buffer.words[_RECEIVED] = self._messages, 0
        self._taken[own.number] = own
        return own.number, own.buffer

    def send(self, number: int) -> Message:
        """The message that gives a taken buffer to a receiver."""
        own = self._taken[number]
        self._sent.add(number)
        message = own.buffer.words[_MESSAGE]
        return Message(self.name, self.process, self._started, number, message, own.buffer.size, own.file)

    def end_round(self, *, is_sent: bool) -> None:
        """End the round; its messages are on their way, or will never be. Frees all other buffers of it."""
        for number, own in self._taken.items():
            if is_sent and number in self._sent:
                own.file = None
            else:
                own.buffer.words[_MESSAGE] = 0
        self._taken.clear()
        self._sent.clear()


class _Loan:
    """Bytes of a message that somebody in this process may still read."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer, self._process = buffer, os.getpid()
        _loans[id(self)] = self  # before the look at the forks: a fork looks at the loans behind it
        self.has_heirs = bool(_forks_under_way)

    def end(self) -> None:
        """Give the buffer back. A forked child gives nothing back, since its parent may read on."""
        if self._process == os.getpid():
            _loans.pop(id(self), None)
            has_heirs = self.has_heirs or bool(_forks_under_way)
            self._buffer.words[_MESSAGE] = _RETIRED if has_heirs else 0


# All loans of this process by their id, and an item for each fork that is under way. Each of these calls is
# atomic: other threads go on while a fork's other handlers run.
_loans: dict[int, _Loan] = {}
_forks_under_way: list[None] = []


def _before_fork() -> None:
    """Have nobody write to what this process reads now, and until the fork is over: its child may read on."""
    _forks_under_way.append(None)
    for loan in list(_loans.values()):
        loan.has_heirs = True


def _after_fork() -> None:
    del _forks_under_way[:1]  # none, if this module was imported meanwhile


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forks_under_way.clear)


class BufferReceiver:
    """The buffers that a process has received from pools in other processes. May be used by any thread."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, int, int | None], dict[int, Buffer]] = {}
        self._held: list[None] = []  # an item for each view; its calls are atomic

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
        self._held.append(None)
        weakref.finalize(view, self._give_back, _Loan(buffer)).atexit = False
        return view

    def drop(self, pool: str, buffers: list[int]) -> None:
        """Forget buffers that their pool no longer uses."""
        for (name, *_), known in list(self._pools.items()):
            if name == pool:
                for number in buffers:
                    known.pop(number, None)

    def _give_back(self, loan: _Loan) -> None:
        loan.end()
        self._held.pop()
        if not self._held:
            self._forget_ended()

    def _forget_ended(self) -> None:
        """Forget the buffers of processes that have ended; what somebody reads stays readable."""
        for pool in list(self._pools):
            if not is_running(pool[1], pool[2]):
                self._pools.pop(pool, None)
