"""Zstandard dictionaries: content that small blobs have in common, stored once instead of in each of them.

A frame carries the number of its dictionary, and the dictionary's file is named by that number, so a reader
needs neither the index nor the blob's name. The number is derived from the dictionary's bytes, so a damaged
file is recognised. Every dictionary is stored in two files, because many blobs depend on it. A file never
changes once it has its name.

Nothing here depends on prefixes, or decides which dictionary a put should use. A dictionary never decides
whether bytes are right: the blob's digest does.
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
from castore.objects.loose import LooseFolder
from castore.records import Buffer
from castore.system.io_errors import AT_FAULT
from castore.system.temporary import open_regular, sync_folder

#: Blobs of at most this many bytes are compressed with a dictionary. Longer blobs repeat enough of their own.
DICTIONARY_LIMIT = 16 * 1024
#: Smallest and largest size in bytes of a dictionary that is written or read.
SMALLEST, LARGEST = 256, 1 << 20

_MAGIC = bytes.fromhex("37a430ec")
# zstd's format reserves dictionary IDs below 2^15 for registered dictionaries, and those from 2^31 on.
_FIRST, _END = 1 << 15, 1 << 31
_SUFFIXES = (".zdict", ".spare")
_FILE = re.compile(r"([0-9a-f]{8})\.(?:zdict|spare)")
# Dictionaries that a process keeps in memory at most: a hostile store may have any number of them.
_LOADED = 32


def derive_number(data: bytes) -> int:
    """The number derived from a dictionary's bytes, whatever number they contain."""
    hashed = int.from_bytes(blake3(data[8:]).digest(length=8), "little")
    return _FIRST + hashed % (_END - _FIRST)


def with_number(data: bytes) -> bytes:
    """A dictionary's bytes with the derived number in zstd's Dictionary_ID field."""
    return _MAGIC + derive_number(data).to_bytes(4, "little") + data[8:]


class BadCopy(NamedTuple):
    """A file that does not hold its dictionary.

    Attributes:
        path: path of the file.
        problem: what is wrong with the file.
        missing: whether there is no such file, as after a process was killed while it wrote the dictionary.
        mended: whether the file was written again from the other copy.
    """

    path: Path
    problem: str
    missing: bool
    mended: bool


class _Contexts(threading.local):
    """Compressors and the decompressor of one thread."""

    def __init__(self, dictionary: zstandard.ZstdCompressionDict) -> None:
        self.decompressor = zstandard.ZstdDecompressor(dict_data=dictionary)
        self.compressors: dict[int, zstandard.ZstdCompressor] = {}


class Dictionary:
    """A dictionary in memory. Thread-safe.

    Args:
        data: bytes of the whole file.

    Raises:
        CorruptError: zstd cannot use it.
    """

    def __init__(self, data: bytes) -> None:
        self.number = int.from_bytes(data[4:8], "little")
        self.size = len(data)
        #: All bytes of its file.
        self.data = data
        self._prepared: dict[int, zstandard.ZstdCompressionDict] = {}
        try:
            # This digests the dictionary for decompression, once for all threads.
            self._contexts = _Contexts(self._parsed())
        except zstandard.ZstdError as error:
            raise self._unusable(error) from error

    def _parsed(self) -> zstandard.ZstdCompressionDict:
        return zstandard.ZstdCompressionDict(self.data, dict_type=zstandard.DICT_TYPE_FULLDICT)

    def _unusable(self, error: zstandard.ZstdError) -> CorruptError:
        return CorruptError(f"zstd cannot use dictionary {self.number:08x}: {error}")

    def decompressor(self) -> zstandard.ZstdDecompressor:
        """The calling thread's decompressor."""
        return self._contexts.decompressor

    def compressor(self, level: int) -> zstandard.ZstdCompressor:
        """The calling thread's compressor. Its frames carry size, checksum and dictionary number.

        Raises:
            CorruptError: zstd cannot compress with this dictionary.
        """
        compressors = self._contexts.compressors
        compressor = compressors.get(level)
        if compressor is None:
            compressors[level] = compressor = zstandard.ZstdCompressor(
                level=level, dict_data=self._for_level(level), write_checksum=True, write_content_size=True
            )
        return compressor

    def _for_level(self, level: int) -> zstandard.ZstdCompressionDict:
        # Digested once per level. Two threads at once may both digest it; one result is kept.
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
        """Compress to one frame that needs this dictionary."""
        compressed: bytes = self.compressor(level).compress(data)
        return compressed

    def compress_many(self, frames: list[Buffer], level: int) -> list[Buffer]:
        """`compress` for several frames, none of them empty, without the GIL."""
        compressed: Any = self.compressor(level).multi_compress_to_buffer(frames)
        return list(compressed)


