"""The embedding cache in one process: every kind of key and output comes back equal, and errors give the
reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from castore import Store
from castore.adapters.embeddings.cache import EmbeddingCache
from castore.adapters.embeddings.key_table import KeyIndex, key_digests
from castore.errors import (
    FullError,
    InvalidValueError,
    NotFoundError,
    OutOfRangeError,
    SerializationError,
    UnhashableError,
)
from tests.adapters.torch.conftest import same_batch


class Encoder:
    """Vectors that identify their items, and a list of all items that were encoded."""

    def __init__(self, width: int = 384) -> None:
        self.width = width
        self.seen: list[int] = []

    def __call__(self, items: list[int]) -> torch.Tensor:
        self.seen += items
        return vectors(items, self.width)


def vectors(items: list[int], width: int = 384) -> torch.Tensor:
    return torch.tensor(items, dtype=torch.float32)[:, None] + torch.arange(width) / 1000


def numbers(keys: str) -> list[int]:
    return [ord(key) for key in keys]


def test_two_fills_that_share_a_key_give_each_key_its_own_vector(store: Store) -> None:
    """The seed gave a and c one row: it numbered the keys of each fill from the earlier size of the cache."""
    cache, encode = EmbeddingCache("demo", store), Encoder()
    assert cache.fill("ab", numbers("ab"), encode) == 2
    assert cache.fill("ac", numbers("ac"), encode) == 1
    assert torch.equal(cache.get("abc"), vectors(numbers("abc")))
    assert encode.seen == numbers("abc")


def test_duplicates_are_encoded_once_within_a_fill_and_across_batches(store: Store) -> None:
    cache, encode = EmbeddingCache("demo", store), Encoder()
    keys = [0, 1, 0, 2, 1, 0, 3, 3, 2, 4] * 20
    assert cache.fill(keys, keys, encode, batch_size=2) == 5
    assert sorted(encode.seen) == [0, 1, 2, 3, 4]
    assert len(cache) == 5


def test_what_is_encoded_comes_in_whole_batches_in_order(store: Store) -> None:
    cache, sizes, seen = EmbeddingCache("demo", store), [], []

    def encode(items: list[int]) -> torch.Tensor:
        sizes.append(len(items))
        seen.extend(items)
        return vectors(items)

    cache.fill(range(1000), range(1000), encode, batch_size=7)
    assert sizes == [7] * 142 + [6]
    assert seen == list(range(1000))


_KEYS: list[tuple[str, list[Any]]] = [
    ("int", [0, -1, 1, 2**63 - 1, -(2**63), 2**70, 123]),
    ("str", ["", "a", "é", "a\0", "\udc80", "x" * 10_000]),
    ("bytes", [b"", b"a", "é".encode(), b"\0"]),
    ("tuple", [(), (0,), ("a", 1), ("a", "1"), (b"a", 1), (("a",), 1), ("a", (1,))]),
    ("mixed", [1, "1", b"1", (1,), ("1",), (b"1",)]),
]


@pytest.mark.parametrize(("kind", "keys"), _KEYS, ids=[kind for kind, _ in _KEYS])
def test_keys_of_every_kind_are_told_apart(store: Store, kind: str, keys: list[Any]) -> None:
    cache = EmbeddingCache("demo", store)
    assert cache.fill(keys, range(len(keys)), vectors) == len(keys)
    again = EmbeddingCache("demo", store)
    assert torch.equal(again.get(keys), vectors(list(range(len(keys)))))
    assert all(key in again for key in keys)


def test_keys_as_scalars_of_numpy_and_torch_are_those_of_python(store: Store) -> None:
    cache = EmbeddingCache("t", store)
    plain = ["a", 3, b"q", (3, "a", b"q")]
    scalars = [
        np.str_("a"), torch.tensor(3, dtype=torch.uint8), np.bytes_(b"q"),
        (np.int32(3), np.str_("a"), np.bytes_(b"q")),
    ]  # fmt: skip
    cache.fill(plain, range(4), torch.tensor)
    assert cache.get(scalars).tolist() == [0, 1, 2, 3]
    assert cache.get(np.array(["a"])).tolist() == [0]


@pytest.mark.parametrize("key", [True, 1.0, None, ["a"], ("a", 1.5)])
def test_a_key_of_another_kind_is_refused(store: Store, key: Any) -> None:
    cache = EmbeddingCache("demo", store)
    with pytest.raises(UnhashableError, match="keys are int, str, bytes, or tuples of those"):
        cache.fill([key], [0], vectors)


@pytest.mark.parametrize(
    "form",
    [range, torch.arange, lambda n: np.arange(n, dtype=np.int32), lambda n: [np.int64(i) for i in range(n)]]
)  # fmt: skip
def test_integers_are_the_same_key_in_every_form(store: Store, form: Callable[[int], Any]) -> None:
    cache = EmbeddingCache("demo", store)
    cache.fill(list(range(10)), range(10), vectors)
    assert torch.equal(cache.rows(form(10)), cache.rows(list(range(10))))


def test_keys_that_share_their_first_half_are_told_apart() -> None:
    keys = np.array([[7, 1], [7, 2], [7, 3], [8, 1], [9, 9]], np.uint64)
    table = KeyIndex.of(keys, np.arange(5))
    asked = np.array([[7, 3], [7, 4], [8, 1], [7, 1], [9, 8], [10, 0]], np.uint64)
    assert table.find(asked).tolist() == [2, -1, 3, 0, -1, -1]
    more = table.with_more(np.array([[7, 4], [1, 1]], np.uint64), np.array([5, 6]))
    assert more.find(np.concatenate([keys, asked[1:2]])).tolist() == [0, 1, 2, 3, 4, 5]
    assert key_digests([5, "5"]).shape == (2, 2)


# --- outputs ------------------------------------------------------------------------------------------------

_OUTPUTS: dict[str, Callable[[list[int]], Any]] = {
    "one number a row": torch.tensor,
    "rows of odd bytes": lambda items: torch.tensor([[i % 256] * 77 for i in items], dtype=torch.uint8),
    "rows of several dimensions": lambda items: torch.tensor(items).view(-1, 1, 1).expand(-1, 3, 5) * 1.5,
    "bool": lambda items: torch.tensor([i % 3 == 0 for i in items]),
    "bfloat16": lambda items: torch.tensor(items)[:, None].expand(-1, 9).to(torch.bfloat16),
    "float8": lambda items: (
        torch.tensor(items)[:, None].to(torch.float8_e4m3fn).view(torch.uint8).view(torch.float8_e4m3fn)
    ),
    "complex": lambda items: torch.tensor([complex(i, -i) for i in items]),
    "a tuple": lambda items: (vectors(items, 4), torch.tensor(items)),
    "a dict in a tuple": lambda items: ({"a/b": vectors(items, 4), "a_b": torch.tensor(items)},
        vectors(items, 2)),
    "a tuple with None": lambda items: (vectors(items, 4), None),
    "ragged": lambda items: [torch.full((i % 5, 3), float(i)) for i in items],
    "ragged bfloat16": lambda items: [torch.full((i % 7,), i, dtype=torch.bfloat16) for i in items],
    "text": lambda items: [f"é{i}" * (i % 3) for i in items],
    "bytes": lambda items: [bytes([i % 256]) * (i % 4) for i in items],
    "ints": lambda items: [i - 2**40 for i in items],
    "floats": lambda items: [i / 3 for i in items],
    "bools": lambda items: [i % 2 == 0 for i in items],
}  # fmt: skip


@pytest.mark.parametrize("kind", _OUTPUTS)
def test_outputs_of_every_kind_come_back_as_they_were(store: Store, kind: str) -> None:
    encode, cache = _OUTPUTS[kind], EmbeddingCache("demo", store)
    for start, end in ((0, 70), (40, 300), (300, 301), (301, 302), (302, 2500)):
        cache.fill(range(start, end), range(start, end), encode, batch_size=16)
    asked = [5, 0, 2499, 301, 5, 120, 300]
    for reader in (cache, EmbeddingCache("demo", store)):
        got, put = reader.get(asked), encode(asked)
        if kind == "float8":
            got, put = got.view(torch.uint8), put.view(torch.uint8)
        same_batch(got, put)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_floats_can_be_stored_narrower_and_stat_says_so(store: Store, dtype: torch.dtype) -> None:
    def encode(items: list[int]) -> Any:
        return vectors(items), torch.tensor(items), [vectors(items, 2)] * len(items)

    cache = EmbeddingCache("demo", store, dtype=dtype)
    cache.fill(range(50), range(50), encode, batch_size=1)
    got = EmbeddingCache("demo", store, dtype=dtype).get([3, 49])
    assert torch.equal(got[0], vectors([3, 49]).to(dtype).float())
    assert torch.equal(got[1], torch.tensor([3, 49]))
    assert got[2][0].dtype == torch.float32
    (entry,) = store.entries("embeddings/demo/output.0")
    assert entry.size == 4096 + 50 * 384 * 2
    expected = {
        "dtype": "float32",
        "stored": str(dtype)[6:],
        "npy": "float16" if dtype == torch.float16 else "uint16",
    }
    assert expected.items() <= entry.metadata.items()
    with pytest.raises(InvalidValueError, match=r"stores output\.0 as"):
        EmbeddingCache("demo", store)


def test_a_value_too_large_for_the_storage_is_an_error_and_no_infinity(store: Store) -> None:
    cache = EmbeddingCache("demo", store, dtype=torch.float16)
    with pytest.raises(SerializationError, match=r"does not fit into torch\.float16"):
        cache.fill([1], [100_000], vectors)
    assert len(cache) == 0


@pytest.mark.parametrize(
    ("outputs", "why"),
    [
        (torch.zeros(3, 4), "not one row for each of 2"),
        (torch.zeros(()), "not one row for each of 2"),
        (torch.zeros(2, 0), "have no elements"),
        ([torch.zeros(2)], "list of 1 is neither a tensor"),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], "differ in their first dimension only"),
        ([torch.zeros(()), torch.zeros(())], "stack them"),
        (["a", b"a"], "a list of bytes, str cannot be kept"),
        ([2**70, 0], "does not fit into 64 bits"),
        ({1: torch.zeros(2)}, "must be text"),
        ((), "nothing to keep"),
        (None, "nothing to keep"),
        (object(), "object is neither a tensor"),
        (torch.eye(2).to_sparse(), "nested, sparse or quantised"),
        ([torch.eye(2).to_sparse()] * 2, "nested, sparse or quantised"),
    ],
)
def test_outputs_that_cannot_be_kept_are_refused_with_the_reason(
    store: Store, outputs: Any, why: str
) -> None:
    with pytest.raises(SerializationError, match=why):
        EmbeddingCache("demo", store).fill([1, 2], [1, 2], lambda _: outputs)


def test_jagged_outputs_are_refused(store: Store) -> None:
    """Made here, for torch imports its compiler to make one."""
    jagged = torch.nested.nested_tensor([torch.ones(1, 2)] * 2, layout=torch.jagged)
    with pytest.raises(SerializationError, match="nested, sparse or quantised"):
        EmbeddingCache("demo", store).fill([1, 2], [1, 2], lambda _: jagged)


def test_outputs_unlike_those_before_are_refused(store: Store) -> None:
    cache = EmbeddingCache("demo", store)
    cache.fill([1], [1], vectors)
    with pytest.raises(
        SerializationError, match=r"output is tensor of float32 \(7,\), where it was .* \(384,\)"
    ):
        cache.fill([2], [2], lambda items: vectors(items, 7))
    with pytest.raises(SerializationError, match="nested otherwise"):
        cache.fill([2], [2], lambda items: (vectors(items),))
    assert len(cache) == 1


def test_an_encoder_that_fails_loses_nothing_of_what_it_did_before(store: Store) -> None:
    def encode(items: list[int]) -> torch.Tensor:
        if 20 in items:
            raise RuntimeError("no more")
        return vectors(items)

    cache = EmbeddingCache("demo", store)
    with pytest.raises(RuntimeError, match="no more"):
        cache.fill(range(40), range(40), encode, batch_size=8)
    assert len(EmbeddingCache("demo", store)) == 16
    assert cache.fill(range(40), range(40), vectors) == 24
    assert torch.equal(cache.get(range(40)), vectors(list(range(40))))


def test_keys_without_items_and_items_without_keys_are_errors(store: Store) -> None:
    cache = EmbeddingCache("demo", store)
    with pytest.raises(InvalidValueError, match="as many items as keys"):
        cache.fill([1, 2], [1], vectors)
    with pytest.raises(InvalidValueError, match="as many items as keys"):
        cache.fill([1, 2], [1, 2, 3], vectors)


# --- looking up ---------------------------------------------------------------------------------------------


def test_a_missing_key_is_a_key_error_that_names_it(store: Store) -> None:
    cache = EmbeddingCache("demo", store)
    with pytest.raises(NotFoundError, match="has no embedding for the key 'a'"):
        cache.rows(["a"])
    cache.fill(["a"], [1], vectors)
    with pytest.raises(KeyError, match="has no embedding for the key 'b'"):
        cache.get(["a", "b", "c"])
    assert cache.find(["b", "a"]).tolist() == [-1, 0]
    assert "b" not in cache


@pytest.mark.parametrize("row", [-1, 3, 7, 24, 10**9])
def test_rows_that_were_never_given_out_are_errors(store: Store, row: int) -> None:
    cache = EmbeddingCache("demo", store)
    cache.fill(range(3), range(3), vectors)
    with pytest.raises(OutOfRangeError, match=f"row {row} of the embedding cache 'demo' does not exist"):
        cache.take(torch.tensor([0, row]))


def test_rows_must_be_what_rows_gives(store: Store) -> None:
    cache = EmbeddingCache("demo", store)
    cache.fill(range(3), range(3), vectors)
    for wrong in (torch.tensor([[0]]), torch.tensor([0.0]), torch.tensor([0], dtype=torch.int32)):
        with pytest.raises(InvalidValueError, match="one-dimensional int64"):
            cache.take(wrong)
    assert cache.take(torch.empty(0, dtype=torch.int64)).shape == (0, 384)


def test_what_is_taken_is_the_callers_own(store: Store) -> None:
    cache = EmbeddingCache("demo", store)
    cache.fill(range(3), range(3), vectors)
    cache.get([1]).zero_()
    assert torch.equal(cache.get([1]), vectors([1]))


def test_whole_arrays_hold_each_row_at_its_number(store: Store) -> None:
    cache = EmbeddingCache("demo", store, dtype=torch.float16)
    cache.fill(range(300), range(300), lambda items: (vectors(items), items), batch_size=64)
    cache.fill(range(300, 310), range(300, 310), lambda items: (vectors(items), items))
    rows = cache.rows(range(310))
    selected = [array[rows] for array in cache.arrays()]
    assert [array.dtype for array in selected] == [torch.float16, torch.int64]
    same_batch(cache.assemble(selected), cache.take(rows))
    assert cache.nbytes == sum(array.nbytes for array in cache.arrays())


def test_arrays_of_ragged_outputs_are_refused(store: Store) -> None:
    cache = EmbeddingCache("demo", store)
    cache.fill("a", [1], lambda items: [torch.zeros(item) for item in items])
    with pytest.raises(InvalidValueError, match="differs in length"):
        cache.arrays()


def test_a_table_larger_than_its_stores_budget_is_an_error(tmp_path: Any) -> None:
    with Store(tmp_path / "store", memory=0, max_size="100KB") as small:
        cache = EmbeddingCache("demo", small)
        cache.fill(range(20), range(20), vectors)
        with pytest.raises(FullError, match="more than its store may hold"):
            cache.fill(range(20, 80), range(20, 80), vectors)
        assert torch.equal(EmbeddingCache("demo", small).get(range(20)), vectors(list(range(20))))


@pytest.mark.parametrize(("first", "second"), [("bert", "bert/large"), ("a/bert", "a"), ("bert", "bert/x/y")])
def test_a_table_below_another_is_refused(store: Store, first: str, second: str) -> None:
    EmbeddingCache(first, store).fill("ab", numbers("ab"), Encoder())
    with pytest.raises(InvalidValueError, match=f"{second!r} would share a folder with {first!r}"):
        EmbeddingCache(second, store)
    assert len(EmbeddingCache(first, store)) == 2
    assert EmbeddingCache("bert-large", store).fill("ab", numbers("ab"), Encoder()) == 2


def test_a_table_without_its_manifest_is_made_anew(store: Store) -> None:
    EmbeddingCache("bert", store).fill("ab", numbers("ab"), Encoder())
    assert store.delete("embeddings/bert/table.json")
    assert EmbeddingCache("bert", store).fill("ab", numbers("ab"), Encoder()) == 2
