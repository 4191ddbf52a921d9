"""cache_embeddings: fills the tables of a model's frozen encoders, and has model and loaders use them.

The order is: check the arguments, fill the tables, and only then change the model and make the loaders. So an
error leaves both as they were.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from castore import Store
from castore.adapters.embeddings.batch_places import Place, RestOfBatch, is_covered, learn_layout
from castore.adapters.embeddings.cache import EmbeddingCache
from castore.adapters.embeddings.config import CacheConfig, CacheType
from castore.adapters.embeddings.dataset_pass import DatasetPass, Extractors, KeyedCollate
from castore.adapters.embeddings.devices import (
    DeviceLookup,
    Lookup,
    MappedLookup,
    SplitLookup,
    fits_on_device,
)
from castore.adapters.embeddings.encoder import CachedEncoder, open_store
from castore.adapters.embeddings.encoder_inputs import (
    EncoderCalls,
    encoder_names,
    find_calls,
    get_encoder,
    set_encoder,
)
from castore.adapters.embeddings.frozen_encoders import preserve_random_state
from castore.adapters.embeddings.loaders import (
    JoinedDataset,
    KeyColumn,
    SampleKeys,
    StreamingCollate,
    check_features,
    collate_first_samples,
    is_cached,
    joined_loader,
    replaced_loader,
    streaming_loader,
)
from castore.adapters.embeddings.table_identity import code_digest, data_digest, table_name
from castore.errors import InvalidValueError, StoreError
from castore.system.job_rank import job_rank


def cache_embeddings(
    model: nn.Module,
    train_loader: DataLoader[Any],
    val_loader: DataLoader[Any] | None = None,
    config: CacheConfig | None = None,
    encoders: Any = None,
    store: Store | str | os.PathLike[str] | None = None,
    *,
    progress: bool | None = None,
) -> tuple[DataLoader[Any], DataLoader[Any] | None]:
    """Run the frozen encoders of a model once over the data, and train on their embeddings from then on.

    A `CachedEncoder` takes each encoder's place in the model. Batches of the returned loaders hold Keys in
    the place of its features, so the training loop and ``model(x)`` stay as they are. Items that any process
    or run encoded before are not encoded again.

    Args:
        model: holds the encoders. They must be frozen: no parameter requires grad, no dropout or batch norm
            in train mode.
        train_loader, val_loader: of map-style datasets that give the same sample for an index every time, or
            of iterable ones, which need a key extractor. Not changed.
        config: see `CacheConfig`.
        encoders: names of submodules ("text", "backbone.image"), or a dict from such a name to the place of
            its input in a batch. A place is a path as 1, "image" or (0, "image"); a function that picks it
            from a batch; a dict of paths by keyword, for an encoder of several inputs; or a list of such, for
            an encoder that is called several times. By default every direct child whose parameters are all
            frozen, fed with the batch's first element.
        store: a `castore.Store`, or the folder of one, in place of ``config.save_dir``.
        progress: show a bar; None: on a terminal.

    Returns:
        the loaders to train with.

    Raises:
        InvalidValueError: an encoder is not frozen, a name or a place does not exist, the data is random, or
            labels cannot be kept; the message names it.
        UnhashableError: an encoder, a dataset or the collate function has no fingerprint; the message names
            it.
    """
    loaders = {"train": train_loader, **({} if val_loader is None else {"val": val_loader})}
    cached = cache_loaders(
        model,
        loaders,
        config or CacheConfig(),
        encoders,
        store,
        progress=progress,
    )
    return cached["train"], cached.get("val")


def cache_loaders(
    model: nn.Module,
    loaders: Mapping[str, DataLoader[Any]],
    config: CacheConfig,
    encoders: Any = None,
    store: Store | str | os.PathLike[str] | None = None,
    *,
    progress: bool | None = None,
) -> dict[str, DataLoader[Any]]:
    """`cache_embeddings` for any number of loaders, by their role."""
    _check_kinds(loaders, config)
    names = encoder_names(model, encoders)
    config.check_names(names)
    if all(config.type_of(name) is CacheType.NONE for name in names):
        raise InvalidValueError("every encoder is CacheType.NONE: there is nothing to cache")
    _check_names_differ(loaders, config)
    with preserve_random_state():
        place = open_store(store, config)
        stand_ins = _make_stand_ins(model, names, config, place)
        plans = [
            _LoaderPlan.make(stand_ins, encoders, config, place, role, loader)
            for role, loader in loaders.items()
        ]
        for plan in plans:
            plan.fill(stand_ins, config, progress)
        changed = {plan.role: plan.make_loader(stand_ins, config) for plan in plans}
    for name, stand_in in stand_ins.items():
        set_encoder(model, name, stand_in)
    return changed


def _check_kinds(loaders: Mapping[str, object], config: object) -> None:
    for role, loader in loaders.items():
        if not isinstance(loader, DataLoader):
            raise InvalidValueError(f"the {role} loader is a {type(loader).__name__}; give a DataLoader")
        if is_cached(loader):
            raise InvalidValueError(
                f"the {role} loader comes from cache_embeddings; give the loader that it was made from"
            )
    if not isinstance(config, CacheConfig):
        raise InvalidValueError(f"config is a {type(config).__name__}; give a CacheConfig")


def _check_names_differ(loaders: Mapping[str, DataLoader[Any]], config: CacheConfig) -> None:
    """Check that no two datasets have one given name while their items are known by index alone."""
    named: dict[str, Any] = {}
    for role, loader in loaders.items():
        if role not in config.fingerprints or config.key_extractors is not None:
            continue
        name = repr(config.fingerprints[role])
        if named.setdefault(name, loader.dataset) is not loader.dataset:
            raise InvalidValueError(
                f"fingerprints gives two datasets the name {name}, so items of the same index would share an "
                "embedding; give the datasets different names, or give a key extractor"
            )


def _make_stand_ins(
    model: nn.Module, names: list[str], config: CacheConfig, store: Store
) -> dict[str, CachedEncoder]:
    """The CachedEncoder for each encoder; an existing one keeps its tables, and its column of Keys."""
    made = {}
    taken = [module._column for module in model.modules() if isinstance(module, CachedEncoder)]
    for name in names:
        if config.type_of(name) is CacheType.NONE:
            continue
        there = get_encoder(model, name)
        if isinstance(there, CachedEncoder):
            _check_same_mask(there, config.masks.get(name), name)
            there._reconfigure(_without_folder(config), store, name)
        else:
            there = CachedEncoder(there, _without_folder(config), name=name, store=store)
            there._column = 1 + max(taken, default=-1)
            taken.append(there._column)
        made[name] = there
    return made


def _check_same_mask(there: CachedEncoder, mask: str | None, name: str) -> None:
    """Check that an encoder which was cached before has the mask that is now given for it."""
    before = there._config.masks.get(there._name)
    if before != mask:
        raise InvalidValueError(
            f"the encoder {name!r} is cached already, with masks={before!r}, and keeps that; give the same"
            f" now, not {mask!r}, or make the model anew"
        )


def _without_folder(config: CacheConfig) -> CacheConfig:
    return CacheConfig(**{**vars(config), "save_dir": None})


@dataclass
class _LoaderPlan:
    """The work for one loader.

    Attributes:
        role: "train" or "val", for example.
        raw: the original loader.
        encoders: the cached ones.
        places: of inputs that Keys replace.
        columns: for each column of Keys: number of its place, number of its encoder, number of its call among
            all.
        dataset_pass: the pass that fills the tables.
        has_labels: whether labels are kept.
        seen: for a stream, the keys of each encoder's items.
    """

    role: str
    raw: DataLoader[Any]
    encoders: list[EncoderCalls]
    places: list[Place]
    columns: list[tuple[int, int, int]]
    dataset_pass: DatasetPass
    has_labels: bool
    seen: list[list[Any]]

    @classmethod
    def make(
        cls,
        stand_ins: Mapping[str, CachedEncoder],
        encoders: Any,
        config: CacheConfig,
        store: Store,
        role: str,
        loader: DataLoader[Any],
    ) -> _LoaderPlan:
        """Read the first samples, and name the tables."""
        first = collate_first_samples(loader, role)
        found, left_alone = find_calls(stand_ins, encoders, first.one)
        layout = learn_layout(first.one, first.others, first.sizes)
        inputs = dict.fromkeys(place for source in found for call in source.calls for place in call.places)
        check_features(first, layout, [*inputs], role)
        extractors: Extractors = {
            source.number: extractor for source in found if (extractor := config.extractor_of(source.name))
        }
        is_stream = isinstance(loader.dataset, IterableDataset)
        for source in found if is_stream else ():
            if source.number not in extractors:
                raise InvalidValueError(
                    f"the {role} loader's dataset is iterable, so its items have no index: give a key "
                    f"extractor for the encoder {source.name!r} with CacheConfig(key_extractors=...)"
                )
        places, columns = _key_columns(found, config)
        has_labels = not is_stream and _keeps_labels(config, first.one, places, left_alone)
        rest = None
        if has_labels:
            rest = RestOfBatch(layout, places)
            rest.check(first.one, first.others)
        identity = _identity(config, role, loader, extractors, store)
        tables = [
            _open_table(source, stand_ins[source.name].digest, identity, config, store) for source in found
        ]
        index = None
        if not is_stream and (extractors or (rest is not None and rest.leaves)):
            parts = {**identity, "labels": has_labels, "places": places}
            parts |= {"calls": [source.calls for source in found if source.number in extractors]}
            index = EmbeddingCache(table_name("labels", parts), store, resident=True)
        dataset_pass = DatasetPass(loader, found, extractors, tables, index, rest, layout)
        return cls(role, loader, found, places, columns, dataset_pass, has_labels, [])

    def fill(
        self, stand_ins: Mapping[str, CachedEncoder], config: CacheConfig, progress: bool | None
    ) -> None:
        """Encode what is missing."""
        self.seen = self.dataset_pass.fill(
            [stand_ins[source.name]._encode for source in self.encoders],
            batch_size=config.batch_size,
            num_workers=config.num_workers or 0,
            start=_start_part(self.dataset_pass.is_shared),
            label=self.role,
            progress=progress,
        )
        for source in self.encoders:
            stand_ins[source.name]._settle()

    def make_loader(self, stand_ins: Mapping[str, CachedEncoder], config: CacheConfig) -> DataLoader[Any]:
        """The loader to train with."""
        is_stream = isinstance(self.raw.dataset, IterableDataset)
        if is_stream:
            pairs = zip(self.dataset_pass.tables, self.seen, strict=True)
            by_encoder = [table.rows(keys) for table, keys in pairs]
        else:
            rows = self.dataset_pass.rows()
            if bool((rows < 0).any()):
                raise StoreError(
                    "embeddings were removed right after they were stored; the store is too small for them "
                    "(raise max_size), or another program deletes from it"
                )
            by_encoder = [rows[:, numbers].flatten() for numbers in _call_numbers(self.encoders)]
        first_keys = [
            stand_ins[source.name]._add_table(
                _place_table(self.dataset_pass.tables[source.number], own, stand_ins[source.name], config)
            )
            for source, own in zip(self.encoders, by_encoder, strict=True)
        ]
        columns = [
            KeyColumn(place, stand_ins[self.encoders[number].name]._column, call, first_keys[number])
            for place, number, call in self.columns
        ]
        if is_stream:
            gather = KeyedCollate(self.raw.collate_fn, self.encoders, self.dataset_pass.extractors)
            collate = StreamingCollate(
                self.raw.collate_fn, gather, self.dataset_pass.tables, columns, self.places
            )
            return streaming_loader(self.raw, collate)
        keys = SampleKeys(rows, columns, len(self.places))
        if self.dataset_pass.rest is not None:
            return joined_loader(
                self.raw, JoinedDataset(keys, self.dataset_pass.rest, self.dataset_pass.index)
            )
        return replaced_loader(self.raw, keys, self.places)


def _identity(
    config: CacheConfig, role: str, loader: DataLoader[Any], extractors: Extractors, store: Store
) -> dict[str, object]:
    """Fingerprints of everything that all tables of a loader's data depend on."""
    given = config.fingerprints
    named = {
        number: code_digest(extractor, "key_extractors", given.get("key_extractors"), store)
        for number, extractor in extractors.items()
    }
    return {
        "dataset": data_digest(loader.dataset, role, given.get(role), store),
        "collate": code_digest(loader.collate_fn, "collate", given.get("collate"), store),
        "key_extractors": named,
    }


