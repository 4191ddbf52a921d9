"""Fingerprints of tokenizers: by their rules, without the state that use leaves behind.

A call of a `transformers` tokenizer changes truncation and padding in its rules (issues 3638, 3847 and 6179
of Hugging Face datasets), and some tokenizers keep caches. Rules of truncation and padding, and caches, are
left out, so a used tokenizer has the same fingerprint as a new one. Where some of the code uses the rules
past the tokenizer (``tokenizer.backend_tokenizer.encode``), truncation and padding count. Imports nothing: a
process with a tokenizer has imported its library.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from typing import Any

from castore.keys.beside_code import BACKEND
from castore.keys.classes import full_name
from castore.keys.encoder import Encoder
from castore.keys.pickled import state_parts

#: Attributes of a `transformers` tokenizer that its use changes, or that only make it faster.
_NOISE = {"_tokenizer", "cache", "deprecation_warnings", "_in_target_context_manager", "verbose"}
_BASES = {
    "transformers.tokenization_utils_base.PreTrainedTokenizerBase",
    "transformers.tokenization_utils_base.SpecialTokensMixin",
}


def tokenizer(encoder: Encoder, value: Any) -> bytes | None:
    """The rule for tokenizers."""
    rules = getattr(sys.modules.get("tokenizers"), "Tokenizer", None)
    if inspect.isclass(rules) and issubclass(type(value), rules):
        return encoder.tagged(*_rules(value))
    if any(full_name(base) in _BASES for base in type(value).__mro__):
        return encoder.tagged(*_transformers(encoder, value))
    return None


def _rules(value: Any) -> Iterator[Any]:
    yield from ("tokenizer", type(value).__module__, value.to_str())
    # The text of the rules lacks this one.
    if getattr(value, "encode_special_tokens", False):
        yield "encode_special_tokens"


def _transformers(encoder: Encoder, value: Any) -> Iterator[Any]:
    encoder.number(value)
    rules = getattr(value, "_tokenizer", None)
    parsed = None
    if rules is not None and hasattr(rules, "to_str"):
        parsed = json.loads(rules.to_str())
        if BACKEND not in encoder.marks:
            parsed.pop("truncation", None)
            parsed.pop("padding", None)
    yield from ("transformers tokenizer", encoder.part(type(value)), encoder.part(parsed))
    if getattr(rules, "encode_special_tokens", False):
        yield "encode_special_tokens"
    state = value.__getstate__() if _own_getstate(value) else vars(value)
    yield from state_parts(encoder, {name: item for name, item in state.items() if name not in _NOISE})


def _own_getstate(value: Any) -> bool:
    return getattr(type(value), "__getstate__", None) is not getattr(object, "__getstate__", None)