class Dictionaries:
    """The folder of dictionaries, and those that this process has loaded. Thread-safe and fork-safe.

    Args:
        folder: ``objects/dicts``.
        loose: creates files with the right permission bits.
    """

    def __init__(self, folder: Path, loose: LooseFolder) -> None:
        self.folder = folder
        self._loose = loose
        self._loaded: dict[int, Dictionary] = {}  # in order of loading

    def paths(self, number: int) -> list[Path]:
        """Where the two copies of a dictionary lie."""
        return [self.folder / f"{number:08x}{suffix}" for suffix in _SUFFIXES]

    def numbers(self) -> list[int]:
        """The numbers of all dictionaries that have a file, intact or not."""
        names = (entry.name for entry in os.scandir(self.folder) if entry.is_file(follow_symlinks=False))
        return sorted({int(match[1], 16) for match in map(_FILE.fullmatch, names) if match})

    def decompressor(self, number: int) -> zstandard.ZstdDecompressor:
        """The calling thread's decompressor for frames that need that dictionary.

        Raises:
            CorruptError: there is no whole copy of the dictionary.
        """
        return (self._loaded.get(number) or self.load(number)).decompressor()

    def load(self, number: int) -> Dictionary:
        """Return a dictionary, which is read once per process.

        Raises:
            CorruptError: there is no whole copy of it.
            OSError: this process cannot read it now; the file itself may be intact.
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
                    # `list` copies in one step, safe from other threads.
                    self._loaded.pop(list(self._loaded)[0], None)  # noqa: RUF015
                self._loaded[number] = found
                return found
            problems.append(problem)
        raise CorruptError(
            f"dictionary {number:08x}, which it needs, has no intact copy left: {'; '.join(problems)}"
        )

    def has(self, number: int) -> bool:
        """Whether the dictionary has a file now. If not, this process stops using it too."""
        if any(map(os.path.lexists, self.paths(number))):
            return True
        self._loaded.pop(number, None)
        return False

    def add(self, data: bytes) -> int:
        """Store a dictionary and return its number. The files are synced when this returns.

        The caller holds the write lock.

        Raises:
            StoreError: another dictionary has its number.
        """
        number = derive_number(data)
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
        """Whether both copies of the dictionary are intact."""
        return all(_read(path, number)[0] is None for path in self.paths(number))

    def repair(self, number: int, *, read_only: bool = False) -> list[BadCopy]:
        """Write bad copies of a dictionary again from a good one; with ``read_only``, only check.

        Returns:
            The copies that were bad.
        """
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
        """Unlink both copies and return their size in bytes.

        The caller holds the write lock and has made sure that no blob needs them.
        """
        self._loaded.pop(number, None)
        return sum(map(_unlink, self.paths(number)))

    def _write(self, path: Path, data: bytes) -> None:
        # Always synced: no blob put later, durable or not, may outlive its dictionary.
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
    """Return ``(problem, bytes)`` of a file; the problem is None if the file is intact."""
    try:
        with open(open_regular(path), "rb") as file:
            data = file.read(LARGEST + 1)
    except FileNotFoundError:
        return f"{path} is missing", b""
    except OSError as error:
        if error.errno not in AT_FAULT:
            raise
        return f"{path} cannot be read ({error.strerror})", b""
    whole = SMALLEST <= len(data) <= LARGEST and data == with_number(data) and derive_number(data) == number
    return (None if whole else f"{path} is damaged"), data
