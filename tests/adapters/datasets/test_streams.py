"""Maps and filters of streams with kept calls: rows are those of plain `datasets`, and the function does not
run again for rows that it has seen.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image, ImageOps, JpegImagePlugin

from castore import Store
from castore.adapters.datasets import CacheWarning, DatasetCache, cached_filter, cached_map, call_blocks
from castore.adapters.datasets.call_blocks import CALLS_FOLDER
from castore.adapters.torch import CachedIterableDataset
from castore.errors import InvalidValueError, UnhashableError
from castore.serialize.serializers import dump
from castore.serialize.serializers import load as loads
from tests.adapters.datasets import stream_cases
from tests.adapters.datasets.noting import calls, log
from tests.adapters.datasets.stream_cases import (
    FORMATTED,
    PIPELINES,
    ROWS,
    STEPS,
    adds,
    cached,
    from_arrow,
    from_odd,
    from_python,
    keeps,
    one_step,
    plain,
    ran,
    told,
)  # fmt: skip
from tests.images import animation, flat, photo
from tests.warm import WarmPython

SOURCES = {"python": from_python, "arrow": from_arrow}
BUILDS = {**{name: one_step(name) for name in [*STEPS, *FORMATTED]}, **PIPELINES}
TABLES = {"arrow batches", "arrow filter", "pandas", "pandas filter"}
#: Rows come in another order in each epoch, so their blocks are those of the same epoch of another run.
MIXED = {"shuffle before"}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_blocks, "TARGET_CALLS", 8)
    monkeypatch.setattr(call_blocks, "TARGET_BYTES", 8 * 200)
    calls.clear()


@pytest.fixture(autouse=True)
def _close_loops_of_plain_datasets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    loops: list[asyncio.AbstractEventLoop] = []
    make = asyncio.new_event_loop

    def noted() -> asyncio.AbstractEventLoop:
        loops.append(make())
        return loops[-1]

    monkeypatch.setattr(asyncio, "new_event_loop", noted)
    yield
    for loop in loops:
        loop.close()


def rows_of(dataset: Any) -> list[Any]:
    """All rows of one epoch, with their types."""
    return [told(row) for row in dataset]


#: How a step gets its rows, and from which source, are two questions: of the longer pipelines, each is run
#: over one of the sources, and `make torture` runs it over the other one.
_OTHER_SOURCES = {*zip(PIPELINES, itertools.cycle(SOURCES))}


@pytest.mark.parametrize(
    ("name", "source"),
    [
        pytest.param(name, source, marks=[pytest.mark.matrix] * ((name, source) in _OTHER_SOURCES))
        for name in BUILDS
        for source in SOURCES
        # Plain datasets cannot join rows of Python's types to the tables of those.
        if name not in TABLES or source != "python"
    ],
)
def test_rows_are_those_of_plain_datasets_and_run_once(store: Store, name: str, source: str) -> None:
    expected = rows_of(BUILDS[name](SOURCES[source](), plain))
    assert expected
    ran()
    dataset = BUILDS[name](SOURCES[source](), cached(store))
    assert rows_of(dataset) == expected
    assert ran() > 0
    assert rows_of(dataset) == expected, "the same object again"
    assert rows_of(BUILDS[name](SOURCES[source](), cached(store))) == expected
    assert ran() == 0, "nothing runs again"


def _over_epochs() -> Iterator[Any]:
    """Each longer pipeline, which may shuffle, and some of the single steps; `make torture` has all."""
    for number, name in enumerate(STEPS):
        yield pytest.param(name, marks=[pytest.mark.matrix] * (number % 3 > 0))
    yield from PIPELINES


@pytest.mark.parametrize("name", _over_epochs())
def test_epochs_are_those_of_plain_datasets(store: Store, name: str) -> None:
    one, other = BUILDS[name](from_arrow(), plain), BUILDS[name](from_arrow(), cached(store))
    for epoch in (1, 2, 1):
        one.set_epoch(epoch)
        other.set_epoch(epoch)
        assert rows_of(other) == rows_of(one)


def test_a_shard_is_found_when_shards_come_in_another_order(store: Store) -> None:
    dataset = cached_map(from_arrow(shards=6), adds, store=store).shuffle(seed=1, buffer_size=5)
    orders = set()
    for epoch in range(4):
        dataset.set_epoch(epoch)
        orders.add(str(rows_of(dataset)))
        assert ran() == (ROWS if epoch == 0 else 0)
    assert len(orders) == 4


def test_files_that_are_streamed(store: Store, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([stream_cases.row(number) for number in range(ROWS)])
    for shard in range(3):
        rows.shard(3, shard).to_parquet(tmp_path / f"{shard}.parquet")
        (tmp_path / f"{shard}.txt").write_text("\n".join(rows.shard(3, shard)["text"]))

    def longer(sample: dict[str, Any]) -> dict[str, Any]:
        log.info("longer")
        return {"longer": sample["text"] + "!"}

    for kind in ("parquet", "text"):
        files = sorted(map(str, tmp_path.glob("*.parquet" if kind == "parquet" else "*.txt")))
        stream = datasets.load_dataset(kind, data_files=files, split="train", streaming=True)
        expected = rows_of(stream.map(longer))
        ran()
        assert rows_of(cached_map(stream, longer, store=store)) == expected
        assert 0 < ran() <= len(expected), "shards begin with the same text"
        assert rows_of(cached_map(stream, longer, store=store)) == expected
        assert ran() == 0


def test_images_come_back_as_plain_datasets_gives_them(store: Store) -> None:
    pictures = [Image.new(mode, (3, 2), 5) for mode in ("L", "RGB", "1")]
    rows = {"image": pictures, "number": [0, 1, 2], "text": ["a", "b", "c"]}
    features = datasets.Features(
        {"image": datasets.Image(), "number": datasets.Value("int64"), "text": datasets.Value("string")}
    )

    def turned(sample: dict[str, Any]) -> dict[str, Any]:
        log.info("turned")
        return {"turned": sample["image"].rotate(90, expand=True), "size": sample["image"].size}

    stream = datasets.Dataset.from_dict(rows, features=features).to_iterable_dataset()
    expected = rows_of(stream.map(turned))
    ran()
    for runs in (3, 0):
        assert rows_of(cached_map(stream, turned, store=store)) == expected
        assert ran() == runs


def from_values(*values: Any) -> datasets.IterableDataset:
    def rows() -> Iterator[dict[str, Any]]:
        for value in values:
            yield {"value": value}

    return datasets.IterableDataset.from_generator(rows)


def test_rows_count_by_all_that_a_function_can_see_of_images(store: Store) -> None:
    def seen(row: dict[str, Any]) -> dict[str, Any]:
        log.info("seen")
        image = row["value"]
        return {"value": [type(image).__name__, ImageOps.exif_transpose(image).size, image.format]}

    def values() -> list[Image.Image]:
        photos = [photo(6, format="PNG"), photo(1, format="PNG"), photo(1, format="TIFF")]
        return [*photos, photos[1].copy()]

    expected = rows_of(from_values(*values()).map(seen))
    ran()
    assert rows_of(cached_map(from_values(*values()), seen, store=store)) == expected
    assert ran() == len(expected)
    assert rows_of(cached_map(from_values(*values()), seen, store=store)) == expected
    assert ran() == 0


# A tag of a TIFF file: where a tile of a map lies.
_PLACE = 33922


@pytest.mark.parametrize("read", ["quantization", "sampling", "tag"])
def test_images_of_equal_pixels_count_by_what_else_their_files_say(store: Store, read: str) -> None:
    """Regression: two flat JPEG files, and two tiles of a map, were one."""
    see: dict[str, Callable[[Any], Any]] = {
        "quantization": lambda image: image.quantization[0][0],
        "sampling": JpegImagePlugin.get_sampling,
        "tag": lambda image: image.tag_v2[_PLACE][0],
    }

    def seen(row: dict[str, Any]) -> dict[str, Any]:
        return {"value": see[read](row["value"])}

    images = [flat("JPEG", quality=50), flat("JPEG", quality=90), flat("JPEG", quality=90, subsampling=0)]
    if read == "tag":
        images = [flat("TIFF", tiffinfo={_PLACE: (float(place), 1.0)}) for place in (1, 2)]
    expected = rows_of(from_values(*images).map(seen))
    assert len({row["value"] for row in expected}) == 2
    for _ in range(2):
        assert rows_of(cached_map(from_values(*images), seen, store=store)) == expected
    cached = CachedIterableDataset(images, see[read], store)
    assert [*cached] == [see[read](image) for image in images]


def test_images_count_by_all_of_their_frames(store: Store) -> None:
    def last(row: dict[str, Any]) -> dict[str, Any]:
        row["value"].seek(1)
        return {"value": row["value"].convert("RGB").getpixel((0, 0))}

    for colour in ("red", "blue"):
        expected = rows_of(from_values(animation(colour)).map(last))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CacheWarning)  # the function leaves the image at another frame
            assert rows_of(cached_map(from_values(animation(colour)), last, store=store)) == expected


def test_values_that_would_lose_a_part_are_not_kept_and_named(store: Store) -> None:
    torch = pytest.importorskip("torch")

    def with_scale(scale: int) -> Any:
        tensor = torch.ones(2)
        tensor.scale = scale
        return tensor

    def scaled(row: dict[str, Any]) -> dict[str, Any]:
        return {"scale": row["value"].scale}

    with pytest.warns(CacheWarning, match="a tensor with the attribute 'scale', which its bytes lack"):
        found = [
            row["scale"]
            for scale in (1, 2)
            for row in cached_map(from_values(with_scale(scale)), scaled, store=store)
        ]
    assert found == [1, 2]
    path = r"\['value'\]\[0\] is a tensor with the attribute"
    stream = cached_map(from_values(3), lambda row: {"value": [with_scale(row["value"])]}, store=store)
    with pytest.warns(CacheWarning, match=path):
        found = [row["value"][0].scale for _ in range(2) for row in stream]
    assert found == [3, 3]

    def in_array(row: dict[str, Any]) -> dict[str, Any]:
        array = np.empty(2, object)
        array[1] = with_scale(row["value"])
        return {"value": array}

    with pytest.warns(CacheWarning, match=r"\['value'\]\.flat\[1\] is a tensor with the attribute"):
        found = [row["value"][1].scale for row in cached_map(from_values(3), in_array, store=store)]
    assert found == [3]
    stream = cached_map(from_values(3), lambda row: {"value": animation("red")}, store=store)
    with pytest.warns(CacheWarning, match="of several frames, of which one would come back"):
        found = [row["value"].n_frames for _ in range(2) for row in stream]
    assert found == [2, 2]


def test_images_come_back_with_what_their_files_say(store: Store) -> None:
    def load(row: dict[str, Any]) -> dict[str, Any]:
        return {"value": photo(row["value"], format="JPEG")}

    def upright(row: dict[str, Any]) -> dict[str, Any]:
        return {"size": ImageOps.exif_transpose(row["value"]).size}

    stream = cached_map(from_values(6), load, store=store).map(upright, remove_columns="value")
    expected = rows_of(from_values(6).map(load).map(upright, remove_columns="value"))
    assert [rows_of(stream) for _ in range(2)] == [expected] * 2


# --- keys ---------------------------------------------------------------------------------------------------


def test_another_function_or_argument_runs_and_other_columns_do_not_matter(store: Store) -> None:
    rows_of(cached_map(from_python(), adds, store=store))
    ran()
    rows_of(cached_map(from_python(), adds, store=store, fn_kwargs={"by": 2}))
    assert ran() == ROWS
    rows_of(cached_map(from_python(), adds, store=store, remove_columns=["text"]))
    assert ran() == 0, "the function sees and returns the same"
    rows_of(cached_map(from_python(), stream_cases.of_columns, store=store, input_columns=["text", "number"]))
    assert ran() == ROWS
    less = from_python().remove_columns(["score", "words"])
    rows_of(cached_map(less, stream_cases.of_columns, store=store, input_columns=["text", "number"]))
    assert ran() == 0, "a function that gets columns sees no others"


def test_a_fingerprint_stands_for_the_function(store: Store) -> None:
    handle = open(__file__)  # noqa: SIM115 - a value without a hash

    def opened(sample: dict[str, Any]) -> dict[str, Any]:
        log.info("opened %s", handle.closed)
        return {"n": 1}

    with handle:
        with pytest.raises(UnhashableError, match="handle"):
            cached_map(from_python(), opened, store=store)
        for expected in (ROWS, 0):
            rows_of(cached_map(from_python(), opened, store=store, fingerprint="1"))
            assert ran() == expected


def test_values_of_another_type_are_other_rows(store: Store) -> None:
    def typed(sample: dict[str, Any]) -> dict[str, Any]:
        log.info("typed")
        return {"type": type(sample["value"]).__name__}

    values = [1, 1.0, True, "1", b"1", None, [1], (1,), {"a": 1}, complex(1)]
    for value in values:
        stream = datasets.IterableDataset.from_generator(_one_row, gen_kwargs={"value": [value]})
        [row] = cached_map(stream, typed, store=store)
        assert row["type"] == type(value).__name__
    assert ran() == len(values)


def _one_row(value: list[Any]) -> Iterator[dict[str, Any]]:
    yield {"value": value[0]}


def test_no_function_and_wrong_arguments(store: Store) -> None:
    assert rows_of(cached_map(from_python(), store=store)) == rows_of(from_python())
    with pytest.raises(InvalidValueError, match=r"IterableDataset\.map has no argument 'num_proc'"):
        cached_map(from_python(), adds, store=store, num_proc=2)
    with pytest.raises(InvalidValueError, match=r"takes a datasets\.Dataset or IterableDataset, not list"):
        cached_filter([1], keeps, store=store)


def test_a_dict_of_streams_is_mapped_split_by_split(store: Store) -> None:
    both = datasets.IterableDatasetDict({"train": from_python(), "test": from_arrow(20)})
    mapped = cached_map(both, adds, store=store)
    assert type(mapped) is datasets.IterableDatasetDict
    assert {split: rows_of(part) for split, part in mapped.items()} == {
        split: rows_of(part.map(adds)) for split, part in both.items()
    }


# --- functions that change ---------------------------------------------------------------------------------


_factor = 1


class _Adds:
    """Adds what may be changed from outside."""

    def __init__(self) -> None:
        self.by = 0

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        log.info("adds")
        return {"sum": sample["number"] * _factor + self.by}


@pytest.fixture
def _factor_of_1() -> Iterator[None]:
    yield
    globals()["_factor"] = 1


@pytest.mark.usefixtures("_factor_of_1")
@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("place", ["attribute", "global", "keyword"])
def test_each_pass_counts_the_function_as_it_is_then(store: Store, place: str, rowwise: bool) -> None:
    adds = _Adds()
    keywords = {"by": 0}

    def maps(sample: dict[str, Any], by: int) -> dict[str, Any]:
        if not rowwise:
            return {"sum": adds(sample)["sum"] + by}
        return {"sum": [adds({"number": number})["sum"] + by for number in sample["number"]]}

    def change(to: int) -> None:
        if place == "attribute":
            adds.by = to
        elif place == "global":
            globals()["_factor"] = to
        else:
            keywords["by"] = to

    batched: dict[str, Any] = {"batched": True, "batch_size": 7} if rowwise else {}
    mapped = cached_map(from_python(), maps, store=store, fn_kwargs=keywords, rowwise=rowwise, **batched)
    same = from_python().map(maps, fn_kwargs=keywords, **batched)
    change(5)  # after the step was made, and before its first row
    for to in (5, 6):
        change(to)
        expected = rows_of(same)
        ran()
        assert rows_of(mapped) == expected
        assert ran() >= ROWS
        assert rows_of(mapped) == expected
        assert ran() == 0
    change(5)
    expected = rows_of(same)
    ran()
    assert rows_of(mapped) == expected
    change(0)
    assert rows_of(cached_map(from_python(), maps, store=store, fn_kwargs=keywords, **batched))
    assert ran() >= ROWS, "nothing lies under the key of the function as it was when the step was made"


def test_a_filter_counts_its_function_as_it_is_in_each_pass(store: Store) -> None:
    least = [0]
    kept = cached_filter(from_python(), lambda sample: sample["number"] >= least[0], store=store)
    assert len(rows_of(kept)) == ROWS
    least[0] = 10
    assert len(rows_of(kept)) == ROWS - 10


def test_a_stream_that_goes_on_counts_the_function_as_it_is_then(store: Store) -> None:
    adds = _Adds()
    mapped = cached_map(from_python(shards=1), adds, store=store)
    list(itertools.islice(mapped, 20))
    state = mapped.state_dict()
    rows_of(mapped)
    adds.by = 100
    mapped.load_state_dict(state)
    assert [row["sum"] for row in mapped] == [number + 100 for number in range(20, ROWS)]


def test_rows_of_a_function_that_changes_in_the_midst_of_a_pass_are_not_kept(store: Store) -> None:
    adds = _Adds()
    mapped = cached_map(from_python(40, shards=1), adds, store=store)

    def run() -> None:
        for row in mapped:
            adds.by += row["number"] in (20, 30)

    with pytest.warns(CacheWarning, match="'_Adds' are not kept.*changed meanwhile.*functools.cache") as said:
        run()
    assert len(said) == 1
    adds.by = 0
    assert [row["sum"] for row in mapped] == [*range(40)]
    adds.by = 1
    assert [row["sum"] for row in mapped] == [*range(1, 41)]


def test_a_function_that_counts_its_calls_has_the_rows_of_plain_datasets(store: Store) -> None:
    def counting() -> Any:
        count = 0

        def counts(sample: dict[str, Any]) -> dict[str, Any]:
            nonlocal count
            count += 1
            return {"count": count}

        return counts

    mapped, same = cached_map(from_python(), counting(), store=store), from_python().map(counting())
    with pytest.warns(CacheWarning, match="changed meanwhile") as said:
        assert [rows_of(mapped) for _ in range(2)] == [rows_of(same) for _ in range(2)]
    assert len(said) == 1
    assert not list(store.entries(CALLS_FOLDER))


class _Loads:
    """Loads what it needs in its first call."""

    def __init__(self) -> None:
        self.model: dict[str, int] | None = None

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        log.info("loads")
        self.model = self.model or {"by": 1}
        return {"sum": sample["number"] + self.model["by"]}


def test_a_value_that_the_first_call_loads_costs_one_row_a_run(store: Store) -> None:
    for expected in (ROWS, 1, 1):
        with pytest.warns(CacheWarning, match="changed meanwhile"):
            assert [row["sum"] for row in cached_map(from_python(), _Loads(), store=store)] == [
                *range(1, ROWS + 1)
            ]
        assert ran() == expected


def test_a_function_whose_first_call_opens_what_has_no_hash_goes_on_with_a_warning(store: Store) -> None:
    class Opens:
        file: Any = None

        def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
            log.info("opens")
            self.file = self.file or open(__file__)  # noqa: SIM115
            return {"n": sample["number"]}

    opens = Opens()
    mapped = cached_map(from_python(), opens, store=store)
    with pytest.warns(CacheWarning, match=r"'Opens' are not kept.*file"):
        assert [row["n"] for _ in range(2) for row in mapped] == [*range(ROWS)] * 2
    opens.file.close()
    assert ran() == 2 * ROWS


class _Large:
    """Has a fingerprint that is slow to take."""

    taken = 0

    def __castore_key__(self) -> int:
        _Large.taken += 1
        return 1

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        log.info("large")
        return {"n": sample["number"]}


def test_a_pass_takes_a_slow_fingerprint_seldom(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_blocks, "_BETWEEN_FINGERPRINTS", 1e9)
    mapped = cached_map(from_python(), _Large(), store=store)
    _Large.taken = 0
    expected = rows_of(mapped)
    assert ran() == ROWS
    assert _Large.taken == 3, "at the beginning, after the first row, and before the others are kept"
    assert rows_of(mapped) == expected
    assert (ran(), _Large.taken) == (0, 4)


# --- edits --------------------------------------------------------------------------------------------------


def test_an_inserted_row_costs_at_most_the_rows_of_its_block(store: Store) -> None:
    numbers = list(range(400))

    def run(numbers: list[int]) -> int:
        stream = datasets.IterableDataset.from_generator(
            stream_cases.made_rows, gen_kwargs={"shards": [numbers]}
        )
        expected = rows_of(stream.map(adds))
        ran()
        assert rows_of(cached_map(stream, adds, store=store)) == expected
        return ran()

    assert run(numbers) == 400
    most = 4 * call_blocks.TARGET_CALLS
    assert 1 <= run([*numbers[:100], 1000, *numbers[100:]]) <= most
    assert run([*numbers[:200], *numbers[201:]]) < most
    assert run([*numbers, 2000]) == 1
    assert run(numbers[50:]) < most


def test_a_rowwise_batch_pays_for_its_new_rows_and_other_batch_sizes_for_none(store: Store) -> None:
    def run(count: int, size: int) -> int:
        stream = from_python(count, shards=1)
        given: dict[str, Any] = {"batched": True, "batch_size": size}
        expected = rows_of(stream.map(stream_cases.each_alone, **given))
        ran()
        mapped = cached_map(stream, stream_cases.each_alone, store=store, rowwise=True, **given)
        assert rows_of(mapped) == expected
        return ran()

    assert run(60, 7) == 60 + 7, "the rows of the first batch are tried alone"
    assert run(60, 13) == 0
    assert run(61, 13) == 1


def test_rows_far_from_the_first_are_tried_too(store: Store) -> None:
    def late(samples: dict[str, list[Any]]) -> dict[str, Any]:
        return {"rank": [sorted(samples["number"]).index(n) if n > 50 else 0 for n in samples["number"]]}

    for rows in (from_python(shards=1), from_arrow()):
        with pytest.raises(InvalidValueError, match="late is said to be row-wise"):
            list(cached_map(rows, late, store=store, batched=True, rowwise=True))


def test_a_function_that_leaves_out_what_a_batch_has_twice_is_not_rowwise(store: Store) -> None:
    def is_new(samples: dict[str, list[Any]]) -> dict[str, Any]:
        seen: set[int] = set()
        return {"new": [not (n % 12 in seen or seen.add(n % 12)) for n in samples["number"]]}  # type: ignore[func-returns-value]

    def is_in_a_large_batch(samples: dict[str, list[Any]]) -> list[bool]:
        return [len(samples["number"]) > 20] * len(samples["number"])

    given: dict[str, Any] = {"store": store, "batched": True, "rowwise": True}
    with pytest.raises(InvalidValueError, match=r"is_new is .*'new' of row 12 .* False in .* True alone"):
        rows_of(cached_map(from_python(), is_new, batch_size=13, **given))
    with pytest.raises(InvalidValueError, match=r"is_in_a_large_batch is .* True in .* False alone"):
        rows_of(cached_filter(from_python(), is_in_a_large_batch, **given))
    assert not list(store.entries(CALLS_FOLDER))


def test_a_small_batch_does_not_keep_a_larger_one_from_being_tried(store: Store) -> None:
    def is_small(samples: dict[str, list[Any]]) -> dict[str, Any]:
        return {"small": [len(samples["number"]) < 10] * len(samples["number"])}

    given: dict[str, Any] = {"store": store, "batched": True, "rowwise": True}
    rows_of(cached_map(from_python(58, shards=1), is_small, batch_size=6, **given))
    found = iter(cached_map(from_python(100, shards=1), is_small, batch_size=20, **given))
    assert all(row["small"] for row in itertools.islice(found, 60)), "two rows of the third batch are new"
    with pytest.raises(InvalidValueError, match="is_small is said to be row-wise"):
        next(found)


def test_a_function_that_is_not_rowwise_is_an_error_with_the_values(store: Store) -> None:
    def sums(samples: dict[str, list[Any]]) -> dict[str, Any]:
        return {"sum": [sum(samples["number"])] * len(samples["number"])}

    with pytest.raises(
        InvalidValueError, match=r"sums is said to be row-wise.*'sum' of row 0 .* is 2145 .* and 0 "
    ):
        list(cached_map(from_python(), sums, store=store, batched=True, rowwise=True))
    given = {"batched": True, "rowwise": True, "remove_columns": from_arrow().column_names}
    with pytest.raises(InvalidValueError, match="groups is said to be row-wise"):
        list(cached_map(from_arrow(), stream_cases.groups, store=store, **given))


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")  # of `datasets`
@pytest.mark.parametrize("form", [None, "numpy", "torch"])
def test_nested_values_of_a_rowwise_function_are_compared_part_by_part(
    store: Store, form: str | None
) -> None:
    """Regression: arrays inside did not tell whether they are equal, and the error was NumPy's or torch's."""
    if form == "torch":
        pytest.importorskip("torch")
    ragged = datasets.Dataset.from_dict({"lists": [[[1, 2], [3]], [[4], []], [[5, 6], [7, 8]]]})

    def hands_on(samples: dict[str, Any]) -> dict[str, Any]:
        return {"same": samples["lists"]}

    def reverses(samples: dict[str, Any]) -> dict[str, Any]:
        return {"same": list(samples["lists"])[::-1]}

    rows = ragged.to_iterable_dataset().with_format(form)
    given: dict[str, Any] = {"store": store, "batched": True, "rowwise": True}
    assert len(list(cached_map(rows, hands_on, **given))) == 3
    with pytest.raises(InvalidValueError, match="reverses is said to be row-wise"):
        list(cached_map(rows, reverses, **given))


def test_images_of_a_rowwise_function_are_compared_by_their_contents(store: Store, tmp_path: Path) -> None:
    """Regression: an image that was handed on has its file in one of the two, and they counted as others."""
    paths = [str(tmp_path / f"{n}.png") for n in range(5)]
    for n, path in enumerate(paths):
        Image.new("RGB", (4, 5), (n, n, n)).save(path)
    images = datasets.Dataset.from_dict({"image": paths}).cast_column("image", datasets.Image())
    given: dict[str, Any] = {"store": store, "batched": True, "rowwise": True}

    def hands_on(samples: dict[str, Any]) -> dict[str, Any]:
        return {"same": samples["image"]}

    def reverses(samples: dict[str, Any]) -> dict[str, Any]:
        return {"same": samples["image"][::-1]}

    found = list(cached_map(images.to_iterable_dataset(), hands_on, **given))
    assert [row["same"].getpixel((0, 0))[0] for row in found] == [0, 1, 2, 3, 4]
    with pytest.raises(InvalidValueError, match="reverses is said to be row-wise"):
        list(cached_map(images.to_iterable_dataset(), reverses, **given))


def test_times_to_the_nanosecond_are_kept(store: Store) -> None:
    """`datasets` gives them as pandas' objects."""
    times = pa.array([1, None, 2**60], pa.timestamp("ns", tz="Europe/Berlin"))
    table = pa.table({"time": times, "span": pa.array([1, 2, None], pa.duration("ns"))})
    rows = datasets.Dataset(table).to_iterable_dataset()

    def hands_on(sample: dict[str, Any]) -> dict[str, Any]:
        log.info("ran")
        return {"later": sample["time"], "spans": [sample["span"]]}

    first = list(cached_map(rows, hands_on, store=store))
    assert ran() == 3
    again = list(cached_map(rows, hands_on, store=store))
    assert ran() == 0
    assert again == first == list(rows.map(hands_on))
    assert {type(row["later"]).__name__ for row in again} == {"Timestamp", "NoneType"}


