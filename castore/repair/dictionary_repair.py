"""Repairs dictionaries: replaces bad copies by good ones, and removes dictionaries that no record needs.

A dictionary is needed as long as any pack has a record made with it, dead records included: a rebuild of the
index may bring those back. Only `doctor` removes dictionaries; gc never does.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import zstandard

from castore.index.database import Index
from castore.objects.codecs import AUTO_CODEC
from castore.objects.dictionaries import BadCopy
from castore.objects.directory import ObjectDirectory
from castore.objects.packs import PackRecord, scan
from castore.system.io_errors import read_around
from castore.write.prefixes import Prefixes

if TYPE_CHECKING:
    from castore.parts import Parts

# Bytes of the longest header that a zstd frame has.
_HEADER = 18


def repair_copies(index: Index, objects: ObjectDirectory) -> list[BadCopy]:
    """Replace bad copies by good ones, or set them aside if none is good; returns the bad ones."""
    found: list[BadCopy] = []
    for number in objects.dictionaries.numbers():
        if objects.dictionaries.is_whole(number):
            continue
        if index.read_only:
            found += objects.dictionaries.repair(number, read_only=True)
            continue
        with index.write():  # nobody removes it meanwhile
            bad = objects.dictionaries.repair(number)
            for copy in bad:
                if not copy.mended and not copy.missing:
                    aside = f"{copy.path.name}-{time.time_ns()}"
                    copy.path.rename(objects.quarantine_folder / aside)
        found += bad
    return found


def repair_prefixes(parts: Parts) -> list[str]:
    """Have every prefix refer to an existing dictionary; returns a sentence for each problem."""
    with parts.index.write():
        numbers, damage = parts.prefixes.read()
        if damage is not None:
            path = parts.prefixes.path
            path.rename(parts.objects.quarantine_folder / f"{path.name}-{time.time_ns()}")
            parts.prefixes.announce_change()
            return [f"{damage}; it has been moved to quarantine, and new blobs are put without a dictionary"]
        missing = {
            prefix: number for prefix, number in numbers.items() if not parts.objects.dictionaries.has(number)
        }
        for prefix in missing:
            parts.prefixes.set(prefix, None)
        return [
            f"dictionary {number:08x} of {prefix or '/'} is gone; new blobs there are put without one"
            for prefix, number in missing.items()
        ]


def remove_unneeded(index: Index, objects: ObjectDirectory, prefixes: Prefixes) -> tuple[int, int]:
    """Remove dictionaries that no prefix has and no record needs; returns how many, and their bytes."""
    unassigned = _unassigned(objects, prefixes)
    if not unassigned:
        return 0, 0
    # Scan all packs without the lock, then records appended since with the lock: appending takes it.
    ends: dict[int, int] = {}
    needed = _needed(objects, ends)
    with index.write():
        unassigned &= _unassigned(objects, prefixes)
        missing = unassigned - needed - _needed(objects, ends)
        prefixes.announce_change()  # a writer that compressed with one, and waits for the lock, checks again
        return len(missing), sum(map(objects.dictionaries.remove, missing))


def _unassigned(objects: ObjectDirectory, prefixes: Prefixes) -> set[int]:
    numbers, damage = prefixes.read()
    # A damaged file may have had any dictionary, so none counts as idle.
    return set() if damage is not None else set(objects.dictionaries.numbers()) - set(numbers.values())


def _needed(objects: ObjectDirectory, ends: dict[int, int]) -> set[int]:
    """The dictionaries that records need. Scans each pack from its offset in ``ends``, and updates that."""
    needed = set()
    for pack in objects.packs.ids():
        try:
            opened = objects.packs.open(pack)
            for found in scan(objects.packs.path(pack), pack, start=ends.get(pack, 0), payloads=False):
                if not isinstance(found, PackRecord):
                    continue
                blob = found.blob
                ends[pack] = blob.offset + blob.stored
                if blob.codec == AUTO_CODEC:
                    needed.add(_number(read_around(opened.fd, min(_HEADER, blob.stored), blob.offset)))
        except FileNotFoundError:
            continue  # gc has rewritten it: its live records are in another pack
    return needed


def _number(header: bytes) -> int:
    try:
        return zstandard.get_frame_parameters(header).dict_id
    except zstandard.ZstdError:
        return 0  # damaged: no dictionary would help
