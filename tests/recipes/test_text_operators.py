"""The operators that come with castore: their measures, their cleaning, and the duplicates that they find."""

from __future__ import annotations

import json
import pickle
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from castore.errors import InvalidValueError
from castore.recipes import registry
from castore.recipes.operators.base import STATS
from castore.recipes.operators.cleaners import (
    CleanEmailMapper,
    CleanLinksMapper,
    ReplaceContentMapper,
    WhitespaceNormalizationMapper,
)
from castore.recipes.operators.exact import DocumentDeduplicator
from castore.recipes.operators.minhash import DocumentMinhashDeduplicator, best_bands

PROSE = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in "
    "want of a wife. However little known the feelings or views of such a man may be on his first entering a "
    "neighbourhood, this truth is so well fixed in the minds of the surrounding families, that he is "
    "considered the rightful property of some one or other of their daughters."
)


@pytest.fixture(autouse=True)
def lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Word lists in Data-Juicer's folder of word lists; castore brings none."""
    monkeypatch.setenv("DATA_JUICER_ASSETS_CACHE", str(tmp_path))
    common = [
        "a",
        "of",
        "the",
        "that",
        "in",
        "is",
        "it",
        "be",
        "such",
        "or",
        "may",
        "must",
        "on",
        "his",
        "he",
    ]
    (tmp_path / "stopwords.json").write_text(json.dumps({"en": common, "de": ["der", "die", "das"]}))
    (tmp_path / "my_flagged_words.json").write_text(json.dumps({"en": ["darn", "heck"]}))
    return tmp_path


def figure(name: str, text: str | None, **parameters: Any) -> float:
    """The figure that a filter measures."""
    op = registry.make(name, parameters)
    sample = op.compute_stats({"text": text})
    assert list(sample[STATS]) == [op.stat]
    return float(sample[STATS][op.stat])


def kept(name: str, text: str, **parameters: Any) -> bool:
    op = registry.make(name, parameters)
    result = op.process(op.compute_stats({"text": text}))
    assert isinstance(result, bool)
    return result


@pytest.mark.parametrize(
    ("name", "text", "parameters", "expected"),
    [
        ("text_length_filter", "日本語", {}, 3),
        ("words_num_filter", " one  two\nthree ", {}, 3),
        ("average_line_length_filter", "abcd\nab\n", {}, 4),
        ("maximum_line_length_filter", "abcd\nab\n", {}, 4),
        ("average_word_length_filter", "ab abcd", {}, 3),
        ("alphanumeric_filter", "ab1!", {}, 0.75),
        ("alphanumeric_filter", "हिन्दी", {}, 1),
        ("special_characters_filter", "ab1! ", {}, 0.6),
        ("special_characters_filter", "हिन्दी", {}, 0),
        ("character_repetition_filter", "abcdefgh", {"rep_len": 2}, 0),
        ("character_repetition_filter", "a" * 50, {"rep_len": 5}, 1),
        ("word_repetition_filter", "a b c a b c", {"rep_len": 3}, 0.5),
        ("word_repetition_filter", "a b", {"rep_len": 3}, 0),
        ("line_repetition_filter", "menu\nhome\n\nmenu\n\n", {}, 2 / 3),
        ("compression_ratio_filter", "a", {}, 1),
    ],
)
def test_figures_are_what_counting_by_hand_gives(
    name: str, text: str, parameters: dict[str, Any], expected: float
) -> None:
    assert figure(name, text, **parameters) == pytest.approx(expected)


FILTERS = [name for name in registry.BUILT_IN if name.endswith("_filter")]


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize(
    "text", ["", None, " ", "\n", "\x00", "\ud800", "🙂", "a" * 100_000], ids=lambda text: ascii(text)[:9]
)
def test_no_text_is_too_odd_for_a_filter(name: str, text: str | None) -> None:
    assert figure(name, text) >= 0


