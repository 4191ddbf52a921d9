"""Names of tables: they change when an embedding may have changed, and at no other time.

An encoder counts by its weights and buffers, by the code of its classes (followed through the user's own
modules) and by its attributes; a tokenizer counts by its rules. Traces of use do not count: attributes that
``forward`` only counts with, and the bookkeeping of libraries. Of an attribute that ``forward`` assigns, the
value counts that it had when the module was first hashed: ``self.mean = self.mean.to(x.device)`` moves a
setting. Train mode does not count either, unless a module's own code reads it: torch's modules that differ in
training are refused. Must never give a random answer: anything without a stable hash is an UnhashableError
with the remedy.
"""

from __future__ import annotations

import inspect
import re
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import nn

from castore.adapters.embeddings.frozen_encoders import process_settings, reads_train_mode
from castore.adapters.noted_values import only_observes
from castore.adapters.torch import ADVICE, key_and_doubts
from castore.errors import InvalidValueError, UnhashableError
from castore.keys.bytecode import attributes_read_of, attributes_replaced_of, attributes_set_of
from castore.keys.classes import has_member, per_class
from castore.keys.encoder import Encoder, UnencodableError
from castore.keys.encoder import key as key_of_config
from castore.keys.functions import orders, uncompiled
from castore.keys.libraries import library_of_class
from castore.keys.objects import OBJECTS
from castore.keys.pickled import lasting, marks_of, pickled_attributes, state_parts
from castore.keys.registry import Rules, Table
from castore.keys.torch_modules import IN_ORDER, order_of_parts, patched_methods
from castore.keys.tracing import Encoded, encode
from castore.keys.values import (
    random_rows,
    refuse_random,
    scripted_module,
    tensor_values,
)
from castore.store import Store

_VERSION = b"castore.encoder.1"
_DIGITS = 40
_KEY_BYTES = 16
# Attributes of torch's modules that do not affect their output.
_MODULE_NOISE = {
    "training", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
    "_compiled_call_impl", "_is_torch_compile", "_compile_kwargs", "__overloads__",
    "_flat_weight_refs",
}  # fmt: skip
# Bookkeeping of transformers and sentence_transformers, and the place from which a model was loaded.
_LIBRARY_NOISE = frozenset({
    "model_card_data", "_model_card_vars", "_model_card_text", "_method_signature_cache",
    "_prompt_length_mapping",
    "_chat_template_suffix_cache", "_modules_placed", "_device_map", "_target_device", "_is_hf_initialized",
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures",
    "_output_capturing_hooks_installed",
    # of Lightning's modules
    "_trainer", "_fabric", "_fabric_optimizers", "_current_fx_name", "_param_requires_grad_state",
})  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Methods that make an object, and do not run it.
_MAKING = ("__init__", "__post_init__", "__setstate__")


def encoder_digest(encoder: Any, name: str, given: object = None, store: Store | None = None) -> str:
    """40 hexadecimal digits that identify what an encoder computes.

    Args:
        encoder: a module or any callable.
        name: its name in the message of an error.
        given: a text or a config that stands for it; None to hash the encoder.
        store: remembers which parts of it look random; None: they are not remembered.

    Raises:
        UnhashableError: a part of it has no stable hash; the message has the path to it.

    Warns:
        RuntimeWarning: the parts that look random have changed since the last run, and nothing else has.

    >>> first, again = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> encoder_digest(first, "encoder") == encoder_digest(again, "encoder")
    False
    >>> _ = again.load_state_dict(first.state_dict())
    >>> encoder_digest(first, "encoder") == encoder_digest(again.eval(), "encoder")
    True
    """
    digits = _digest(encoder, f"encoder {name!r}", name, given, store)
    around = _process_parts(name) if given is None else []
    return digits if not around else key_of_config([digits, *around])


def code_digest(
    function: Callable[..., Any] | None, what: str, given: object = None, store: Store | None = None
) -> str:
    """40 hexadecimal digits that identify a user's function, such as a collate function.

    See `encoder_digest`.
    """
    return _digest(function, what, what, given, store)


def data_digest(dataset: Any, role: str, given: object = None, store: Store | None = None) -> str:
    """40 hexadecimal digits that identify a dataset, by `castore.adapters.torch.dataset_key`.

    See `encoder_digest`.

    Raises:
        UnhashableError: the dataset has no fingerprint; the message names the part and the remedy.
    """
    if given is not None:
        return key_of_config(given)
    try:
        digits, doubts = key_and_doubts(dataset)
    except UnhashableError as error:
        problem = str(error).removesuffix(ADVICE)
        raise UnhashableError(f"the {role} loader's {problem}; {_remedy(role)}") from None
    if doubts is not None and store is not None:
        doubts.compare(store, f"the {role} loader's dataset", _random_advice(role))
    return digits


