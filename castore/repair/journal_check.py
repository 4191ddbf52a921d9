"""Whether the index and the names journal say the same of every name, asked of a store that others may be using.

The two are never read at one moment, and a record is in the journal before its transaction commits. So what differs at
first sight counts only if it still does under the write lock, with what was appended meanwhile. Holds all names and
digests in memory.
"""

from __future__ import annotations

from contextlib import closing
from typing import NamedTuple

from castore.index.database import Index
from castore.index.journal import JournalTail
from castore.index.name_ranges import digests_of_names


class Agreement(NamedTuple):
    """How far they agree.

    Attributes:
        forgotten: names that only the journal knows, with their digests.
        differing: how many names have another digest in one than in the other, or are in one only; ``forgotten`` included.
        damaged: how many stretches of the journal could not be read.
    """

    forgotten: dict[str, bytes]
    differing: int
    damaged: int


_AGREED = Agreement({}, 0, 0)


def compare(index: Index) -> Agreement:
    """Compare them. Takes the write lock only if they seem to differ, and then for what differs."""
    with closing(JournalTail(index.journal, index.beacon)) as tail:
        said, damaged = _last_words(index)
        differing = _differing(index, said)
        if not differing and not damaged:
            return _AGREED
        with index.write() as txn:
            appended = tail.poll()
            if appended is None or damaged:
                # Rotated twice; or a record that was just being written, which looks like damage.
                said, damaged = _last_words(index)
                differing = _differing(index, said)
                appended = []
            for name, digest, *_ in appended:
                differing.add(name)
                if digest is None:
                    said.pop(name, None)
                else:
                    said[name] = digest
            known = {name: txn.digest_of(name) for name in differing}
    wrong = {name: said.get(name) for name, digest in known.items() if digest != said.get(name)}
    forgotten = {name: digest for name, digest in wrong.items() if digest is not None and known[name] is None}
    return Agreement(forgotten, len(wrong), damaged)


def _differing(index: Index, said: dict[str, bytes]) -> set[str]:
    """The names that have another digest in the index than in ``said``, or are in one only."""
    with closing(digests_of_names(index)) as rows:
        known = dict(rows)
    differing = {name for name, digest in said.items() if known.get(name) != digest}
    differing.update(name for name in known if name not in said)
    return differing


def _last_words(index: Index) -> tuple[dict[str, bytes], int]:
    """What the journal says of each name that is not gone, and how many stretches of it are damaged."""
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
