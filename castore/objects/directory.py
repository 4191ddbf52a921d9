"""The object directory: opens, places, removes and sets aside the bytes of blobs, loose or packed.

The directory asks nothing of the index: its callers decide whether a blob is known, named or wanted. The
interface to a storage place is small on purpose (open, publish, append, remove, list), so that another kind
of place can be added.
"""

from __future__ import annotations

import os
import time
from contextlib import closing, suppress
from pathlib import Path

import xxhash
from blake3 import blake3

from castore.errors import CorruptError
from castore.objects.codecs import CODECS, FRAME_SIZE
from castore.objects.decode import BlobReader
from castore.objects.dictionaries import Dictionaries
from castore.objects.encode import HashingFrames, raw_checksums
from castore.objects.frames import frame_count, probe_size, read_table
from castore.objects.loose import LooseFolder
from castore.objects.packs import PACK_LIMIT, PackFile, PackFolder, PackRecord, PackWriter, read_record, scan
from castore.records import AWAY, DIGEST_SIZE, LOOSE, Blob
from castore.system.io_errors import AT_FAULT, read_around
from castore.system.ram_cache import MemoryLRU
from castore.system.temporary import open_no_follow, open_regular, sync_folder

# Upper bound in bytes of a blob and of an object: file offsets are signed.
_LONGEST = 1 << 62


def check_row(blob: Blob) -> None:
    """Check a row of the index before it is used. The row may be damaged or hostile.

    Raises:
        CorruptError: no blob can have such a row.
    """
    digest, size, stored, codec, pack, offset = blob
    try:
        limits = (FRAME_SIZE, PACK_LIMIT) if pack > 0 else (_LONGEST, _LONGEST)
        sound = 0 <= size <= limits[0] and 0 <= stored <= limits[1] and 0 <= offset < _LONGEST
    except TypeError:
        sound = False
    if (
        not sound
        or codec not in CODECS
        or type(digest) is not bytes
        or len(digest) != DIGEST_SIZE
        or pack < AWAY
    ):
        raise CorruptError(f"the index has a row that cannot be: {tuple(blob)}; `castore doctor` tells more")


def describe_loose(digest: bytes, codec: str, path: Path) -> tuple[Blob, bytes | None]:
    """Return the row that an object's own bytes give, and its frames' checksums if the index keeps them.

    Only a raw object of several frames has such checksums. It is read in full, and its digest is checked.

    Raises:
        CorruptError: the object has no seek table, or its bytes do not have the digest in its name.
        OSError: the object cannot be read.
    """
    fd = open_regular(path)
    try:
        stored = os.fstat(fd).st_size
        size = probe_size(codec, stored, lambda offset, length: os.pread(fd, length, offset))
        blob = Blob(digest, size, stored, codec, LOOSE, 0)
        if codec != "none" or frame_count(size) == 1:
            return blob, None
        frames = HashingFrames(fd)
        checksums = raw_checksums(frames)
        if frames.digest != digest:
            raise CorruptError("the bytes do not have the digest they are stored under")
        return blob, checksums
    finally:
        os.close(fd)


def _frame_length(blob: Blob, stored: bytes) -> int:
    """Stored bytes of the one frame of a loose object, in front of its seek table."""
    table = read_table(
        blob.codec, blob.size, blob.stored, lambda start, length: stored[start : start + length]
    )
    return table.offsets[1]


class Seal:
    """A hash of a blob's stored bytes, which a process remembers once it has compared the digest.

    Equal stored bytes decode to equal content, so a later read compares the stored bytes alone, which are
    fewer and cost a tenth of the time a byte. The hash is XXH3-128 with a seed that only this process has:
    nobody who writes to the disk can aim at it.
    """

    __slots__ = ("length", "value")

    def __init__(self) -> None:
        self.value = _UNSEALED
        self.length = 0  # of the frame; behind it a loose object has a seek table


_UNSEALED = -1  # no hash is negative
_SEED = int.from_bytes(os.urandom(8), "little")


