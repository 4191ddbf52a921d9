"""States of tokens without their padding: a mask removes it from outputs, and a mask adds it again.

The padding of a batch depends on its other items, so padding is no part of an item's embedding. Knows no
tables.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from castore.adapters.embeddings.batch_places import map_leaves, rebuild_sequence
from castore.errors import InvalidValueError


def get_mask(kwargs: Mapping[str, Any], keyword: str, name: str) -> torch.Tensor:
    """The mask (B, L), as bool, among the arguments of an encoder.

    Raises:
        InvalidValueError: there is none, or it marks nothing of an item, as a mask of the padding may do.
    """
    mask = kwargs.get(keyword)
    if type(mask) is not torch.Tensor or mask.ndim != 2:
        got = "nothing" if mask is None else f"a {type(mask).__name__} of {tuple(getattr(mask, 'shape', ()))}"
        raise InvalidValueError(
            f"the encoder {name!r} needs its mask (see CacheConfig.masks) as {keyword}=..., a tensor (B, "
            f"L), and got {got}; call it with {keyword}=..., and name the place of the mask with "
            f"encoders={{{name!r}: {{{keyword!r}: ...}}}}"
        )
    marked = mask.bool()
    if not bool(marked.any(1).all()):
        raise InvalidValueError(
            f"the mask {keyword!r} of the encoder {name!r} is false everywhere for an item; it must be true "
            "where the item is and false where padding is: pass the inverted mask, and invert it in the "
            "encoder"
        )
    return marked


def remove_padding(outputs: Any, mask: torch.Tensor) -> Any:
    """Outputs with a list of tensors (length, D) in the place of each tensor (B, L, D).

    Raises:
        InvalidValueError: no tensor's first dimensions are those of the mask.
    """
    found = []

    def cut(leaf: Any, _: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.ndim != 3 or leaf.shape[:2] != mask.shape:
            return leaf
        found.append(leaf)
        return [states[own] for states, own in zip(leaf, mask.to(leaf.device), strict=True)]

    cut_outputs = map_leaves(outputs, cut)
    if not found:
        raise InvalidValueError(
            f"no output has the shape (B, L, D) with the (B, L) of the mask, {tuple(mask.shape)}; leave the "
            "encoder out of CacheConfig.masks"
        )
    return cut_outputs


def add_padding(outputs: Any, mask: torch.Tensor) -> Any:
    """Outputs with a tensor (B, L, D), zeros where the mask is false, in the place of each list of tensors.

    Raises:
        InvalidValueError: the mask marks more or fewer elements of an item than there are.
    """
    if isinstance(outputs, dict):
        changed = copy.copy(outputs)
        for name, value in outputs.items():
            changed[name] = add_padding(value, mask)
        return changed
    if isinstance(outputs, tuple):
        return rebuild_sequence(outputs, [add_padding(value, mask) for value in outputs])
    if not isinstance(outputs, list) or not isinstance(outputs[0], torch.Tensor):
        return outputs
    lengths, marked = [len(states) for states in outputs], mask.sum(1).tolist()
    if lengths != marked:
        raise InvalidValueError(
            f"the mask marks {marked} elements of these items, and {lengths} were kept; "
            "pass the mask that belongs to the keys"
        )
    values = torch.cat(outputs)
    whole = values.new_zeros((*mask.shape, *values.shape[1:]))
    whole[mask.to(values.device)] = values
    return whole
