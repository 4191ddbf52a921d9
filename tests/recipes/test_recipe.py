"""Recipes: the meaning of valid ones, and errors that give the file, the line, the value and the nearest
right word.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest

from castore.errors import CastoreError, InvalidNameError, InvalidValueError
from castore.recipes import registry
from castore.recipes.operators.lengths import TextLengthFilter
from castore.recipes.recipe import Recipe, RecipeStep, parse, read

GOOD = """\
project_name: 'demo-cache-compress'
dataset_path: './data/large-dataset.jsonl'
export_path: './outputs/large-processed.jsonl'

use_cache: true
cache_compress: 'zstd'
ds_cache_dir: '/data/large_disk/dj_cache'

process:
  - text_length_filter:
      min_len: 100
  - whitespace_normalization_mapper
  - clean_links_mapper:
"""

BASIC = "dataset_path: a.jsonl\nexport_path: b.jsonl\n"


def test_a_recipe_is_read_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD)
    recipe = read(path)
    assert recipe == Recipe(
        project_name="demo-cache-compress",
        dataset_path="./data/large-dataset.jsonl",
        export_path="./outputs/large-processed.jsonl",
        cache_compress="zstd",
        ds_cache_dir="/data/large_disk/dj_cache",
        process=[
            RecipeStep("text_length_filter", {"min_len": 100}),
            RecipeStep("whitespace_normalization_mapper"),
            RecipeStep("clean_links_mapper"),
        ],
    )
    names = [type(op).__name__ for op in recipe.operators()]
    assert names == ["TextLengthFilter", "WhitespaceNormalizationMapper", "CleanLinksMapper"]


def test_defaults_are_the_seeds() -> None:
    recipe = parse(BASIC + "process: []")
    assert (recipe.use_cache, recipe.cache_compress, recipe.ds_cache_dir) == (True, None, None)
    assert (recipe.use_checkpoint, recipe.temp_dir, recipe.num_proc, recipe.text_key) == (
        False,
        None,
        1,
        "text",
    )


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("use_cache: false", "use_cache", False),
        ("cache_compress: gzip", "cache_compress", "gzip"),
        ("cache_compress: lz4", "cache_compress", "lz4"),
        ("cache_compress: 'zstd'", "cache_compress", "zstd"),
        ("cache_compress: null", "cache_compress", None),
        ("temp_dir: /tmp/dj_temp", "temp_dir", "/tmp/dj_temp"),
        ("ds_cache_dir: null", "ds_cache_dir", None),
        ("use_checkpoint: true", "use_checkpoint", True),
        ("np: 4", "num_proc", 4),
        ("num_proc: 4", "num_proc", 4),
        ("text_keys: content", "text_key", "content"),
        ("text_keys: [content, title]", "text_key", "content"),
    ],
)
def test_every_key_of_the_seed_is_understood(line: str, name: str, value: object) -> None:
    assert getattr(parse(BASIC + line + "\nprocess: []"), name) == value


def test_operators_work_on_the_column_of_text_keys_unless_they_say_otherwise() -> None:
    recipe = parse(
        BASIC + "text_keys: content\nprocess: [clean_links_mapper, {clean_email_mapper: {text_key: title}}]"
    )
    assert [op.text_key for op in recipe.operators()] == ["content", "title"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dataset_paths: x", "r.yaml:1: there is no key 'dataset_paths'; did you mean 'dataset_path'?"),
        (BASIC + "use_cach: no", "r.yaml:3: there is no key 'use_cach'; did you mean 'use_cache'?"),
        (BASIC + "num_procs: 4\nprocess: []",
         "r.yaml:3: there is no key 'num_procs'; did you mean 'num_proc'?"),
        (BASIC, "r.yaml: the key 'process' is missing"),
        ("export_path: x\nprocess: []", "r.yaml: the key 'dataset_path' is missing"),
        (BASIC + "use_cache: maybe", "r.yaml:3: use_cache must be true or false, not 'maybe' (text)"),
        (BASIC + "np: '4'", "r.yaml:3: np must be a whole number, not '4' (text)"),
        (BASIC + "np: true", "r.yaml:3: np must be a whole number, not True (true or false)"),
        (BASIC + "np: 0\nprocess: []", "r.yaml: num_proc must be at least 1, not 0"),
        (BASIC + "np: 2\nnum_proc: 2\nprocess: []", "r.yaml:4: num_proc sets num_proc, which is set already"),
        (
            BASIC + "cache_compress: zst",
            "r.yaml:3: cache_compress must be 'zstd' or 'lz4' or 'gzip' or 'none' or null, not 'zst' (text)",
        ),
        (BASIC + "process: text_length_filter",
         "r.yaml:3: process must be a list, not 'text_length_filter' (text)"),
        (BASIC + "text_keys: []\nprocess: []", "r.yaml: text_keys is empty"),
        (BASIC + "text_keys: [1]\nprocess: []",
         "r.yaml:3: text_keys must be text or a list (text each), not [1]"),
        ("dataset_path: ''\nexport_path: x\nprocess: []", "r.yaml: dataset_path is empty"),
        ("dataset_path: 5\n", "r.yaml:1: dataset_path must be text, not 5 (a whole number)"),
        (BASIC + "dataset_path: c",
         "r.yaml:3: the key 'dataset_path' occurs twice; the first is in line 1"),
        (BASIC + "yes: 5", "r.yaml:3: a key must be text, not 'yes'; put it in quotes"),
        ("[a, b]", "r.yaml: a recipe must be a map of keys and values"),
        ("", "r.yaml: a recipe must be a map of keys and values"),
        ("just words", "r.yaml: a recipe must be a map of keys and values"),
        ("a: [1, 2", "r.yaml:1: expected ',' or ']', but got '<stream end>'"),
        ("a: 1\n b: 2", "r.yaml:2: mapping values are not allowed here"),
        ("a: \x00", "r.yaml: this is not YAML: "),
        ("dataset_path: !!python/object/apply:os.system ['true']",
         "r.yaml:1: could not determine a constructor"),
        ("a: 2001-99-99", "r.yaml: this is not YAML: month must be in 1..12"),
        ("x: &x [*x]", "r.yaml:1: there is no key 'x'"),
        ("[" * 5000, "r.yaml: "),
    ],
)  # fmt: skip
def test_a_bad_recipe_says_where_and_what(text: str, message: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        parse(text, "r.yaml")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("process", "message"),
    [
        ("- text_lenght_filter",
         "r.yaml:4: there is no operator 'text_lenght_filter'; did you mean 'text_length_filter'?"),
        ("- clean_links_mapper\n- dedup",
         "r.yaml:5: there is no operator 'dedup'; name your own operator by its dotted path"),
        ("- text_length_filter:\n    min_length: 5",
         "r.yaml:4: text_length_filter has no parameter 'min_length'; did you mean 'min_len'?"),
        ("- text_length_filter:\n    tokens: 5",
         "r.yaml:4: text_length_filter has no parameter 'tokens'; it takes min_len, max_len, text_key"),
        ("- text_length_filter:\n    min_len: ten",
         "r.yaml:4: min_len of text_length_filter must be a whole number, not 'ten' (text)"),
        ("- text_length_filter:\n    min_len: 1.5",
         "r.yaml:4: min_len of text_length_filter must be a whole number, not 1.5 (a number)"),
        ("- alphanumeric_filter:\n    min_ratio: 1e-x",
         "r.yaml:4: min_ratio of alphanumeric_filter must be a number, not '1e-x' (text)"),
        ("- text_length_filter:\n    min_len: 9\n    max_len: 3",
         "r.yaml:4: text_length_filter: min_len=9 is above max_len=3"),
        ("- replace_content_mapper",
         "r.yaml:4: replace_content_mapper needs the parameter 'pattern'; give it"),
        ("- replace_content_mapper: {pattern: [1]}",
         "r.yaml:4: pattern of replace_content_mapper must be text or a list (text each) or null, not [1]"),
        ("- replace_content_mapper: {pattern: '('}",
         "r.yaml:4: replace_content_mapper: pattern='(' is not a regular expression"),
        ("- no_such_package.Mapper", "r.yaml:4: there is no module 'no_such_package'"),
        ("- os.pth.join", "r.yaml:4: os has no 'pth'; did you mean 'path'?"),
        ("- a..b", "r.yaml:4: 'a..b' is not a dotted path"),
    ],
)  # fmt: skip
def test_a_bad_operator_says_where_and_what(process: str, message: str) -> None:
    recipe = parse(f"{BASIC}process:\n{process}", "r.yaml")
    with pytest.raises(InvalidValueError) as caught:
        recipe.operators()
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("process", "message"),
    [
        ("- clean_links_mapper: {repl: x}\n  clean_email_mapper: {}",
         "r.yaml:4: an item of process must be one operator"),
        ("- 5", "r.yaml:4: an item of process must name an operator, not be 5"),
        ("-", "r.yaml:4: an item of process must name an operator, not be None"),
        ("- text_length_filter: 100",
         "r.yaml:4: the value of text_length_filter must be a map or null, not 100"),
        ("- text_length_filter:\n    min_len: 1\n    min_len: 2",
         "r.yaml:6: the key 'min_len' occurs twice"),
    ],
)  # fmt: skip
def test_a_bad_item_of_process_says_where_and_what(process: str, message: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        parse(f"{BASIC}process:\n{process}", "r.yaml")
    assert str(caught.value).startswith(message)


def test_a_project_cannot_lead_out_of_its_folder() -> None:
    with pytest.raises(InvalidNameError, match=r"'\.\.'"):
        parse(BASIC + "project_name: ../other\nprocess: []")


def test_a_file_that_is_no_text_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidValueError, match="is not text in UTF-8"):
        read(tmp_path / "r.yaml")
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.yaml")


def test_overrides_are_checked_like_the_file() -> None:
    recipe = parse(BASIC + "use_cache: true\nprocess: [clean_links_mapper]")
    changed = recipe.replace(use_cache=False, cache_compress="zstd", num_proc=None)
    assert (changed.use_cache, changed.cache_compress, changed.num_proc) == (False, "zstd", 1)
    assert changed.process == recipe.process
    with pytest.raises(InvalidValueError, match="cache_compress must be"):
        recipe.replace(cache_compress="brotli")


# Finding operators


MODULE = """
import castore
class Mapper:
    def __init__(self, suffix="!", times: int = 1):
        self.suffix = suffix * times
    def process(self, sample):
        return {**sample, "text": sample["text"] + self.suffix}