def _open_table(
    source: EncoderCalls, digest: str, identity: Mapping[str, object], config: CacheConfig, store: Store
) -> EmbeddingCache:
    named = identity["key_extractors"]
    assert isinstance(named, dict)
    parts = {
        **identity,
        "key_extractors": named.get(source.number),
        "encoder": digest,
        "calls": source.calls,
        "dtype": str(config.dtype),
        "mask": config.masks.get(source.name),
    }
    kind = config.type_of(source.name)
    return EmbeddingCache(
        table_name(getattr(source.encoder, "__name__", type(source.encoder).__name__), parts),
        store,
        dtype=config.dtype,
        resident=kind in (CacheType.CPU, CacheType.AUTO),
    )


def _keeps_labels(config: CacheConfig, batch: Any, places: list[Place], left_alone: list[Place]) -> bool:
    if config.labels is not None:
        return config.labels
    if left_alone:
        return False
    # The first element is the features; the others are labels.
    return isinstance(batch, Mapping) or () in places or is_covered(batch[0], (0,), places)


def _key_columns(
    encoders: list[EncoderCalls], config: CacheConfig
) -> tuple[list[Place], list[tuple[int, int, int]]]:
    """All places that Keys replace, and a column for each of an encoder's places.

    A column is the number of the place, the number of the encoder, and the number of the call among all.
    Masks are not replaced: they are needed to pad the encoder's outputs.
    """
    places: list[Place] = []
    columns = []
    calls = 0
    for source in encoders:
        for call in source.calls:
            mask = config.masks.get(source.name)
            for place in call.places_without(mask):
                if place not in places:
                    places.append(place)
                columns.append((places.index(place), source.number, calls))
            calls += 1
    return places, columns


def _call_numbers(encoders: list[EncoderCalls]) -> list[list[int]]:
    """The numbers of each encoder's calls among all calls."""
    numbers, calls = [], 0
    for source in encoders:
        numbers.append(list(range(calls, calls + len(source.calls))))
        calls += len(source.calls)
    return numbers


def _place_table(
    table: EmbeddingCache, rows: torch.Tensor, stand_in: CachedEncoder, config: CacheConfig
) -> Lookup:
    kind = config.type_of(stand_in._name)
    rows = torch.unique(rows)  # sorted
    if kind is CacheType.AUTO and fits_on_device(table, rows, stand_in._device(torch.device("cpu"))):
        kind = CacheType.GPU
    if kind is not CacheType.GPU:
        return MappedLookup(table)
    return SplitLookup(table, rows) if config.split else DeviceLookup(table, rows)


def _start_part(is_shared: bool) -> float:
    """The part of the samples, from 0 to 1, at which this rank begins.

    Each rank of a node has another one, or each rank of the job if its nodes share blocks.
    """
    rank, size = int(os.environ.get("LOCAL_RANK") or 0), int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if is_shared:
        rank, size = job_rank()
    return rank / max(size, 1)