def test_a_function_that_leaves_a_row_out_and_gives_another_twice_is_an_error(store: Store) -> None:
    """Regression: as many rows as before were paired by place, and later runs gave the rows of others."""

    def moves(samples: dict[str, list[Any]]) -> dict[str, Any]:
        times = [0 if n == 3 else 2 if n == 40 else 1 for n in samples["number"]]
        return {"twice": [n for n, count in zip(samples["number"], times, strict=True) for _ in range(count)]}

    given: dict[str, Any] = {"store": store, "batched": True, "rowwise": True, "batch_size": 60}
    removed = from_arrow().column_names
    with pytest.raises(
        InvalidValueError, match="moves is said to be row-wise, and does not give one row for each"
    ):
        list(cached_map(from_arrow(), moves, remove_columns=removed, **given))
    assert not list(store.entries(CALLS_FOLDER))


# --- ends ---------------------------------------------------------------------------------------------------


def _places() -> Iterator[Any]:
    """Each pipeline stops in the midst of a shard; at the other places some do, and in `make torture` all."""
    for number, name in enumerate([*STEPS, *PIPELINES]):
        yield pytest.param(name, 17)
        for at in (0, 40):
            yield pytest.param(name, at, marks=[pytest.mark.matrix] * (number % 5 > 0))


