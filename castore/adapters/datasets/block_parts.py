"""The parts of a slow block: each is kept as soon as it is there.

A block of a function that takes a second a row takes hours. So a slow block is cut once more, by the same
rule and finer, and its result is put together from the results of the parts. A run that is killed leaves the
parts that were done, and a change of a row runs one part.

A part's result is the entry `PARTS_FOLDER`/<key>, and keys are made as those of blocks are. While the block
is being made the entry has a file of its own. Once the block's result is there, the entry is empty, and its
metadata names some rows of the block's file: parts take no space of their own.

Must never give rows of a part whose bytes are damaged: such a part is not there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
from datasets.table import table_cast

from castore.adapters.datasets.block_entries import NO_ROOM, BlockResult, NotInBlocksError, write_result
from castore.adapters.datasets.block_step import (
    UNCHANGED,
    BlockStep,
    Written,
)
from castore.adapters.datasets.dataset_entries import StorageOptions
from castore.adapters.datasets.source_blocks import SourceBlock, block_of_rows, cut_rows
from castore.adapters.datasets.tables import batches_of
from castore.errors import FullError, StoreError, TooLargeError
from castore.records import LOST
from castore.store import Store

#: The folder of the results of parts, each named by its key.
PARTS_FOLDER = ".datasets/parts"
# A part is of use while its block is being made, and for the next changes of it.
_SECONDS = 30 * 86400.0
#: Parts of the size of blocks. A step's first block is as long as `datasets` needs to decide the types.
AS_BLOCKS = 1
#: So many parts of a block tell how long the rest of it takes.
TELLING_PARTS = 3
# How many parts a slow block may be cut into, on average.
_FINER = (4, 16, 64, 256, 1024, 4096)

#: Gives the key of a block, by the number of its first row, and the features of the result.
KeyOf = Callable[[SourceBlock, int, str | None], str]


class Part(NamedTuple):
    """A part of a block.

    Attributes:
        block: the part's rows, as a block of their own.
        rows: the number of its rows.
        first: the number of its first row among all rows of the step's input.
        key: of its result.
    """

    block: SourceBlock
    rows: int
    first: int
    key: str


class MadePart(NamedTuple):
    """A part whose result is in a file.

    Attributes:
        part: the part; None for rows that are no part of their own.
        rows: the number of rows that went into it.
        written: the file.
        is_reused: whether the result was kept.
        digest: of the file that has it in the store; None if it is not kept.
    """

    part: Part | None
    rows: int
    written: Written
    is_reused: bool
    digest: str | None


class BlockParts:
    """The parts of a step's blocks.

    Args:
        store: keeps the results.
        step: the step.
        options: the storage options of results.
        key_of: gives their keys.
        fresh: find no part whose result is kept.
    """

    def __init__(
        self, store: Store, step: BlockStep, options: StorageOptions, key_of: KeyOf, *, fresh: bool
    ) -> None:
        self._store = store
        self._step = step
        self._options = options
        self._key_of = key_of
        #: Whether no part is found whose result is kept.
        self.fresh = fresh
        self._has_kept = False
        self._latest: tuple[str, pa.Table] | None = None
        self._made: set[str] = set()  # keys

    def choose(
        self,
        rows: pa.Table,
        first: int,
        features: str | None,
        seconds_a_row: float | None,
        *,
        follows_kill: bool,
    ) -> int | None:
        """How many parts a block is cut into, on average; None for a block that is to be made as a whole.

        A block of which a part is kept, the first of its rows, say, is cut as it was then.

        Args:
            rows, first: the block, and the number of its first row.
            features: the features of the result, in JSON, as far as they are known.
            seconds_a_row: the time that the function takes, if that is known.
            follows_kill: whether an earlier run was killed: another kill shall not cost a whole first block.
        """
        if len(rows) <= self._step.at_once:
            return None
        seconds = None if seconds_a_row is None else seconds_a_row * len(rows)
        self._has_kept = not self.fresh and next(self._store.entries(PARTS_FOLDER), None) is not None
        is_slow = seconds is not None and seconds > self._step.slow_seconds(len(rows))
        by_default = self.fit(rows, seconds_a_row) if is_slow and seconds_a_row is not None else None
        if follows_kill and by_default is None and self._step.decides_features(len(rows), features):
            by_default = AS_BLOCKS
        # Parts of a block that takes little time here may have been made in more processes.
        may_be_kept = self._has_kept and (seconds is None or self._step.may_be_slow(seconds))
        if by_default is None and not may_be_kept:
            return None
        head = rows[: self.head_rows(len(rows), features)]
        return self._kept_cut(head, first, features, (AS_BLOCKS, *_FINER)) or by_default

    def _kept_cut(self, rows: pa.Table, first: int, features: str | None, cuts: Iterable[int]) -> int | None:
        """The way of cutting of which parts are kept; None if none are."""
        kept = {finer: self._kept_ends(rows, first, features, finer) for finer in cuts}
        likely = max(kept, key=lambda finer: kept[finer])
        return likely if kept[likely] else None

    def _kept_ends(self, rows: pa.Table, first: int, features: str | None, finer: int) -> int:
        """How many of the first and the last part are kept: one may be alike in two ways of cutting."""
        if not self._has_kept:
            return 0
        pieces = self._cut(rows, finer)
        ends = (pieces[0], first), (pieces[-1], first + len(rows) - len(pieces[-1]))
        return sum(self._find(self._part(*end, features).key) is not None for end in ends)

    def fit(self, rows: pa.Table, seconds_a_row: float) -> int:
        """How many parts fit the time that a block's rows take; as `choose` gives it."""
        most = self._step.slow_seconds(len(rows))
        counts = ((finer, len(self._cut(rows, finer))) for finer in _FINER)
        fit = (finer for finer, count in counts if 2 * seconds_a_row * len(rows) / count <= most)
        return next(fit, _FINER[-1])

    def cut_anew(
        self,
        rows: pa.Table,
        first: int,
        features: str | None,
        finer: int,
        rest: Part,
        speeds: Sequence[float],
    ) -> list[Part] | None:
        """Larger parts from one part on, if such parts are kept, or if those before it tell that they fit the
        time; None for the same.

        Args:
            rows, first, features, finer: as for `cut`, which has made the parts.
            rest: the part.
            speeds: the seconds that a row took, of each part before it.
        """
        if len(speeds) != TELLING_PARTS:
            return None
        others = rows[rest.first - first :]
        coarser = [other for other in _FINER if other < finer]
        kept = self._kept_cut(others, rest.first, features, (finer, *coarser)) if coarser else None
        fit = kept or self.fit(rows, statistics.median(speeds))
        return self.cut(others, rest.first, features, fit) if fit < finer else None

    def rows_kept(self, rows: pa.Table, first: int, features: str | None) -> int:
        """How many rows of a block are in parts that are kept, so that the next run need not run them.

        The next run cuts the block at the same places, unless a part that it makes takes another time.

        Args:
            rows, first: the block, and the number of its first row.
            features: the features of the result, in JSON, as far as they are known.
        """
        finer = self.choose(rows, first, features, None, follows_kill=False)
        if finer is None:
            return 0
        joined, kept = Joined(self._step), 0
        head = self.head_rows(len(rows), features)
        try:
            for part, written in self._kept_parts(rows[:head], first, features, finer):
                joined.add(written)
                kept += part.rows
            if kept == head < len(rows):  # else nobody knows the features of the others
                for part, written in self._kept_parts(rows[head:], first + head, joined.decide(), finer):
                    joined.add(written)
                    kept += part.rows
        except PartsDifferError:
            return 0
        return kept

    def _kept_parts(
        self, rows: pa.Table, first: int, features: str | None, finer: int
    ) -> Iterator[tuple[Part, Written]]:
        waiting, speeds = deque(self.cut(rows, first, features, finer)), list[float]()
        while waiting:
            part = waiting.popleft()
            found = self._find(part.key)
            if found is None:
                continue
            written = _written(found, "")
            yield part, written
            speeds.append(seconds_of_row(written, part.rows))
            anew = self.cut_anew(rows, first, features, finer, waiting[0], speeds) if waiting else None
            waiting = waiting if anew is None else deque(anew)

    def head_rows(self, rows: int, features: str | None) -> int:
        """How many of a block's first rows decide the features of the result; all if these are known."""
        if features is not None or self._step.has_features:
            return rows
        return min(rows, self._step.rule.first_rows if self._step.at_once == 1 else self._step.at_once)

    def cut(self, rows: pa.Table, first: int, features: str | None, finer: int) -> list[Part]:
        """The parts of a block's rows; ``finer`` as `choose` gives it, the other arguments as there."""
        pieces = self._cut(rows, finer)
        begins = itertools.accumulate((len(piece) for piece in pieces), initial=first)
        return [self._part(piece, begin, features) for piece, begin in zip(pieces, begins, strict=False)]

    def _cut(self, rows: pa.Table, finer: int) -> list[pa.Table]:
        rule = self._step.rule._replace(first_rows=0, least_rows=self._step.at_once)
        return list(cut_rows([rows], self._step.dataset.features, rule, finer))

    def _part(self, rows: pa.Table, first: int, features: str | None) -> Part:
        block = block_of_rows(rows, self._step.dataset.features)
        return Part(block, len(rows), first, self._key_of(block, first, features))

    def _find(self, key: str) -> dict[str, Any] | None:
        """The metadata of a kept part, with the ``digest`` of the file that has its rows; None for others."""
        if not self._has_kept:
            return None
        entry = self._store.entry(f"{PARTS_FOLDER}/{key}")
        if entry is None:
            return None
        found = {"digest": entry.digest, **entry.metadata}
        blob = self._store.blob(found["digest"])
        return None if blob is None or blob.pack == LOST else found

    def is_kept(self, part: Part) -> bool:
        """Whether the result of a part is kept."""
        return self._find(part.key) is not None

    def bring(self, part: Part, file: Path) -> MadePart | None:
        """Write the rows of a kept part to a file; None if it is not kept."""
        found = self._find(part.key)
        table = None if found is None else self._read(found["digest"])
        if found is None or table is None:
            return None
        self._store.count_use(f"{PARTS_FOLDER}/{part.key}")
        rows = table[found["start"] : found["start"] + found["rows"]]
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, rows.schema) as writer:
            writer.write_table(rows)
        return MadePart(part, part.rows, _written(found, str(file)), True, found["digest"])

    def _read(self, digest: str) -> pa.Table | None:
        """The rows of a file; None if its bytes are damaged or gone."""
        latest = self._latest  # parts of one block follow one another
        if latest is not None and latest[0] == digest:
            return latest[1]
        blob = self._store.blob(digest)
        data = None if blob is None else self._store.get_blob(blob)
        if data is None:
            return None
        table = pa.ipc.open_stream(data).read_all()
        self._latest = digest, table
        return table

    def keep(self, part: Part, written: Written) -> MadePart:
        """Keep the result of a part that has run.

        Raises:
            NotInBlocksError: it does not fit into the budget, or onto the disk.
        """
        try:
            entry = self._store.put_file(
                f"{PARTS_FOLDER}/{part.key}",
                written.path,
                codec=self._options.codec,
                level=self._options.level,
                ttl=self._ttl,
                metadata=_about(written, 0),
            )
        except (FullError, TooLargeError) as error:
            raise NotInBlocksError(NO_ROOM) from error
        self._made.add(part.key)
        return MadePart(part, part.rows, written, False, entry.digest)

    def forget(self) -> None:
        """Take back the keys of all parts that were kept."""
        for key in self._made:
            self._store.delete(f"{PARTS_FOLDER}/{key}")

    def link(self, made: Sequence[MadePart], result: BlockResult) -> None:
        """Have the parts of a block name rows of its result, and remove their own files."""

        def link() -> None:
            start = 0
            for part, _, written, _, _ in made:
                if part is not None:
                    # The second key is that of the same rows in a block that has others in front of it.
                    later = self._key_of(part.block, part.first, result.features)
                    self._made |= {part.key, later}
                    for key in {part.key, later}:
                        about = {**_about(written, start), "digest": result.digest}
                        batch.put(f"{PARTS_FOLDER}/{key}", b"", codec="none", metadata=about)
                start += written.rows

        batch = self._store.batch(ttl=self._ttl)
        batch.run(link)
        # Now, not with the next gc: the rows are in the store twice.
        own = {part.digest for part in made if part.digest is not None} - {result.digest}
        with contextlib.suppress(StoreError):  # a mount does not answer: gc removes them later
            self._store.remove_blobs(bytes.fromhex(digest) for digest in own)

    @property
    def _ttl(self) -> float:
        return min(self._options.seconds_to_live, _SECONDS)


