"""Recipes: YAML files with Data-Juicer's keys that name the input data, the operators, and the export.

Reads and checks recipes, runs nothing. Keys of Data-Juicer's without a use in castore are noted, or are
errors: `castore.recipes.juicer_keys` lists them. Every error names the file, the line, the wrong value, and
the nearest right word. Only plain YAML is read (`yaml.safe_load`'s): a tag that would make a Python object is
an error.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]

from castore.errors import CastoreError, InvalidValueError
from castore.names import check_name
from castore.recipes import juicer_keys, registry
from castore.recipes.value_types import check_type, convert_checked

#: Alternative names of keys.
ALIASES = {"np": "num_proc"}


@dataclasses.dataclass(frozen=True)
class RecipeStep:
    """One operator of a recipe.

    Attributes:
        operator: the operator's name, its dotted path, or the operator itself.
        parameters: the parameters of the operator.
        place: the file and line, for messages.
    """

    operator: Any
    parameters: dict[str, Any] = dataclasses.field(default_factory=dict)
    place: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe: the input data, the operators, and the place of the result.

    Attributes:
        dataset_path: a file (jsonl, json, csv, parquet, txt, each also with .gz), a folder of such, a folder
            of `save_to_disk`, or a pattern with ``*``; empty where ``dataset`` names the files.
        export_path: the place of the result: a file (jsonl, json, csv, parquet), or a folder (in the layout
            of `save_to_disk`).
        process: the operators, in order: names, dotted paths, objects, or one-key maps of a name and its
            parameters.
        project_name: the name of the checkpoint.
        use_cache: keep the result of each step, and use kept results.
        cache_compress: the codec of kept results: ``"zstd"``, ``"lz4"``, ``"gzip"``, ``"none"``; None for the
            store's own.
        ds_cache_dir: the store; None for the default one.
        temp_dir: the folder of uncompressed intermediate data while it is used; None for a folder in the
            store.
        use_checkpoint: keep only the latest step, and continue from it after a failure; excludes the cache.
        num_proc: processes that run an operator (also ``np``).
        text_keys: the column of the text.
        dataset: in the place of ``dataset_path``, several files: ``configs`` is a list of maps with a
            ``path`` and a ``weight``; ``max_sample_num`` draws so many samples in all, from each by its
            weight.
        operators_of: the library whose operators come first where both libraries have one of a name.
        keep_stats_in_res_ds: export the columns of statistics and tags, too.
        columns: other columns that Data-Juicer's operators work on, such as ``image_key``.
        notes: the keys of the file that have no effect, each with the reason.

    Raises:
        InvalidValueError: a value has the wrong type, or is not among the allowed ones.
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
    dataset: dict[str, Any] | None = None
    operators_of: Literal["castore", "data-juicer"] = "castore"
    keep_stats_in_res_ds: bool = False
    columns: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(Recipe).items():
            check_type(getattr(self, name), hint, name)
        if self.num_proc < 1:
            raise InvalidValueError(f"num_proc must be at least 1, not {self.num_proc!r}")
        self.parts()
        for name in ("dataset_path", "export_path", "project_name"):
            if not getattr(self, name) and not (name == "dataset_path" and self.dataset):
                raise InvalidValueError(f"{name} is empty; give it a value")
        for name in ("ds_cache_dir", "temp_dir"):
            if getattr(self, name) == "":  # the system takes "" for the working folder
                raise InvalidValueError(f"{name} is empty; name a folder, or leave it out")
        for name in ("dataset_path", "export_path", "ds_cache_dir", "temp_dir"):  # no shell sees a file's ~
            if path := getattr(self, name):
                object.__setattr__(self, name, os.path.expanduser(path))
        check_name(self.project_name)
        if not self.text_keys:
            raise InvalidValueError("text_keys is empty; name the column of the text")
        object.__setattr__(self, "process", [_parse_step(item) for item in self.process])

    @property
    def text_key(self) -> str:
        """The column of the text that operators work on."""
        return self.text_keys if isinstance(self.text_keys, str) else self.text_keys[0]

    def parts(self) -> list[tuple[str, float]]:
        """Paths and weights of ``dataset``; empty where ``dataset_path`` names the input.

        Raises:
            InvalidValueError: ``dataset`` does not name paths, or names paths that are not on this machine.
        """
        if self.dataset_path or self.dataset is None:
            return []
        check_type(self.max_sample_num, int | None, "max_sample_num of dataset")
        configs = self.dataset.get("configs")
        unknown = [name for name in self.dataset if name not in ("configs", "max_sample_num")]
        if unknown or not isinstance(configs, list) or not configs:
            raise InvalidValueError(
                f"dataset has {', '.join(map(repr, self.dataset)) or 'nothing'}; it takes configs, a list of "
                "maps like "
                "{path: data.jsonl, weight: 1.0}, and max_sample_num"
            )
        if self.max_sample_num is not None and self.max_sample_num < 1:
            raise InvalidValueError(
                f"max_sample_num of dataset must be at least 1, not {self.max_sample_num}"
            )
        return [_parse_part(config) for config in configs]

    @property
    def max_sample_num(self) -> int | None:
        """The number of samples to draw from the parts; None for all."""
        return (self.dataset or {}).get("max_sample_num")

    def operators(self) -> list[Any]:
        """The operators, constructed and ready to run.

        Raises:
            InvalidValueError: an operator or a parameter does not exist, or has the wrong type.
        """
        made = []
        for step in self.process:
            with _error_prefix(step.place):
                made.append(
                    registry.make(
                        step.operator,
                        step.parameters,
                        defaults={"text_key": self.text_key, **self.columns},
                        juicer_first=self.operators_of == "data-juicer",
                    )
                )
        return made

    def replace(self, **changes: Any) -> Recipe:
        """The recipe with other values; None keeps a value."""
        given = {name: value for name, value in changes.items() if value is not None}
        return dataclasses.replace(self, **given)


_STRING_TAG = "tag:yaml.org,2002:str"
_DERIVED = ("columns", "notes")
KEYS = [field.name for field in dataclasses.fields(Recipe) if field.name not in _DERIVED]
#: Keys that name other columns for Data-Juicer's operators.
COLUMN_KEYS = ("image_key", "image_bytes_key", "audio_key", "video_key")


def read(path: str | os.PathLike[str]) -> Recipe:
    """The recipe in a file.

    Raises:
        OSError: the file cannot be read.
        InvalidValueError: the file is no recipe.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidValueError(f"{os.fspath(path)} is not text in UTF-8: {error.reason}") from error
    return parse(text, os.fspath(path))


