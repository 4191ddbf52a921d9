"""A blob held open by its digest: ranges, and all of it in order, whatever happens to the store."""

from __future__ import annotations

import os
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest

from castore import CorruptError, InvalidValueError, NotFoundError, Store
from castore.objects.codecs import FRAME_SIZE
from tests.helpers import flip, noise, text

SIZES = [0, 1, 1000, FRAME_SIZE, FRAME_SIZE + 1, 40 * FRAME_SIZE + 17]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("codec", ["zstd", "lz4", "gzip", "none"])
def test_all_bytes_come_in_order_and_in_bounded_pieces(store: Store, size: int, codec: str) -> None:
    data = text(size)
    entry = store.put("a", data, codec=codec)
    with store.open_blob(entry.digest) as blob:
        assert blob.size == size
        pieces = list(blob.pieces())
        assert b"".join(pieces) == data
        assert max(map(len, pieces)) <= FRAME_SIZE
        assert b"".join(blob.pieces(whole=False)) == data
        assert blob.read_all() == data


@pytest.mark.parametrize("size", SIZES)
def test_any_range_is_read_and_ends_with_the_blob(store: Store, size: int) -> None:
    data = noise(size, 1)
    with store.open_blob(store.put("a", data).digest) as blob:
        for start in (0, 1, size // 2, max(0, size - 1), size, size + 10):
            for length in (0, 1, FRAME_SIZE, 3 * FRAME_SIZE, size + 1):
                assert blob.read(start, length) == data[start : start + length]


def test_a_digest_is_given_raw_or_in_hex(store: Store) -> None:
    entry = store.put("a", b"bytes")
    for digest in (entry.digest, bytes.fromhex(entry.digest)):
        with store.open_blob(digest) as blob:
            assert blob.blob.digest.hex() == entry.digest
            assert blob.read_all() == b"bytes"


def test_what_is_open_is_read_to_its_end_though_gc_has_taken_it(store: Store) -> None:
    data = noise(20 * FRAME_SIZE, 1)
    entry = store.put("a", data)
    with store.open_blob(entry.digest) as blob, closing(blob.pieces()) as pieces:
        read = [next(pieces)]
        store.delete("a")
        store.gc(grace=0)
        assert store.stat().blobs == 0
        read += pieces
        assert b"".join(read) == data
        with pytest.raises(NotFoundError, match=entry.digest):
            store.open_blob(entry.digest)


def test_a_digest_that_nothing_has_is_not_found(store: Store) -> None:
    with pytest.raises(NotFoundError, match="ab" * 32):
        store.open_blob("ab" * 32)


def _frame_in_the_middle(store: Store, digest: str) -> tuple[str, int]:
    blob = store.index.blob(bytes.fromhex(digest))
    assert blob is not None
    return store.objects.loose.path(blob.digest, blob.codec), blob.stored // 2


@pytest.mark.parametrize("codec", ["zstd", "lz4", "gzip", "none"])
def test_damage_is_raised_before_its_bytes_are_given_and_the_blob_is_missing_from_then_on(
    store: Store, codec: str
) -> None:
    data = text(40 * FRAME_SIZE)
    entry = store.put("a", data, codec=codec)
    path, place = _frame_in_the_middle(store, entry.digest)
    flip(Path(path), place)
    given: list[bytes] = []
    with store.open_blob(entry.digest) as blob, pytest.raises(CorruptError) as raised:
        given.extend(blob.pieces(whole=False))
    assert raised.value.digest == entry.digest
    assert data.startswith(b"".join(given))
    assert 0 < len(given) < 40
    assert store.stat().corrupt == 1
    assert store.get("a") is None
    with pytest.raises(NotFoundError):
        store.open_blob(entry.digest)
    store.put("a", data, codec=codec)
    with store.open_blob(entry.digest) as blob:
        assert blob.read_all() == data


def test_whole_frames_in_another_order_fail_the_digest_of_all_bytes(store: Store) -> None:
    """Each frame passes its own check: the second lies where the first was, with its place in the table."""
    frames = [noise(FRAME_SIZE, number) for number in range(6)]
    entry = store.put("a", b"".join(frames), codec="lz4")
    other = store.put("b", b"".join([frames[1], frames[0], *frames[2:]]), codec="lz4")
    ours, theirs = (_frame_in_the_middle(store, one.digest)[0] for one in (entry, other))
    assert os.stat(ours).st_size == os.stat(theirs).st_size
    Path(ours).chmod(0o600)
    Path(ours).write_bytes(Path(theirs).read_bytes())
    with store.open_blob(entry.digest) as blob, pytest.raises(CorruptError, match="digest"):
        for _ in blob.pieces():
            pass
    assert store.get("a") is None
    assert store.get("b") is not None


def test_pieces_that_nobody_takes_any_more_leave_no_file_open(store: Store) -> None:
    entry = store.put("a", noise(40 * FRAME_SIZE, 1))
    before = set(os.listdir("/proc/self/fd"))
    blob = store.open_blob(entry.digest)
    pieces = blob.pieces()
    assert len(list(islice(pieces, 5))) == 5
    blob.close()  # while frames are being decoded ahead
    assert next(pieces)
    pieces.close()
    assert set(os.listdir("/proc/self/fd")) - before == set()
    with pytest.raises(ValueError, match="closed"):
        next(blob.pieces())


def test_a_forked_child_goes_on_with_pieces_that_its_parent_began(store: Store) -> None:
    data = noise(40 * FRAME_SIZE, 1)
    with store.open_blob(store.put("a", data).digest) as blob:
        pieces = blob.pieces()
        first = b"".join(islice(pieces, 4))
        child = os.fork()
        if not child:
            os._exit(0 if first + b"".join(pieces) == data else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert first + b"".join(pieces) == data


def test_ranges_that_cannot_be_and_a_closed_blob_are_refused_and_harm_nothing(store: Store) -> None:
    """Regression: sound bytes were called damaged, and bytes from elsewhere were given out."""
    blob = store.open_blob(store.put("a", noise(3 * FRAME_SIZE)).digest)
    for start, length in ((-1, 5), (-(10**9), 10), (-blob.size, 5), (0, -1)):
        with pytest.raises(InvalidValueError, match="whole numbers of bytes from 0 on"):
            blob.read(start, length)
    blob.close()
    blob.close()
    for use in (lambda: blob.read(0, 5), blob.read_all, lambda: list(blob.pieces())):
        with pytest.raises(InvalidValueError, match="is closed; open it again"):
            use()
    assert store.verify().bad == []
