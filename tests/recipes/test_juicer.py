"""Data-Juicer's recipes: the keys and operators that run here, and the figures of castore's operators."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from castore.adapters.datasets.step_plan import plan_steps
from castore.adapters.datasets.steps import steps_of
from castore.errors import InvalidValueError
from castore.recipes import juicer_keys, registry
from castore.recipes.operators.base import NeedsMoreError
from castore.recipes.operators.simhash import DocumentSimhashDeduplicator
from castore.recipes.recipe import parse
from castore.recipes.runner import process
from castore.store import Store
from tests.cli.conftest import folder  # noqa: F401 - a fixture
from tests.recipes.recipes import exported, here, place, recipe  # noqa: F401 - fixtures
from tests.warm import WarmPython

FACTS: dict[str, Any] = json.loads(Path(__file__).with_name("juicer_recipes.json").read_text("utf-8"))
FIGURES: dict[str, Any] = json.loads(Path(__file__).with_name("juicer_figures.json").read_text("utf-8"))
PAGE = Path(__file__).parents[2] / "docs" / "process.md"
BASIC = "dataset_path: a.jsonl\nexport_path: b.jsonl\n"


@pytest.fixture(autouse=True)
def lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The word lists of the figures, in Data-Juicer's folder of word lists."""
    assets = tmp_path / "assets"
    assets.mkdir()
    for name in ("stopwords", "flagged_words"):
        (assets / f"{name}.json").write_text(json.dumps({**FIGURES["lists"], "zh": ["的"]}))
    monkeypatch.setenv("DATA_JUICER_ASSETS_CACHE", str(assets))
    return assets


# The score over its recipes


@pytest.mark.parametrize("name", FACTS["keys"])
def test_every_key_of_its_recipes_is_taken_noted_or_refused_with_a_reason(name: str) -> None:
    fact = FACTS["keys"][name]
    foreign = juicer_keys.JUICER_KEYS.get(name)
    assert fact["how"] == ("taken" if foreign is None else "noted" if foreign.noted else "refused")
    for value in fact["values"]:
        text = yaml.safe_dump({"dataset_path": "a", "export_path": "b.jsonl", name: value, "process": []})
        if value == "<image>":
            with pytest.raises(
                InvalidValueError, match=r"^r.yaml:\d: image_special_token: '<image>' is not supported"
            ):
                parse(text, "r.yaml")
        else:
            assert all(len(note.splitlines()) == 1 for note in parse(text, "r.yaml").notes)


#: Other keys that a value needs beside it to be valid.
BESIDE: dict[str, dict[str, Any]] = {
    "num_blocks": {"hamming_distance": 1},
    "hamming_distance": {"num_blocks": 64},
    "max_len": {"min_len": 0},
    "max_num": {"min_num": 0},
    "max_ratio": {"min_ratio": 0.0},
    "min_ratio": {"max_ratio": 1.0},
    "repl": {"pattern": "a"},
}


@pytest.mark.parametrize("name", FACTS["parameters"])
def test_our_operators_take_what_its_recipes_give_them(name: str) -> None:
    for parameter, values in FACTS["parameters"][name].items():
        for value in values:
            if parameter.endswith("_dir"):
                continue  # a folder that only the makers of Data-Juicer have
            parameters_given = {**BESIDE.get(parameter, {}), parameter: value}
            of_tokens = parameter == "tokenization" and value is True
            if of_tokens or (parameter.endswith("_ratio") and value > 1):
                parameters_given["tokenization"] = True
                with pytest.raises(
                    NeedsMoreError, match=r"tokenization: true .*`pip install py-data-juicer`"
                ):
                    registry.make(name, parameters_given)
            else:
                registry.make(name, parameters_given)


def test_the_score_over_its_recipes_is_held() -> None:
    uses = FACTS["operators"]
    ours = {name: count for name, count in uses.items() if name in registry.BUILT_IN}
    assert (len(uses), len(ours)) == (157, 20)
    assert (sum(uses.values()), sum(ours.values())) == (699, 433)
    hows = [fact["how"] for fact in FACTS["keys"].values()]
    assert {how: hows.count(how) for how in set(hows)} == {"taken": 16, "noted": 22, "refused": 11}


