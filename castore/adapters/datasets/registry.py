"""Finding operators, by name, by dotted path or as they are, and making them with their parameters.

A name stands for a class of `castore.adapters.datasets.ops`, or for what `register` was given. A dotted path
names any importable class, function or object, which means that **a recipe can run any code that is
installed**: run only recipes you trust. Must never guess: what is misspelt is an error that offers the
nearest right word.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, TypeVar

from castore.errors import CastoreError, InvalidValueError

T = TypeVar("T")

_OPS = "castore.adapters.datasets.ops"

#: The operators that come with castore, and where each is.
BUILT_IN = {
    "text_length_filter": "lengths.TextLengthFilter",
    "words_num_filter": "lengths.WordsNumFilter",
    "average_line_length_filter": "lengths.AverageLineLengthFilter",
    "maximum_line_length_filter": "lengths.MaximumLineLengthFilter",
    "average_word_length_filter": "lengths.AverageWordLengthFilter",
    "alphanumeric_filter": "characters.AlphanumericFilter",
    "special_characters_filter": "characters.SpecialCharactersFilter",
    "character_repetition_filter": "repetition.CharacterRepetitionFilter",
    "word_repetition_filter": "repetition.WordRepetitionFilter",
    "line_repetition_filter": "repetition.LineRepetitionFilter",
    "compression_ratio_filter": "repetition.CompressionRatioFilter",
    "replace_content_mapper": "cleaning.ReplaceContentMapper",
    "clean_links_mapper": "cleaning.CleanLinksMapper",
    "clean_email_mapper": "cleaning.CleanEmailMapper",
    "whitespace_normalization_mapper": "cleaning.WhitespaceNormalizationMapper",
    "document_deduplicator": "exact.DocumentDeduplicator",
    "document_minhash_deduplicator": "minhash.DocumentMinhashDeduplicator",
}

_registered: dict[str, Any] = {}


def register(name: str) -> Callable[[T], T]:
    """A decorator that makes a class, or a function, known to recipes under a name.

    Raises:
        InvalidValueError: the name is taken, or has a dot in it.

    >>> @register("shout_mapper")
    ... class Shout:
    ...     def process(self, sample):
    ...         return {**sample, "text": sample["text"].upper()}
    >>> make("shout_mapper").process({"text": "hey"})
    {'text': 'HEY'}
    """
    if "." in name:
        raise InvalidValueError(f"{name!r} cannot name an operator: names with a dot are places of code")

    def keep(operator: T) -> T:
        if name in BUILT_IN or _registered.setdefault(name, operator) is not operator:
            raise InvalidValueError(f"there is an operator {name!r} already; choose another name")
        return operator

    return keep


def names() -> list[str]:
    """The names of all operators, sorted."""
    return sorted({*BUILT_IN, *_registered})


def find(name: str) -> Any:
    """The class, function or object that a name or a dotted path stands for.

    Raises:
        InvalidValueError: there is none; the message offers the nearest name.
        CastoreError: its module cannot be imported.
    """
    if name in _registered:
        return _registered[name]
    if name in BUILT_IN:
        module, _, cls = BUILT_IN[name].partition(".")
        return getattr(import_module(f"{_OPS}.{module}"), cls)
    if "." in name:
        return _at(name)
    hint = nearest(name, names()) or (
        "; one of your own goes by its dotted path, like my_package.my_module.MyMapper"
    )
    raise InvalidValueError(f"there is no operator {name!r}{hint}")


def make(
    operator: Any, parameters: Mapping[str, Any] | None = None, *, defaults: Mapping[str, Any] | None = None
) -> Any:
    """An operator, ready to run.

    Args:
        operator: a name, a dotted path, a class, a function, or an operator.
        parameters: what to make it with. A function gets them beside the sample.
        defaults: parameters for operators that know them, if ``parameters`` does not say otherwise.

    Raises:
        InvalidValueError: there is no such operator, or it does not take these parameters.
        CastoreError: its module cannot be imported.

    >>> make("text_length_filter", {"min_len": 100}).min_len
    100
    >>> make("text_length_filter", {"min_length": 100})
    Traceback (most recent call last):
    castore.errors.InvalidValueError: text_length_filter has no parameter 'min_length'; did you mean
    'min_len'?
    """
    label = operator if isinstance(operator, str) else getattr(operator, "__name__", type(operator).__name__)
    target = find(operator) if isinstance(operator, str) else operator
    given = dict(parameters or {})
    if not isinstance(target, type | types.FunctionType | types.BuiltinFunctionType | functools.partial):
        if given:
            raise InvalidValueError(f"{label} is an object that is made already; it takes no parameters")
        return target
    known = _known(target)
    if known is not None:
        given = {name: value for name, value in (defaults or {}).items() if name in known} | given
    _check(label, target, given, known)
    if isinstance(target, type):
        return _made(label, target, given)
    return functools.partial(target, **given) if given else target


def _made(label: str, cls: type, parameters: Mapping[str, Any]) -> Any:
    try:
        return cls(**parameters)
    except InvalidValueError as error:
        raise InvalidValueError(f"{label}: {error}") from error
    except (TypeError, ValueError) as error:
        raise InvalidValueError(f"{label} cannot be made with {dict(parameters)!r}: {error}") from error


def nearest(word: str, words: Iterable[str]) -> str:
    """A question that offers the word that is most like one, or "" if none is.

    >>> nearest("proces", ["process", "project_name"])
    "; did you mean 'process'?"
    """
    found = difflib.get_close_matches(word, [*words], n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def _at(path: str) -> Any:
    """What is at a dotted path: the longest part that is a module, then attributes."""
    parts = path.split(".")
    if not all(part.isidentifier() for part in parts):
        raise InvalidValueError(f"{path!r} is no dotted path; write it like my_package.my_module.MyMapper")
    for length in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:length])
        try:
            found: Any = import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise CastoreError(f"cannot import {module} for the operator {path}: {error}") from error
            continue  # no module of that name: perhaps a class in the one around it
        except Exception as error:  # whatever the user's module does when it is imported
            raise CastoreError(
                f"cannot import {module} for the operator {path}: {type(error).__name__}: {error}"
            ) from error
        for part in parts[length:]:
            if not hasattr(found, part):
                place = getattr(found, "__name__", module)
                raise InvalidValueError(f"{place} has no {part!r}{nearest(part, dir(found))}")
            found = getattr(found, part)
        return found
    raise InvalidValueError(
        f"there is no module {parts[0]!r} for the operator {path}; "
        "modules beside the recipe, in the working folder, and installed ones are found"
    )


def _known(target: Any) -> dict[str, inspect.Parameter] | None:
    """The parameters that can be given by name, or None if nobody knows or any goes."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None  # written in C, and it does not say
    kinds = {parameter.kind for parameter in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return None
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = [(name, parameter) for name, parameter in parameters.items() if parameter.kind in named]
    # A function's first is the sample.
    return dict(found if isinstance(target, type) else found[1:])


def _check(
    label: str, target: Any, given: Mapping[str, Any], known: Mapping[str, inspect.Parameter] | None
) -> None:
    if known is None:
        return
    for name in given:
        if name not in known:
            hint = nearest(str(name), known) or f"; it takes {', '.join(known) or 'none'}"
            raise InvalidValueError(f"{label} has no parameter {name!r}{hint}")
    required = [name for name, parameter in known.items() if parameter.default is parameter.empty]
    missing = [name for name in required if name not in given]
    if missing:
        raise InvalidValueError(f"{label} needs the parameter {missing[0]!r}, which is not given")
    hints = _hints(target)
    for name, value in given.items():
        check_type(value, hints.get(name, Any), f"{name} of {label}")


def _hints(target: Any) -> dict[str, Any]:
    try:
        if isinstance(target, type):
            return typing.get_type_hints(target.__init__)  # type: ignore[misc]
        return typing.get_type_hints(getattr(target, "func", target))
    except (AttributeError, NameError, TypeError):
        return {}  # annotations that name what is imported for type checkers only


def check_type(value: object, hint: Any, what: str) -> None:
    """Raise InvalidValueError if ``value`` is not of the type of ``hint``; types that YAML has not pass.

    >>> check_type("ten", int, "min_len of text_length_filter")
    Traceback (most recent call last):
    castore.errors.InvalidValueError: min_len of text_length_filter must be a whole number, not 'ten' (text)
    """
    if not _fits(value, hint):
        kind = _WORDS.get(type(value), type(value).__name__)
        raise InvalidValueError(f"{what} must be {_told(hint)}, not {value!r} ({kind})")


_WORDS: dict[Any, str] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a map",
    type(None): "null",
}  # fmt: skip


def _alternatives(hint: Any) -> tuple[Any, ...]:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def _fits(value: object, hint: Any) -> bool:
    return any(_fits_one(value, one) for one in _alternatives(hint))


def _fits_one(value: object, hint: Any) -> bool:
    origin = typing.get_origin(hint) or hint
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if origin not in _WORDS:
        return True
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if not isinstance(value, origin):
        return False
    inner = typing.get_args(hint)
    return not (origin is list and inner) or all(_fits(item, inner[0]) for item in value)


def _told(hint: Any) -> str:
    return " or ".join(dict.fromkeys(_told_one(one) for one in _alternatives(hint)))


def _told_one(hint: Any) -> str:
    origin = typing.get_origin(hint) or hint
    inner = typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(map(repr, inner))
    if origin is list and inner and inner[0] is not Any:
        return f"a list ({_told(inner[0])} each)"
    return _WORDS.get(origin, str(hint))