@pytest.mark.parametrize("name", FILTERS)
def test_prose_passes_every_filter_but_noise_fails_some(name: str) -> None:
    parameters = {"max_ratio": 0.3} if name == "special_characters_filter" else {}
    assert kept(name, PROSE, **parameters)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("special_characters_filter", "== -- ## $$ %% 12 34"),
        ("alphanumeric_filter", "== -- ## $$ %% a"),
        ("line_repetition_filter", "buy now\n" * 5),
        ("compression_ratio_filter", "buy now " * 500),
        ("character_repetition_filter", "buy now " + "-" * 500),
        ("word_repetition_filter", "buy now and win " * 50),
        ("average_word_length_filter", "aGVsbG8gd29ybGQsIGhlbGxvIHdvcmxkLCBoZWxsbyB3b3JsZA=="),
    ],
)
def test_what_is_no_prose_goes(name: str, text: str) -> None:
    assert not kept(name, text)


def test_bounds_are_included() -> None:
    assert [kept("text_length_filter", "a" * n, min_len=2, max_len=3) for n in (1, 2, 3, 4)] == [
        False, True, True, False,
    ]  # fmt: skip


def test_a_figure_is_measured_anew_behind_a_mapper() -> None:
    length = registry.make("text_length_filter")
    sample = length.compute_stats({"text": "see https://example.org"})
    sample = length.compute_stats(CleanLinksMapper().process(sample))
    assert sample[STATS] == {"text_len": 4}


def test_two_filters_of_one_figure_keep_their_windows() -> None:
    short, long = (registry.make("character_repetition_filter", {"rep_len": n}) for n in (1, 20))
    sample = long.compute_stats(short.compute_stats({"text": "abababababababababab"}))
    assert sample[STATS] == {"char_rep_ratio": 0.0}


def test_filters_keep_figures_of_others() -> None:
    sample = {"text": "hello", STATS: {"mine": 1.0}}
    assert registry.make("text_length_filter").compute_stats(sample)[STATS] == {"mine": 1.0, "text_len": 5}


@pytest.mark.parametrize(
    ("dirty", "clean"),
    [
        ("see https://example.org/a_(b)?c=d#e, then", "see , then"),
        ("(http://example.org)", "()"),
        ("www.example.org.", "."),
        ("ftp://x.y/z", ""),
        ("awww.not", "awww.not"),
        ("no link: http:// or https", "no link: http:// or https"),
    ],
)
def test_links_go_and_the_sentence_stays(dirty: str, clean: str) -> None:
    assert CleanLinksMapper().clean(dirty) == clean


@pytest.mark.parametrize(
    ("dirty", "clean"),
    [
        ("ada.lovelace+x@mail.example.co.uk!", "!"),
        ("<ada@example.org>", "<>"),
        ("grüße@müller.de.", "."),
        ("a@b", "a@b"),
        ("@handle and x @ y", "@handle and x @ y"),
    ],
)
def test_addresses_go_and_the_sentence_stays(dirty: str, clean: str) -> None:
    assert CleanEmailMapper().clean(dirty) == clean


