"""Checks whether index and names journal have the same digest for every name, in a store that may be in use.

Index and journal are not read at one moment, and a record is in the journal before its transaction commits.
So a difference counts only if it persists under the write lock, with the records appended meanwhile. Holds
all names and digests in memory.
"""

from __future__ import annotations

from contextlib import closing
from typing import NamedTuple

from castore.index.database import Index
from castore.index.journal import JournalTail
from castore.index.name_ranges import digests_of_names


class JournalDifferences(NamedTuple):
    """The differences between index and journal.

    Attributes:
        forgotten: names that only the journal has, with their digests.
        differing: the number of names with different digests, or in only one of both; ``forgotten`` included.
        damaged: the number of stretches of the journal that could not be read.
    """

    forgotten: dict[str, bytes]
    differing: int
    damaged: int


_NO_DIFFERENCES = JournalDifferences({}, 0, 0)


def compare(index: Index) -> JournalDifferences:
    """Compare both. Takes the write lock only if they seem to differ, and then only for those names."""
    with closing(JournalTail(index.journal, index.beacon)) as tail:
        recorded, damaged = _last_records(index)
        differing = _differing(index, recorded)
        if not differing and not damaged:
            return _NO_DIFFERENCES
        with index.write() as txn:
            appended = tail.poll()
            if appended is None or damaged:
                # Two new segments were started, or a record was just being written, which looks like damage.
                recorded, damaged = _last_records(index)
                differing = _differing(index, recorded)
                appended = []
            for name, digest, *_ in appended:
                differing.add(name)
                if digest is None:
                    recorded.pop(name, None)
                else:
                    recorded[name] = digest
            known = {name: txn.digest_of(name) for name in differing}
    wrong = {name: recorded.get(name) for name, digest in known.items() if digest != recorded.get(name)}
    forgotten = {name: digest for name, digest in wrong.items() if digest is not None and known[name] is None}
    return JournalDifferences(forgotten, len(wrong), damaged)


def _differing(index: Index, recorded: dict[str, bytes]) -> set[str]:
    """The names whose digests in the index and in ``recorded`` differ, or that are in only one of both."""
    with closing(digests_of_names(index)) as rows:
        known = dict(rows)
    differing = {name for name, digest in recorded.items() if known.get(name) != digest}
    differing.update(name for name in known if name not in recorded)
    return differing


def _last_records(index: Index) -> tuple[dict[str, bytes], int]:
    """The digest that the journal has for each name, and the number of its damaged stretches."""
    last: dict[str, bytes] = {}
    damaged = 0
    for record in index.journal.replay():
        if record is None:
            damaged += 1
        elif record.digest is None:
            last.pop(record.name, None)
        else:
            last[record.name] = record.digest
    return last, damaged