def parse(text: str, source: str = "recipe") -> Recipe:
    """The recipe in a YAML text.

    Args:
        text: the YAML.
        source: the name of the text in messages.

    Raises:
        InvalidValueError: the text is no recipe.

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
    castore.errors.InvalidValueError: recipe.yaml:1: there is no key 'dataset_paths';
    did you mean 'dataset_path'?
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        lines = _key_lines(node, source)
        # Parse the text a second time, for values.
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}" if mark else source
        raise InvalidValueError(f"{place}: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, CastoreError):
            raise
        raise InvalidValueError(f"{source}: this is not YAML: {_join_lines(error)}") from error
    return _make_recipe(values, lines, source)


def _make_recipe(values: dict[str, Any], lines: dict[str, list[int]], source: str) -> Recipe:
    given: dict[str, Any] = {}
    columns: dict[str, str] = {}
    reasons: dict[str | None, list[str]] = {}
    hints = typing.get_type_hints(Recipe)
    for name, value in values.items():
        key = ALIASES.get(name, name)
        with _error_prefix(f"{source}:{lines[name][0]}"):
            if name in juicer_keys.JUICER_KEYS:
                if not (name == "export_type" and str(values.get("export_path")).endswith(f".{value}")):
                    reasons.setdefault(juicer_keys.explain_key(name, value), []).append(name)
                continue
            if name in COLUMN_KEYS:
                check_type(value, str | None, name)
                columns |= {} if value is None else {name: value}
                continue
            if key not in KEYS:
                known = [*KEYS, *ALIASES, *COLUMN_KEYS, *juicer_keys.JUICER_KEYS]
                raise InvalidValueError(
                    f"there is no key {name!r}{registry.suggest_nearest(str(name), known)}"
                )
            if key in given:
                raise InvalidValueError(f"{name} sets {key}, which is set already; keep one of the two")
            if value is None:
                continue  # as if the key were missing
            given[key] = convert_checked(value, hints[key], str(name))
    if "dataset" in given and "dataset_path" in given:
        reasons["dataset_path comes before it"] = ["dataset"]
    if "dataset" in given:
        given.setdefault("dataset_path", "")
    for name in ("dataset_path", "export_path", "process"):
        if name not in given:
            raise InvalidValueError(f"{source}: the key {name!r} is missing; add it")
    steps = [
        _parse_step(item, f"{source}:{line}")
        for item, line in zip(given["process"], lines["process"][1:], strict=True)
    ]
    reasons.pop(None, None)
    notes = tuple(f"{', '.join(names)}: without effect, since {reason}" for reason, names in reasons.items())
    with _error_prefix(source):
        return Recipe(**{**given, "process": steps, "columns": columns, "notes": notes})


def _parse_part(config: Any) -> tuple[str, float]:
    """Path and weight in one of the maps of ``dataset``."""
    if not isinstance(config, Mapping):
        raise InvalidValueError(
            f"an item of configs of dataset must be a map like {{path: data.jsonl}}, not {config!r}"
        )
    kind = config.get("type", "local")
    if kind not in ("local", "ondisk"):
        raise InvalidValueError(
            f"dataset with type: {kind} is not supported, since castore reads files only; download the data, "
            "and give its path"
        )
    unknown = [name for name in config if name not in ("type", "path", "weight", "source")]
    if unknown or not config.get("path"):
        raise InvalidValueError(
            f"an item of configs of dataset has {', '.join(map(repr, config))}; it takes type: local, a path "
            "and a weight"
        )
    weight = convert_checked(config.get("weight", 1.0), float, "weight of dataset")
    if not 0 < weight < float("inf"):
        raise InvalidValueError(f"weight of dataset must be above 0, not {weight!r}")
    check_type(config["path"], str, "path of dataset")
    return os.path.expanduser(config["path"]), float(weight)


def _key_lines(node: Any, source: str) -> dict[str, list[int]]:
    """For each key of the recipe its line, followed by the lines of its list's items.

    Raises:
        InvalidValueError: the YAML is no map, or has a key twice: YAML would silently take the last.
    """
    if not isinstance(node, yaml.MappingNode):
        raise InvalidValueError(
            f"{source}: a recipe must be a map of keys and values, like `dataset_path: data.jsonl`"
        )
    found: dict[str, list[int]] = {}
    for place, name, value in _unique_pairs(node, source):
        found[name] = [place]
        if isinstance(value, yaml.SequenceNode):
            found[name] += [item.start_mark.line + 1 for item in value.value]
            for item in value.value:
                for _, _, inner in _unique_pairs(item, source):
                    # The parameters of one operator.
                    for _ in _unique_pairs(inner, source):
                        pass
    return found


def _unique_pairs(node: Any, source: str) -> Iterator[tuple[int, Any, Any]]:
    """Line, key and value of each pair of a map; nothing of other nodes."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode) or key.tag != _STRING_TAG:
            shown = f", not {key.value!r}" if isinstance(key, yaml.ScalarNode) else ""
            raise InvalidValueError(f"{source}:{line}: a key must be text{shown}; put it in quotes")
        if key.value in seen:
            raise InvalidValueError(
                f"{source}:{line}: the key {key.value!r} occurs twice; the first is in line {seen[key.value]}"
            )
        seen[key.value] = line
        yield line, key.value, value


def _parse_step(item: Any, place: str = "") -> RecipeStep:
    if isinstance(item, RecipeStep):
        return item
    with _error_prefix(place):
        if isinstance(item, Mapping):
            if len(item) != 1:
                raise InvalidValueError(
                    f"an item of process must be one operator with its parameters below it, not {len(item)}: "
                    f"{', '.join(map(str, item))}"
                )
            ((name, parameters),) = item.items()
            check_type(name, str, "the name of an operator")
            check_type(parameters, dict[str, Any] | None, f"the value of {name}")
            return RecipeStep(name, dict(parameters or {}), place)
        if item is None or isinstance(item, bool | int | float | list):
            raise InvalidValueError(f"an item of process must name an operator, not be {item!r}")
        return RecipeStep(item, {}, place)


class _error_prefix:  # noqa: N801 - reads as a statement where it stands
    """Prefixes an error with its place."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CastoreError) and self._place and not str(error).startswith(self._place):
            raise type(error)(f"{self._place}: {error}") from error


def _join_lines(error: Exception) -> str:
    return " ".join(str(error).split())