@pytest.mark.parametrize("mapper", [CleanLinksMapper(), CleanEmailMapper(), WhitespaceNormalizationMapper()])
@pytest.mark.parametrize(
    "piece", ["a", "a.", "a@", "http://", "http://a.", "www.", "a@b.", " ", "\u00a0", "a-"]
)
def test_hostile_text_takes_time_in_proportion(mapper: Any, piece: str) -> None:
    text = piece * (300_000 // len(piece))
    started = time.process_time()
    mapper.clean(text)
    assert time.process_time() - started < 2


def test_patterns_are_replaced_in_order_with_groups() -> None:
    op = ReplaceContentMapper([r"(\w+)@(\w+)", "at"], [r"\1 at \2", "AT"])
    assert op.clean("ada@example") == "ada AT example"


def test_joiners_stay_where_other_spaces_are_made_plain() -> None:
    assert (
        WhitespaceNormalizationMapper().clean("می\u200cخواهم\u3000a\u2003b\u200bc") == "می\u200cخواهم a b c"
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: registry.make("text_length_filter", {"min_len": 9, "max_len": 3}),
         "min_len=9 is above max_len=3"),
        (lambda: registry.make("alphanumeric_filter", {"min_ratio": 25}), "min_ratio=25 .* from 0 to 1"),
        (lambda: registry.make("character_repetition_filter", {"rep_len": 0}),
         "rep_len=0 must be at least 1"),
        (lambda: ReplaceContentMapper("(a"), "not a regular expression: missing"),
        (lambda: ReplaceContentMapper("(a)", r"\2"), "invalid group reference"),
        (lambda: ReplaceContentMapper("(?x)a # why", r"\1"), "invalid group reference"),
        (lambda: ReplaceContentMapper(["a", "b"], ["c"]), "2 patterns and 1 replacements"),
        (lambda: DocumentMinhashDeduplicator(jaccard_threshold=0), "above 0"),
        (lambda: DocumentMinhashDeduplicator(tokenization="sentencepiece"), "space, punctuation, character"),
        (lambda: DocumentMinhashDeduplicator(num_bands=50, num_rows_per_band=50), "do not fit"),
        (lambda: DocumentMinhashDeduplicator(num_permutations=1), "at least 8"),
    ],
)  # fmt: skip
def test_a_parameter_that_makes_no_sense_is_refused_at_once(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        make()


def test_a_missing_column_and_a_number_are_named() -> None:
    op = registry.make("text_length_filter")
    with pytest.raises(InvalidValueError, match="no column 'text' for text_length_filter, only 'content'"):
        op.compute_stats({"content": "x"})
    with pytest.raises(InvalidValueError, match="needs text in the column 'text', not int"):
        op.compute_stats({"text": 5})


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_every_operator_travels_to_other_processes_and_says_what_it_is(name: str) -> None:
    parameters = {"pattern": "a"} if name == "replace_content_mapper" else {}
    op = registry.make(name, parameters | {"text_key": "content"})
    assert vars(pickle.loads(pickle.dumps(op))) == vars(op)
    assert op._name == name
    assert "text_key='content'" in repr(op)


# Deduplicators


def deduplicated(op: Any, texts: list[str]) -> list[str]:
    dataset = datasets.Dataset.from_dict({"text": texts})
    hashed = dataset.map(op.compute_hash, keep_in_memory=True)
    return list(op.process(hashed)["text"])


@pytest.fixture(autouse=True)
def _no_bars() -> None:
    datasets.utils.disable_progress_bars()


def test_of_equal_texts_the_first_stays() -> None:
    assert deduplicated(DocumentDeduplicator(), ["b", "a", "b", "B", "a", "b!"]) == ["b", "a", "B", "b!"]


def test_equality_can_look_past_case_and_punctuation() -> None:
    op = DocumentDeduplicator(lowercase=True, ignore_non_character=True)
    assert deduplicated(op, ["Straße 1", "STRASSE", "straße!", "weg"]) == ["Straße 1", "weg"]


def test_a_dataset_without_duplicates_is_not_copied() -> None:
    dataset = datasets.Dataset.from_dict({"text": ["a", "b"]})
    for op in (DocumentDeduplicator(), DocumentMinhashDeduplicator()):
        hashed = dataset.map(op.compute_hash, keep_in_memory=True)
        assert op.process(hashed) is hashed


def test_nothing_comes_of_nothing() -> None:
    for op in (DocumentDeduplicator(), DocumentMinhashDeduplicator()):
        dataset = datasets.Dataset.from_dict({"text": ["a"], op.column: [b""]}).select([])
        assert len(op.process(dataset)) == 0


def words(count: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    return [f"w{chance.randrange(10**9)}" for _ in range(count)]


def alike(count: int, common: int, seed: int) -> tuple[str, str, float]:
    """Two texts of a number of words each, of which a number are in both, and their Jaccard similarity."""
    both, one, two = words(common, seed), words(count - common, seed + 1), words(count - common, seed + 2)
    return " ".join(both + one), " ".join(both + two), common / (2 * count - common)


def test_signatures_estimate_similarity_without_bias() -> None:
    op = DocumentMinhashDeduplicator(window_size=1)
    errors = []
    for seed in range(60):
        first, second, similarity = alike(200, random.Random(seed).randrange(200), 1000 * seed)
        estimate = float((op.signature(first) == op.signature(second)).mean())
        errors.append(estimate - similarity)
    # The spread is sqrt(s (1 - s) / 256), at most 1/32.
    assert abs(np.mean(errors)) < 0.015
    assert np.std(errors) < 1 / 32


def test_signatures_follow_from_the_seed_alone() -> None:
    assert DocumentMinhashDeduplicator(num_permutations=8, seed=1).signature("a b c d e f").tolist() == [
        1205851055, 711250625, 2250990387, 1097897588, 319104008, 29053534, 411557710, 637126572,
    ]  # fmt: skip


def test_near_duplicates_go_and_cousins_stay() -> None:
    texts, expected = [], []
    for seed in range(0, 3000, 100):
        near = alike(300, 285, seed)  # similarity 0.90
        cousin = alike(300, 150, seed + 50)  # similarity 0.33
        texts += [*near[:2], *cousin[:2]]
        expected += [near[0], *cousin[:2]]
    op = DocumentMinhashDeduplicator(window_size=1, jaccard_threshold=0.7)
    assert deduplicated(op, texts) == expected


@pytest.mark.parametrize(
    ("parameters", "one", "other"),
    [
        ({}, "The Quick Brown Fox jumps", "the quick brown fox jumps"),
        ({"ignore_pattern": r"\d+", "tokenization": "character"}, "page 1 of the book",
         "page 27 of the book"),
        ({"tokenization": "punctuation"}, "so, it is done: at last!", "so it is done at last"),
        ({"tokenization": "character", "window_size": 3}, "今天天气很好我们去公园散步吧",
         "今天天气很好我们去公园散步啊"),
        ({}, "", " "),
        ({}, "short", "short"),
    ],
)  # fmt: skip
def test_what_counts_as_equal_is_what_the_parameters_say(
    parameters: dict[str, Any], one: str, other: str
) -> None:
    assert deduplicated(DocumentMinhashDeduplicator(**parameters), [one, "x y z", other]) == [one, "x y z"]


def test_a_chain_of_near_duplicates_is_one_cluster() -> None:
    base = words(200, 5)
    chain = [" ".join(base[at : at + 150]) for at in (0, 10, 20, 30, 40, 50)]
    op = DocumentMinhashDeduplicator(window_size=1, jaccard_threshold=0.8)
    assert deduplicated(op, [*chain, "another text altogether"]) == [chain[0], "another text altogether"]


def test_thousands_of_equal_texts_are_found_quickly() -> None:
    op = DocumentMinhashDeduplicator()
    same, other = op.signature(PROSE), op.signature(PROSE[::-1])
    signatures = np.stack([same] * 5000 + [other] * 5000)
    started = time.process_time()
    leaders = op.clusters(signatures)
    assert time.process_time() - started < 10
    assert set(leaders.tolist()) == {0, 5000}


def test_clusters_of_texts_that_repeat_are_those_of_one_of_each() -> None:
    random.seed(3)
    words = [f"w{number}" for number in range(40)]
    base = [random.choices(words, k=10) for _ in range(15)]
    texts = []
    for _ in range(200):
        text = list(random.choice(base))
        if random.random() < 0.5:
            text[random.randrange(10)] = random.choice(words)
        texts.append(" ".join(text))
    op = DocumentMinhashDeduplicator(window_size=1, jaccard_threshold=0.7)
    firsts = {text: place for place, text in reversed([*enumerate(texts)])}
    one_of_each = sorted(firsts.values())
    alone = op.clusters(np.stack([op.signature(texts[place]) for place in one_of_each]))
    leaders = {texts[place]: one_of_each[leader] for place, leader in zip(one_of_each, alone, strict=True)}
    assert len({*leaders.values()}) < len(leaders) < len(texts)
    found = op.clusters(np.stack([op.signature(text) for text in texts]))
    assert found.tolist() == [leaders[text] for text in texts]


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.8, 0.95, 1.0])
def test_bands_miss_few_pairs_at_the_threshold(threshold: float) -> None:
    bands, rows = best_bands(256, threshold)
    assert bands * rows <= 256
    assert 1 - (1 - min(1.0, threshold + 0.05) ** rows) ** bands > 0.85
    assert 1 - (1 - (threshold - 0.3) ** rows) ** bands < 0.4


def test_the_registry_names_every_operator_there_is() -> None:
    listed = set(registry.BUILT_IN.values())
    assert len(listed) == len(registry.BUILT_IN)
    for name in registry.BUILT_IN:
        assert re.fullmatch(r"[a-z_]+_(filter|mapper|deduplicator)", name)
        assert registry.find_operator(name).__doc__
