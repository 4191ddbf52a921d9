"""Finds operators by name, by dotted path or as objects, and constructs them with their parameters.

A name stands for an object given to `register`, for a class of `castore.recipes.operators`, or, where
`py-data-juicer` is installed, for one of its operators. A dotted path names any importable class, function or
object, which means that **a recipe can run any code that is installed**: run only recipes you trust. Must
never guess: a misspelt name is an error that offers the nearest right word.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, TypeVar

from castore.errors import CastoreError, InvalidValueError
from castore.recipes import juicer_operators
from castore.recipes.operators.base import NeedsMoreError
from castore.recipes.value_types import convert_checked, fits
from castore.units import shown

T = TypeVar("T")

_OPS = "castore.recipes.operators"

#: The operators that come with castore, each with its module.
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
    "stopwords_filter": "wordlists.StopwordsFilter",
    "flagged_words_filter": "wordlists.FlaggedWordsFilter",
    "replace_content_mapper": "cleaners.ReplaceContentMapper",
    "clean_links_mapper": "cleaners.CleanLinksMapper",
    "clean_email_mapper": "cleaners.CleanEmailMapper",
    "whitespace_normalization_mapper": "cleaners.WhitespaceNormalizationMapper",
    "clean_copyright_mapper": "cleaners.CleanCopyrightMapper",
    "fix_unicode_mapper": "unicode_repair.FixUnicodeMapper",
    "punctuation_normalization_mapper": "unicode_repair.PunctuationNormalizationMapper",
    "document_deduplicator": "exact.DocumentDeduplicator",
    "document_minhash_deduplicator": "minhash.DocumentMinhashDeduplicator",
    "document_simhash_deduplicator": "simhash.DocumentSimhashDeduplicator",
}

_registered: dict[str, Any] = {}


def register(name: str) -> Callable[[T], T]:
    """A decorator that registers a class, or a function, under a name for recipes.

    Raises:
        InvalidValueError: the name is taken, or contains a dot.

    >>> @register("shout_mapper")
    ... class Shout:
    ...     def process(self, sample):
    ...         return {**sample, "text": sample["text"].upper()}
    >>> make("shout_mapper").process({"text": "hey"})
    {'text': 'HEY'}
    """
    if "." in name:
        raise InvalidValueError(
            f"{name!r} cannot name an operator, since a name with a dot is a dotted path; choose a name "
            "without one"
        )

    def keep(operator: T) -> T:
        if name in BUILT_IN or _registered.setdefault(name, operator) is not operator:
            raise InvalidValueError(f"there is an operator {name!r} already; choose another name")
        return operator

    return keep


def operator_names() -> list[str]:
    """The names of all operators except Data-Juicer's own, sorted."""
    return sorted({*BUILT_IN, *_registered})


def find_operator(name: str, *, juicer_first: bool = False) -> Any:
    """The class, function or object that a name or a dotted path stands for.

    Args:
        name: the name of an operator, or its dotted path.
        juicer_first: prefer Data-Juicer's operators to castore's of the same name.

    Raises:
        InvalidValueError: there is no such operator; the message offers the nearest name.
        CastoreError: the operator's module cannot be imported.
    """
    if "." in name:
        return _import_path(name)
    if name in _registered:
        return _registered[name]
    if juicer_first and not juicer_operators.is_installed():
        raise InvalidValueError(
            "operators_of: data-juicer needs py-data-juicer, which is not installed; pip install "
            "py-data-juicer"
        )
    if juicer_first and name in juicer_operators.load_operators():
        return juicer_operators.load_operators()[name]
    if name in BUILT_IN:
        module, _, cls = BUILT_IN[name].partition(".")
        return getattr(import_module(f"{_OPS}.{module}"), cls)
    if name in juicer_operators.load_operators():
        return juicer_operators.load_operators()[name]
    hint = suggest_nearest(name, [*operator_names(), *juicer_operators.load_operators()])
    raise InvalidValueError(f"there is no operator {name!r}{hint or _other_places()}")


def _other_places() -> str:
    own = "name your own operator by its dotted path, like my_package.my_module.MyMapper"
    if juicer_operators.is_installed():
        return f"; {own}"
    return f"; {own}, and install py-data-juicer for Data-Juicer's operators"


def make(
    operator: Any,
    parameters: Mapping[str, Any] | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
    juicer_first: bool = False,
) -> Any:
    """An operator, ready to run.

    If an operator of castore's lacks a requested feature because that takes a model, Data-Juicer's operator
    of the same name takes its place, where the library is installed.

    Args:
        operator: a name, a dotted path, a class, a function, or an operator.
        parameters: the operator's parameters. A function receives them beside the sample.
        defaults: parameters for operators that know them, unless ``parameters`` gives other values.
        juicer_first: prefer Data-Juicer's operators to castore's of the same name.

    Raises:
        InvalidValueError: there is no such operator, or it does not take these parameters.
        CastoreError: the operator's module cannot be imported.

    >>> make("text_length_filter", {"min_len": 100}).min_len
    100
    >>> make("text_length_filter", {"min_length": 100})
    Traceback (most recent call last):
    castore.errors.InvalidValueError: text_length_filter has no parameter 'min_length'; did you mean
    'min_len'?
    """
    if not isinstance(operator, str):
        label = getattr(operator, "__name__", type(operator).__name__)
        return _make_from(label, operator, parameters or {}, defaults or {})
    try:
        return _make_from(
            operator, find_operator(operator, juicer_first=juicer_first), parameters or {}, defaults or {}
        )
    except NeedsMoreError as error:
        theirs = juicer_operators.load_operators().get(operator)
        if theirs is None:
            raise NeedsMoreError(
                f"{error}; after `pip install py-data-juicer` Data-Juicer's operator runs in its place"
            ) from None
        return _make_from(operator, theirs, parameters or {}, defaults or {})