def _process_parts(option: str) -> list[object]:
    """The settings of the whole process that change an encoder's result, if they are not torch's own."""
    found: list[object] = []
    dtype, hooks = process_settings()
    if dtype is not torch.float32:
        found.append(str(dtype))
    if hooks:
        found.append(_encoded(hooks, "torch's hooks for all modules", option).code)
    return found


def table_name(label: str, parts: Mapping[str, object]) -> str:
    """The name of a table: a readable label, and a digest of ``parts``."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", label).strip("._-")[:40] or "encoder"
    return f"{plain}-{key_of_config(dict(parts))}"


def item_key(key: object, what: str = "the key of an item") -> bytes:
    """16 bytes that stand for a key extractor's result, or for the content of an item.

    Raises:
        UnhashableError: it has no stable hash.
    """
    return blake3(encode(_MODELS, key, what).code).digest(length=_KEY_BYTES)


def extracted_key(extractor: Callable[[Any], object], feature: Any, *numbers: int) -> bytes:
    """`item_key` of a key extractor's result, with numbers that count too.

    Raises:
        InvalidValueError: it is None.
        UnhashableError: as for `item_key`.
    """
    found = extractor(feature)
    if found is None:
        raise InvalidValueError(
            "a key extractor has returned None, so all such items would share one embedding; return what "
            "tells an item from the others"
        )
    return item_key((*numbers, found) if numbers else found)


def _digest(value: Any, what: str, option: str, given: object, store: Store | None) -> str:
    if given is not None:
        return key_of_config(given)
    encoded = _encoded(value, what, option)
    doubts = encoded.doubts() if store is not None else None
    if doubts is not None and store is not None:
        doubts.compare(store, what, _random_advice(option))
    return str(blake3(_VERSION + encoded.code).hexdigest()[:_DIGITS])


def _encoded(value: Any, what: str, option: str) -> Encoded:
    try:
        return encode(_MODELS, value, what)
    except UnhashableError as error:
        raise UnhashableError(f"{error}; {_remedy(option)}") from None


def _remedy(option: str) -> str:
    return f"or identify it with CacheConfig(fingerprints={{{option!r}: ...}})"


def _random_advice(option: str) -> str:
    return f"if it does not count, leave it out in __getstate__, {_remedy(option)}"


def _held(encoder: Encoder, value: Any) -> bytes | None:
    """The types that encoders hold besides those of `OBJECTS`."""
    return _HELD(encoder, value) if uncompiled(value) is value else None


def _with_weights(encoder: Encoder, value: Any) -> bytes | None:
    """An object of the user's that leaves a model or weights out of its pickle. They count all the same."""
    if not _pickles_itself(type(value)):
        return None
    code = OBJECTS(encoder, value)
    pickled = pickled_attributes(value) or {}
    weights = {
        name: item
        for name, item in sorted(vars(value).items())
        if name not in pickled and isinstance(item, nn.Module | torch.Tensor | np.ndarray)
    }
    if not weights:
        return code
    parts = [(name, encoder.part(item, f".{name}")) for name, item in weights.items()]
    return encoder.tagged("with weights", code, parts)


@per_class
def _pickles_itself(cls: type) -> bool:
    own = [base for base in cls.__mro__ if not library_of_class(base)]
    names = ("__getstate__", "__reduce__", "__reduce_ex__")
    is_plain = not issubclass(cls, nn.Module | type) and bool(own) and has_member(cls, "__dict__")
    return is_plain and any(name in vars(base) for base in own for name in names)


def _module(encoder: Encoder, value: nn.Module) -> Iterator[Any]:
    encoder.number(value)
    yield from ("module", encoder.part(type(value), f" -> {type(value).__name__}"))
    assigned = _assigned_attributes(type(value))
    noise = _MODULE_NOISE | {*_HOOKS} | assigned
    if reads_train_mode(value):
        noise -= {"training"}
    state = {name: item for name, item in vars(value).items() if name not in noise}
    around = encoder.marks
    encoder.marks = around | (marks_of(type(value)) & {IN_ORDER})
    try:
        yield from state_parts(encoder, lasting(encoder, value, state))
        hooks = {name: vars(value).get(name, {}).values() for name in _HOOKS}
        counted = {name: [hook for hook in given if not only_observes(hook)] for name, given in hooks.items()}
        yield [encoder.part(given, f".{name}") for name, given in counted.items()]
        order = order_of_parts(value, encoder.marks)
    finally:
        encoder.marks = around
    if order is not None:
        yield "order", order
    if settings := _assigned_settings(encoder, value, assigned):
        yield "assigned", sorted(settings.items())
    for name, function in patched_methods(type(value)):
        yield name, encoder.part(function, f".{name}")


