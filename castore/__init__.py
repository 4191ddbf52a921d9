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

from castore.errors import (
    CastoreError,
    CorruptError,
    DictionaryError,
    FullError,
    InvalidNameError,
    InvalidValueError,
    MissingDependencyError,
    NameConflictError,
    NotFoundError,
    SerializationError,
    StoreError,
    TooLargeError,
    UnhashableError,
)
from castore.keys import key
from castore.records import Entry
from castore.store import Store

__version__ = "0.1.0"

__all__ = [
    "CastoreError",
    "CorruptError",
    "DictionaryError",
    "Entry",
    "FullError",
    "InvalidNameError",
    "InvalidValueError",
    "MissingDependencyError",
    "NameConflictError",
    "NotFoundError",
    "SerializationError",
    "Store",
    "StoreError",
    "TooLargeError",
    "UnhashableError",
    "key",
]
