"""Recipes: YAML files, with Data-Juicer's keys, that say what to process, how, and where the result goes.

Reads and checks, runs nothing. Every error says the file, the line, the value that is wrong, and the nearest
right word. Only plain YAML is read (`yaml.safe_load`'s): a tag that would make a Python object is an error.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]

from castore.adapters.datasets import registry
from castore.errors import CastoreError, InvalidValueError
from castore.names import check_name

#: Other words for keys.
ALIASES = {"np": "num_proc"}


@dataclasses.dataclass(frozen=True)
class Step:
    """One operator of a recipe.

    Attributes:
        operator: its name, a dotted path, or the operator itself.
        parameters: what to make it with.
        place: the file and line, for messages.
    """

    operator: Any
    parameters: dict[str, Any] = dataclasses.field(default_factory=dict)
    place: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What to do to which data.

    Attributes:
        dataset_path: a file (jsonl, json, csv, parquet, txt, each also with .gz), a folder of such, a folder
            of `save_to_disk`, or a pattern with ``*``.
        export_path: where the result goes: a file (jsonl, json, csv, parquet), or a folder (as `save_to_disk`
            makes).
        process: the operators, in order: names, dotted paths, objects, or one-key maps of a name and its
            parameters.
        project_name: whose checkpoint it is.
        use_cache: keep the result of each step, and take it from there the next time.
        cache_compress: codec of what is kept: ``"zstd"``, ``"lz4"``, ``"gzip"``, ``"none"``; None for the
            store's own.
        ds_cache_dir: the store; None for the default one.
        temp_dir: where uncompressed intermediate data lies while it is used; None for a folder in the store.
        use_checkpoint: keep the latest step only, and go on from there after a failure; no cache then.
        num_proc: processes that run an operator (also ``np``).
        text_keys: the column of the text.

    Raises:
        InvalidValueError: a value is of the wrong type, or no such value.
    """

    dataset_path: str
    export_path: str
    process: list[Any]
    project_name: str = "castore"
    use_cache: bool = True
    cache_compress: Literal["zstd", "lz4", "gzip", "none"] | None = None
    ds_cache_dir: str | None = None
    temp_dir: str | None = None
    use_checkpoint: bool = False
    num_proc: int = 1
    text_keys: str | list[str] = "text"

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(Recipe).items():
            registry.check_type(getattr(self, name), hint, name)
        if self.num_proc < 1:
            raise InvalidValueError(f"num_proc must be at least 1, not {self.num_proc!r}")
        for name in ("dataset_path", "export_path", "project_name"):
            if not getattr(self, name):
                raise InvalidValueError(f"{name} is empty")
        check_name(self.project_name)
        if not self.text_keys:
            raise InvalidValueError("text_keys is empty; name the column of the text")
        object.__setattr__(self, "process", [_step(item) for item in self.process])

    @property
    def text_key(self) -> str:
        """The column of the text that operators work on."""
        return self.text_keys if isinstance(self.text_keys, str) else self.text_keys[0]

    def operators(self) -> list[Any]:
        """The operators, made and ready.

        Raises:
            InvalidValueError: an operator or a parameter is not there, or of the wrong type.
        """
        made = []
        for step in self.process:
            with _placed(step.place):
                made.append(
                    registry.make(step.operator, step.parameters, defaults={"text_key": self.text_key})
                )
        return made

    def replace(self, **changes: Any) -> Recipe:
        """The recipe with other values; what is None stays as it is."""
        given = {name: value for name, value in changes.items() if value is not None}
        return dataclasses.replace(self, **given)


_TEXT = "tag:yaml.org,2002:str"
KEYS = [field.name for field in dataclasses.fields(Recipe)]


