"""The parts of an operator that count in its fingerprint, and errors for parts without a stable hash."""

from __future__ import annotations

import functools
import io
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from castore.adapters.datasets import operator_fingerprint
from castore.adapters.datasets.operator_description import describe
from castore.errors import UnhashableError


class Operator:
    """Holds any value."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def process(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "held": str(self.held)}


class Tokenizer:
    """Behaves as the tokenizers of `transformers`: each call leaves its truncation in the rules."""

    def __init__(self) -> None:
        self.calls = 0

    @functools.cached_property
    def table(self) -> dict[str, int]:
        return {"a": 1}


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: io.StringIO("text"), "cannot hash <class '_io.StringIO'>"),
        (
            lambda: open("/proc/self/status", encoding="ascii"),  # noqa: SIM115
            "what is read from it depends on where it stands",
        ),
        (lambda: (n for n in range(3)), "cannot hash a generator"),
        (lambda: weakref.ref(Operator), "what it refers to may be gone"),
        (lambda: __import__("sqlite3").connect(":memory:"), "cannot pickle 'sqlite3.Connection'"),
    ],
)
def test_what_cannot_be_hashed_is_an_error_that_names_the_attribute_and_offers_a_way_out(
    make: Callable[[], Any], part: str
) -> None:
    held = make()
    with pytest.raises(UnhashableError) as caught:
        operator_fingerprint(Operator({"deep": [1, held]}).process, "my_operator")
    if hasattr(held, "close"):
        held.close()
    message = str(caught.value)
    assert message.startswith("my_operator.__self__.held['deep'][1]")
    assert part in message
    assert "fingerprint=" in message


def test_locks_that_are_held_and_pools_that_work_change_nothing() -> None:
    lock = threading.Lock()
    free = operator_fingerprint(Operator(lock).process)
    with lock:
        assert operator_fingerprint(Operator(lock).process) == free


def test_a_cached_property_that_was_used_changes_nothing() -> None:
    fresh, used = Tokenizer(), Tokenizer()
    assert used.table
    assert operator_fingerprint(Operator(fresh)) == operator_fingerprint(Operator(used))


def test_an_array_that_is_changed_in_place_is_another_one() -> None:
    array = np.zeros(1_000_000)
    before = operator_fingerprint(Operator(array))
    array[999_999] = 1
    assert operator_fingerprint(Operator(array)) != before


def test_weights_that_are_changed_behind_autograd_are_others() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(100, 100)
    before = operator_fingerprint(Operator(model))
    model.weight.data[3, 4] += 1
    assert operator_fingerprint(Operator(model)) != before


def test_a_source_of_random_numbers_that_was_used_has_moved_on() -> None:
    fresh, used = random.Random(7), random.Random(7)
    assert operator_fingerprint(Operator(fresh)) == operator_fingerprint(Operator(used))
    used.random()
    assert operator_fingerprint(Operator(fresh)) != operator_fingerprint(Operator(used))


def test_the_layout_of_an_array_in_memory_changes_nothing() -> None:
    array = np.arange(2_000_000.0).reshape(1000, 2000)
    assert operator_fingerprint(Operator(array)) == operator_fingerprint(Operator(np.asfortranarray(array)))


def test_sets_hold_objects_of_the_users() -> None:
    first, again = Operator(1), Operator(1)
    assert operator_fingerprint(Operator({first})) == operator_fingerprint(Operator({again}))
    assert operator_fingerprint(Operator({first})) != operator_fingerprint(Operator({Operator(2)}))


def test_a_tokenizer_is_told_by_its_rules() -> None:
    tokenizers = pytest.importorskip("tokenizers")

    def make(words: list[str]) -> Any:
        vocabulary = {word: number for number, word in enumerate(["[UNK]", *words])}
        return tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))

    assert operator_fingerprint(Operator(make(["a", "b"]))) == operator_fingerprint(
        Operator(make(["a", "b"]))
    )
    assert operator_fingerprint(Operator(make(["a", "b"]))) != operator_fingerprint(
        Operator(make(["a", "c"]))
    )


def test_a_tokenizer_that_splits_special_tokens_is_another_one() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")

    def both(split: bool) -> list[str]:
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
        made.encode_special_tokens = split
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
        fast._tokenizer.encode_special_tokens = split
        return [operator_fingerprint(Operator(made)), operator_fingerprint(Operator(fast))]

    assert both(False) == both(False)
    assert not {*both(False)} & {*both(True)}


def test_the_metadata_of_an_arrow_schema_counts() -> None:
    plain = pa.table({"a": [1, 2]})
    field = pa.field("a", pa.int64(), metadata={"unit": "m"})
    described = [
        plain,
        plain.replace_schema_metadata({"unit": "m"}),
        plain.replace_schema_metadata({"unit": "cm"}),
        plain.cast(pa.schema([field])),
    ]
    for kept in (described, [table.to_batches()[0] for table in described]):
        assert len({operator_fingerprint(Operator(table)) for table in kept}) == len(described)


def test_a_tokenizer_of_transformers_that_was_used_is_the_same() -> None:
    """datasets' issues 3638, 3847 and 6179: truncation and padding of the last call stay in the tokenizer's
    rules.
    """
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    rules = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    rules.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=rules, unk_token="[UNK]", pad_token="[UNK]"
    )
    before = operator_fingerprint(Operator(tokenizer))
    tokenizer(["a a a a", "a"], truncation=True, max_length=3, padding="max_length")
    assert operator_fingerprint(Operator(tokenizer)) == before
    tokenizer.add_tokens(["b"])
    assert operator_fingerprint(Operator(tokenizer)) != before

    def past_the_tokenizer(sample: dict[str, Any]) -> dict[str, Any]:
        return {"ids": tokenizer.backend_tokenizer.encode(sample["text"]).ids}

    codes = []
    for length in (2, 2, 4):
        tokenizer.backend_tokenizer.enable_truncation(length)
        codes.append(operator_fingerprint(past_the_tokenizer))
    assert codes[0] == codes[1] != codes[2]


def test_many_tokenizers_each_keep_their_fingerprint() -> None:
    """More than those whose rules are remembered."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")

    def made(words: int) -> Any:
        rules = tokenizers.models.WordLevel({"?": 0, **{f"w{n}": n for n in range(1, words)}}, unk_token="?")
        return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(rules))

    first = [operator_fingerprint(Operator(made(words))) for words in range(2, 42)]
    assert [operator_fingerprint(Operator(made(words))) for words in range(2, 42)] == first
    assert len({*first}) == 40


@pytest.mark.parametrize(
    "held",
    [dict(zip("abc", range(3), strict=True)), [1, ("x", {2})], {Tokenizer()}, Tokenizer],
    ids=["dict", "list", "objects", "class"],
)
def test_what_is_said_of_a_parameter_does_not_depend_on_what_is_around_it(held: Any) -> None:
    """Otherwise explain() would name a parameter where only the code has changed."""

    class Other(Operator):
        first = Tokenizer
        more = property(lambda self: {"held": self.held})

    report = [describe(kind(held), "operator").parts["the parameter 'held'"] for kind in (Operator, Other)]
    assert report[0] == report[1]
    assert report[0][0]