def test_a_recipe_like_its_own_is_explained_and_runs_with_its_notes(
    place: Path,  # noqa: F811
    here: Any,  # noqa: F811
    lists: Path,
) -> None:
    path = recipe(
        place,
        [
            "clean_email_mapper", "clean_links_mapper", "fix_unicode_mapper",
            "punctuation_normalization_mapper",
            "whitespace_normalization_mapper", "clean_copyright_mapper",
            {"alphanumeric_filter": {"tokenization": False, "min_ratio": 0.3, "max_ratio": 0.95}},
            {"flagged_words_filter": {"lang": "en", "tokenization": False, "max_ratio": 0.9,
             "flagged_words_dir": str(lists)}},
            {"text_length_filter": {"min_len": None, "max_len": "2e5"}},
            {"words_num_filter": {"lang": "en", "tokenization": False, "min_num": 5, "max_num": "1e5"}},
            {"document_simhash_deduplicator": {"ignore_pattern": r"\p{P}", "num_blocks": 6,
             "hamming_distance": 4}},
        ],
        np=1, open_tracer=True, executor_type="ray", ray_address="auto", op_fusion=True, export_shard_size=0,
    )  # fmt: skip
    ran = here("--config", path, "--explain")
    assert ran.code == 0, ran.err
    assert "open_tracer: without effect, since there is no tracer" in ran.err
    assert (
        "executor_type, ray_address: without effect, since everything runs in processes of this machine"
        in ran.err
    )
    assert ran.out.count("\n") == 15
    ran = here("--config", path, "--json")
    assert ran.code == 0, ran.err
    assert 0 < ran.json["rows_out"] == len(exported(place)) < ran.json["rows_in"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("export_shard_size: 1000", "export_shard_size: 1000 is not supported, since the result is one file"),
        ("export_type: parquet",
         "export_type: 'parquet' is not supported, since the ending of export_path decides"),
        ("keep_hashes_in_res_ds: true", "keep_hashes_in_res_ds: true is not supported"),
        ("custom_operator_paths: [ops.py]",
         "custom_operator_paths: .* your own operators are named by their dotted paths"),
        ("operators_of: mine", "operators_of must be 'castore' or 'data-juicer', not 'mine'"),
        ("open_tracre: true", "there is no key 'open_tracre'; did you mean 'open_tracer'?"),
    ],
)  # fmt: skip
def test_what_would_change_the_result_and_cannot_be_had_is_an_error(line: str, message: str) -> None:
    with pytest.raises(InvalidValueError, match=f"^r.yaml:3: {message}".replace("?", r"\?")) as caught:
        parse(f"{BASIC}{line}\nprocess: []", "r.yaml")
    assert "\n" not in str(caught.value)


def test_nulls_mean_what_is_not_given() -> None:
    found = parse(
        f"{BASIC}np: null\nuse_cache: null\nopen_tracer: null\nprocess: [text_length_filter: {{min_len: "
        "null}]"
    )
    assert (found.num_proc, found.use_cache, found.notes) == (1, True, ())
    assert found.operators()[0].min_len == 10
    with pytest.raises(InvalidValueError, match="the key 'export_path' is missing"):
        parse("dataset_path: a\nexport_path: null\nprocess: []")


@pytest.mark.parametrize(
    ("text", "expected"), [("2e5", 200_000), ("1E3", 1000), ("2.0e+5", 200_000), ("300.0", 300), ("70", 70)]
)
def test_numbers_are_taken_however_yaml_reads_them(text: str, expected: int) -> None:
    found = parse(f"{BASIC}process: [text_length_filter: {{max_len: {text}}}]").operators()[0].max_len
    assert (found, type(found)) == (expected, int)


@pytest.mark.parametrize("text", ["2.5", "1e-3", "2e", "e5", "'70'", "1e400"])
def test_numbers_that_are_not_whole_are_no_lengths(text: str) -> None:
    with pytest.raises(InvalidValueError, match="max_len of text_length_filter must be a whole number"):
        parse(f"{BASIC}process: [text_length_filter: {{max_len: {text}}}]").operators()