#: For each module the first values of the settings that its `forward` assigns, as canonical bytes.
_first_values: weakref.WeakKeyDictionary[nn.Module, dict[str, bytes]] = weakref.WeakKeyDictionary()


def first_values(encoder: Any) -> dict[str, dict[str, bytes]]:
    """The first values of the settings that modules assign, by module, for a copy of an encoder."""
    named = encoder.named_modules() if isinstance(encoder, nn.Module) else ()
    return {name: _first_values[module] for name, module in named if module in _first_values}


def forget_first_values(encoder: Any) -> None:
    """Have the settings that modules assign count as they are now."""
    for module in encoder.modules() if isinstance(encoder, nn.Module) else ():
        _first_values.pop(module, None)


def restore_first_values(encoder: Any, values: Mapping[str, dict[str, bytes]]) -> None:
    """Let a copy of an encoder have the first values of the original."""
    for name, module in encoder.named_modules() if isinstance(encoder, nn.Module) else ():
        if name in values:
            _first_values[module] = values[name]


def _assigned_settings(encoder: Encoder, module: nn.Module, assigned: frozenset[str]) -> dict[str, bytes]:
    if not assigned or library_of_class(type(module)):
        return {}
    if module not in _first_values:
        counted = assigned & (_attributes_replaced(type(module)) | _attributes_read(type(module)))
        given = {name: item for name, item in vars(module).items() if name in counted and item is not None}
        found: dict[str, bytes] = {}
        for name, item in given.items():
            with suppress(UnencodableError):
                found[name] = encoder.beside().part(item, f".{name}")
        _first_values[module] = found
    return _first_values[module]


@per_class
def _attributes_read(cls: type) -> frozenset[str]:
    """Attributes of ``self`` that methods of the user's read, other than to update them in place."""
    return _in_methods(cls, attributes_read_of)


@per_class
def _attributes_replaced(cls: type) -> frozenset[str]:
    """Attributes of ``self`` that methods of the user's assign, other than to update them in place. A helper
    may read them that no method shows.
    """
    return _in_methods(cls, attributes_replaced_of)


def _in_methods(cls: type, ask: Callable[[types.CodeType, str], frozenset[str]]) -> frozenset[str]:
    own = (base for base in cls.__mro__ if not library_of_class(base))
    members = (item for base in own for name, item in vars(base).items() if name not in _MAKING)
    found: frozenset[str] = frozenset()
    for member in members:
        code = getattr(inspect.unwrap(member) if callable(member) else None, "__code__", None)
        if isinstance(code, types.CodeType) and code.co_argcount:
            found |= ask(code, code.co_varnames[0])
    return found


def _scripted(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield from scripted_module(encoder, value, frozenset({"training"}))


def _named_value(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield from ("torch", type(value).__name__, str(value))


def _random(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield refuse_random(value)


_HELD = Table(
    [
        ("torch", ("Tensor",), tensor_values),
        ("torch.jit", ("ScriptModule",), _scripted),
        ("torch.nn", ("Module",), _module),
        ("torch", ("dtype", "layout", "memory_format"), _named_value),
        # The device does not affect the result.
        ("torch", ("device",), lambda encoder, value: iter(("device",))),
        *random_rows(_random),
    ]
)
_MODELS = Rules(_held, _with_weights, OBJECTS, orders=orders, left_out=_LIBRARY_NOISE)


@per_class
def _assigned_attributes(cls: type) -> frozenset[str]:
    """Attributes of ``self`` that a class's `forward`, or that of one of its bases, assigns."""
    found: frozenset[str] = frozenset()
    for base in cls.__mro__:
        forward: Any = vars(base).get("forward")
        code = getattr(inspect.unwrap(forward), "__code__", None)
        if isinstance(code, types.CodeType) and code.co_argcount:
            found |= attributes_set_of(code, code.co_varnames[0])
    return found
