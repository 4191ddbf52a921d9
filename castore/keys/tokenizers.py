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

from blake3 import blake3

from castore.keys.beside_code import BACKEND
from castore.keys.classes import full_name
from castore.keys.encoder import Encoder
from castore.keys.pickled import state_parts

#: Attributes of a `transformers` tokenizer that its use changes, or that only make it faster.
_NOISE = {"_tokenizer", "cache", "deprecation_warnings", "_in_target_context_manager", "verbose"}
#: Canonical bytes of the latest rules, by digest of their text, and all else that the bytes depend on.
_encoded: dict[tuple[bytes, bool, bool], bytes] = {}
_MOST_ENCODED = 16
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
    text = rules.to_str() if rules is not None and hasattr(rules, "to_str") else "null"
    yield from ("transformers tokenizer", encoder.part(type(value)), _encoded_rules(encoder, text))
    if getattr(rules, "encode_special_tokens", False):
        yield "encode_special_tokens"
    state = value.__getstate__() if _own_getstate(value) else vars(value)
    yield from state_parts(encoder, {name: item for name, item in state.items() if name not in _NOISE})


def _encoded_rules(encoder: Encoder, text: str) -> bytes:
    """The canonical bytes of a tokenizer's rules, from their JSON."""
    counts_all = BACKEND in encoder.marks
    if encoder.watch is not None:  # wants to see each part
        return encoder.part(_parsed(text, counts_all))
    # With 120,000 words, parsing and encoding takes seven times as long as asking for the text.
    digest = blake3(text.encode("utf-8", "surrogatepass")).digest()
    code = _encoded.get((digest, counts_all, encoder.ordered))
    if code is None:
        code = encoder.part(_parsed(text, counts_all))
        while len(_encoded) >= _MOST_ENCODED:
            _encoded.pop(next(iter(_encoded)), None)
        _encoded[digest, counts_all, encoder.ordered] = code
    return code


def _parsed(text: str, counts_all: bool) -> Any:
    rules = json.loads(text)
    if not counts_all and rules is not None:
        rules.pop("truncation", None)
        rules.pop("padding", None)
    return rules


def _own_getstate(value: Any) -> bool:
    return getattr(type(value), "__getstate__", None) is not getattr(object, "__getstate__", None)
