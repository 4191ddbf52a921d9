"""CachedEncoder: takes the place of an encoder, and encodes no item twice.

Given Keys, it looks up. Given anything else, it asks the store for the embedding of each item, by the key
extractor's key or by content, and runs the encoder only on items that are not in the store. The encoder keeps
its weights: `state_dict` has the names that it had without this wrapper.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import os
import secrets
from collections import OrderedDict, UserDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd import forward_ad

from castore import Store
from castore.adapters.embeddings.batch_places import PerItem, map_leaves, rebuild_sequence, select_items
from castore.adapters.embeddings.cache import EmbeddingCache
from castore.adapters.embeddings.config import CacheConfig, CacheType
from castore.adapters.embeddings.devices import Lookup, list_tensors, map_tensors
from castore.adapters.embeddings.frozen_encoders import ChangeDetector, check_frozen, refuse_random_numbers
from castore.adapters.embeddings.keys import ABSENT, ROWS_PER_TABLE, TABLES, Keys
from castore.adapters.embeddings.masks import add_padding, get_mask, remove_padding
from castore.adapters.embeddings.second_run import names_random_source, require_same
from castore.adapters.embeddings.table_identity import (
    code_digest,
    encoder_digest,
    extracted_key,
    first_values,
    forget_first_values,
    item_key,
    restore_first_values,
    table_name,
)
from castore.errors import CacheWarning, InvalidValueError, warn
from castore.keys.classes import full_name
from castore.keys.libraries import library_of_class

_CPU = torch.device("cpu")
# Values of arguments that are settings of a call, and no features.
_PLAIN = (bool, int, float, complex, str, bytes)
_BATCH_ADVICE = (
    ", since it is no batch of items; pass tensors, arrays or lists with one element for each item, all of"
    " one length, or tuples of as many texts, or leave the encoder uncached with CacheType.NONE"
)
# Changes of globals after which a warning comes.
_OFTEN = 3


class CachedEncoder(nn.Module):
    """An encoder whose embeddings are computed once and kept in a store.

    Args:
        encoder: a frozen module, or any function of a batch. A batch is a tensor or array (B, ...), a list of
            B items, a tuple of B texts or bytes, as the default collate makes of those, or a dict or tuple of
            these. Anything else is encoded without the cache; a warning reports this once. For a batch the
            encoder returns tensors (B, ...), lists of B tensors that differ in length, or tuples and dicts of
            these.
        config: ``cache_type``, ``key_extractors``, ``dtype``, ``masks``, ``save_dir`` and ``fingerprints``
            are used.
        name: its name in the config and in errors.
        store: a `castore.Store`, or the folder of one, in place of ``config.save_dir``.

    Raises:
        InvalidValueError: the encoder is trainable, or random in train mode; the message names the part.
        UnhashableError: the encoder has no fingerprint; the message names the part.

    >>> import tempfile
    >>> encode = CachedEncoder(nn.Linear(3, 2).requires_grad_(False), store=tempfile.mkdtemp())
    >>> encode(torch.ones(4, 3)).shape, len(encode.memo)         # four items that are one
    (torch.Size([4, 2]), 1)
    """

    # On the class, for objects pickled by versions without these attributes.
    _warned_uncached = _warned_settings = _is_tried = False
    _checked_settings: tuple[Any, ...] = ()

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
        self._name = name
        self._config = config or CacheConfig()
        self._column = 0
        self.encoder = encoder
        self._extractor = self._config.extractor_of(name)
        self._mask = self._config.masks.get(name)
        self._tables: dict[int, Lookup] = {}
        self._store = open_store(store, self._config)
        forget_first_values(encoder)
        #: 40 hexadecimal digits that identify what the encoder computes.
        self.digest = encoder_digest(encoder, name, self._config.fingerprints.get(name), self._store)
        self._memo: EmbeddingCache | None = None
        self._detector = ChangeDetector(encoder)
        self._changes_of_globals = 0
        if not isinstance(encoder, nn.Module) and not callable(encoder):
            raise InvalidValueError(
                f"the encoder {name!r} is a {type(encoder).__name__}; give a module or a function"
            )
        self.register_load_state_dict_pre_hook(_prefix_weight_names)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_refresh_digest)  # type: ignore[no-untyped-call]
        self._is_made = True

    @property
    def memo(self) -> EmbeddingCache:
        """The embeddings of items that were not given as Keys."""
        if self._memo is None:
            given = self._config.fingerprints.get("key_extractors")
            extractor = self._extractor and code_digest(self._extractor, "key_extractors", given, self._store)
            parts = {
                "encoder": self.digest,
                "key_extractor": extractor,
                "dtype": str(self._config.dtype),
                "mask": self._mask,
            }
            self._memo = EmbeddingCache(
                table_name(type(self.encoder).__name__, parts),
                self._store,
                dtype=self._config.dtype,
                resident=self._config.type_of(self._name) is not CacheType.DISK,
            )
        return self._memo

    def _reconfigure(self, config: CacheConfig, store: Store, name: str) -> None:
        """Encode items that are not given as Keys as another config says, from now on; tables stay.

        A fingerprint of the encoder that the config before gave, and this one does not, still counts.
        """
        known = self._config.fingerprints.get(self._name)
        given = config.fingerprints if known is None else {name: known, **config.fingerprints}
        self._config = CacheConfig(**{**vars(config), "fingerprints": given})
        self._name, self._store, self._memo = name, store, None
        self._extractor = config.extractor_of(name)
        self._refresh_digest()

    def _refresh_digest(self) -> None:
        """Compute the encoder's digest again. If it has changed, only the tables of that one are found."""
        before = self.digest
        self._hash_again()
        if self.digest != before:
            self._tables = {
                number: _table_for(self.digest, before, table) for number, table in self._tables.items()
            }

    def _hash_again(self) -> None:
        check_frozen(self.encoder, self._name)
        digest = encoder_digest(self.encoder, self._name, self._config.fingerprints.get(self._name))
        changed = self._detector.changed_globals()
        self._detector.note()
        if digest != self.digest:
            self.digest, self._memo = digest, None
            self._warn_of_globals(changed)

    def _warn_of_globals(self, changed: list[str]) -> None:
        """Warn once of a global that changes again and again, such as a config with the training step."""
        if changed:
            self._changes_of_globals += 1
            if self._changes_of_globals == _OFTEN:
                warn(
                    f"the encoder {self._name!r} has another key for the {_OFTEN}rd time, and encodes all"
                    f" anew each time, since what its code reads has changed: {', '.join(changed)}; hold in"
                    " the encoder itself what it needs of them",
                    CacheWarning,
                )

    def _add_table(self, table: Lookup) -> int:
        """Make Keys refer to rows of this table; returns the key of row 0.

        The table's number is random, and from no source that training draws from. So keys that were made for
        another model are noticed.
        """
        while (number := secrets.randbelow(TABLES)) in self._tables:
            pass
        self._tables[number] = table
        return number * ROWS_PER_TABLE

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The embeddings of a batch, as the encoder returns them."""
        if torch.compiler.is_dynamo_compiling():
            # Nothing of a look-up can be compiled: it reads files, and compares what the encoder is.
            disable: Any = torch._dynamo.disable
            return disable(self._find_embeddings)(*args, **kwargs)
        return self._find_embeddings(*args, **kwargs)

    def _find_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        keys = next((value for value in (*args, *kwargs.values()) if isinstance(value, Keys)), None)
        if keys is not None:
            self._warn_of_settings(args, kwargs)
            return self._pad(self._look_up(keys), kwargs)
        if self._config.type_of(self._name) is CacheType.NONE or any(
            tensor.requires_grad for tensor in list_tensors([*args, *kwargs.values()])
        ):
            return self.encoder(*args, **kwargs)
        if _carry_more_than_values():
            self._warn_uncached("a batch within torch.func, forward-mode AD or a trace", "")
            return self.encoder(*args, **kwargs)
        return self._look_up_or_encode(args, kwargs)

    def _encode(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the encoder without gradients, in its own precision, whatever the first caller's is.

        `_settle` follows, after one run or many.

        Raises:
            InvalidValueError: it draws random numbers, or gives another result the second time.
        """
        advice = "call eval() on it, or leave it uncached with CacheType.NONE"
        device = self._device(_CPU)

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device)

        if device != _CPU:
            args = [map_tensors(value, move) for value in args]
            kwargs = {name: map_tensors(value, move) for name, value in kwargs.items()}

        def run() -> Any:
            own = torch.autocast(device.type, enabled=False)
            with torch.no_grad(), own, refuse_random_numbers(f"the encoder {self._name!r}", advice):
                return self.encoder(*args, **kwargs)

        outputs = run()
        if not self._is_tried:
            self._is_tried = True
            if self._detector.weights_changed() or names_random_source(self.encoder):
                require_same(self._name, outputs, run())
        return (
            outputs
            if self._mask is None
            else remove_padding(outputs, get_mask(kwargs, self._mask, self._name))
        )

    def _settle(self) -> None:
        """Accept what the encoder has changed of itself while it ran."""
        self._detector.settle()

    def _pad(self, outputs: Any, kwargs: Mapping[str, Any]) -> Any:
        return (
            outputs if self._mask is None else add_padding(outputs, get_mask(kwargs, self._mask, self._name))
        )

    def _refresh_if_changed(self, *, encodes: bool) -> None:
        """If the encoder seems to have changed, compute its digest again. Tables are left alone unless its
        weights have changed: what a helper of the encoder remembers looks like a setting.
        """
        if not self._detector.may_have_changed(encodes=encodes):
            return
        if self._detector.weights_changed() or self._detector.weights_replaced():
            self._refresh_digest()
        else:
            self._hash_again()

    def _look_up(self, keys: Keys) -> Any:
        if self._detector.weights_changed():
            self._refresh_digest()
        if not len(keys):
            raise InvalidValueError("an empty batch of keys has no embeddings")
        column = keys.column_in_memory(self._column)
        # Rows are far below 2**40, so the least and the greatest key show whether all are of one table.
        low, high = (int(key) for key in torch.aminmax(column))
        if low <= ABSENT:
            raise InvalidValueError(
                f"the encoder {self._name!r} got keys of a place for which it was not cached; name all of "
                "its places with encoders=..."
            )
        number = low // ROWS_PER_TABLE
        table = self._tables.get(number)
        if table is None or high // ROWS_PER_TABLE != number:
            raise InvalidValueError(
                f"the encoder {self._name!r} got keys of several tables, or of another model; look up batches"
                " of one loader, which cache_embeddings has made for this model"
            )
        given = column if table.in_memory else keys.column(self._column)
        return table.take(given - number * ROWS_PER_TABLE, self._device(keys.device))

    def _look_up_or_encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch = (*args, kwargs)
        count, layout = _learn_layout(batch)
        if not count:
            if layout is None:
                fed = ", ".join(_describe(value) for value in (*args, *kwargs.values())) or "nothing"
                self._warn_uncached(fed, _BATCH_ADVICE)
            return self.encoder(*args, **kwargs)
        keys = [self._item_key(layout, select_items(layout, batch, [position])) for position in range(count)]

        def encode(positions: list[int]) -> Any:
            *some, named = select_items(layout, batch, positions)
            outputs = self._encode(some, named)
            self._settle()
            return outputs

        self._refresh_if_changed(encodes=False)
        rows = self.memo.find(keys)
        if bool((rows < 0).any()):
            self._refresh_if_changed(encodes=True)
            self.memo.fill(keys, range(count), encode, batch_size=count)
            rows = self.memo.rows(keys)
        device = self._device(_CPU)
        found = self._pad(self.memo.take(rows), kwargs)
        return found if device == _CPU else map_tensors(found, lambda tensor: tensor.to(device))

    def _warn_uncached(self, fed: str, advice: str) -> None:
        if not self._warned_uncached:
            self._warned_uncached = True
            warn(f"the encoder {self._name!r} got {fed}, which is encoded each time{advice}", CacheWarning)

    def _warn_of_settings(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Warn once of plain values beside keys that are not the encoder's defaults: they have no effect."""
        given = (*enumerate(args), *kwargs.items())
        plain = tuple((name, value) for name, value in given if isinstance(value, _PLAIN))
        if self._warned_settings or plain == self._checked_settings:  # most batches get what the last one got
            return
        self._checked_settings = plain
        if settings := _other_than_defaults(self.encoder, args, kwargs):
            self._warned_settings = True
            warn(
                f"the encoder {self._name!r} got {', '.join(settings)} beside keys, which has no effect:"
                " embeddings are those of the time when the cache was filled; build it into the encoder, or"
                " leave the encoder uncached with CacheType.NONE",
                CacheWarning,
            )

    def _item_key(self, layout: tuple[Any, ...], item: tuple[Any, ...]) -> bytes:
        if self._extractor is None:
            *args, kwargs = _plain(map_leaves(layout, lambda _, value: _to_key_form(value), item))
            return item_key((args, kwargs), f"an item that the encoder {self._name!r} is fed")
        *given, named = _only_item(layout, item)
        features = [*given, *named.values()]
        return extracted_key(self._extractor, features[0] if len(features) == 1 else features)

    def _device(self, default: torch.device) -> torch.device:
        """The encoder's device; ``default`` if it has no weights."""
        if isinstance(self.encoder, nn.Module):
            # The first alone: a walk over all of a deep encoder's takes longer than a look-up.
            for tensor in itertools.chain(self.encoder.parameters(), self.encoder.buffers()):
                return tensor.device
        return default

    # Methods that act as the encoder's own

    def train(self, mode: bool = True) -> CachedEncoder:
        """Set the mode of this wrapper; the encoder stays in the mode in which it was cached."""
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The encoder's state, under the names that it has without this wrapper."""
        if isinstance(self.encoder, nn.Module):
            return self.encoder.state_dict(*args, **kwargs)
        return super().state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_first_values": first_values(self.encoder)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        values = state.pop("_first_values", {})
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        restore_first_values(self.encoder, values)
        self._detector.note_copy()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            encoder = self.__dict__.get("encoder") or self.__dict__.get("_modules", {}).get("encoder")
            if encoder is None or name.startswith("__"):
                raise
            return getattr(encoder, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute where reading finds it: the encoder's own, a layer say, on the encoder.

        Raises:
            InvalidValueError: it is the encoder itself.
        """
        if self._is_encoders(name):
            setattr(self.encoder, name, value)
        elif name == "encoder" and "_is_made" in vars(self) and value is not self.encoder:
            raise InvalidValueError(
                f"the cached encoder {self._name!r} keeps the encoder that it was made with; wrap the other"
                " one anew, with cache_embeddings or CachedEncoder"
            )
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_encoders(name):
            delattr(self.encoder, name)
        else:
            super().__delattr__(name)

    def _is_encoders(self, name: str) -> bool:
        """Whether an attribute is the encoder's, and none of this wrapper's."""
        own = vars(self)
        return (
            "_is_made" in own
            and name not in own
            and name != "encoder"
            and not hasattr(type(self), name)
            and hasattr(self.encoder, name)
        )


class _OutdatedLookup:
    """A table of the encoder before its weights changed.

    Args:
        lookup: the table's, without what lies on a device.
        digest: of the encoder then.
    """

    in_memory = True

    def __init__(self, lookup: Lookup, digest: str) -> None:
        self.cache = lookup.cache
        self.lookup, self.digest = copy.copy(lookup), digest

    def take(self, rows: torch.Tensor, device: torch.device) -> Any:
        """Raise an error: these are another encoder's embeddings."""
        raise InvalidValueError(
            "the weights of a cached encoder have changed since its embeddings "
            "were computed; call cache_embeddings again"
        )


def _table_for(digest: str, before: str, table: Lookup) -> Lookup:
    """A table once the encoder's digest has changed: weights may come back, as after an average of them was
    tried.
    """
    if not isinstance(table, _OutdatedLookup):
        return _OutdatedLookup(table, before)
    return table.lookup if table.digest == digest else table


def _carry_more_than_values() -> bool:
    """Whether tensors carry derivatives, batches or a trace that no look-up gives back."""
    jit: Any = torch.jit
    return (
        jit.is_tracing()
        or forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def open_store(store: Store | str | os.PathLike[str] | None, config: CacheConfig) -> Store:
    """The given or configured store. A store that is opened here has no RAM tier: embeddings are mapped.

    Raises:
        InvalidValueError: both are given.
    """
    if store is not None and config.save_dir is not None:
        raise InvalidValueError("give either store=... or CacheConfig(save_dir=...), not both")
    return (
        store
        if isinstance(store, Store)
        else Store(store if store is not None else config.save_dir, memory=0)
    )


def _prefix_weight_names(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Turn the names of weights that `state_dict` gives into those of the modules."""
    for name in [name for name in state if name.startswith(prefix)]:
        state[f"{prefix}encoder.{name[len(prefix) :]}"] = state.pop(name)


def _refresh_digest(module: CachedEncoder, keys: Any) -> None:
    module._refresh_digest()


def _learn_layout(batch: tuple[Any, ...]) -> tuple[int, Any]:
    """The number of items in a batch, and its layout; 0 and None if its parts disagree, or have no items."""
    lengths = _lengths(batch, _has_items) or _lengths(batch, _is_tuple_of_texts)
    if len(lengths) != 1:
        return 0, None
    (count,) = lengths
    return count, _layout_of(batch, count)


def _has_items(value: Any) -> bool:
    """Whether a part of a batch has one element for each item, whatever the other parts are."""
    if isinstance(value, torch.Tensor):
        return _is_dense(value) and value.ndim > 0
    return isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether items can be taken from a tensor: a sparse or nested one has none, and an item would lack the
    attributes that somebody has set on the tensor.
    """
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    return is_plain and all(name.startswith("_") for name in tensor.__dict__)


def _is_tuple_of_texts(value: Any) -> bool:
    """Whether a part may be the default collate's tuple of texts. Beside other parts it may be a constant."""
    return type(value) is tuple and bool(value) and all(type(item) in (str, bytes) for item in value)


def _lengths(value: Any, has_items: Callable[[Any], bool]) -> set[int]:
    """The lengths of all parts that have items."""
    if has_items(value):
        return {len(value)}
    if isinstance(value, tuple) or _is_mapping_of_parts(value):
        inner = value if isinstance(value, tuple) else value.values()
        return set().union(*(_lengths(one, has_items) for one in inner))
    return set()


def _is_mapping_of_parts(value: Any) -> bool:
    """Whether a mapping is its parts, and nothing else: another class may answer for names that it lacks."""
    cls = type(value)
    is_known = cls in (dict, OrderedDict) or (issubclass(cls, UserDict) and library_of_class(cls) is not None)
    return is_known and isinstance(value, Mapping)


def _layout_of(value: Any, count: int) -> Any:
    """The layout of a batch of ``count`` items.

    Elements of tensors, arrays, lists and tuples of texts belong to single items.
    """
    if _has_items(value):
        is_tensor, is_array = isinstance(value, torch.Tensor), isinstance(value, np.ndarray)
        return PerItem("tensor" if is_tensor else "numpy" if is_array else "list")
    if _is_tuple_of_texts(value) and len(value) == count:
        return PerItem("tuple")
    if _is_mapping_of_parts(value):
        layout = copy.copy(value)
        for name, inner in value.items():
            layout[name] = _layout_of(inner, count)
        return layout
    return (
        rebuild_sequence(value, [_layout_of(inner, count) for inner in value])
        if isinstance(value, tuple)
        else value
    )


def _to_key_form(value: Any) -> Any:
    """An item in the form that its key is made of. The dtype of an array of texts depends on its batch."""
    return value.tolist() if isinstance(value, np.ndarray) and value.dtype.kind in "USO" else value


def _plain(value: Any) -> Any:
    """A batch's parts as they count in keys: of a mapping of a library's, such as a tokenizer's result, its
    class and its parts.
    """
    if _is_mapping_of_parts(value):
        parts = {name: _plain(inner) for name, inner in value.items()}
        return parts if type(value) is dict else (full_name(type(value)), parts)
    return rebuild_sequence(value, [*map(_plain, value)]) if isinstance(value, tuple) else value


def _only_item(layout: Any, value: Any) -> Any:
    """The only item of a batch of one."""
    if isinstance(layout, PerItem):
        return value[0]
    if isinstance(layout, Mapping):
        return {name: _only_item(inner, value[name]) for name, inner in layout.items()}
    if isinstance(layout, tuple):
        return rebuild_sequence(
            value, [_only_item(inner, one) for inner, one in zip(layout, value, strict=True)]
        )
    return value


def _other_than_defaults(encoder: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """The plain values among the arguments of a call that are not the encoder's defaults, for a message."""
    try:
        parameters = inspect.signature(
            encoder.forward if isinstance(encoder, nn.Module) else encoder
        ).parameters
    except (TypeError, ValueError):  # a function of another language may have none
        parameters = MappingProxyType({})
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    named = {**dict(zip(defaults, args, strict=False)), **kwargs}
    return [
        f"{name}={value!r:.40}"
        for name, value in named.items()
        if isinstance(value, _PLAIN)
        and (type(value), value) != (type(defaults.get(name)), defaults.get(name))
    ]


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor) and not _is_dense(value):
        return f"a {type(value).__name__} that is sparse or nested, or has attributes"
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}" + (
        f" of {len(value)}" if isinstance(value, list | tuple | Mapping) else ""
    )
