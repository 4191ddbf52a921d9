"""CachedEncoder: stands where an encoder stood, and encodes no item twice.

Given Keys, it looks up; given anything else, it asks the store for the embedding of each item, by the key that the key
extractor tells or by content, and runs the encoder on those that nobody has encoded yet. The encoder's weights are its
own as before: `state_dict` has the names it had without this wrapper.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from castore import Store
from castore.adapters.embeddings.batches import PerItem, select
from castore.adapters.embeddings.cache import EmbeddingCache
from castore.adapters.embeddings.config import CacheConfig, CacheType
from castore.adapters.embeddings.devices import Placed, over_tensors, tensors_of
from castore.adapters.embeddings.frozen import check_frozen, no_random_numbers
from castore.adapters.embeddings.identity import code_digest, encoder_digest, item_key, table_name
from castore.adapters.embeddings.keys import ABSENT, ROWS_PER_TABLE, Keys
from castore.adapters.embeddings.masks import mask_in, padded, unpadded
from castore.errors import InvalidValueError

_CPU = torch.device("cpu")


class CachedEncoder(nn.Module):
    """An encoder whose embeddings are computed once and kept in a store.

    Args:
        encoder: a frozen module, or any function of a batch. A batch is a tensor (B, ...), a list of B items, or a dict
            or tuple of tensors (B, ...), and goes through uncached if it is anything else; what it returns for one are tensors
            (B, ...), lists of B tensors that differ in length, or tuples and dicts of these.
        config: of this, ``cache_type``, ``key_extractors``, ``dtype``, ``masks``, ``save_dir`` and ``fingerprints`` count.
        name: what the config and errors call it.
        store: a `castore.Store`, or the folder of one, in place of ``config.save_dir``.

    Raises:
        InvalidValueError: the encoder is trainable, or random in train mode; the message says which part of it.
        UnhashableError: the encoder has no fingerprint; the message says which part of it.

    >>> import tempfile
    >>> encode = CachedEncoder(nn.Linear(3, 2).requires_grad_(False), store=tempfile.mkdtemp())
    >>> encode(torch.ones(4, 3)).shape, len(encode.memo)         # four items that are one
    (torch.Size([4, 2]), 1)
    """

    def __init__(
        self,
        encoder: Any,
        config: CacheConfig | None = None,
        *,
        name: str = "encoder",
        store: Store | str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        check_frozen(encoder, name)
        self.name = name
        self.config = config or CacheConfig()
        self.column = 0
        self.encoder = encoder
        #: 40 hexadecimal digits that identify what the encoder computes.
        self.digest = encoder_digest(encoder, name, self.config.fingerprints.get(name))
        self._extractor = self.config.extractor_of(name)
        self._mask = self.config.masks.get(name)
        self._tables: list[Placed] = []
        self._store = opened(store, self.config)
        self._memo: EmbeddingCache | None = None
        if not isinstance(encoder, nn.Module) and not callable(encoder):
            raise InvalidValueError(
                f"the encoder {name!r} is a {type(encoder).__name__}; give a module or a function"
            )
        self.register_load_state_dict_pre_hook(_one_level_down)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_look_at_weights)  # type: ignore[no-untyped-call]

    @property
    def memo(self) -> EmbeddingCache:
        """The embeddings of what was not given as Keys."""
        if self._memo is None:
            given = self.config.fingerprints.get("key_extractors")
            extractor = self._extractor and code_digest(self._extractor, "key_extractors", given)
            parts = {
                "encoder": self.digest,
                "key_extractor": extractor,
                "dtype": str(self.config.dtype),
                "mask": self._mask,
            }
            self._memo = EmbeddingCache(
                table_name(type(self.encoder).__name__, parts),
                self._store,
                dtype=self.config.dtype,
                resident=self.config.type_of(self.name) is not CacheType.DISK,
            )
        return self._memo

    def look_again(self) -> None:
        """See whether the encoder is another one by now; what was cached of the one before is then forgotten here."""
        check_frozen(self.encoder, self.name)
        digest = encoder_digest(self.encoder, self.name, self.config.fingerprints.get(self.name))
        if digest != self.digest:
            self.digest = digest
            self._memo = None
            self._tables = [_Outdated(table.cache) for table in self._tables]

    def add_table(self, table: Placed) -> int:
        """Let Keys mean rows of this table; the first of these keys."""
        self._tables.append(table)
        return (len(self._tables) - 1) * ROWS_PER_TABLE

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The embeddings of a batch, as the encoder returns them."""
        keys = next((value for value in (*args, *kwargs.values()) if isinstance(value, Keys)), None)
        if keys is not None:
            return self._padded(self._look_up(keys.column(self.column)), kwargs)
        if self.config.type_of(self.name) is CacheType.NONE or any(
            tensor.requires_grad for tensor in tensors_of([*args, *kwargs.values()])
        ):
            return self.encoder(*args, **kwargs)
        return self._remember(args, kwargs)

    def encode(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the encoder, out of the graph, and in its own precision: what is kept must not depend on who asked first.

        Raises:
            InvalidValueError: it draws random numbers.
        """
        advice = "call eval() on it, or leave it uncached with CacheType.NONE"
        device = self._device(_CPU)

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device)

        own = torch.autocast(device.type, enabled=False)
        with torch.no_grad(), own, no_random_numbers(f"the encoder {self.name!r}", advice):
            if device != _CPU:
                args = [over_tensors(value, move) for value in args]
                kwargs = {name: over_tensors(value, move) for name, value in kwargs.items()}
            outputs = self.encoder(*args, **kwargs)
        return outputs if self._mask is None else unpadded(outputs, mask_in(kwargs, self._mask, self.name))

    def _padded(self, outputs: Any, kwargs: Mapping[str, Any]) -> Any:
        return outputs if self._mask is None else padded(outputs, mask_in(kwargs, self._mask, self.name))

    def _look_up(self, keys: torch.Tensor) -> Any:
        if not len(keys):
            raise InvalidValueError("an empty batch of keys has no embeddings")
        # Rows are far below 2**44, so the ends tell whether all are of one table.
        low, high = (int(key) for key in torch.aminmax(keys))
        if low <= ABSENT:
            raise InvalidValueError(
                f"the encoder {self.name!r} is fed with keys from a place that it was not cached for; name its places with"
                " encoders=..."
            )
        number = low // ROWS_PER_TABLE
        if number >= len(self._tables) or high // ROWS_PER_TABLE != number:
            raise InvalidValueError(
                f"the encoder {self.name!r} got keys of several tables, or of another model; look up batches of one loader"
            )
        return self._tables[number].take(keys - number * ROWS_PER_TABLE, self._device(keys.device))

    def _remember(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch = [*args, kwargs]
        count = _count(batch)
        if not count:
            return self.encoder(*args, **kwargs)
        layout = [
            *(_layout_of(value) for value in args),
            {name: _layout_of(value) for name, value in kwargs.items()},
        ]
        keys = [self._key_of(select(layout, batch, [position])) for position in range(count)]

        def encode(positions: list[int]) -> Any:
            *some, named = select(layout, batch, positions)
            return self.encode(some, named)

        rows = self.memo.find(keys)
        if bool((rows < 0).any()):
            self.memo.fill(keys, range(count), encode, batch_size=count)
            rows = self.memo.rows(keys)
        device = self._device(_CPU)
        found = self._padded(self.memo.take(rows), kwargs)
        return found if device == _CPU else over_tensors(found, lambda tensor: tensor.to(device))

    def _key_of(self, item: list[Any]) -> bytes:
        *args, kwargs = item
        if self._extractor is None:
            return item_key((args, kwargs), f"an item that the encoder {self.name!r} is fed")
        features = [_alone(value) for value in (*args, *kwargs.values())]
        return item_key(self._extractor(features[0] if len(features) == 1 else features))

    def _device(self, default: torch.device) -> torch.device:
        """Where the encoder is; ``default`` if it has no weights."""
        if isinstance(self.encoder, nn.Module):
            for tensor in (*self.encoder.parameters(), *self.encoder.buffers()):
                return tensor.device
        return default

    # As if the encoder stood here itself

    def train(self, mode: bool = True) -> CachedEncoder:
        """Note the mode; the encoder stays in the one it was cached in."""
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The encoder's, under the names that it has without this wrapper."""
        if isinstance(self.encoder, nn.Module):
            return self.encoder.state_dict(*args, **kwargs)
        return super().state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            encoder = self.__dict__.get("encoder") or self.__dict__.get("_modules", {}).get("encoder")
            if encoder is None or name.startswith("__"):
                raise
            return getattr(encoder, name)


class _Outdated:
    """A table of the encoder that was here before its weights changed."""

    def __init__(self, cache: EmbeddingCache) -> None:
        self.cache = cache

    def take(self, rows: torch.Tensor, device: torch.device) -> Any:
        """Always an error: these are another encoder's embeddings."""
        raise InvalidValueError(
            "the weights of a cached encoder have changed since its embeddings were computed; call cache_embeddings again"
        )


def opened(store: Store | str | os.PathLike[str] | None, config: CacheConfig) -> Store:
    """The store that is meant, without a RAM tier if it is opened here: embeddings are mapped.

    Raises:
        InvalidValueError: it is said twice.
    """
    if store is not None and config.save_dir is not None:
        raise InvalidValueError("give either store=... or CacheConfig(save_dir=...), not both")
    return (
        store
        if isinstance(store, Store)
        else Store(store if store is not None else config.save_dir, memory=0)
    )


def _one_level_down(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Names of weights as `state_dict` gives them, as the modules are."""
    for name in [name for name in state if name.startswith(prefix)]:
        state[f"{prefix}encoder.{name[len(prefix) :]}"] = state.pop(name)


def _look_at_weights(module: CachedEncoder, keys: Any) -> None:
    module.look_again()


def _layout_of(value: Any) -> Any:
    """What of an input belongs to single items: the first dimension of tensors, the elements of lists."""
    if isinstance(value, torch.Tensor):
        return PerItem("tensor")
    if isinstance(value, list):
        return PerItem("list")
    if isinstance(value, Mapping):
        return {name: _layout_of(inner) for name, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_layout_of, value))
    return value


def _count(batch: Any) -> int:
    """How many items a batch has; 0 if that cannot be told, since its parts disagree."""
    found: set[int] = set()

    def note(value: Any) -> None:
        if isinstance(value, torch.Tensor | list) and (not isinstance(value, torch.Tensor) or value.ndim):
            found.add(len(value))
        elif isinstance(value, Mapping | tuple):
            for inner in value.values() if isinstance(value, Mapping) else value:
                note(inner)

    for value in batch:
        note(value)
    return found.pop() if len(found) == 1 else 0


def _alone(value: Any) -> Any:
    """One item of a batch of one."""
    if isinstance(value, torch.Tensor | list):
        return value[0]
    if isinstance(value, Mapping):
        return {name: _alone(inner) for name, inner in value.items()}
    return tuple(map(_alone, value)) if isinstance(value, tuple) else value
