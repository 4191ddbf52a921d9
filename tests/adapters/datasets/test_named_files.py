"""Files that rows name count as rows do: a step over a folder of images runs block by block, and an image
that changes costs its block, wherever in a row its name stands.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import numpy as np
import PIL.Image
import pyarrow as pa
import pytest

from castore import Store
from castore.adapters.datasets import CacheWarning, Pipeline, cached_filter, cached_map, tables, wait
from castore.adapters.datasets.named_files import file_sizes, file_states
from tests.adapters.datasets.small_blocks import small_blocks
from tests.adapters.datasets.test_map_filter import ran, runs

IMAGE = datasets.Image()
COUNT = 120


@pytest.fixture(autouse=True)
def _count_anew() -> None:
    runs.clear()


def save(path: Path, number: int) -> None:
    """An image of 230 KB, large enough for blocks of some dozens; its size in pixels is new each time."""
    PIL.Image.new("RGB", (240 + number % 3, 320), (number % 256, number // 256, 0)).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "images"
    made.mkdir()
    for number in range(COUNT):
        save(made / f"{number:03}.bmp", number)
    return made


def named(folder: Path, numbers: Any = range(COUNT)) -> datasets.Dataset:
    rows = {"number": list(numbers), "image": [str(folder / f"{number:03}.bmp") for number in numbers]}
    return datasets.Dataset.from_dict(
        rows, features=datasets.Features({"number": datasets.Value("int64"), "image": IMAGE})
    )


def some_blocks() -> contextlib.AbstractContextManager[None]:
    """Blocks of four images.

    Rows hold the folder's path, which is another in each run, and the ends of blocks with it. Among dozens of
    blocks, a change reaches the next common end long before the last row all the same.
    """
    return small_blocks(1 << 20, 10_000)


def red(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"red": sample["image"].getpixel((0, 0))[0]}


def is_dark(sample: dict[str, Any]) -> bool:
    ran()
    return bool(sample["image"].getpixel((0, 0))[0] < 100)


def bright(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    ran()
    return {"bright": [image.getpixel((0, 0))[0] > 100 for image in batch["image"]]}


def shown(dataset: datasets.Dataset) -> list[Any]:
    """The rows of a dataset, with the pixels of their images."""
    return [
        {name: (value.size, value.tobytes()) if name == "image" else value for name, value in row.items()}
        for row in dataset
    ]


#: Steps over `named`, each as castore's and as that of `datasets`.
STEPS: dict[str, tuple[Callable[..., datasets.Dataset], Callable[..., datasets.Dataset], dict[str, Any]]] = {
    "map": (cached_map, datasets.Dataset.map, {"function": red, "writer_batch_size": 10}),
    "map without the images": (
        cached_map,
        datasets.Dataset.map,
        {"function": red, "writer_batch_size": 10, "remove_columns": ["image"]},
    ),
    "batches": (
        cached_map,
        datasets.Dataset.map,
        {"function": bright, "batched": True, "batch_size": 5, "writer_batch_size": 10},
    ),
    "filter": (cached_filter, datasets.Dataset.filter, {"function": is_dark}),
}


@pytest.mark.parametrize("step", STEPS)
def test_steps_over_a_folder_of_images_give_what_datasets_gives_and_run_once(
    step: str, folder: Path, store: Store
) -> None:
    ours, theirs, arguments = STEPS[step]
    plain = theirs(named(folder), **arguments)
    runs.clear()
    first = ours(named(folder), **arguments, store=store)
    assert len(runs) == COUNT // arguments.get("batch_size", 1)
    again = ours(named(folder), **arguments, store=store)
    assert len(runs) == COUNT // arguments.get("batch_size", 1)
    for result in (first, again):
        assert result.features == plain.features
        assert len(result) == len(plain)
        assert shown(result) == shown(plain)


def test_a_folder_in_which_an_image_is_new_or_changed_or_gone_costs_the_blocks_around_it(
    folder: Path, store: Store
) -> None:
    def result(numbers: Any) -> tuple[list[int], int]:
        runs.clear()
        with some_blocks():
            found = cached_map(named(folder, numbers), red, store=store, writer_batch_size=10)
        return found["red"][:], len(runs)

    assert result(range(COUNT)) == ([number % 256 for number in range(COUNT)], COUNT)
    save(folder / f"{COUNT}.bmp", 77)
    found, ran_new = result(range(COUNT + 1))
    assert (found[-1], len(found)) == (77, COUNT + 1)
    save(folder / "080.bmp", 222)
    found, ran_changed = result(range(COUNT + 1))
    assert (found[79:82], len(found)) == ([79, 222, 81], COUNT + 1)
    found, ran_gone = result([number for number in range(COUNT + 1) if number != 50])
    assert found[49:51] == [49, 51]
    assert 1 <= ran_new < COUNT
    assert 1 <= ran_changed < COUNT
    assert 1 <= ran_gone < COUNT


def test_a_pipeline_in_processes_over_a_folder_of_images_goes_on_behind_an_error(
    folder: Path, store: Store
) -> None:
    broken = folder / "119.bmp"
    whole = broken.read_bytes()
    broken.write_bytes(b"no image")
    with pytest.raises(Exception, match="cannot identify image file"):
        Pipeline([red], store=store, num_proc=2).run(named(folder))
    broken.write_bytes(whole)
    [step] = (found := Pipeline([red], store=store).run(named(folder))).steps
    assert found.dataset["red"][:] == list(range(COUNT))
    # A pipeline's first block has 1,000 rows: here it is the only one.
    assert step.rows_in == COUNT


def test_a_block_runs_again_if_an_image_changes_meanwhile(folder: Path, store: Store) -> None:
    def changing(sample: dict[str, Any]) -> dict[str, Any]:
        found = red(sample)
        if sample["number"] == 90 and not changed:
            changed.append(True)
            save(folder / "090.bmp", 222)  # its own, for a block may end before it
        return found

    class Changed(list[bool]):
        def __castore_key__(self) -> str:
            return "Changed"

    changed = Changed()
    for run in range(2):
        words = "is not kept: files that rows of the input name have changed"
        with some_blocks(), nullcontext() if run else pytest.warns(CacheWarning, match=words):
            found = cached_map(named(folder), changing, store=store, writer_batch_size=10)
        assert found["red"][89:92] == [89, 222, 91]
    assert COUNT < len(runs) < 2 * COUNT


def test_a_function_that_changes_its_own_images_runs_in_one_piece_as_in_datasets(
    folder: Path, store: Store
) -> None:
    def brighter(sample: dict[str, Any]) -> dict[str, Any]:
        save(folder / f"{sample['number']:03}.bmp", sample["number"] + 100)
        return red(sample)

    # Its key has the images as they were, and `datasets` makes another result of these, too, once more.
    with pytest.warns(CacheWarning, match="is not kept: files that rows of the input name have changed"):
        found = cached_map(named(folder), brighter, store=store, writer_batch_size=10)
    assert found["red"][:] == [number + 100 for number in range(COUNT)]


@pytest.mark.filterwarnings("ignore:.*files that rows of the input name have:castore.errors.CacheWarning")
@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("way", ["calls", "pipeline"])
def test_what_was_made_of_files_that_came_meanwhile_is_not_taken_for_those_before(
    way: str, is_cut: bool, folder: Path, store: Store, tmp_path: Path
) -> None:
    """Regression: results of mixed files were kept under the key of the first ones, with the steps behind."""
    other, link = tmp_path / "other", tmp_path / "link"
    other.mkdir()
    for number in range(COUNT):
        save(other / f"{number:03}.bmp", number + 100)

    def point_to(place: Path) -> None:
        (tmp_path / "new").symlink_to(place)
        (tmp_path / "new").replace(link)

    def switching(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["number"] == 60 and switch:
            switch.clear()
            point_to(other)
        return {"red": sample["image"].getpixel((0, 0))[0]}

    def twice(sample: dict[str, Any]) -> dict[str, Any]:
        return {"twice": 2 * sample["red"]}

    class Switch(list[bool]):
        def __castore_key__(self) -> str:
            return "Switch"

    def run() -> datasets.Dataset:
        if way == "pipeline":
            made = Pipeline([switching, twice], store=store).run(data).dataset
        else:
            made = cached_map(cached_map(data, switching, store=store), twice, store=store)
        wait()
        return made

    switch = Switch([True])
    point_to(folder)
    data = named(link)
    with some_blocks() if is_cut else nullcontext():
        mixed = run()
        assert mixed["red"][61:] == [number + 100 for number in range(61, COUNT)]
        assert mixed["twice"] == [2 * value for value in mixed["red"]]
        point_to(folder)
        again = run()
    assert again["red"] == list(range(COUNT))
    assert again["twice"] == [2 * number for number in range(COUNT)]


def test_files_are_read_some_at_a_time_where_a_dataset_is_kept_with_their_bytes(folder: Path) -> None:
    """All at once, a folder of photographs would have to fit into memory."""
    with mock.patch.object(tables, "SHARD_BYTES", 1 << 20):
        streams = list(tables.arrow_streams(named(folder), embed=True))
    held = [pa.ipc.open_stream(stream).read_all() for stream in streams]
    assert sum(map(len, held)) == COUNT
    assert max(len(table) for table in held) * 230_400 <= 8 << 20
    assert not any(file_states(table, named(folder).features) for table in held)


# --- results name files as those of `map` do ----------------------------------------------------------------


def width(sample: dict[str, Any]) -> dict[str, Any]:
    return {"width": sample["image"].width}


def height(sample: dict[str, Any]) -> dict[str, Any]:
    return {"height": sample["image"].height}


def total(sample: dict[str, Any]) -> dict[str, Any]:
    image = sample["image"]
    return {"total": int(np.asarray(image).sum()), "name": Path(image.filename).name}


@pytest.mark.parametrize("in_blocks", [False, True])
def test_chains_over_jpegs_see_the_pixels_and_names_that_those_of_datasets_see(
    in_blocks: bool, tmp_path: Path, store: Store
) -> None:
    """An image that is decoded from bytes has no name, and would be encoded anew for each step."""
    for number in range(40):
        noise = np.random.default_rng(number).integers(0, 256, (128, 128, 3), dtype=np.uint8)
        PIL.Image.fromarray(noise).save(tmp_path / f"{number:03}.jpg", quality=95)
    data = datasets.Dataset.from_dict(
        {"image": [str(tmp_path / f"{number:03}.jpg") for number in range(40)]},
        features=datasets.Features({"image": IMAGE}),
    )
    plain = data.map(width).map(height).map(total)
    with small_blocks() if in_blocks else contextlib.nullcontext():
        for _ in range(3):
            chain = data
            for step in (width, height, total):
                chain = cached_map(chain, step, store=store, writer_batch_size=5)
            wait()
            for found in (chain, Pipeline([width, height, total], store=store).run(data).dataset):
                assert found.features == plain.features
                assert [found[column][:] for column in ("width", "height", "total", "name")] == [
                    plain[column][:] for column in ("width", "height", "total", "name")
                ]
    images = sum(path.stat().st_size for path in tmp_path.glob("*.jpg"))
    assert store.totals().unique < images


@pytest.mark.parametrize("count", [10, 3000])
def test_an_image_that_is_not_there_keeps_no_step_from_being_kept_that_does_not_read_it(
    count: int, tmp_path: Path, store: Store
) -> None:
    def more(number: int) -> dict[str, Any]:
        ran()
        return {"more": number + 1}

    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        for _ in range(2):
            found = cached_map(named(tmp_path, range(count)), more, input_columns="number", store=store)
            assert found["more"][:] == list(range(1, count + 1))
            wait()
    assert len(runs) == count


def test_an_image_in_the_place_of_another_one_of_its_size_and_time_is_another_one(
    tmp_path: Path, store: Store
) -> None:
    for number in (3, 6):
        (tmp_path / str(number)).mkdir()
        save(tmp_path / str(number) / "000.bmp", number)
        os.utime(tmp_path / str(number) / "000.bmp", (1e9, 1e9))
        (tmp_path / "now").unlink(missing_ok=True)
        (tmp_path / "now").symlink_to(tmp_path / str(number))
        assert cached_map(named(tmp_path / "now", [0]), red, store=store)["red"][0] == number
        wait()


# --- where a row can name a file ----------------------------------------------------------------------------

#: A feature, the value of a row that names a path, and the image in the row that a function sees.
SHAPES: dict[str, tuple[Any, Callable[[str], Any], Callable[[Any], Any]]] = {
    "itself": (IMAGE, lambda path: path, lambda value: value),
    "list": (datasets.List(IMAGE), lambda path: [path], lambda value: value[0]),
    "list of one length": (datasets.List(IMAGE, length=1), lambda path: [path], lambda value: value[0]),
    "large list": (datasets.LargeList(IMAGE), lambda path: [path], lambda value: value[0]),
    "list of lists": (
        datasets.List(datasets.List(IMAGE)),
        lambda path: [[], [path]],
        lambda value: value[1][0],
    ),
    "dict": ({"inner": IMAGE}, lambda path: {"inner": path}, lambda value: value["inner"]),
    "list of dicts": (
        datasets.List({"inner": IMAGE}),
        lambda path: [{"inner": None}, {"inner": path}],
        lambda value: value[1]["inner"],
    ),
    "archive": (IMAGE, lambda path: f"zip://one.bmp::{path}.zip", lambda value: value),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_an_image_that_changes_is_another_input_wherever_its_name_stands(
    shape: str, tmp_path: Path, store: Store
) -> None:
    feature, value, image = SHAPES[shape]
    path = tmp_path / "one.bmp"

    def red_of(sample: dict[str, Any]) -> dict[str, Any]:
        ran()
        return {"red": image(sample["image"]).getpixel((0, 0))[0]}

    def result() -> Any:
        rows = datasets.Dataset.from_dict(
            {"image": [value(str(path))]}, features=datasets.Features({"image": feature})
        )
        found = cached_map(rows, red_of, store=store)["red"][0]
        wait()
        return found

    for number in (1, 2):
        save(path, number)
        with zipfile.ZipFile(f"{path}.zip", "w") as archive:
            archive.write(path, "one.bmp")
        assert [result(), result()] == [number, number]
        assert len(runs) == number


def grey(path: Path, value: int, *, times: tuple[int, int] | None = None) -> None:
    """An image of one colour; all have one size in bytes."""
    PIL.Image.new("L", (4, 4), value).save(path)
    if times is not None:
        os.utime(path, ns=times)


def first_pixel(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {"value": sample["image"].getpixel((0, 0))}


def test_images_of_one_size_and_time_are_told_apart_by_their_inodes(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: two folders out of one archive, and a link that led to the other, gave the old result."""
    for number, name in enumerate(("v1", "v2")):
        (tmp_path / name).mkdir()
        grey(tmp_path / name / "0.bmp", number)
    real = os.stat

    def in_one_tick(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        found = real(path, *args, **kwargs)
        if not str(path).endswith(".bmp"):
            return found
        facts = {name: getattr(found, name) for name in ("st_atime_ns", "st_dev", "st_nlink")}
        return os.stat_result(found, {**facts, "st_mtime_ns": 1, "st_ctime_ns": 2})

    monkeypatch.setattr(os, "stat", in_one_tick)
    link = tmp_path / "now"
    link.symlink_to("v1")
    rows = datasets.Dataset.from_dict(
        {"image": [str(link / "0.bmp")]}, features=datasets.Features(image=IMAGE)
    )
    assert cached_map(rows, first_pixel, store=store)["value"][:] == [0]
    link.unlink()
    link.symlink_to("v2")
    assert cached_map(rows, first_pixel, store=store)["value"][:] == [1]


def test_of_a_selection_the_files_of_its_rows_count_alone(tmp_path: Path, store: Store) -> None:
    """Regression: the step behind a filter ran once more in the second run, and one over chosen rows did
    whenever another image changed.
    """
    paths = [str(tmp_path / f"{number}.png") for number in range(6)]
    for number, path in enumerate(paths):
        grey(Path(path), number)
    table = datasets.Dataset.from_dict({"image": paths}, features=datasets.Features(image=IMAGE))
    stream = table.with_format("arrow")[:]  # `save_to_disk` would keep the bytes
    with pa.ipc.new_stream(tmp_path / "rows.arrow", stream.schema) as writer:
        writer.write_table(stream)

    def run() -> Any:
        rows = datasets.Dataset.from_file(str(tmp_path / "rows.arrow"))
        few = cached_filter(rows, lambda sample: sample["image"].getpixel((0, 0)) < 3, store=store)
        values = cached_map(few, first_pixel, store=store)["value"][:]
        wait()
        return values + cached_map(rows.select([4, 1]), first_pixel, store=store)["value"][:]

    assert [run(), len(runs)] == [[0, 1, 2, 4, 1], 5]
    assert [run(), len(runs)] == [[0, 1, 2, 4, 1], 5]
    grey(Path(paths[5]), 9)
    assert run() == [0, 1, 2, 4, 1]
    assert len(runs) == 8, "the filter saw that image, and the chosen rows do not have it"
    grey(Path(paths[4]), 8)
    assert run() == [0, 1, 2, 8, 1]


def opened(sample: dict[str, Any]) -> dict[str, Any]:
    image = PIL.Image.open(sample["path"])
    image.load()  # closes the file
    return {**sample, "image": image}


def twice(sample: dict[str, Any]) -> dict[str, Any]:
    ran()
    return {**sample, "twice": 2 * sample["value"]}


def test_a_pipeline_sees_a_new_file_in_the_place_of_one_that_a_step_has_named(
    tmp_path: Path, store: Store
) -> None:
    """Regression: the steps behind that one gave the old result, as no key tells of the file."""
    path = tmp_path / "0.png"
    rows = datasets.Dataset.from_dict({"path": [str(path)] * 2})

    def run(*more: Any) -> tuple[list[bool], Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CacheWarning)
            result = Pipeline([opened, first_pixel, *more], store=store).run(rows)
        return [step.hit for step in result.steps], result.dataset.remove_columns(["image", "path"])[:]

    grey(path, 1)
    assert run(twice) == ([False] * 3, {"value": [1, 1], "twice": [2, 2]})
    assert run(twice) == ([True] * 3, {"value": [1, 1], "twice": [2, 2]})
    grey(path, 7)
    assert run() == ([True, False], {"value": [7, 7]})
    assert run(twice) == ([True, True, False], {"value": [7, 7], "twice": [14, 14]})
    assert run(twice) == ([True] * 3, {"value": [7, 7], "twice": [14, 14]})


@pytest.mark.parametrize("is_batched", [False, True])
@pytest.mark.parametrize("shape", ["itself", "list of lists", "list of dicts"])
def test_a_stream_of_images_that_the_function_opens_itself_runs_again_for_a_changed_one(
    shape: str, is_batched: bool, tmp_path: Path, store: Store
) -> None:
    _, value, image = SHAPES[shape]
    undecoded = datasets.Image(decode=False)
    feature = {
        "itself": undecoded,
        "list of lists": datasets.List(datasets.List(undecoded)),
        "list of dicts": datasets.List({"inner": undecoded}),
    }[shape]
    path = tmp_path / "one.bmp"

    def red_of(sample: dict[str, Any]) -> dict[str, Any]:
        images = sample["image"] if is_batched else [sample["image"]]
        reds = [red({"image": PIL.Image.open(image(one)["path"])})["red"] for one in images]
        return {"red": reds if is_batched else reds[0]}

    for number in (1, 2):
        save(path, number)
        rows = datasets.Dataset.from_dict(
            {"image": [value(str(path))]}, features=datasets.Features({"image": feature})
        ).to_iterable_dataset()
        for _ in range(2):
            [row] = cached_map(rows, red_of, store=store, batched=is_batched)
            assert row["red"] == number
        assert len(runs) == number


def test_rows_name_files_by_paths_where_they_have_no_bytes(tmp_path: Path) -> None:
    def file(size: int) -> str:
        path = tmp_path / str(size)
        path.write_bytes(bytes(size))
        return str(path)

    def stored(path: str | None, data: bytes | None = None) -> dict[str, Any]:
        return {"bytes": data, "path": path}

    features = datasets.Features({"a": IMAGE, "b": datasets.List({"c": datasets.List(IMAGE, length=2)})})
    rows: list[dict[str, Any]] = [
        {"a": stored(file(1)), "b": [{"c": [stored(file(10)), stored(file(10))]}]},
        {"a": stored(file(2), b"held"), "b": None},
        {"a": None, "b": [{"c": None}, {"c": [stored(file(100)), None]}]},
        {"a": stored("https://host/x.png"), "b": []},
        {"a": stored("no such file"), "b": [{"c": [stored("null\0byte"), stored(file(1000))]}]},
    ]
    table = pa.Table.from_pylist(rows, features.arrow_schema)
    chunked = pa.concat_tables([table.slice(0, 2), table.slice(2, 0), table.slice(2)])
    for each in (table, chunked, pa.concat_tables([table, table]).slice(5)):
        assert file_sizes(each, features).tolist() == [21, 0, 100, 0, 1000]
        states = file_states(each, features)
        assert [state[0].rpartition("/")[2] for state in states] == [
            "1", "10", "100", "1000", "no such file", "null\0byte",
        ]  # fmt: skip
        assert [state[1:2] for state in states] == [[1], [10], [100], [1000], [], []]
    plain = datasets.Features.from_arrow_schema(table.schema.remove_metadata())
    assert file_states(table, plain) == []
