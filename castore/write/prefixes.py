"""Maps prefixes to the dictionaries that compress small blobs below them, for all processes of a store.

The map is one small file beside the dictionaries, replaced by a rename under the write lock. A word of the
beacon then changes, and other processes read the file again. The map matters for new blobs only: a read needs
just the number in the frame. So if the file or a dictionary is damaged, puts go on without a dictionary, and
`castore doctor` reports it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from castore.errors import CorruptError, StoreError, warn
from castore.index.beacon import PREFIXES, Beacon
from castore.names import check_prefix
from castore.objects.dictionaries import Dictionaries, Dictionary
from castore.system.temporary import open_regular, write_whole

_FILE = "prefixes.json"
# Bytes, far more than anybody's prefixes take. A longer file is cut, and then is not valid JSON.
_MAX_BYTES = 1 << 20
_NUMBER = re.compile("[0-9a-f]{8}")


class Prefixes:
    """The prefixes that have a dictionary. Safe to share between threads and over forks.

    Args:
        dictionaries: of the store.
        tmp: folder of files being written.
        beacon: its word for prefixes changes when another process has changed the file.
        mode: permission bits of the file.
    """

    def __init__(self, dictionaries: Dictionaries, tmp: Path, beacon: Beacon, mode: int) -> None:
        self._dictionaries = dictionaries
        self.path = dictionaries.folder / _FILE
        self._tmp = tmp
        self._words = beacon.words
        self._mode = mode
        self._seen_word: int | None = None
        self._numbers: dict[str, int] = {}

    def dictionary(self, name: str) -> Dictionary | None:
        """The dictionary for a new blob of that name: the one of the longest prefix, or None."""
        if self._words[PREFIXES] != self._seen_word:
            self._reload()
        numbers = self._numbers
        if not numbers:
            return None
        part, number = name, numbers.get(name)
        while number is None:
            if not part:
                return None
            part = part.rpartition("/")[0]
            number = numbers.get(part)
        try:
            return self._dictionaries.load(number)
        except CorruptError as error:
            numbers.pop(part, None)  # not loaded again until the file changes
            _warn(f"new blobs below {part!r} are compressed without their dictionary: {error}")
            return None

    def _reload(self) -> None:
        # Read the word first: the next call sees a change made in between.
        seen = self._words[PREFIXES]
        self._numbers, problem = self.read()
        self._seen_word = seen
        if problem is not None:
            _warn(f"new blobs are compressed without dictionaries: {problem}")

    def read(self) -> tuple[dict[str, int], str | None]:
        """The numbers by prefix that the file has now, and a sentence about its damage, or None."""
        try:
            with open(open_regular(self.path), "rb") as file:
                raw = json.loads(file.read(_MAX_BYTES))
            if not isinstance(raw, dict):
                raise TypeError("it is no object")
            return {check_prefix(prefix): _parse_number(text) for prefix, text in raw.items()}, None
        except FileNotFoundError:
            return {}, None
        except (ValueError, TypeError, RecursionError) as error:
            return {}, f"{self.path} is damaged ({error})"

    def set(self, prefix: str, number: int | None) -> bool:
        """Set the dictionary for new blobs below a prefix, or None for no dictionary.

        The caller holds the write lock.

        Returns:
            Whether that changed the file.

        Raises:
            StoreError: the file is damaged.
        """
        numbers, damage = self.read()
        if damage is not None:
            raise StoreError(f"{damage}; `castore doctor` sets it aside")
        before = numbers.pop(prefix, None)
        if number is not None:
            numbers[prefix] = number
        if number == before:
            return False
        self._write(numbers)
        return True

    def _write(self, numbers: dict[str, int]) -> None:
        text = json.dumps({prefix: f"{numbers[prefix]:08x}" for prefix in sorted(numbers)}, indent=2)
        write_whole(self.path, [text.encode(), b"\n"], self._tmp, self._mode)
        self.announce_change()

    def announce_change(self) -> None:
        """Have every process read the file again."""
        self._words[PREFIXES] = (self._words[PREFIXES] + 1) % 2**64


def _parse_number(text: object) -> int:
    if not isinstance(text, str) or not _NUMBER.fullmatch(text):
        raise ValueError(f"{text!r} is no dictionary's number")
    return int(text, 16)


def _warn(what: str) -> None:
    # A put must not fail for a dictionary's saving. But users must not learn of the loss only from a full
    # disk.
    warn(f"{what}; `castore doctor` tells more", RuntimeWarning)