def _make_from(label: str, target: Any, parameters: Mapping[str, Any], defaults: Mapping[str, Any]) -> Any:
    if not isinstance(target, type | types.FunctionType | types.BuiltinFunctionType | functools.partial):
        if parameters:
            raise InvalidValueError(
                f"{label} is an object already, so it takes no parameters; give its class"
            )
        if not callable(target) and not any(hasattr(target, method) for method in _METHODS):
            raise InvalidValueError(
                f"{label} is {shown(target)}, and no operator: name a function, or a class with a method "
                "process, compute_stats or compute_hash"
            )
        return target
    known = _known_parameters(target)
    if known is not None:
        parameters = {name: value for name, value in defaults.items() if name in known} | dict(parameters)
    given = _check_parameters(label, target, parameters, known)
    if isinstance(target, type):
        return _instantiate(label, target, given)
    return functools.partial(target, **given) if given else target


def _instantiate(label: str, cls: type, parameters: Mapping[str, Any]) -> Any:
    try:
        return cls(**parameters)
    except InvalidValueError as error:
        raise type(error)(f"{label}: {error}") from error
    except (TypeError, ValueError) as error:
        raise InvalidValueError(
            f"{label} cannot be constructed with {dict(parameters)!r}: {error}"
        ) from error
    except CastoreError:
        raise
    except Exception as error:  # a constructor may raise anything: it may download a model, ask a server
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise CastoreError(
            f"{label} cannot be constructed with {dict(parameters)!r}: {message[:400]}"
        ) from error


def suggest_nearest(word: str, words: Iterable[str]) -> str:
    """A question that offers the word most similar to ``word``, or "" if no word is near.

    >>> suggest_nearest("proces", ["process", "project_name"])
    "; did you mean 'process'?"
    >>> suggest_nearest("image_blur_mapper", ["clean_email_mapper"])
    ''
    """
    # A shared ending, the kind of the operator, does not make two names similar.
    stems: dict[str, str] = {}
    for known in words:
        stems.setdefault(_KIND_OF_OPERATOR.sub("", known), known)
    found = difflib.get_close_matches(_KIND_OF_OPERATOR.sub("", word), stems, n=1, cutoff=_NEAR)
    return f"; did you mean {stems[found[0]]!r}?" if found else ""


# The methods of which an operator has one.
_METHODS = ("process", "process_batched", "compute_stats", "compute_stats_batched", "compute_hash")
_KIND_OF_OPERATOR = re.compile("_(mapper|filter|deduplicator|selector|grouper|aggregator)$")
# The fraction of letters that two words share: one or two slips in a word of ten.
_NEAR = 0.8


def _import_path(path: str) -> Any:
    """The object at a dotted path: the longest part that is a module, then attributes."""
    parts = path.split(".")
    if not all(part.isidentifier() for part in parts):
        raise InvalidValueError(f"{path!r} is not a dotted path; write it like my_package.my_module.MyMapper")
    for length in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:length])
        try:
            found: Any = import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise CastoreError(f"cannot import {module} for the operator {path}: {error}") from error
            continue  # no module of that name: perhaps a class in the enclosing module
        except Exception as error:  # the user's module may raise anything when it is imported
            raise CastoreError(
                f"cannot import {module} for the operator {path}: {type(error).__name__}: {error}"
            ) from error
        for part in parts[length:]:
            if not hasattr(found, part):
                place = getattr(found, "__name__", module)
                raise InvalidValueError(f"{place} has no {part!r}{suggest_nearest(part, dir(found))}")
            found = getattr(found, part)
        return found
    raise InvalidValueError(
        f"there is no module {parts[0]!r} for the operator {path}; "
        "put the module beside the recipe or into the working folder, or install it"
    )


def _known_parameters(target: Any) -> dict[str, inspect.Parameter] | None:
    """The parameters that can be given by name, or None if they are unknown or any name is accepted."""
    theirs = juicer_operators.find_parameters(target)
    if theirs is not None:
        return theirs
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None  # written in C, without a signature
    if inspect.Parameter.VAR_KEYWORD in {parameter.kind for parameter in parameters.values()}:
        return None
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = [(name, parameter) for name, parameter in parameters.items() if parameter.kind in named]
    # The first parameter of a function is the sample.
    return dict(found if isinstance(target, type) else found[1:])


def _check_parameters(
    label: str, target: Any, given: Mapping[str, Any], known: Mapping[str, inspect.Parameter] | None
) -> dict[str, Any]:
    """The parameters, converted to the types that the target takes."""
    if known is None:
        return dict(given)
    for name in given:
        if name not in known:
            hint = suggest_nearest(str(name), known) or f"; it takes {', '.join(known) or 'none'}"
            raise InvalidValueError(f"{label} has no parameter {name!r}{hint}")
    hints = _type_hints(target)
    fitting = {}
    for name, value in given.items():
        hint, has_default = hints.get(name, Any), known[name].default is not inspect.Parameter.empty
        # Recipes write null for a parameter that is not given.
        if value is None and has_default and not fits(None, hint):
            continue
        fitting[name] = convert_checked(value, hint, f"{name} of {label}")
    required = [name for name, parameter in known.items() if parameter.default is parameter.empty]
    missing = [name for name in required if name not in given]
    if missing:
        raise InvalidValueError(f"{label} needs the parameter {missing[0]!r}; give it")
    return fitting


def _type_hints(target: Any) -> dict[str, Any]:
    try:
        if isinstance(target, type):
            return typing.get_type_hints(target.__init__)  # type: ignore[misc]
        return typing.get_type_hints(getattr(target, "func", target))
    except (AttributeError, NameError, TypeError):
        return {}  # annotations may name imports that exist for type checkers only
