"""castore keeps every derived training artefact once, compressed and verified, as plain bytes or files.

A *blob* is immutable bytes, known by its digest. An *entry* is a name that points to a blob, with a
serializer, metadata, an expiry and a pin. `Store` puts, gets and lists entries. docs/glossary.md has all
terms.
"""

from __future__ import annotations

# Type checkers know this name without an import: `typing` would take a third of this module's import time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from castore.errors import (
        CacheWarning,
        CastoreError,
        ConflictError,
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
        RemoteDeniedError,
        RemoteError,
        RemoteMissingError,
        RemoteUnreachableError,
        RemoteWarning,
        SegmentError,
        SerializationError,
        SlotError,
        StoreError,
        TooLargeError,
        UnhashableError,
    )
    from castore.gc.collect import Collected, Plan
    from castore.index.figures import PrefixSize
    from castore.index.places import AwayBlobs
    from castore.keys.encoder import Content, key
    from castore.read.open_blob import OpenBlob
    from castore.records import Blob, Buffer, Entry, Found, Mount, Totals
    from castore.remote.outcomes import (
        BackgroundPull,
        Checked,
        Progress,
        Pulled,
        Pushed,
        RemoteChange,
        RemoteCollected,
        RemoteCommit,
        RemoteProblem,
        RemoteResult,
        RemoteUsage,
        Warmed,
    )
    from castore.remote.remote import Remote
    from castore.remote.remotes import RemoteSettings
    from castore.remote.shared_results import SharedTurn
    from castore.repair.verify import Finding, Report
    from castore.serialize.kinds import register_type
    from castore.settings import Settings
    from castore.shm.shared_frames import SharedFrames
    from castore.stats import PrefixDictionary, RemoteUse, Stat
    from castore.store import Store
    from castore.training import Rewritten, Trained
    from castore.units import NEVER, UNLIMITED
    from castore.write.batch import Batch
    from castore.write.incoming import NewFile
    from castore.write.putter import SupportsRead

__version__ = "0.1.0"

__all__ = [
    "NEVER",
    "UNLIMITED",
    "AwayBlobs",
    "BackgroundPull",
    "Batch",
    "Blob",
    "Buffer",
    "CacheWarning",
    "CastoreError",
    "Checked",
    "Collected",
    "ConflictError",
    "Content",
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
    "Progress",
    "Pulled",
    "Pushed",
    "Remote",
    "RemoteChange",
    "RemoteCollected",
    "RemoteCommit",
    "RemoteDeniedError",
    "RemoteError",
    "RemoteMissingError",
    "RemoteProblem",
    "RemoteResult",
    "RemoteSettings",
    "RemoteUnreachableError",
    "RemoteUsage",
    "RemoteUse",
    "RemoteWarning",
    "Report",
    "Rewritten",
    "SegmentError",
    "SerializationError",
    "Settings",
    "SharedFrames",
    "SharedTurn",
    "SlotError",
    "Stat",
    "Store",
    "StoreError",
    "SupportsRead",
    "TooLargeError",
    "Totals",
    "Trained",
    "UnhashableError",
    "Warmed",
    "key",
    "register_type",
]

#: Public names that are not in `castore.errors`, and the module of each.
_MODULES = {
    "Batch": "write.batch",
    "Blob": "records",
    "Buffer": "records",
    "Collected": "gc.collect",
    "Content": "keys.encoder",
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
    "Checked": "remote.outcomes",
    "Progress": "remote.outcomes",
    "BackgroundPull": "remote.outcomes",
    "Pulled": "remote.outcomes",
    "Pushed": "remote.outcomes",
    "Remote": "remote.remote",
    "RemoteChange": "remote.outcomes",
    "RemoteCollected": "remote.outcomes",
    "RemoteCommit": "remote.outcomes",
    "RemoteProblem": "remote.outcomes",
    "RemoteResult": "remote.outcomes",
    "RemoteUsage": "remote.outcomes",
    "AwayBlobs": "index.places",
    "RemoteUse": "stats",
    "RemoteSettings": "remote.remotes",
    "Report": "repair.verify",
    "Rewritten": "training",
    "Settings": "settings",
    "SharedFrames": "shm.shared_frames",
    "SharedTurn": "remote.shared_results",
    "Stat": "stats",
    "Store": "store",
    "SupportsRead": "write.putter",
    "Totals": "records",
    "Trained": "training",
    "UNLIMITED": "units",
    "Warmed": "remote.outcomes",
    "key": "keys.encoder",
    "register_type": "serialize.kinds",
}


def __getattr__(name: str) -> object:
    """Import a public name on its first use: the command's first lines and its Ctrl-C handler run before."""
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
