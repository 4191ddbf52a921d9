"""Fingerprints of tokenizers: by their rules, not by what using them leaves behind.

A call of a tokenizer of `transformers` sets truncation and padding in the rules behind it (Hugging Face datasets' issues
3638, 3847, 6179), and some keep caches. These are left out here, so that a tokenizer that was used is the same as a
new one. Nothing is imported for this: whoever holds a tokenizer has its library.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

#: What using a tokenizer of `transformers` changes, or what only speeds it up.
_NOISE = {"_tokenizer", "cache", "deprecation_warnings", "_in_target_context_manager", "verbose"}
_BASES = {
    "transformers.tokenization_utils_base.PreTrainedTokenizerBase",
    "transformers.tokenization_utils_base.SpecialTokensMixin",
}


def tokenizer_parts(value: Any) -> Callable[[Any, Any], Iterator[Any]] | None:
    """What makes the parts of a tokenizer, given an `InstanceEncoder` and it; None if ``value`` is none."""
    rules = getattr(sys.modules.get("tokenizers"), "Tokenizer", None)
    if inspect.isclass(rules) and issubclass(type(value), rules):
        return _rules
    bases = {f"{base.__module__}.{base.__qualname__}" for base in type(value).__mro__}
    return _transformers if bases & _BASES else None


def _rules(encoder: Any, value: Any) -> Iterator[Any]:
    yield from ("tokenizer", type(value).__module__, value.to_str())


def _transformers(encoder: Any, value: Any) -> Iterator[Any]:
    encoder._met[id(value)] = (len(encoder._met), value)
    rules = getattr(value, "_tokenizer", None)
    told = None
    if rules is not None and hasattr(rules, "to_str"):
        told = json.loads(rules.to_str())
        told.pop("truncation", None)
        told.pop("padding", None)
    yield from ("transformers tokenizer", encoder.part(type(value)), encoder.part(told))
    state = value.__getstate__() if _own_getstate(value) else vars(value)
    yield from encoder.state({name: item for name, item in state.items() if name not in _NOISE})


def _own_getstate(value: Any) -> bool:
    return getattr(type(value), "__getstate__", None) is not getattr(object, "__getstate__", None)