@pytest.mark.parametrize(
    "name", ["image_blur_mapper", "perplexity_filter", "video_nsfw_filter", "random_selector"]
)
def test_nothing_is_suggested_for_what_is_not_near(name: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        registry.find_operator(name)
    assert "did you mean" not in str(caught.value)
    assert "install py-data-juicer" in str(caught.value)


# Several sources


def _sources(folder: Path) -> list[str]:  # noqa: F811
    paths = [str(folder / f"{name}.jsonl") for name in "abc"]
    for path, rows in zip(paths, (6, 10, 3), strict=True):
        name = Path(path).stem
        Path(path).write_text("".join(json.dumps({"text": f"{name}{row}"}) + "\n" for row in range(rows)))
    return paths


def _read(folder: Path, values: dict[str, Any]) -> list[str]:  # noqa: F811
    text = yaml.safe_dump({"dataset": values, "export_path": str(folder / "out.jsonl"), "process": []})
    process(parse(text), store=Store(folder / "store"))
    return [json.loads(line)["text"] for line in (folder / "out.jsonl").read_text().splitlines()]


def test_several_sources_are_read_one_behind_the_other(tmp_path: Path) -> None:
    a, b, c = _sources(tmp_path)
    configs = [{"type": "local", "path": path, "weight": 0.5} for path in (b, a)]
    assert _read(tmp_path, {"configs": configs}) == [f"b{n}" for n in range(10)] + [f"a{n}" for n in range(6)]
    assert _read(tmp_path, {"configs": [{"path": c}]}) == ["c0", "c1", "c2"]


def test_weights_draw_so_many_of_each_source_and_the_same_every_time(tmp_path: Path) -> None:
    a, b, c = _sources(tmp_path)
    values = {
        "max_sample_num": 12,
        "configs": [{"path": a, "weight": 1}, {"path": b, "weight": 1}, {"path": c, "weight": 2}],
    }
    drawn = _read(tmp_path, values)
    by_hand = []
    for name, rows, count in (("a", 6, 3), ("b", 10, 3), ("c", 3, 6)):
        shuffled = datasets.Dataset.from_dict({"text": [f"{name}{n}" for n in range(rows)]}).shuffle(seed=42)
        by_hand += (shuffled["text"][:] * 2)[:count]
    assert drawn == by_hand == _read(tmp_path, values)
    assert len(_read(tmp_path, {**values, "max_sample_num": 4})) == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"configs": [{"type": "remote", "path": "x"}]},
         "type: remote is not supported, since castore reads files only"),
        ({"configs": []}, "dataset has 'configs'; it takes configs, a list of maps"),
        ({"config": [{"path": "x"}]}, "dataset has 'config'; it takes configs"),
        ({"configs": [{"path": "x", "weight": 0}]}, "weight of dataset must be above 0"),
        ({"configs": [{"path": "x", "weights": 1}]}, "it takes type: local, a path and a weight"),
        ({"configs": [{"path": "x"}], "max_sample_num": 0}, "max_sample_num of dataset must be at least 1"),
        ({"configs": ["x"]}, "an item of configs of dataset must be a map"),
    ],
)  # fmt: skip
def test_sources_that_make_no_sense_are_errors(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        parse(yaml.safe_dump({"dataset": values, "export_path": "b.jsonl", "process": []}))


def test_a_path_that_is_no_path_of_this_machine_is_refused(tmp_path: Path) -> None:
    [a, _, _] = _sources(tmp_path)
    for source, result, message in (
        (
            "s3://bucket/a.jsonl",
            str(tmp_path / "out.jsonl"),
            "dataset_path 's3://bucket/a.jsonl' is not a local path",
        ),
        (a, "s3://bucket/out.jsonl", "export_path 's3://bucket/out.jsonl' is not a local path"),
    ):
        text = yaml.safe_dump({"dataset_path": source, "export_path": result, "process": []})
        with pytest.raises(InvalidValueError, match=message):
            process(parse(text), store=Store(tmp_path / "store"))


def test_statistics_stay_in_the_result_if_the_recipe_wants_them(tmp_path: Path) -> None:
    [a, _, _] = _sources(tmp_path)
    out = tmp_path / "out.jsonl"
    values = {"dataset_path": a, "export_path": str(out), "process": [{"text_length_filter": {"min_len": 1}}]}
    for keep in (True, False):
        process(
            parse(yaml.safe_dump({**values, "keep_stats_in_res_ds": keep})), store=Store(tmp_path / "store")
        )
        row = json.loads(out.read_text().splitlines()[0])
        assert row == {"text": "a0", **({"__dj__stats__": {"text_len": 2}} if keep else {})}


# Figures

#: The cases in which castore's operators differ; docs/process.md has the reasons.
DIFFER = {
    "words_num_filter": {"punctuation"},  # a full-width digit is not a word
    "alphanumeric_filter": {"Hindi", "Thai"},  # marks belong to their letters
    "special_characters_filter": {
        "Danish", "Turkish", "Russian", "Chinese", "Japanese", "Hindi", "Arabic", "mojibake", "punctuation",
        "spaces",
    },  # letters on Data-Juicer's list of special characters
    "clean_links_mapper": {"links"},  # the bracket after a link
}  # fmt: skip


@pytest.mark.parametrize("fact", FIGURES["figures"], ids=lambda fact: fact[0])
def test_figures_are_data_juicers_or_the_page_says_why_not(fact: list[Any]) -> None:
    name, parameters, stat, expected = fact
    operator = registry.make(name, parameters)
    assert operator.stat == stat
    differ = set()
    for text, figure in expected.items():
        if operator.measure(FIGURES["texts"][text]) != pytest.approx(figure, abs=1e-9):
            differ.add(text)
    assert differ == DIFFER.get(name, set())
    assert not differ or f"| `{name}`" in PAGE.read_text("utf-8").partition("## Where figures differ")[2]


@pytest.mark.parametrize("fact", FIGURES["cleaned"], ids=lambda fact: fact[0])
def test_texts_are_cleaned_as_data_juicer_cleans_them(fact: list[Any]) -> None:
    name, parameters, changed = fact
    operator = registry.make(name, parameters)
    results = {key: operator.process({"text": text})["text"] for key, text in FIGURES["texts"].items()}
    differ = {key for key, text in FIGURES["texts"].items() if results[key] != changed.get(key, text)}
    assert differ == DIFFER.get(name, set())


@pytest.mark.parametrize("fact", FIGURES["hashes"], ids=lambda fact: fact[0].get("tokenization", "space"))
def test_simhashes_are_data_juicers_bit_for_bit(fact: list[Any]) -> None:
    parameters, expected = fact
    operator = DocumentSimhashDeduplicator(**parameters)
    for key, figure in expected.items():
        text = FIGURES["texts"][key]
        # These texts are shorter than a window: Data-Juicer's hash of all of them is 0, so one stays.
        if figure != "0":
            assert operator.hash_of(text) == int(figure), key


@given(st.lists(st.integers(0, 2**16 - 1), max_size=40), st.integers(1, 4), st.integers(1, 6))
def test_simhash_clusters_are_those_of_all_pairs(numbers: list[int], distance: int, more: int) -> None:
    hashes = np.unique(np.array(numbers, np.uint64) * np.uint64(0x0001_0001_0000_8001))
    operator = DocumentSimhashDeduplicator(hamming_distance=distance, num_blocks=distance + more)
    leaders = list(range(len(hashes)))
    for one in range(len(hashes)):
        for other in range(one):
            if bin(int(hashes[one]) ^ int(hashes[other])).count("1") <= distance:
                low, high = sorted((leaders[one], leaders[other]))
                leaders = [low if leader == high else leader for leader in leaders]
    assert operator.clusters(hashes).tolist() == leaders


def test_simhash_keeps_the_first_of_each_cluster_and_all_that_differ() -> None:
    base = " ".join(f"word{n}" for n in range(200))
    texts = ["short", base, "other", base + " more", "", base.replace("word7 ", "word8 "), "also short"]
    found = process_all(DocumentSimhashDeduplicator(window_size=2), texts)
    assert found == ["short", base, "other", "", "also short"]


def process_all(operator: Any, texts: list[str]) -> list[str]:
    hashed = datasets.Dataset.from_dict({"text": texts}).map(operator.compute_hash)
    return list(operator.process(hashed)["text"])


@given(st.text(max_size=200))
def test_no_text_is_too_odd_for_the_new_operators(text: str) -> None:
    for name in ("punctuation_normalization_mapper", "clean_copyright_mapper", "fix_unicode_mapper"):
        assert isinstance(registry.make(name).process({"text": text})["text"], str)
    for tokenization in ("space", "punctuation", "character"):
        assert 0 <= DocumentSimhashDeduplicator(tokenization=tokenization).hash_of(text) < 2**64


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("stopwords_filter", {"stopwords_dir": "nowhere"},
         r"there is no \*stopwords\*.json in 'nowhere'; set stopwords_dir to a folder"),
        ("flagged_words_filter", {"lang": "xx"}, "have no language 'xx'; they have de, en, zh"),
        ("fix_unicode_mapper", {"normalization": "NFX"}, "'NFX' is not one of NFC, NFKC, NFD, NFKD"),
        ("document_simhash_deduplicator", {"num_blocks": 4},
         "hamming_distance=4 must be at least 1 and less than"),
        ("document_simhash_deduplicator", {"tokenization": "x"},
         "is not one of space, punctuation, character"),
        ("document_simhash_deduplicator", {"ignore_pattern": r"\p{P}("}, "is not a regular expression"),
        ("document_minhash_deduplicator", {"tokenization": "sentencepiece"}, "needs a model"),
    ],
)  # fmt: skip
def test_what_the_new_operators_cannot_do_is_said(
    name: str, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        registry.make(name, parameters)


def test_a_word_list_that_is_none_is_an_error(tmp_path: Path) -> None:
    for text in ("[", '["a"]', '{"en": "a b"}', '{"en": [1]}'):
        (tmp_path / "stopwords.json").write_text(text)
        with pytest.raises(InvalidValueError, match=r"stopwords\.json"):
            registry.make("stopwords_filter", {"stopwords_dir": str(tmp_path)})


@pytest.mark.parametrize(
    "link", ["HTTPS://Example.ORG/a", "Http://a.example", "FTP://a.example/b", "WWW.EXAMPLE.ORG"]
)
def test_links_in_capitals_go(link: str) -> None:
    assert registry.make("clean_links_mapper").clean(f"see {link}.") == "see ."


def test_patterns_of_its_recipes_are_read_as_it_reads_them() -> None:
    assert registry.make("replace_content_mapper", {"pattern": "r'\\d+'", "repl": "#"}).clean("a1") == "a#"
    assert registry.make("replace_content_mapper", {"pattern": r"\p{Lu}"}).clean("aÄB") == "a"
    assert registry.make("replace_content_mapper", {"pattern": None, "repl": ""}).clean("a1") == "a1"


@pytest.mark.parametrize(
    "name",
    ["average_line_length_filter", "words_num_filter", "word_repetition_filter", "document_deduplicator"],
)
def test_rows_kept_before_a_figure_was_mended_are_not_found_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = datasets.Dataset.from_dict({"text": ["a b", "c"]})

    def keys() -> list[str]:
        return [step.key for step in plan_steps(steps_of(registry.make(name)), rows._fingerprint)]

    mended = keys()
    monkeypatch.setattr(registry.find_operator(name), "_castore_revision", 1)
    assert set(keys()).isdisjoint(mended)


# Data-Juicer's own operators, where py-data-juicer is installed

# Stands in for the library, which asks for releases of a dozen others: its registry, its classes and how they
# are called.
BASE_OP = """
class Registry:
    def __init__(self):
        self.modules = {}
    def register(self, name):
        def keep(cls):
            self.modules[name] = cls
            cls._name = name
            return cls
        return keep
OPERATORS, TAGGING_OPS = Registry(), Registry()
class OP:
    _batched_op = False
    _BASE_PARAMS = {"text_key": (str, "text"), "num_proc": (None, None), "image_key": (str, "images")}
    def __init__(self, *args, **kwargs):
        self.text_key = kwargs.get("text_key", "text")
        self.image_key = kwargs.get("image_key", "images")
    def is_batched_op(self):
        return self._batched_op
class Mapper(OP):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.process = self.process_batched if self._batched_op else self.of_one
    def of_one(self, sample):
        # As in the library: what looks like a batch of one is taken for one.
        if all(isinstance(value, list) for value in sample.values()):
            one = self.process_single({k: v[0] for k, v in sample.items()})
            return {key: [value] for key, value in one.items()}
        return self.process_single(sample)
class Filter(OP):
    pass
class Selector(OP):
    pass
class Grouper(OP):
    pass
class Aggregator(OP):
    pass
"""
OPS = """
from datasets import Dataset
from .base_op import *
class NestedDataset(Dataset):
    pass
@OPERATORS.register("image_mark_mapper")
class ImageMark(Mapper):
    def __init__(self, mark: str = "!", *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.mark = mark
    def process_single(self, sample):
        sample["marks"] = [self.mark, self.image_key]
        return sample
@OPERATORS.register("dialog_topic_mapper")
@TAGGING_OPS.register("dialog_topic_mapper")
class Topic(Mapper):
    _batched_op = True
    def process_batched(self, samples):
        for meta, text in zip(samples["__dj__meta__"], samples[self.text_key]):
            meta["topic"] = text[:1]
        return samples
class WithLanguage(Filter):
    def __init__(self, lang: str = "", min_score: float = 0.5, **kwargs):
        super().__init__(**kwargs)
        self.lang = lang
@OPERATORS.register("words_num_filter")
class WordsNum(WithLanguage):
    def __init__(self, tokenization: bool = False, min_num: int = 1, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.min_num = min_num
    def compute_stats_single(self, sample):
        sample["__dj__stats__"]["num_tokens"] = len(sample[self.text_key])
        return sample
    def process_single(self, sample):
        return sample["__dj__stats__"]["num_tokens"] >= self.min_num
    compute_stats, process = compute_stats_single, process_single
@OPERATORS.register("random_selector")
class Every(Selector):
    def __init__(self, select_num: int, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.select_num = select_num
    def process(self, dataset):
        # As in the library, whose dataset is of a class of its own.
        nested = NestedDataset.__new__(NestedDataset)
        nested.__dict__ = dict(dataset.__dict__)
        return nested.select(range(self.select_num))
@OPERATORS.register("naive_grouper")
class All(Grouper):
    def process(self, dataset):
        return [{key: dataset[key][:] for key in dataset.column_names}]
@OPERATORS.register("count_aggregator")
class Count(Aggregator):
    def process_single(self, sample):
        sample["__dj__batch_meta__"]["count"] = len(sample["text"])
        return {**sample, "count": len(sample["text"])}
    process = process_single
@OPERATORS.register("downloading_mapper")
class Downloading(Mapper):
    def __init__(self, **kwargs):
        raise OSError("cannot\\ndownload")
"""


# Runs the given recipes, and prints their results or errors.
DRIVER = """
import json, sys, yaml
from castore import Store
from castore.recipes.recipe import parse
from castore.recipes.runner import process
from castore.errors import CastoreError
answers = []
for values in json.load(sys.stdin):
    try:
        outcome = process(parse(yaml.safe_dump(values, sort_keys=False), "r.yaml"), store=Store("store"))
    except CastoreError as error:
        answers.append(str(error))
    else:
        steps = [[step.name, step.kind, step.hit] for step in outcome.steps]
        answers.append([steps, [json.loads(line) for line in open("out.jsonl")]])
json.dump(answers, sys.stdout)
"""


class Juicer:
    """A folder where the stand-in is installed."""

    def __init__(self, folder: Path, warm_datasets: WarmPython) -> None:  # noqa: F811
        self.folder = folder
        self._python = warm_datasets
        self.ops = folder / "site" / "data_juicer" / "ops" / "__init__.py"
        self.ops.parent.mkdir(parents=True)
        (self.ops.parents[1] / "__init__.py").write_text("")
        self.ops.with_name("base_op.py").write_text(BASE_OP)
        self.ops.write_text(OPS)
        rows = [{"text": text, "images": [text]} for text in ("one two", "three", "four five six")]
        (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(self, *recipes: dict[str, Any]) -> list[Any]:
        """The results of recipes in a new process: steps and rows, or the text of an error."""
        inputs = [{"dataset_path": "in.jsonl", "export_path": "out.jsonl", **recipe} for recipe in recipes]
        paths = os.pathsep.join([str(self.folder / "site"), str(PAGE.parents[1])])
        around = {**os.environ, "PYTHONPATH": paths}
        ran = self._python.run(
            ["-c", DRIVER], sent=json.dumps(inputs), cwd=self.folder, env=around, text=True
        )
        assert ran.returncode == 0, ran.stderr
        return list(json.loads(ran.stdout))


@pytest.fixture
def juicer(tmp_path: Path, warm_datasets: WarmPython) -> Juicer:
    return Juicer(tmp_path, warm_datasets)


def test_its_operators_go_by_their_plain_names_where_it_is_installed(juicer: Juicer) -> None:
    values = {
        "image_key": "pictures",
        "keep_stats_in_res_ds": True,
        "process": [{"image_mark_mapper": {"mark": "?"}}, "dialog_topic_mapper",
            {"text_length_filter": {"min_len": 6}}],
    }  # fmt: skip
    [[steps, rows]] = juicer.run(values)
    assert [name for name, _, _ in steps] == [
        "image_mark_mapper", "dialog_topic_mapper", "text_length_filter (stats)", "text_length_filter",
    ]  # fmt: skip
    assert [row["text"] for row in rows] == ["one two", "four five six"]
    assert rows[0]["marks"] == ["?", "pictures"]
    assert [row["__dj__meta__"] for row in rows] == [{"topic": "o"}, {"topic": "f"}]
    # The next process finds every step by its key.
    [[steps, again]] = juicer.run(values)
    assert [hit for _, _, hit in steps] == [True] * 4
    assert again == rows


def test_its_selectors_and_groupers_get_the_whole_dataset(juicer: Juicer) -> None:
    two = {"random_selector": {"select_num": 2}}
    [steps, rows], [_, groups] = juicer.run(
        {"process": [two]}, {"process": [two, "naive_grouper", "count_aggregator"]}
    )
    assert steps == [["random_selector", "select", False]]
    assert [row["text"] for row in rows] == ["one two", "three"]
    assert [(row["text"], row["count"]) for row in groups] == [(["one two", "three"], 2)]


def test_ours_come_first_unless_the_recipe_or_a_parameter_says_otherwise(juicer: Juicer) -> None:
    def make_recipe(parameters: dict[str, Any], **keys: Any) -> dict[str, Any]:
        return {"keep_stats_in_res_ds": True, **keys, "process": [{"words_num_filter": parameters}]}

    answers = juicer.run(
        make_recipe({"min_num": 1}),
        make_recipe({"min_num": 1, "lang": "en", "tokenization": True}),
        make_recipe({"min_num": 1}, operators_of="data-juicer"),
    )
    stats = [list(rows[0]["__dj__stats__"]) for _, rows in answers]
    assert stats == [["num_words"], ["num_tokens"], ["num_tokens"]]


WRONG: list[tuple[Any, str]] = [
    ({"image_mark_mapper": {"marks": "?"}},
     "image_mark_mapper has no parameter 'marks'; did you mean 'mark'?"),
    ({"image_mark_mapper": {"mark": 5}}, "mark of image_mark_mapper must be text, not 5"),
    ({"random_selector": {}}, "random_selector needs the parameter 'select_num'; give it"),
    ("downloading_mapper",
     "downloading_mapper cannot be constructed with {'text_key': 'text'}: OSError: cannot download"),
    ("image_marks_mapper", "there is no operator 'image_marks_mapper'; did you mean 'image_mark_mapper'?"),
    ("clean_html_mapper",
     "there is no operator 'clean_html_mapper'; name your own operator by its dotted path"),
]  # fmt: skip


def test_what_is_wrong_with_one_of_its_operators_is_said(juicer: Juicer) -> None:
    answers = juicer.run(*({"process": [step]} for step, _ in WRONG))
    for answer, (_, message) in zip(answers, WRONG, strict=True):
        assert answer.startswith(f"r.yaml:4: {message}")
        assert "\n" not in answer


def test_a_library_that_cannot_be_imported_is_an_error_of_one_line_for_its_own_operators_only(
    juicer: Juicer,
) -> None:
    juicer.ops.write_text("import not_there_at_all")
    theirs, ours = juicer.run({"process": ["image_mark_mapper"]}, {"process": ["clean_links_mapper"]})
    assert theirs.startswith("r.yaml:4: cannot import py-data-juicer for its operators: ModuleNotFoundError")
    # A checkout in the working folder is not an installation.
    found = juicer.ops.parents[1]
    assert f"Python found it in {found}, which is not installed: pip install -e {found.parent}" in theirs
    assert len(ours[1]) == 3


def test_its_operators_are_not_to_be_had_where_it_is_not_installed() -> None:
    recipe = parse(f"{BASIC}operators_of: data-juicer\nprocess: [text_length_filter]", "r.yaml")
    with pytest.raises(InvalidValueError, match=r"^r.yaml:4: operators_of: data-juicer needs py-data-juicer"):
        recipe.operators()