@pytest.mark.parametrize(("name", "at"), _places())
def test_a_stream_goes_on_from_its_state_and_from_that_of_a_plain_one(
    store: Store, name: str, at: int
) -> None:
    def begun(step: stream_cases.Step) -> tuple[Any, list[Any]]:
        dataset = BUILDS[name](from_arrow(), step)
        taken = [told(row) for row in itertools.islice(dataset, at)]
        return dataset.state_dict(), taken

    def rest(step: stream_cases.Step, state: Any) -> list[Any]:
        dataset = BUILDS[name](from_arrow(), step)
        dataset.load_state_dict(state)
        return rows_of(dataset)

    of_plain, of_cached = begun(plain), begun(cached(store))
    assert of_cached == of_plain, "the state too"
    expected = rest(plain, of_plain[0])
    for _ in range(2):
        assert rest(cached(store), of_cached[0]) == expected
    assert rest(plain, of_cached[0]) == expected


def test_a_pass_that_is_broken_off_leaves_its_rows(store: Store) -> None:
    for count in (1, 5, 20, 60):
        before = count
        for row in cached_map(from_python(), adds, store=store):
            if not (before := before - 1):
                assert row["sum"] == count
                break
    assert ran() == 60, "no row ran twice"
    rows_of(cached_map(from_python(), adds, store=store))
    assert ran() == ROWS - 60


