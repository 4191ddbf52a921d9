"""Zstandard dictionaries: what small blobs have in common, kept once, so that each of them need not say it again.

A frame that was made with one carries its number, and the file is named by it, so a reader needs neither the index nor
the name of a blob. The number is drawn from the dictionary's own bytes: a damaged file is not taken for the dictionary.
Every file is there twice, because many blobs hang on it. A file never changes once it has its name.

Nothing here knows prefixes, or which dictionary a put should use. Whether bytes are right is never left to a dictionary:
the blob's digest decides.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any, NamedTuple

import zstandard
from blake3 import blake3

from castore.errors import CorruptError, StoreError
from castore.objects.codecs import Buffer
from castore.objects.loose import LooseFolder
from castore.system.io_errors import AT_FAULT
from castore.system.temporary import open_regular, sync_folder

#: Blobs of at most this many bytes are compressed with a dictionary: what is longer learns enough from itself.
DICTIONARY_LIMIT = 16 * 1024
#: Bytes of the smallest and of the largest dictionary that is made or read.
SMALLEST, LARGEST = 256, 1 << 20

_MAGIC = bytes.fromhex("37a430ec")
# Numbers below are for dictionaries that somebody registers with zstd's authors, those from 2^31 on are reserved.
_FIRST, _END = 1 << 15, 1 << 31
_SUFFIXES = (".zdict", ".spare")
_FILE = re.compile(r"([0-9a-f]{8})\.(?:zdict|spare)")
# Dictionaries that a process holds at a time: a hostile store may have any number of them.
_LOADED = 32


def number_of(data: bytes) -> int:
    """The number that a dictionary's bytes give, whatever number stands in them."""
    drawn = int.from_bytes(blake3(data[8:]).digest(length=8), "little")
    return _FIRST + drawn % (_END - _FIRST)


def numbered(data: bytes) -> bytes:
    """A dictionary with its number where zstd looks for it."""
    return _MAGIC + number_of(data).to_bytes(4, "little") + data[8:]


class BadCopy(NamedTuple):
    """A file that does not hold its dictionary.

    Attributes:
        path: of the file.
        problem: what is wrong with it.
        missing: it is not there at all, as when a process was killed while it made the dictionary.
        mended: it has been made anew from the other copy.
    """

    path: Path
    problem: str
    missing: bool
    mended: bool


class _Contexts(threading.local):
    """What one thread compresses and decompresses with."""

    def __init__(self, dictionary: zstandard.ZstdCompressionDict) -> None:
        self.decompressor = zstandard.ZstdDecompressor(dict_data=dictionary)
        self.compressors: dict[int, zstandard.ZstdCompressor] = {}


class Dictionary:
    """A dictionary in memory, ready for use by any thread.

    Args:
        data: the whole file.

    Raises:
        CorruptError: zstd cannot use it.
    """

    def __init__(self, data: bytes) -> None:
        self.number = int.from_bytes(data[4:8], "little")
        self.size = len(data)
        self._data = data
        self._prepared: dict[int, zstandard.ZstdCompressionDict] = {}
        try:
            # Digests it for decoding, once for all threads.
            self._contexts = _Contexts(self._parsed())
        except zstandard.ZstdError as error:
            raise self._unusable(error) from error

    def _parsed(self) -> zstandard.ZstdCompressionDict:
        return zstandard.ZstdCompressionDict(self._data, dict_type=zstandard.DICT_TYPE_FULLDICT)

    def _unusable(self, error: zstandard.ZstdError) -> CorruptError:
        return CorruptError(f"dictionary {self.number:08x} is none that zstd can use: {error}")

    def decompressor(self) -> zstandard.ZstdDecompressor:
        """The calling thread's."""
        return self._contexts.decompressor

    def compressor(self, level: int) -> zstandard.ZstdCompressor:
        """The calling thread's; its frames carry size, checksum and number.

        Raises:
            CorruptError: zstd cannot compress with it.
        """
        compressors = self._contexts.compressors
        compressor = compressors.get(level)
        if compressor is None:
            compressors[level] = compressor = zstandard.ZstdCompressor(
                level=level, dict_data=self._for_level(level), write_checksum=True, write_content_size=True
            )
        return compressor

    def _for_level(self, level: int) -> zstandard.ZstdCompressionDict:
        # Digested once a level. Two threads that do it at once do it twice, and one of the two is kept.
        prepared = self._prepared.get(level)
        if prepared is None:
            prepared = self._parsed()
            try:
                prepared.precompute_compress(level=level)
            except zstandard.ZstdError as error:
                raise self._unusable(error) from error
            self._prepared[level] = prepared
        return prepared

    def compress(self, data: Buffer, level: int) -> bytes:
        """One frame that needs this dictionary."""
        compressed: bytes = self.compressor(level).compress(data)
        return compressed

    def compress_many(self, frames: list[Buffer], level: int) -> list[Buffer]:
        """`compress` for several, none of them empty, without the GIL."""
        compressed: Any = self.compressor(level).multi_compress_to_buffer(frames)
        return list(compressed)


