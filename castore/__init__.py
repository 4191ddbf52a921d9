"""castore keeps every derived training artefact once, compressed and verified, and hands it out as plain bytes or files.

The words, used everywhere with these meanings:

blob
    Immutable bytes, known by their digest: BLAKE3-256 of the uncompressed bytes.
entry
    A name that points to a blob, with its serializer, metadata, expiry and pin: what users put, get and see.
name
    A relative POSIX path in UTF-8, such as ``imagenet/train-00001.tar``.
key
    A name computed from a config, from content, or from a function's fingerprint (`castore.key`).
object directory
    Where the bytes live: loose objects (one file a blob) and packs (many small blobs a file).
frame
    An independently compressed piece of a blob; a seek table lists them, so any range decodes alone.
dictionary
    What small blobs below a prefix have in common, kept once: zstd compresses them against it.
index
    The SQLite database of blobs and entries. It can be rebuilt from the object directory.
pin
    A user's word that gc leaves an entry alone.
view
    The tree of names as files, as a mount shows it (package ``castore_fuse``).

Importing this package is quick and pulls in none of the adapters' libraries.
"""

from __future__ import annotations

# The checkers' word for what they alone read; `typing` itself would be a third of what this module takes to import.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from castore.errors import (
        CastoreError,
        CorruptError,
        DictionaryError,
        FullError,
        InvalidNameError,
        InvalidValueError,
        LostSettingsWarning,
        MissingDependencyError,
        NameConflictError,
        NestedStoreWarning,
        NotFoundError,
        OutOfRangeError,
        SegmentError,
        SerializationError,
        SlotError,
        StoreError,
        TooLargeError,
        UnhashableError,
    )
    from castore.gc.collect import Collected, Plan
    from castore.index.figures import PrefixSize
    from castore.keys.encoder import key
    from castore.read.open_blob import OpenBlob
    from castore.records import Blob, Entry, Found, Mount, Totals
    from castore.repair.verify import Finding, Report
    from castore.serialize.kinds import register_type
    from castore.settings import Settings
    from castore.shm.shared_frames import SharedFrames
    from castore.stats import PrefixDictionary, Stat
    from castore.store import Store
    from castore.training import Rewritten, Trained
    from castore.units import NEVER, UNLIMITED
    from castore.write.batch import Batch, SupportsRead
    from castore.write.incoming import NewFile

__version__ = "0.1.0"

__all__ = [
    "NEVER",
    "UNLIMITED",
    "Batch",
    "Blob",
    "CastoreError",
    "Collected",
    "CorruptError",
    "DictionaryError",
    "Entry",
    "Finding",
    "Found",
    "FullError",
    "InvalidNameError",
    "InvalidValueError",
    "LostSettingsWarning",
    "MissingDependencyError",
    "Mount",
    "NameConflictError",
    "NestedStoreWarning",
    "NewFile",
    "NotFoundError",
    "OpenBlob",
    "OutOfRangeError",
    "Plan",
    "PrefixDictionary",
    "PrefixSize",
    "Report",
    "Rewritten",
    "SegmentError",
    "SerializationError",
    "Settings",
    "SharedFrames",
    "SlotError",
    "Stat",
    "Store",
    "StoreError",
    "SupportsRead",
    "TooLargeError",
    "Totals",
    "Trained",
    "UnhashableError",
    "key",
    "register_type",
]

#: Public names that are not in `castore.errors`, and the module of each.
_MODULES = {
    "Batch": "write.batch",
    "Blob": "records",
    "Collected": "gc.collect",
    "Entry": "records",
    "Finding": "repair.verify",
    "Found": "records",
    "Mount": "records",
    "NEVER": "units",
    "NewFile": "write.incoming",
    "OpenBlob": "read.open_blob",
    "Plan": "gc.collect",
    "PrefixDictionary": "stats",
    "PrefixSize": "index.figures",
    "Report": "repair.verify",
    "Rewritten": "training",
    "Settings": "settings",
    "SharedFrames": "shm.shared_frames",
    "Stat": "stats",
    "Store": "store",
    "SupportsRead": "write.batch",
    "Totals": "records",
    "Trained": "training",
    "UNLIMITED": "units",
    "key": "keys.encoder",
    "register_type": "serialize.kinds",
}


def __getattr__(name: str) -> object:
    """Import what is asked for. The command's first lines run before any of it, and so does what catches its Ctrl-C."""
    from importlib import import_module

    if name in __all__:
        value: object = getattr(import_module(f"castore.{_MODULES.get(name, 'errors')}"), name)
    elif name.startswith("_"):
        raise AttributeError(f"module 'castore' has no attribute {name!r}")
    else:
        try:
            value = import_module(f"castore.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"castore.{name}":
                raise
            raise AttributeError(f"module 'castore' has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