class Outer:
    class Inner(Mapper):
        pass
def shout(sample, loud: bool = False):
    return {"text": sample["text"].upper() if loud else sample["text"]}
ready = Mapper("?")
def broken(sample, x: "NoSuchType" = None): return sample
class Picky:
    def __init__(self, n):
        raise ValueError("n must be prime")
class Open:
    def __init__(self, **options):
        self.options = options
    def process(self, sample):
        return sample
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_own_ops").mkdir()
    (tmp_path / "my_own_ops" / "__init__.py").write_text("")
    (tmp_path / "my_own_ops" / "text.py").write_text(MODULE)
    (tmp_path / "my_own_ops" / "bad.py").write_text("1 / 0")
    (tmp_path / "my_own_ops" / "needy.py").write_text("import not_there_at_all")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("my_own_ops")]:
        monkeypatch.delitem(sys.modules, name)
    return "my_own_ops"


@pytest.mark.parametrize(
    ("name", "parameters", "expected"),
    [
        ("text.Mapper", {"suffix": "."}, "a."),
        ("text.Mapper", {"times": 3}, "a!!!"),
        ("text.Outer.Inner", {}, "a!"),
        ("text.ready", {}, "a?"),
        ("text.shout", {"loud": True}, "A"),
        ("text.shout", {}, "a"),
        ("text.broken", {"x": 5}, "a"),
        ("text.Open", {"anything": 5}, "a"),
    ],
)
def test_operators_come_by_dotted_path(
    module: str, name: str, parameters: dict[str, Any], expected: str
) -> None:
    operator = registry.make(f"{module}.{name}", parameters)
    run = operator.process if hasattr(operator, "process") else operator
    assert run({"text": "a"})["text"] == expected


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("text.Maper", {}, "my_own_ops.text has no 'Maper'; did you mean 'Mapper'?"),
        ("txt.Mapper", {}, "my_own_ops has no 'txt'"),
        ("bad.Mapper", {},
         "cannot import my_own_ops.bad for the operator my_own_ops.bad.Mapper: ZeroDivisionError"),
        ("needy.Mapper", {},
         "cannot import my_own_ops.needy for the operator .* No module named 'not_there_at_all'"),
        ("text.ready", {"suffix": "."}, "my_own_ops.text.ready is an object already"),
        ("text.Picky", {"n": 4}, "Picky cannot be constructed with {'n': 4}: n must be prime"),
        ("text.shout", {"sample": 4}, "my_own_ops.text.shout has no parameter 'sample'"),
        ("text.shout", {"loud": 1}, "loud of my_own_ops.text.shout must be true or false, not 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_dotted_path_is_said(
    module: str, name: str, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(CastoreError, match=message):
        registry.make(f"{module}.{name}", parameters)


def test_objects_classes_and_functions_are_operators_as_they_are() -> None:
    ready = TextLengthFilter(5)
    partial = functools.partial(max, key=len)
    assert registry.make(ready) is ready
    assert registry.make(TextLengthFilter, {"min_len": 7}).min_len == 7
    assert registry.make(len) is len
    assert registry.make(partial) is partial
    recipe = Recipe(
        dataset_path="a", export_path="b", process=[ready, {"text_length_filter": {"min_len": 3}}]
    )
    assert [op.min_len for op in recipe.operators()] == [5, 3]


def test_registered_operators_are_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})

    @registry.register("my_custom_mapper")
    class Custom:
        def __init__(self, param: str) -> None:
            self.param = param

    recipe = parse(BASIC + "process:\n  - my_custom_mapper:\n      param: value\n")
    assert [op.param for op in recipe.operators()] == ["value"]
    assert "my_custom_mapper" in registry.operator_names()
    with pytest.raises(InvalidValueError, match="already"):
        registry.register("my_custom_mapper")(object)
    with pytest.raises(InvalidValueError, match="already"):
        registry.register("text_length_filter")(object)
    with pytest.raises(InvalidValueError, match="dot"):
        registry.register("my.mapper")


def test_a_tilde_is_the_home_in_all_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: no shell sees it in a file, so the result came into a folder of the name ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = {name: f"~/{name}" for name in ("dataset_path", "export_path", "ds_cache_dir", "temp_dir")}
    recipe = Recipe(process=[], **paths)  # type: ignore[arg-type]
    assert {name: getattr(recipe, name) for name in paths} == {name: f"{tmp_path}/{name}" for name in paths}
    mixture = Recipe("", "o.jsonl", [], dataset={"configs": [{"path": "~/a.jsonl"}]})
    assert mixture.parts() == [(f"{tmp_path}/a.jsonl", 1.0)]