def read(path: str | os.PathLike[str]) -> Recipe:
    """The recipe of a file.

    Raises:
        OSError: it cannot be read.
        InvalidValueError: it is no recipe.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidValueError(f"{os.fspath(path)} is not text in UTF-8: {error.reason}") from error
    return parse(text, os.fspath(path))


def parse(text: str, source: str = "recipe") -> Recipe:
    """The recipe of a text in YAML.

    Args:
        text: the YAML.
        source: what to call it in messages.

    Raises:
        InvalidValueError: it is no recipe.

    >>> recipe = parse('''
    ... dataset_path: data/*.jsonl
    ... export_path: out.jsonl
    ... np: 4
    ... process:
    ...   - text_length_filter: {min_len: 100}
    ...   - clean_links_mapper
    ... ''')
    >>> recipe.num_proc, recipe.operators()[0].min_len
    (4, 100)
    >>> parse("dataset_paths: data/*.jsonl", "recipe.yaml")
    Traceback (most recent call last):
    castore.errors.InvalidValueError: recipe.yaml:1: there is no key 'dataset_paths'; did you mean 'dataset_path'?
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        lines = _lines(node, source)
        # The same nodes once more, this time as values.
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}" if mark else source
        raise InvalidValueError(f"{place}: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, CastoreError):
            raise
        raise InvalidValueError(f"{source}: this is no YAML: {_one_line(error)}") from error
    return _recipe(values, lines, source)


def _recipe(values: dict[str, Any], lines: dict[str, list[int]], source: str) -> Recipe:
    given: dict[str, Any] = {}
    for name, value in values.items():
        key = ALIASES.get(name, name)
        with _placed(f"{source}:{lines[name][0]}"):
            if key not in KEYS:
                raise InvalidValueError(
                    f"there is no key {name!r}{registry.nearest(str(name), [*KEYS, *ALIASES])}"
                )
            if key in given:
                raise InvalidValueError(f"{name} says again what num_proc says; keep one of them")
            registry.check_type(value, typing.get_type_hints(Recipe)[key], str(name))
            given[key] = value
    for name in ("dataset_path", "export_path", "process"):
        if name not in given:
            raise InvalidValueError(f"{source}: the key {name!r} is missing")
    steps = [
        _step(item, f"{source}:{line}")
        for item, line in zip(given["process"], lines["process"][1:], strict=True)
    ]
    with _placed(source):
        return Recipe(**{**given, "process": steps})


def _lines(node: Any, source: str) -> dict[str, list[int]]:
    """For each key of the recipe its line, and behind it those of the items of its list.

    Raises:
        InvalidValueError: it is not a map, or a key is there twice: YAML would take the last and say nothing.
    """
    if not isinstance(node, yaml.MappingNode):
        raise InvalidValueError(
            f"{source}: a recipe is a map of keys and values, like `dataset_path: data.jsonl`"
        )
    found: dict[str, list[int]] = {}
    for place, name, value in _unique(node, source):
        found[name] = [place]
        if isinstance(value, yaml.SequenceNode):
            found[name] += [item.start_mark.line + 1 for item in value.value]
            for item in value.value:
                for _, _, inner in _unique(item, source):
                    # Parameters of one operator.
                    for _ in _unique(inner, source):
                        pass
    return found


def _unique(node: Any, source: str) -> Iterator[tuple[int, Any, Any]]:
    """Line, key and value of each pair of a map; nothing of other nodes."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode) or key.tag != _TEXT:
            shown = f", not {key.value!r}" if isinstance(key, yaml.ScalarNode) else ""
            raise InvalidValueError(f"{source}:{line}: a key must be a word{shown}; quotes make it one")
        if key.value in seen:
            raise InvalidValueError(
                f"{source}:{line}: the key {key.value!r} is there twice; the first is in line {seen[key.value]}"
            )
        seen[key.value] = line
        yield line, key.value, value


def _step(item: Any, place: str = "") -> Step:
    if isinstance(item, Step):
        return item
    with _placed(place):
        if isinstance(item, Mapping):
            if len(item) != 1:
                raise InvalidValueError(
                    f"each item of process is one operator with its parameters below it, not {len(item)}: "
                    f"{', '.join(map(str, item))}"
                )
            ((name, parameters),) = item.items()
            registry.check_type(name, str, "the name of an operator")
            registry.check_type(parameters, dict[str, Any] | None, f"what stands below {name}")
            return Step(name, dict(parameters or {}), place)
        if item is None or isinstance(item, bool | int | float | list):
            raise InvalidValueError(f"an item of process names an operator, and {item!r} does not")
        return Step(item, {}, place)


class _placed:  # noqa: N801 - reads as a statement where it stands
    """Says in front of an error where it is."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CastoreError) and self._place and not str(error).startswith(self._place):
            raise type(error)(f"{self._place}: {error}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