def test_an_error_of_the_function_comes_after_the_rows_before_it_which_are_kept(store: Store) -> None:
    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        log.info("fails")
        if sample["number"] == 21:
            raise OSError("gone")
        return {"n": sample["number"]}

    for expected in (22, 1):
        stream = iter(cached_map(from_python(shards=1), fails, store=store))
        assert [next(stream)["n"] for _ in range(21)] == list(range(21))
        with pytest.raises(OSError, match=r"^gone$"):
            next(stream)
        assert ran() == expected


def test_no_row_waits_for_the_row_behind_it(store: Store) -> None:
    asked: list[int] = []

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(30):
            asked.append(number)
            yield {"number": number, "text": ""}

    stream = datasets.IterableDataset.from_generator(rows)
    for _ in range(2):
        asked.clear()
        for taken, _row in enumerate(cached_map(stream, adds, store=store), start=1):
            assert len(asked) == taken
    assert ran() == 30


def test_two_passes_at_once_have_their_own_places(store: Store) -> None:
    dataset = cached_map(from_python(), adds, store=store)
    expected = rows_of(from_python().map(adds))
    ran()
    first, second = iter(dataset), iter(dataset)
    both = [told(row) for pair in zip(first, second, strict=True) for row in pair]
    assert both[::2] == both[1::2] == expected
    rows_of(dataset)
    ran()
    assert [told(row) for pair in zip(dataset, dataset, strict=True) for row in pair][::2] == expected
    assert ran() == 0


