"""The inputs of encoders: which encoders of a model are cached, and where in a batch their inputs are.

Knows models and batches, no tables. An encoder has one call or several (one for the query, one for the
document). A call has one input, or several by keyword.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from castore.adapters.embeddings.batch_places import (
    Place,
    find_place,
    format_place,
    get_at,
    parse_place,
    select_items,
)
from castore.adapters.embeddings.config import check_name_among
from castore.adapters.embeddings.encoder import CachedEncoder
from castore.adapters.embeddings.frozen_encoders import why_not_frozen
from castore.errors import InvalidValueError


@dataclass(frozen=True)
class Call:
    """One call of an encoder: the places of its inputs, by keyword, or a single one."""

    places: tuple[Place, ...]
    keywords: tuple[str, ...] = ()

    def places_without(self, keyword: str | None) -> list[Place]:
        """The places of all inputs but that of a keyword."""
        if not self.keywords:
            return [*self.places]
        return [place for place, name in zip(self.places, self.keywords, strict=True) if name != keyword]

    def read(self, batch: Any) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments."""
        values = [get_at(batch, place) for place in self.places]
        return ([], dict(zip(self.keywords, values, strict=True))) if self.keywords else (values, {})

    def read_items(self, batch: Any, layout: Any, positions: list[int]) -> tuple[list[Any], dict[str, Any]]:
        """The same for some items of the batch."""
        values = [
            select_items(get_at(layout, place), get_at(batch, place), positions) for place in self.places
        ]
        return ([], dict(zip(self.keywords, values, strict=True))) if self.keywords else (values, {})

    def feature(self, sample: Any) -> Any:
        """A key extractor's argument: the same places in a sample, or the sample if it lacks them."""
        try:
            values = [get_at(sample, place) for place in self.places]
        except InvalidValueError:
            return sample
        return dict(zip(self.keywords, values, strict=True)) if self.keywords else values[0]


@dataclass(frozen=True)
class EncoderCalls:
    """An encoder of a model, and its calls.

    Attributes:
        name: in the model, with dots.
        encoder: the module or function, without a CachedEncoder around it.
        calls: its calls.
        number: its index among the cached encoders.
    """

    name: str
    encoder: Any
    calls: tuple[Call, ...]
    number: int


def encoder_names(model: nn.Module, encoders: Any) -> list[str]:
    """The names of the encoders that the user gives; by default every child whose parameters are all frozen.

    Raises:
        InvalidValueError: there is none of that name, or none at all.
    """
    if encoders is not None:
        children = [name for name, _ in model.named_modules() if name]
        names = [encoders] if not isinstance(encoders, list | tuple | Mapping) else list(encoders)
        for name in names:
            if not isinstance(name, str):
                raise InvalidValueError(
                    f"encoders holds a {type(name).__name__}; give names: {', '.join(map(repr, children))}"
                )
            if get_encoder(model, name) is None:
                check_name_among(name, children, f"encoders names {name!r}")
        return names
    reasons = []
    found = []
    for name, child in model.named_children():
        frozen = [not parameter.requires_grad for parameter in child.parameters()]
        if frozen and all(frozen):
            found.append(name)
        else:
            reasons.append(f"{name!r} ({why_not_frozen(child) or 'it has no parameters'})")
    if not found:
        if hasattr(model, "_orig_mod"):
            raise InvalidValueError(
                "the model is compiled, which hides its children: call cache_embeddings before torch.compile,"
                " or name the encoders with encoders=..."
            )
        raise InvalidValueError(
            f"no child of the model is frozen: {', '.join(reasons) or 'it has none'}; freeze one, or name "
            "the encoders with encoders=..."
        )
    return found


def find_calls(
    cached: Mapping[str, CachedEncoder], encoders: Any, batch: Any
) -> tuple[list[EncoderCalls], list[Place]]:
    """The calls of the encoders to cache, and the places of inputs of the other encoders.

    Args:
        cached: the encoders to cache, by name.
        encoders: the user's argument, which may name others too.
        batch: one, as the loader makes it.

    Raises:
        InvalidValueError: an input is not at its place, or a cached encoder shares one with an encoder that
            is not cached.
    """
    places = encoders if isinstance(encoders, Mapping) else {}
    found = [
        EncoderCalls(name, stand_in.encoder, _parse_calls(name, places.get(name), batch), number)
        for number, (name, stand_in) in enumerate(cached.items())
    ]
    alone = [(name, where) for name, where in places.items() if name not in cached]
    others = [
        place for name, where in alone for call in _parse_calls(name, where, batch) for place in call.places
    ]
    _check_disjoint(found, others)
    return found, others


def set_encoder(model: nn.Module, name: str, value: Any) -> None:
    """Put a value in the place of an encoder."""
    parent, _, last = name.rpartition(".")
    setattr(get_encoder(model, parent) if parent else model, last, value)


def get_encoder(model: Any, name: str) -> Any:
    """The value in the place of an encoder, which may be a CachedEncoder; None if there is none."""
    for part in name.split("."):
        model = getattr(model, part, None)
    return model


def _parse_calls(name: str, where: Any, batch: Any) -> tuple[Call, ...]:
    given = where if isinstance(where, list) else [where]
    if not given:
        raise InvalidValueError(f"encoders[{name!r}] is an empty list; name the place of its input")
    calls = tuple(_parse_call(name, one, batch) for one in given)
    for call in calls:
        call.read(batch)  # raises an error that lists what is there
    return calls


def _parse_call(name: str, where: Any, batch: Any) -> Call:
    if where is None:
        return Call((_default_place(name, batch),))
    if isinstance(where, Mapping):
        return Call(tuple(_parse_place(name, place, batch) for place in where.values()), tuple(where))
    return Call((_parse_place(name, where, batch),))


def _parse_place(name: str, where: Any, batch: Any) -> Place:
    if not callable(where):
        return parse_place(where)
    found = find_place(batch, where(batch))
    if found is None:
        raise InvalidValueError(
            f"the input of the encoder {name!r} is not a part of the batch but computed from it; give the "
            "place of that part, such as (0, 'image'), and compute the input in the encoder or in the "
            "collate function"
        )
    return found


def _default_place(name: str, batch: Any) -> Place:
    if isinstance(batch, Mapping):
        raise InvalidValueError(
            f"a batch has the names {', '.join(map(repr, batch))}; choose the input of the encoder with "
            f"encoders={{{name!r}: ...}}"
        )
    # A list of items is a batch of samples that are features alone.
    structured = isinstance(batch, tuple) or (
        isinstance(batch, list) and not isinstance(batch[0], str | bytes)
    )
    return (0,) if structured else ()


def _check_disjoint(cached: list[EncoderCalls], others: list[Place]) -> None:
    """Check that no input lies inside another, and that none also feeds an encoder that is not cached."""
    owners: dict[Place, str] = {}
    for source in cached:
        for place in (place for call in source.calls for place in call.places):
            for other, owner in owners.items():
                if other != place and (other[: len(place)] == place or place[: len(other)] == other):
                    raise InvalidValueError(
                        f"the input of the encoder {source.name!r} is {format_place(place)} and that of "
                        f"{owner!r} is {format_place(other)}, and one contains the other; give both the "
                        "same place, or places that do not overlap"
                    )
            owners[place] = source.name
    for place in others:
        for other, owner in owners.items():
            if other[: len(place)] == place or place[: len(other)] == other:
                raise InvalidValueError(
                    f"{format_place(place)} is the input of the encoder {owner!r}, which is cached, and of "
                    "one that is not (CacheType.NONE); give the other encoder's input a place of its own, "
                    "or cache both"
                )