class ObjectDirectory:
    """The objects of one store.

    Args:
        path: folder of the store.
        object_mode: permission bits of finished objects.
        file_mode: permission bits of files that castore appends to.
        folder_mode: permission bits of folders.
        durable: whether finished objects survive a power cut.
    """

    def __init__(
        self, path: Path, *, object_mode: int, file_mode: int, folder_mode: int, durable: bool
    ) -> None:
        objects = path / "objects"
        self.quarantine_folder = path / "quarantine"
        self.durable = durable
        self.loose = LooseFolder(objects, path / "tmp", mode=object_mode, folder_mode=folder_mode)
        self.packs = PackFolder(objects / "packs")
        self.dictionaries = Dictionaries(objects / "dicts", self.loose)
        self._pack_mode = file_mode

    def path(self, blob: Blob) -> str:
        """The file that a blob's stored bytes lie in: its object, or a pack. Only for a blob that is here."""
        return (
            self.loose.path(blob.digest, blob.codec)
            if blob.pack == LOOSE
            else str(self.packs.path(blob.pack))
        )

    def where(self, blob: Blob) -> str:
        """Describe a blob's place for a message."""
        try:
            check_row(blob)
        except CorruptError:
            return f"a row of the index for {blob.digest!r}"
        if blob.pack == LOOSE:
            return self.loose.path(blob.digest, blob.codec)
        if not blob.is_here:
            return "nowhere"
        return f"{self.packs.path(blob.pack)} at {blob.offset}"

    def open(
        self, blob: Blob, *, checksums: bytes | None = None, cache: MemoryLRU[bytes] | None = None
    ) -> BlobReader:
        """Return a reader that keeps the blob's bytes readable until it is closed, whatever gc does.

        Raises:
            FileNotFoundError: the bytes are not where ``blob`` places them.
            CorruptError: ``blob`` is not sound (`check_row`).
        """
        check_row(blob)
        if not blob.is_here:
            raise FileNotFoundError(f"the bytes of blob {blob.digest.hex()} are not in the store")
        opened: PackFile | None = None
        if blob.pack == LOOSE:
            # Something else than a regular file may lie here. The reader rejects it by its length, or cannot
            # read it.
            fd = open_no_follow(self.loose.path(blob.digest, blob.codec))
        else:
            opened = self.packs.open(blob.pack)
            fd = opened.fd
        return BlobReader(
            blob,
            fd,
            pack=opened,
            checksums=checksums,
            cache=cache,
            where=self.where(blob),
            with_dictionary=self.dictionaries.decompressor,
        )

    def find_intact(self, digest: bytes) -> tuple[Blob, bytes | None] | None:
        """Find an intact loose object of ``digest``, without the index: ``(blob, checksums)`` or None.

        Reads the whole object. For use after a failed read, to decide whether the object or its row is at
        fault.
        """
        if type(digest) is not bytes or len(digest) != DIGEST_SIZE:
            return None
        for codec in CODECS:
            path = Path(self.loose.path(digest, codec))
            try:
                blob, checksums = describe_loose(digest, codec, path)
                with closing(self.open(blob, checksums=checksums)) as reader:
                    hasher = blake3()
                    for index in range(reader.frames):
                        hasher.update(reader.frame(index))
            except (CorruptError, OSError):
                continue
            if hasher.digest() == digest:
                return blob, checksums
        return None

    def holds(self, blob: Blob) -> bool:
        """Whether a row's bytes exist: an intact record, or a file. Nothing is decoded."""
        try:
            check_row(blob)
            if blob.pack > 0:
                read_record(self.packs.open(blob.pack).fd, blob)
        except (CorruptError, FileNotFoundError):
            return False
        return blob.pack > 0 or (blob.pack == LOOSE and os.path.lexists(self.where(blob)))

    def lacks(self, blob: Blob) -> bool:
        """Whether a row refers to bytes that should be here, and are not."""
        return blob.pack != AWAY and not self.holds(blob)

    def digests(self) -> set[bytes]:
        """All digests that have an object or a record, without the index. Scans all packs: for repair."""
        packed: set[bytes] = set()
        for pack in self.packs.ids():
            with suppress(FileNotFoundError):  # gc has moved this pack's live records to another pack
                found = scan(self.packs.path(pack), pack, payloads=False)
                packed.update(one.blob.digest for one in found if isinstance(one, PackRecord))
        return packed | {digest for digest, _, _ in self.loose.listing()}

    def is_empty(self) -> bool:
        """Whether there is no object and no pack."""
        return not self.packs.ids() and next(self.loose.listing(), None) is None

    def read_small(self, blob: Blob, seal: Seal | None = None) -> bytes:
        """Return all bytes of a blob of one frame, without a reader.

        Args:
            blob: must be sound (`check_row`, which this does not repeat) and not lost.
            seal: of this blob alone, from its earlier reads; made good by the first one.

        Raises:
            FileNotFoundError: its pack or file does not exist (any more).
            CorruptError: the bytes differ from those that were put.
        """
        digest, size, stored, codec, number, offset = blob
        try:
            if number > 0:
                pack = self.packs.open(number)  # this reference keeps the pack open until the bytes are read
                raw = os.pread(pack.fd, stored, offset)
            else:
                raw = self._read_loose(blob)
            value = _UNSEALED if seal is None else xxhash.xxh3_128_intdigest(raw, _SEED)
            is_known = seal is not None and seal.value == value
            if number > 0 or codec == "none":
                frame = raw
            else:
                frame = raw[: seal.length if seal is not None and is_known else _frame_length(blob, raw)]
            data = CODECS[codec].decompress(frame, size, self.dictionaries.decompressor)
            if not is_known:
                if blake3(data).digest() != digest:
                    raise CorruptError("the bytes do not have the digest they are stored under")
                if seal is not None:
                    seal.length, seal.value = len(frame), value  # in this order, for other threads
        except (CorruptError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in AT_FAULT:
                raise
            where = self.where(blob)
            message = f"blob {blob.digest.hex()} is damaged in {where}: {error}"
            raise CorruptError(message, digest=blob.digest.hex(), where=where) from error
        return data

    def check_content(self, blob: Blob, payload: bytes) -> None:
        """Check the payload of a record: it has to decode to the bytes of the blob's digest.

        Raises:
            CorruptError: it does not.
        """
        data = CODECS[blob.codec].decompress(payload, blob.size, self.dictionaries.decompressor)
        if blake3(data).digest() != blob.digest:
            raise CorruptError("the bytes do not have the digest they are stored under")

    def _read_loose(self, blob: Blob) -> bytes:
        """The stored bytes of a loose object of a single frame."""
        if blob.stored > 2 * FRAME_SIZE:
            raise CorruptError(f"the index has {blob.stored} bytes for a blob of one frame")
        fd = open_no_follow(self.loose.path(blob.digest, blob.codec))
        try:
            stored = os.pread(fd, blob.stored, 0)
        finally:
            os.close(fd)
        if len(stored) != blob.stored:
            raise CorruptError(f"the object ends {blob.stored - len(stored)} bytes early")
        return stored

    def start_pack(self, pack: int) -> PackWriter:
        """Create a pack to append to. The caller has registered its id and holds the write lock."""
        path = self.packs.path(pack)
        # An existing file was left by a transaction that registered the id and did not commit: no row refers
        # to it.
        self.discard(path)
        writer = PackWriter(path, pack, self._pack_mode)
        if self.durable:
            sync_folder(path.parent)
        return writer

    def remove_loose(self, digest: bytes, codec: str) -> None:
        """Unlink an object. The caller holds the write lock and has made sure that no row refers to it."""
        if codec not in CODECS:  # the row is damaged: gc finds the file as a leftover
            return
        self.discard(Path(self.loose.path(digest, codec)))

    def discard(self, path: Path) -> None:
        """Remove a file that no row refers to. A folder in its place is moved to the quarantine."""
        try:
            path.unlink(missing_ok=True)
        except IsADirectoryError:
            path.rename(self.quarantine_folder / f"{path.name}-{time.time_ns()}")

    def quarantine(self, blob: Blob) -> Path | None:
        """Set a bad object aside for inspection and return its new path; None if nothing was there."""
        try:
            check_row(blob)
        except CorruptError:
            return None  # the row names no place
        suffix = Path(self.loose.path(blob.digest, blob.codec)).suffix
        target = self.quarantine_folder / f"{blob.digest.hex()}{suffix}"
        try:
            if blob.pack == LOOSE:
                os.rename(self.loose.path(blob.digest, blob.codec), target)
            elif blob.pack > 0:
                pack = self.packs.open(blob.pack)
                fd, temporary = self.loose.create()
                with os.fdopen(fd, "wb") as file:
                    file.write(read_around(pack.fd, min(blob.stored, 1 << 20), blob.offset))
                    self.loose.seal(fd, durable=False)
                temporary.rename(target)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return target

    def close(self) -> None:
        """Close the open packs as soon as their readers are done."""
        self.packs.close()