def seconds_of_row(written: Written, rows: int) -> float:
    """The seconds that a row took."""
    return written.seconds / max(1, rows) if written.seconds_a_row is None else written.seconds_a_row


def _written(found: dict[str, Any], file: str) -> Written:
    """A part's result in a file, by the metadata that `_about` made."""
    return Written(
        file,
        found["rows"],
        found["features"],
        found["seconds"],
        found["names_files"],
        found["seconds_a_row"],
        frozenset(map(tuple, found["keys"])),
        loaded=frozenset(map(tuple, found.get("loaded", ()))),
    )


def _about(written: Written, start: int) -> dict[str, Any]:
    return {
        "start": start,
        "rows": written.rows,
        "features": written.features,
        "seconds": round(written.seconds, 6),
        "names_files": written.names_files,
        "seconds_a_row": written.seconds_a_row,
        "keys": sorted(written.keys),
        "loaded": sorted(written.loaded),
    }


class PartsDifferError(Exception):
    """The parts of a block do not show what its result is."""


class Joined:
    """The result of a block as its parts show it.

    Parts whose features were not given have those that their own rows show. If these are the same, they are
    those that one pass finds. A column without a value in some parts takes the type of the others, integers
    beside fractions become fractions, and the order of columns is that of the first part: so one pass
    does. Rows with other keys than those before are an error, or not, as they lie in what `datasets` writes
    at once.
    """

    def __init__(self, step: BlockStep) -> None:
        self._step = step
        self._made: list[Written] = []
        self._keys: frozenset[tuple[str, ...]] = frozenset()
        self._features: Any = None

    def add(self, part: Written) -> None:
        """Add the next part.

        Raises:
            PartsDifferError: it does not go together with those before.
        """
        self._keys |= part.keys
        if len(self._keys) > 1:
            raise PartsDifferError
        if part.rows or not self._made:
            found = json.loads(part.features)
            is_first = not any(made.rows for made in self._made)
            self._features = found if is_first else _merge(self._features, found)
        self._made.append(part)

    @property
    def features(self) -> str:
        """The features of the parts so far, in JSON."""
        return UNCHANGED if self._features is None else json.dumps(self._features)

    def decide(self) -> str:
        """The features that all parts behind those so far get.

        Raises:
            PartsDifferError: no row shows them.
        """
        if not any(part.rows for part in self._made):
            raise PartsDifferError
        return self.features

    def write(self, file: Path) -> Written | None:
        """Write the result to a file; None if values of a part do not fit into the type of the others."""
        found = self._features
        features = self._step.dataset.features if found is None else datasets.Features.from_dict(found)
        with_rows = [part for part in self._made if part.rows] or self._made[:1]
        try:
            tables = [_cast(_read_file(part.path), features) for part in with_rows]
        except (TypeError, pa.ArrowException):
            # Large integers beside fractions, or nulls from a block in which others were texts.
            return None
        rows = pa.concat_tables(tables)
        seconds = sum(part.seconds for part in self._made)
        names_files = any(part.names_files for part in self._made)
        loaded = frozenset[tuple[str, str]]().union(*(part.loaded for part in self._made))
        path = write_result(batches_of(rows), features, str(file))
        return Written(path, len(rows), self.features, seconds, names_files, loaded=loaded)


def _read_file(path: str) -> pa.Table:
    return pa.ipc.open_stream(pa.memory_map(path)).read_all()


def _cast(table: pa.Table, features: datasets.Features) -> pa.Table:
    schema = features.arrow_schema
    return table if table.schema.equals(schema, check_metadata=False) else table_cast(table, schema)


_NULL = {"dtype": "null", "_type": "Value"}
_NUMBERS = [{"dtype": dtype, "_type": "Value"} for dtype in ("int64", "float64")]


def _merge(one: Any, other: Any, *, is_inner: bool = False) -> Any:
    """The features that one pass finds in rows with those features, and behind them rows with the others."""
    if json.dumps(one) == json.dumps(other):  # the order of fields counts
        return one
    if is_inner and _NULL in (one, other):
        return other if one == _NULL else one
    if is_inner and one in _NUMBERS and other in _NUMBERS:
        return _NUMBERS[1]
    if not isinstance(one, dict) or not isinstance(other, dict) or one.keys() != other.keys():
        raise PartsDifferError
    if is_inner and list(one) != list(other):
        raise PartsDifferError
    return {name: _merge(value, other[name], is_inner=True) for name, value in one.items()}