def test_a_pass_holds_no_more_than_some_blocks(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 1 << 16
    monkeypatch.setattr(call_blocks, "TARGET_BYTES", 4 * size)

    def grows(sample: dict[str, Any]) -> dict[str, Any]:
        return {"bytes": bytes([sample["number"]]) * size}

    stream = from_python(200, shards=1)
    for _ in range(2):
        tracemalloc.start()
        try:
            assert sum(len(row["bytes"]) for row in cached_map(stream, grows, store=store)) == 200 * size
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert most < 5 * 16 * size, "five blocks of the largest size"


# --- what is not kept ---------------------------------------------------------------------------------------


def test_values_that_would_not_come_back_are_a_warning_and_run_again(store: Store) -> None:
    class Own:
        def __init__(self, number: int) -> None:
            self.number = lambda: number

    def makes(sample: dict[str, Any]) -> dict[str, Any]:
        log.info("makes")
        return {"own": Own(1) if sample["number"] in (3, 5) else None}

    for expected in (ROWS, 2):
        with pytest.warns(CacheWarning, match=r"'makes' are not kept.*\['own'\]") as warned:
            rows = list(cached_map(from_python(), makes, store=store))
        assert [row["number"] for row in rows if row["own"]] == [3, 5]
        assert [item.category for item in warned].count(CacheWarning) == 1
        assert ran() == expected


def test_rows_that_cannot_be_told_apart_are_a_warning_and_run_again(store: Store) -> None:
    def odd() -> Iterator[dict[str, Any]]:
        for number in range(10):
            yield {"number": number, "text": "a", "what": iter([1]) if number == 4 else None}

    stream = datasets.IterableDataset.from_generator(odd)
    for expected in (10, 1):
        with pytest.warns(CacheWarning, match="cannot be told apart"):
            assert [row["sum"] for row in cached_map(stream, adds, store=store)] == list(range(1, 11))
        assert ran() == expected


def test_a_function_that_changes_its_input_and_does_not_return_it_runs_again(store: Store) -> None:
    def changes(sample: dict[str, Any]) -> dict[str, Any]:
        log.info("changes")
        sample["nested"]["a"] += 1
        return {"n": 1}

    def changes_and_keeps(sample: dict[str, Any]) -> bool:
        log.info("changes")
        sample["words"].append("more")
        return True

    for kind, function in (("map", changes), ("filter", changes_and_keeps)):
        expected = rows_of(plain(from_python(), kind, function))
        ran()
        for _ in range(2):
            with pytest.warns(CacheWarning, match="changes values of its input in place"):
                assert rows_of(cached(store)(from_python(), kind, function)) == expected
            assert ran() == ROWS


def test_rows_that_came_from_a_block_can_be_changed(store: Store) -> None:
    dataset = cached_map(from_python(), stream_cases.returns_it, store=store)
    expected = rows_of(dataset)
    for row in dataset:
        row["words"].append("changed")
        row["nested"]["a"] = "changed"
    assert rows_of(dataset) == expected


def test_a_store_without_room_gives_the_rows_and_one_warning(tmp_path: Any) -> None:
    expected = rows_of(from_odd().map(stream_cases.adds_noise))
    with Store(tmp_path / "full", max_size=1000) as full:
        with pytest.warns(CacheWarning, match="'adds_noise' are not kept") as warned:
            assert rows_of(cached_map(from_odd(), stream_cases.adds_noise, store=full)) == expected
        assert len(warned) == 1


@pytest.mark.parametrize("lost", ["", "locks/beacon"])
def test_a_store_that_goes_gives_the_rows_and_one_warning(lost: str, tmp_path: Path) -> None:
    expected = rows_of(from_python().map(adds))
    ran()
    with Store(tmp_path / "lost") as store:
        stream = iter(cached_map(from_python(), adds, store=store))
        rows = [told(next(stream)) for _ in range(ROWS // 2)]
        gone = tmp_path / "lost" / lost
        gone.rename(tmp_path / "elsewhere")
        words = "lost its file locks/beacon" if lost else "is gone"
        with pytest.warns(CacheWarning, match=f"'adds' are neither found nor kept.*{words}") as warned:
            rows += map(told, stream)
        assert len(warned) == 1
        (tmp_path / "elsewhere").rename(gone)
    assert rows == expected
    assert ran() == ROWS


def test_a_damaged_block_runs_again(store: Store) -> None:
    dataset = cached_map(from_python(), adds, store=store)
    expected = rows_of(dataset)
    blocks = list(store.entries(CALLS_FOLDER))
    assert len(blocks) > 5
    for place, entry in enumerate(blocks):
        wrong = [b"", b"\xc1", b"not a block at all", b"\x92\xc4\x00\x90"][place % 4]
        store.put(entry.name, wrong)
    ran()
    assert rows_of(dataset) == expected
    assert ran() == ROWS
    assert rows_of(dataset) == expected
    assert ran() == 0


def test_records_that_are_no_results_run_again(store: Store) -> None:
    dataset = cached_map(from_python(), adds, store=store)
    expected = rows_of(dataset)
    wrong = [
        b"", b"\xc1", b"\x01", b"\x93\xc2\x01\x02", b"\x92\xc3\x01", b"\x92\x01\x01",
        dumps([False, {}, [[[], [2]]]]), dumps([False, [1], [[[1], [5, 5]]]]), dumps({"a": 1}),
    ]  # fmt: skip
    calls_of = {}
    for entry in list(store.entries(CALLS_FOLDER)):
        digests, records = loads(store.get(entry.name) or b"", "msgpack")
        broken = [wrong[place % len(wrong)] for place in range(len(records))]
        calls_of[entry.name] = len(records)
        store.put(entry.name, dumps([digests, broken]))
    ran()
    assert rows_of(dataset) == expected
    assert ran() == sum(calls_of.values()) == ROWS
    assert rows_of(dataset) == expected
    assert ran() == 0


def dumps(value: Any) -> bytes:
    """A value as blocks have it."""
    return dump(value, "msgpack")[1]


def test_blocks_that_gc_took_run_again(store: Store) -> None:
    dataset = cached_map(from_python(), adds, store=store)
    expected = rows_of(dataset)
    ran()
    gone = list(store.entries(CALLS_FOLDER))[::2]
    store.delete_many([entry.name for entry in gone])
    assert rows_of(dataset) == expected
    assert ran() == sum(entry.metadata["calls"] for entry in gone)


def test_a_slow_function_is_kept_after_some_seconds_of_its_work(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_blocks, "TARGET_SECONDS", 0.0)
    stream = iter(cached_map(from_python(), adds, store=store))
    for taken in range(1, 6):
        next(stream)
        assert len(list(store.entries(CALLS_FOLDER))) == taken


# --- iterations that nobody ends ----------------------------------------------------------------------------


def test_an_iteration_that_the_garbage_collector_ends_leaves_its_rows(store: Store) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.own = self
            self.stream = iter(cached_map(from_python(), adds, store=store))

    gc.disable()  # or it might come before the first look
    try:
        list(itertools.islice(Cycle().stream, 3))
        assert not list(store.entries(CALLS_FOLDER))
        gc.collect()
    finally:
        gc.enable()
    ran()
    rows_of(cached_map(from_python(), adds, store=store))
    assert ran() == ROWS - 3


def test_an_iteration_that_ends_inside_a_call_of_the_store_is_kept_by_the_next_one(store: Store) -> None:
    stream: Any = iter(cached_map(from_python(), adds, store=store))
    list(itertools.islice(stream, 3))

    def entries() -> Iterator[tuple[str, bytes]]:
        stream.close()  # as Python's garbage collector may do anywhere
        yield "a", b"a"

    store.put_many(entries())
    assert not list(store.entries(CALLS_FOLDER)), "one call of the store does not interrupt another"
    ran()
    rows_of(cached_map(from_python(), adds, store=store))
    assert ran() == ROWS - 3


def test_a_stream_can_be_put_into_the_store_that_keeps_its_calls(store: Store) -> None:
    dataset = cached_map(from_python(), adds, store=store)
    DatasetCache(store).put("rows", dataset)
    assert DatasetCache(store).dataset("rows")["sum"][:] == [row["sum"] for row in dataset]
    assert ran() == ROWS


# The program that fails is forked off with all imports of the next one, those of a first stream too, and ends
# as each program does.
_SCRIPT = """
import ctypes, datasets, os, sys
from castore import Store
from castore.adapters.datasets import cached_map

def f(row):
    print("ran", flush=True)
    return {"n": row["number"]}

list(datasets.Dataset.from_dict({"number": [1]}).to_iterable_dataset())
fails = os.fork() == 0
if not fails:
    print("ended", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
store = Store(sys.argv[1])
numbers = datasets.Dataset.from_dict({"number": list(range(9))})
rows = cached_map(numbers.to_iterable_dataset(), f, store=store)
stream = iter(rows)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(stream))  # held to the end, as by an extension module
for number, row in enumerate(stream):
    if fails and number == 4:
        raise SystemError("the training fails")
"""


def test_a_program_that_ends_with_an_error_leaves_its_rows(tmp_path: Path, warm_datasets: WarmPython) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    ended = warm_datasets.run([script, tmp_path / "store"], text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("the training fails") == 1 + ended.stderr.count(
        'raise SystemError("the training'
    )
    assert ended.stdout.split() == [*["ran"] * 5, "ended", "1", *["ran"] * 4]
