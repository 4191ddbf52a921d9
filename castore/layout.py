"""The one list of the paths in a store's folder, with the kind of object at each.

All code that makes, removes or judges files below a store uses this list: opening a store makes the folders,
`doctor` sets foreign objects aside, gc removes leftovers of dead processes. ``docs/format.md`` has the same
paths with their meaning, and a test compares both. An adapter that needs a new place below the store adds a
line here.

Has names only: never reads a disk.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

#: The settings. A folder that has this file is a store.
SETTINGS = "castore.json"
#: The index, and the folder of the names journal.
INDEX, NAMES = "index.sqlite", "objects/names"
#: The folder of uncompressed work files of processes. It is made on first use.
WORK = "work"
#: The folders of remotes, and of the pages of their trees. Both are made on first use.
REMOTES, PAGES = "remotes", "pages"


class Kind(Enum):
    """The kind of object at a path."""

    FILE = "file"
    SOCKET = "socket"
    #: A folder whose contents are in this list, too.
    FOLDER = "folder"
    #: A folder whose contents are not in this list: they belong to the process in its name, or to nobody.
    TREE = "tree"


class Place(NamedTuple):
    """A path, or all paths of a pattern, below the store.

    Attributes:
        path: as ``docs/format.md`` writes it.
        pattern: a regular expression of the whole path.
        kind: of the object there.
        is_written: whether processes write to a file after it was made. Other files are read, replaced and
            removed.
    """

    path: str
    pattern: str
    kind: Kind = Kind.FILE
    is_written: bool = False

    @property
    def is_fixed(self) -> bool:
        """Whether this is one path, not a pattern."""
        return self.pattern == re.escape(self.path.rstrip("/"))


def _fixed(path: str, kind: Kind = Kind.FILE, *, is_written: bool = False) -> Place:
    return Place(path, re.escape(path.rstrip("/")), kind, is_written)


_NUMBER, _DIGITS, _EIGHT = "[0-9]{1,20}", "[0-9a-f]{2}", "[0-9a-f]{8}"
# PID namespace, PID, start time of the process, and a random part.
_PROCESS = f"{_NUMBER}-{_NUMBER}-{_NUMBER}-[0-9a-f]{{32}}"

# Names of remotes and refs (remote/keys.py).
_LABEL = "[A-Za-z0-9][A-Za-z0-9._-]{0,99}"

PLACES = (
    _fixed(SETTINGS),
    _fixed("index.sqlite", is_written=True),
    _fixed("index.sqlite-wal", is_written=True),
    _fixed("index.sqlite-shm", is_written=True),
    _fixed("index.sqlite-journal", is_written=True),
    _fixed("objects/", Kind.FOLDER),
    Place("objects/ab/", f"objects/{_DIGITS}", Kind.FOLDER),
    Place("objects/ab/abcd….zst", f"objects/{_DIGITS}/[0-9a-f]{{64}}(?:\\.zst|\\.lz4|\\.gz)?"),
    _fixed("objects/packs/", Kind.FOLDER),
    Place("objects/packs/0000002a.pack", f"objects/packs/{_EIGHT}\\.pack"),
    _fixed("objects/dicts/", Kind.FOLDER),
    Place("objects/dicts/1a2b3c4d.zdict", f"objects/dicts/{_EIGHT}\\.zdict"),
    Place("objects/dicts/1a2b3c4d.spare", f"objects/dicts/{_EIGHT}\\.spare"),
    _fixed("objects/dicts/prefixes.json"),
    _fixed("objects/names/", Kind.FOLDER),
    Place("objects/names/00000003.names", "objects/names/[0-9]{8}\\.names", is_written=True),
    Place("objects/names/00000003.snapshot", "objects/names/[0-9]{8}\\.snapshot"),
    _fixed("tmp/", Kind.FOLDER),
    Place("tmp/N-P-S-U.part", f"tmp/{_PROCESS}\\.part"),
    Place("tmp/N-P-S-U.abcd…", f"tmp/{_PROCESS}\\.[0-9a-f]{{64}}"),
    Place("tmp/N-P-S-U.T.claims", f"tmp/{_PROCESS}\\.[0-9a-f]{{32}}\\.claims"),
    _fixed(f"{WORK}/", Kind.FOLDER),
    Place(f"{WORK}/N-P-S-U/", f"{WORK}/{_PROCESS}", Kind.TREE),
    _fixed(f"{REMOTES}/", Kind.FOLDER),
    Place(f"{REMOTES}/R/", f"{REMOTES}/{_LABEL}", Kind.FOLDER),
    Place(f"{REMOTES}/R/remote.json", f"{REMOTES}/{_LABEL}/remote\\.json"),
    Place(f"{REMOTES}/R/REF@H", f"{REMOTES}/{_LABEL}/{_LABEL}@[0-9a-f]{{16}}"),
    Place(f"{REMOTES}/R/REF@H.pending", f"{REMOTES}/{_LABEL}/{_LABEL}@[0-9a-f]{{16}}\\.pending"),
    Place(f"{REMOTES}/R/REF@H.pulling", f"{REMOTES}/{_LABEL}/{_LABEL}@[0-9a-f]{{16}}\\.pulling"),
    Place(f"{REMOTES}/R/REF@seen", f"{REMOTES}/{_LABEL}/{_LABEL}@seen"),
    _fixed(f"{PAGES}/", Kind.FOLDER),
    Place(f"{PAGES}/abcd…", f"{PAGES}/[0-9a-f]{{64}}"),
    _fixed("locks/", Kind.FOLDER),
    _fixed("locks/beacon", is_written=True),
    _fixed("locks/compute", is_written=True),
    _fixed("locks/datasets", is_written=True),
    _fixed("locks/embeddings", is_written=True),
    _fixed("locks/remotes", is_written=True),
    _fixed("locks/fetcher", is_written=True),
    _fixed("locks/fetcher.sock", Kind.SOCKET),
    Place("locks/mount-H.json", "locks/mount-[0-9a-f]{16}\\.json"),
    Place("locks/.mount-H.json.P", f"locks/\\.mount-[0-9a-f]{{16}}\\.json\\.{_NUMBER}"),
    Place("locks/mount-N-P.sock", f"locks/mount-{_NUMBER}-{_NUMBER}\\.sock", Kind.SOCKET),
    _fixed("quarantine/", Kind.TREE),
    _fixed("ballast", is_written=True),
    _fixed(".gitignore"),
    _fixed("CACHEDIR.TAG"),
)

#: Folders of a fixed path. Each must be the store's own, and not a link.
FOLDERS = tuple(
    place.path.rstrip("/") for place in PLACES if place.kind in (Kind.FOLDER, Kind.TREE) and place.is_fixed
)
#: The folders that are made with the store.
CREATED = tuple(folder for folder in FOLDERS if folder not in (WORK, REMOTES, PAGES))
#: Names that the top folder may have.
TOP = frozenset(place.path.split("/")[0] for place in PLACES)

_ANY = re.compile(
    "|".join(f"(?P<p{number}>{place.pattern})" for number, place in enumerate(PLACES)), re.ASCII
)


def place_of(path: str) -> Place | None:
    """The line of the list for a path below the store, or None if castore makes no such path.

    >>> place_of("objects/packs/0000002a.pack").kind
    <Kind.FILE: 'file'>
    >>> place_of("objects/packs/readme.txt") is None
    True
    """
    found = _ANY.fullmatch(path)
    return None if found is None or found.lastgroup is None else PLACES[int(found.lastgroup[1:])]