class Dictionaries:
    """The folder of dictionaries, and those of them that this process uses. Safe to share between threads and over forks.

    Args:
        folder: ``objects/dicts``.
        loose: makes files, and knows their permission bits.
    """

    def __init__(self, folder: Path, loose: LooseFolder) -> None:
        self.folder = folder
        self._loose = loose
        self._loaded: dict[int, Dictionary] = {}  # the first loaded comes first

    def paths(self, number: int) -> list[Path]:
        """Where the two copies of a dictionary lie."""
        return [self.folder / f"{number:08x}{suffix}" for suffix in _SUFFIXES]

    def numbers(self) -> list[int]:
        """The dictionaries that there are files of, whole or not."""
        names = (entry.name for entry in os.scandir(self.folder) if entry.is_file(follow_symlinks=False))
        return sorted({int(match[1], 16) for match in map(_FILE.fullmatch, names) if match})

    def decompressor(self, number: int) -> zstandard.ZstdDecompressor:
        """The calling thread's decompressor for frames of that number.

        Raises:
            CorruptError: there is no whole copy of the dictionary.
        """
        return (self._loaded.get(number) or self.load(number)).decompressor()

    def load(self, number: int) -> Dictionary:
        """A dictionary, read once a process.

        Raises:
            CorruptError: there is no whole copy of it.
            OSError: this process cannot read it now, which says nothing of the file.
        """
        found = self._loaded.get(number)
        if found is not None:
            return found
        problems = []
        for path in self.paths(number):
            problem, data = _read(path, number)
            if problem is None:
                found = Dictionary(data)
                if len(self._loaded) >= _LOADED:
                    self._loaded.pop(list(self._loaded)[0], None)  # noqa: RUF015 (in one step, for other threads)
                self._loaded[number] = found
                return found
            problems.append(problem)
        raise CorruptError(
            f"of dictionary {number:08x}, with which it was compressed or would be, no whole copy is left: {'; '.join(problems)}"
        )

    def has(self, number: int) -> bool:
        """Whether a file of the dictionary is there now; if not, this process does not use it any more either."""
        if any(map(os.path.lexists, self.paths(number))):
            return True
        self._loaded.pop(number, None)
        return False

    def add(self, data: bytes) -> int:
        """Keep a dictionary, on the disk when this returns; the caller holds the write lock. Returns its number.

        Raises:
            StoreError: another dictionary has its number.
        """
        number = number_of(data)
        for path in self.paths(number):
            problem, there = _read(path, number)
            if problem is None and there != data:
                raise StoreError(
                    f"{path} is another dictionary of the same number; train again with another --size"
                )
            if problem is not None:
                self._write(path, data)
        return number

    def is_whole(self, number: int) -> bool:
        """Whether both copies are."""
        return all(_read(path, number)[0] is None for path in self.paths(number))

    def mend(self, number: int, *, read_only: bool = False) -> list[BadCopy]:
        """Make bad copies of a dictionary anew from a good one, or just look; returns those that were bad."""
        read = {path: _read(path, number) for path in self.paths(number)}
        good = next((data for problem, data in read.values() if problem is None), None)
        bad = [
            BadCopy(path, problem, not os.path.lexists(path), good is not None and not read_only)
            for path, (problem, _) in read.items()
            if problem is not None
        ]
        if good is not None and not read_only:
            for copy in bad:
                self._write(copy.path, good)
        return bad

    def remove(self, number: int) -> int:
        """Unlink both copies; returns how many bytes that were. The caller holds the write lock and knows that no blob needs them."""
        self._loaded.pop(number, None)
        return sum(map(_unlink, self.paths(number)))

    def _write(self, path: Path, data: bytes) -> None:
        # Always synced: blobs that are put later, durably or not, must not outlive it.
        fd, temporary = self._loose.create()
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                self._loose.seal(fd, durable=True)
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def _unlink(path: Path) -> int:
    try:
        size = path.lstat().st_size
    except FileNotFoundError:
        return 0
    path.unlink()
    return size


def _read(path: Path, number: int) -> tuple[str | None, bytes]:
    """What is wrong with a file, or None, and its bytes."""
    try:
        with open(open_regular(path), "rb") as file:
            data = file.read(LARGEST + 1)
    except FileNotFoundError:
        return f"{path} is missing", b""
    except OSError as error:
        if error.errno not in AT_FAULT:
            raise
        return f"{path} cannot be read ({error.strerror})", b""
    whole = SMALLEST <= len(data) <= LARGEST and data == numbered(data) and number_of(data) == number
    return (None if whole else f"{path} is damaged"), data
