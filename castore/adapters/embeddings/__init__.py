"""Frozen encoders: embeddings computed once and kept in a store, for any PyTorch code.

The options are those of Quaterion's cache, without its limitations.

May import: torch, the store and all below it, `mapped_check`, and names that the `__init__.py` of
`castore.adapters.torch` has. Two of those names are not public: `ADVICE` and `key_and_doubts`.
Must never: give a row that another encoder computed, or train an encoder.
"""

from __future__ import annotations

from castore.errors import MissingDependencyError

try:
    from castore.adapters.embeddings.cache import EmbeddingCache
    from castore.adapters.embeddings.config import CacheConfig, CacheType
    from castore.adapters.embeddings.encoder import CachedEncoder
    from castore.adapters.embeddings.encoder_outputs import Leaf, Schema
    from castore.adapters.embeddings.keys import Keys
    from castore.adapters.embeddings.model_cache import cache_embeddings
    from castore.adapters.embeddings.table_fill import Filling
except ModuleNotFoundError as error:
    if error.name not in ("torch", "numpy", "tqdm"):
        raise
    raise MissingDependencyError.of(error.name, "embeddings") from error

__all__ = [
    "CacheConfig",
    "CacheType",
    "CachedEncoder",
    "EmbeddingCache",
    "Filling",
    "Keys",
    "Leaf",
    "Schema",
    "cache_embeddings",
]
