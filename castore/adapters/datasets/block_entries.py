"""Results of steps on blocks as entries of a store.

The result of a step on a block is one Arrow file, the entry `BLOCKS_FOLDER`/<key>. A finished step names the
same blobs once more, as the files of its folder (`dataset_entries`): they take their space once, and stay as
long as either name does. A result whose bytes are gone or damaged is no result.

Must never keep a result under a key before all of its rows are written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
from datasets.arrow_writer import ArrowWriter

from castore.adapters.datasets.dataset_entries import StorageOptions
from castore.adapters.datasets.operator_state import Loaded
from castore.adapters.datasets.tables import split_off_first_rows
from castore.errors import FullError, NotFoundError, TooLargeError
from castore.records import LOST, Entry
from castore.store import Store

#: The folder of the results of blocks, each named by its key.
BLOCKS_FOLDER = ".datasets/blocks"
#: So much of an input suffices to estimate the size of all results.
_SHOWS_SIZE = 1 / 20
#: The reason of a step whose results push each other out.
NO_ROOM = (
    "the store has no room for the results of all blocks, and those that had run ran again, which a larger "
    "max_size avoids"
)


class BlockResult(NamedTuple):
    """The result of a step on one block.

    Attributes:
        key: 40 hexadecimal digits.
        digest: of its Arrow file, 64 hexadecimal digits.
        rows_in, rows: rows of the block, and of its result.
        features: the features of the result, in JSON: their order counts; "null" if they are the block's.
        size, stored: bytes of the file, uncompressed and in the store.
        reused: whether it was there before.
        loaded: the objects that its operator had loaded; see `operator_state`.
        rows_reused, seconds_saved: of a result that was made now: the rows of its parts that were there
            before, and the seconds that these parts took.
        seconds: time that the operator took for it; 0 where that is not known.
        when: seconds since the epoch at which it was kept.
        names_files: whether its rows name local files.
    """

    key: str
    digest: str
    rows_in: int
    rows: int
    features: str
    size: int
    stored: int
    reused: bool
    seconds: float = 0.0
    when: float = 0.0
    names_files: bool = False
    loaded: Loaded = frozenset()
    rows_reused: int = 0
    seconds_saved: float = 0.0


def check_room(store: Store, done: int, whole: int, stored: int) -> None:
    """Check that results will fit into the store, as far as those that are there show.

    Args:
        store: the store.
        done, whole: of the input, so much is done, and so much there is, in rows or bytes.
        stored: bytes in the store that the results of the done part take.

    Raises:
        NotInBlocksError: they will not, and later ones would push earlier ones out.
    """
    most = store.settings.max_size
    if most is not None and done >= whole * _SHOWS_SIZE and stored * whole > most * done:
        raise NotInBlocksError(NO_ROOM)


def saved_by(results: Iterable[BlockResult]) -> tuple[int, float]:
    """The rows that did not run for these results, and the seconds that they took when they ran."""
    rows = sum(result.rows_in if result.reused else result.rows_reused for result in results)
    return rows, sum(result.seconds if result.reused else result.seconds_saved for result in results)


class NotInBlocksError(Exception):
    """A step cannot run block by block; the message is the reason."""


class RemembersError(NotInBlocksError):
    """The operator remembers rows, so one process has to show it all of them, in order."""


def name_of_result(key: str) -> str:
    """The name of the entry of a block's result, and of the lock that is a claim of the block."""
    return f"{BLOCKS_FOLDER}/{key}"


def find_result(store: Store, key: str) -> BlockResult | None:
    """The result of a block, if it is kept."""
    entry = store.entry(name_of_result(key))
    if entry is None:
        return None
    blob = store.blob(entry.digest)
    if blob is None or blob.pack == LOST:
        return None
    store.count_use(entry.name)
    return _result(key, entry, True)


def _result(key: str, entry: Entry, reused: bool) -> BlockResult:
    about = entry.metadata
    return BlockResult(
        key,
        entry.digest,
        about["rows_in"],
        about["rows"],
        about["features"],
        entry.size,
        entry.stored,
        reused,
        about.get("seconds", 0.0),
        entry.created,
        about.get("names_files", False),
        frozenset(map(tuple, about.get("loaded", ()))),
    )


def write_result(batches: Iterable[pa.Table], features: datasets.Features, file: str) -> str:
    """Write rows as one Arrow stream beside a file; returns the stream's path.

    The same rows give the same bytes, however they lie in memory or in files: what `map` writes has its
    batches, and a fingerprint, in it. So a step behind one that was edited, and gives the same rows, is
    found.

    Args:
        batches: the rows, as `tables.row_batches` has them.
        features: their features.
        file: a path of this process's own. A step has written the rows there, perhaps.
    """
    path = f"{file}.block"
    with pa.OSFile(path, "wb") as sink:
        _write_stream(batches, features, sink)
    return path


def make_stream(batches: Iterable[pa.Table], features: datasets.Features) -> pa.Buffer:
    """The same bytes as `write_result` writes, in memory."""
    sink = pa.BufferOutputStream()
    _write_stream(batches, features, sink)
    return sink.getvalue()


def _write_stream(batches: Iterable[pa.Table], features: datasets.Features, sink: pa.NativeFile) -> None:
    with ArrowWriter(features=features, stream=sink) as writer:
        for number, rows in enumerate(batches):
            table = rows.combine_chunks()
            for piece in split_off_first_rows(table) if number == 0 else (table,):
                writer.write_table(piece)
        writer.finalize(close_stream=False)


def remove_result(file: Path) -> None:
    """Remove what a step and `write_result` have written. Mapped bytes stay readable."""
    file.unlink(missing_ok=True)
    Path(f"{file}.block").unlink(missing_ok=True)


def put_result(
    store: Store,
    key: str,
    source: str | pa.Buffer,
    rows_in: int,
    rows: int,
    features: str,
    options: StorageOptions,
    seconds: float = 0.0,
    *,
    names_files: bool = False,
    loaded: Loaded = frozenset(),
) -> BlockResult:
    """Keep the result of a block, an Arrow stream in memory or in a file, with the seconds that the operator
    took for it.

    Raises:
        NotInBlocksError: it does not fit into the budget, or onto the disk.
    """
    how: Any = {
        "codec": options.codec,
        "level": options.level,
        "ttl": options.seconds_to_live,
        "metadata": {
            "rows_in": rows_in,
            "rows": rows,
            "features": features,
            "seconds": round(seconds, 6),
            **({"names_files": True} if names_files else {}),
            **({"loaded": sorted(loaded)} if loaded else {}),
        },
    }
    name = name_of_result(key)
    try:
        if isinstance(source, str):
            entry = store.put_file(name, source, **how)
        else:
            entry = store.put(name, memoryview(source), **how)
    except (FullError, TooLargeError) as error:
        raise NotInBlocksError(NO_ROOM) from error
    return _result(key, entry, False)


def name_again(store: Store, key: str, other: str) -> None:
    """Keep a block's result under another key as well, if it is still there. No bytes are written."""
    with contextlib.suppress(NotFoundError):
        store.copy(name_of_result(key), name_of_result(other))
