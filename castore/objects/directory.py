"""The object directory: where blobs lie, whichever way they lie there.

It opens, places, removes and sets aside the bytes of blobs, and asks nothing of the index: whether a blob is known,
named or wanted is decided above. What it asks of a place is small on purpose (open, publish, append, remove, list),
so that another kind of place can stand behind it one day.
"""

from __future__ import annotations

import os
from pathlib import Path

from blake3 import blake3

from castore.errors import CorruptError
from castore.memory import MemoryLRU
from castore.objects.codecs import CODECS
from castore.objects.decode import BlobReader
from castore.objects.loose import LooseFolder
from castore.objects.packs import PackFolder, PackWriter
from castore.records import LOOSE, LOST, Blob
from castore.temporary import sync_folder


class ObjectDirectory:
    """The objects of one store.

    Args:
        path: the store's folder.
        object_mode: permission bits of finished objects.
        file_mode: permission bits of files that are written to.
        folder_mode: permission bits of folders.
        durable: finished objects survive a power cut.
    """

    def __init__(
        self, path: Path, *, object_mode: int, file_mode: int, folder_mode: int, durable: bool
    ) -> None:
        objects = path / "objects"
        self.quarantine_folder = path / "quarantine"
        self.durable = durable
        self.loose = LooseFolder(objects, path / "tmp", mode=object_mode, folder_mode=folder_mode)
        self.packs = PackFolder(objects / "packs")
        self._pack_mode = file_mode

    def where(self, blob: Blob) -> str:
        """What to call a blob's place in a message."""
        if blob.pack == LOOSE:
            return self.loose.path(blob.digest, blob.codec)
        return f"{self.packs.path(blob.pack)} at {blob.offset}"

    def open(
        self, blob: Blob, *, checksums: bytes | None = None, cache: MemoryLRU[bytes] | None = None
    ) -> BlobReader:
        """A reader that holds the blob's bytes until it is closed, whatever gc does meanwhile.

        Raises:
            FileNotFoundError: the bytes are not where `blob` says.
        """
        if blob.pack == LOST:
            raise FileNotFoundError(f"blob {blob.digest.hex()} is lost")
        if blob.pack == LOOSE:
            fd = os.open(self.loose.path(blob.digest, blob.codec), os.O_RDONLY | os.O_CLOEXEC)
            opened = None
        else:
            opened = self.packs.open(blob.pack)
            fd = opened.fd
        return BlobReader(blob, fd, pack=opened, checksums=checksums, cache=cache, where=self.where(blob))

    def is_empty(self) -> bool:
        """Whether there is no object and no pack."""
        return not self.packs.ids() and next(self.loose.listing(), None) is None

    def read_packed(self, blob: Blob) -> bytes:
        """All bytes of a packed blob of one frame: the short way, without a reader.

        Raises:
            FileNotFoundError: the pack is not there (any more).
            CorruptError: the bytes are not those that were put.
        """
        digest, size, stored, codec, number, offset = blob
        pack = self.packs.open(number)  # held by this name until the bytes are read
        payload = os.pread(pack.fd, stored, offset)
        try:
            data = CODECS[codec].decompress(payload, size)
            if blake3(data).digest() != digest:
                raise CorruptError("the bytes do not have the digest they are stored under")
        except CorruptError as error:
            where = self.where(blob)
            message = f"blob {blob.digest.hex()} is damaged in {where}: {error}"
            raise CorruptError(message, digest=blob.digest.hex(), where=where) from error
        return data

    def start_pack(self, pack: int) -> PackWriter:
        """A pack to append to; the caller has registered its id and holds the write lock."""
        path = self.packs.path(pack)
        # A file that is here already was left by a transaction that registered the id and did not commit, so no row
        # can mean it.
        path.unlink(missing_ok=True)
        writer = PackWriter(path, pack, self._pack_mode)
        if self.durable:
            sync_folder(path.parent)
        return writer

    def remove_loose(self, digest: bytes, codec: str) -> None:
        """Unlink an object. The caller holds the write lock and knows that no row means it."""
        Path(self.loose.path(digest, codec)).unlink(missing_ok=True)

    def quarantine(self, blob: Blob) -> Path | None:
        """Set a bad object aside for whoever wants to look at it; None if there was nothing to set aside."""
        suffix = Path(self.loose.path(blob.digest, blob.codec)).suffix
        target = self.quarantine_folder / f"{blob.digest.hex()}{suffix}"
        try:
            if blob.pack == LOOSE:
                os.rename(self.loose.path(blob.digest, blob.codec), target)
            elif blob.pack > 0:
                pack = self.packs.open(blob.pack)
                target.write_bytes(os.pread(pack.fd, min(blob.stored, 1 << 20), blob.offset))
                target.chmod(self.loose.mode)
        except FileNotFoundError:
            return None
        return target

    def close(self) -> None:
        """Let go of open packs."""
        self.packs.close()
