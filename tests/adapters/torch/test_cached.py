"""CachedDataset: a second run and another process start warm, with the same samples, whoever runs the
workers.
"""

from __future__ import annotations

import copy
import os
import pickle
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import datasets
import numpy as np
import pytest
import safetensors
import torch
from torch.utils.data import TensorDataset

import castore_fuse
from castore import InvalidNameError, SerializationError, Store, StoreError, UnhashableError
from castore.adapters.torch.cached import CachedDataset
from castore.errors import MissingDependencyError
from castore_fuse.lifecycle import check_fuse
from tests import helpers
from tests.adapters.torch.drawn import Batched, Drawn
from tests.warm import WarmPython


@pytest.fixture
def drawn(tmp_path: Path) -> Drawn:
    return Drawn(10, tmp_path / "log")


def numbers(samples: Any) -> list[int]:
    return [sample["y"] for sample in samples]


def test_a_second_dataset_over_the_store_starts_warm(drawn: Drawn, tmp_path: Path) -> None:
    with CachedDataset(drawn, tmp_path / "cache") as first:
        assert numbers(first) == list(range(10))
    with CachedDataset(Drawn(10, tmp_path / "other"), tmp_path / "cache") as second:
        assert numbers(second) == list(range(10))
        assert (second.hits, second.misses) == (10, 0)


def test_another_process_starts_warm(tmp_path: Path, warm_torch: WarmPython) -> None:
    """With the fingerprint and not a key of ours: it has to come out the same."""
    program = """
import sys, torch
from torch.utils.data import TensorDataset
from castore.adapters.torch.cached import CachedDataset
class Doubled(torch.utils.data.Dataset):
    def __init__(self, factor): self.factor = factor
    def __len__(self): return 5
    def __getitem__(self, index): return torch.tensor(index * self.factor)
cached = CachedDataset(Doubled(2), sys.argv[1])
print([int(x) for x in cached], cached.hits, cached.misses)
"""
    told = [warm_torch.output(["-c", program, tmp_path / "store"]) for _ in range(2)]
    assert told == ["[0, 2, 4, 6, 8] 0 5\n", "[0, 2, 4, 6, 8] 5 0\n"]


def test_batches_keep_order_and_duplicates_and_read_what_is_missing_in_one_call(
    tmp_path: Path, store: Store
) -> None:
    data = Batched(10, tmp_path / "log")
    cached = CachedDataset(data, store)
    assert cached[3]["y"] == 3
    assert numbers(cached.__getitems__([5, 3, 5, -1])) == [5, 3, 5, 9]
    assert Path(f"{data.log}.batches").read_text() == "[5, 9]\n"
    assert data.reads == [3, 5, 9]
    assert numbers(cached.__getitems__([9, 5, 9])) == [9, 5, 9]
    assert data.reads == [3, 5, 9]
    assert cached.__getitems__([]) == []


def test_samples_of_a_missing_batch_differ_from_those_of_a_kept_one_in_nothing(store: Store) -> None:
    """None and falsy samples count as kept, too."""
    cached = CachedDataset([None, 0, "", (1, np.float32(2)), torch.zeros(0)], store)
    first, second = (cached.__getitems__(range(5)) for _ in range(2))
    assert list(map(type, first)) == list(map(type, second))
    assert first[:4] == second[:4] == [None, 0, "", (1, np.float32(2))]
    assert cached.hits == 5


def test_an_edit_of_a_sample_does_not_reach_the_store(drawn: Drawn, store: Store) -> None:
    cached = CachedDataset(drawn, store)
    for _ in range(2):
        cached[1]["x"].zero_()
        cached.__getitems__([1])[0]["x"].zero_()
    assert int(cached[1]["x"][0, 0]) == 1


def test_another_version_of_the_data_starts_anew_and_both_are_kept(store: Store) -> None:
    first, second = TensorDataset(torch.zeros(2)), TensorDataset(torch.ones(2))
    for _ in range(2):
        assert CachedDataset(first, store)[0][0] == 0
        assert CachedDataset(second, store)[0][0] == 1


def test_a_transform_that_was_edited_misses(store: Store, tmp_path: Path, warm_torch: WarmPython) -> None:
    program = """
import sys
sys.dont_write_bytecode = True
from castore.adapters.torch.cached import CachedDataset
from mytransforms import change
class Data:
    def __init__(self, transform): self.transform = transform
    def __len__(self): return 1
    def __getitem__(self, index): return self.transform(1)
print(CachedDataset(Data(change), sys.argv[1])[0])
"""
    answers = []
    for body in ("x + 1", "x + 2", "x + 1"):
        # Compiled files are kept by time in seconds: none here.
        (tmp_path / "mytransforms.py").write_text(f"def change(x):\n    return {body}\n")
        answers.append(warm_torch.output(["-c", program, store.path], cwd=tmp_path))
    assert answers == ["2\n", "3\n", "2\n"]
    assert len(list(store.entries())) == 2


def test_a_key_of_ones_own_names_the_folder(drawn: Drawn, store: Store) -> None:
    CachedDataset(drawn, store, key="mine/v1")[7]
    assert [entry.name for entry in store.entries()] == ["mine/v1/000000/000000007.safetensors"]
    assert len(CachedDataset(drawn, store, key={"version": 1}).key) == 40
    with pytest.raises(InvalidNameError):
        CachedDataset(drawn, store, key="../outside")


def test_samples_lie_in_folders_of_a_thousand(store: Store) -> None:
    cached = CachedDataset(list(range(1002)), store, key="n")
    cached.prefetch([0, 999, 1000, 1001])
    names = [entry.name.removeprefix("n/") for entry in store.entries()]
    assert names == [
        "000000/000000000.safetensors", "000000/000000999.safetensors",
        "000001/000001000.safetensors", "000001/000001001.safetensors",
    ]  # fmt: skip


def test_a_mount_shows_samples_as_safetensors_files(drawn: Drawn, store: Store, tmp_path: Path) -> None:
    try:
        check_fuse()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    cached = CachedDataset(drawn, store, key="drawn")
    cached.fill()
    with castore_fuse.mounted(store) as root:
        files = sorted(Path(root).glob("drawn/*/*.safetensors"))
        assert len(files) == 10
        with safetensors.safe_open(files[4], "pt") as file:
            assert torch.equal(file.get_tensor("x"), drawn[4]["x"])
            assert file.get_tensor("y").item() == 4


def test_damaged_samples_are_read_again_and_healed(drawn: Drawn, store: Store) -> None:
    cached = CachedDataset(drawn, store)
    cached.fill()
    for index in (2, 3):
        path, offset, length = helpers.payload(store, cached.name_of(index))
        helpers.flip(path, offset + length // 2)
    assert numbers(cached.__getitems__([1, 2])) == [1, 2]
    assert cached[3]["y"] == 3
    assert drawn.reads == sorted([*range(10), 2, 3])
    assert numbers(cached) == list(range(10))
    assert len(drawn.reads) == 12


def test_an_entry_that_is_no_sample_is_replaced_and_told(
    drawn: Drawn, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    cached = CachedDataset(drawn, store)
    store.put(cached.name_of(1), b"not a sample")
    store.put(cached.name_of(2), b"")
    assert cached[1]["y"] == 1
    assert numbers(cached.__getitems__([1, 2])) == [1, 2]
    assert drawn.reads == [1, 2]
    assert (cached.hits, cached.misses) == (1, 2)
    assert all(f"{cached.name_of(index)} is read from the dataset again" in caplog.text for index in (1, 2))


def test_fill_reads_what_is_missing_and_shows_how_far_it_is(
    drawn: Drawn, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    cached = CachedDataset(drawn, store)
    assert cached.prefetch([1, 1, -1]) == 2
    assert cached.fill(progress=True, batch_size=3) == 8
    assert "10/10" in capsys.readouterr().err
    assert drawn.reads == list(range(10))
    assert cached.fill() == 0
    assert capsys.readouterr().err == ""
    assert (cached.hits, cached.misses) == (0, 0)


def test_fill_with_workers(drawn: Drawn, store: Store, no_leftovers: None) -> None:
    assert CachedDataset(drawn, store).fill(num_workers=2, batch_size=2) == 10
    assert drawn.reads == list(range(10))


def test_threads_and_processes_that_miss_at_once_agree(drawn: Drawn, store: Store) -> None:
    cached = CachedDataset(drawn, store)
    answers = helpers.in_processes(4, lambda _: numbers(cached.__getitems__(list(range(10)))))
    assert answers == [list(range(10))] * 4
    assert cached.hits + cached.misses == 40
    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(numbers(cached))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [list(range(10))] * 4
    helpers.recount(store)


def test_it_pickles_without_samples_and_counts_on(drawn: Drawn, tmp_path: Path) -> None:
    cached = CachedDataset(drawn, tmp_path / "store")
    cached.fill()
    data = pickle.dumps(cached)
    assert len(data) < 2000
    again = pickle.loads(data)
    assert again[3]["y"] == 3
    assert copy.copy(cached)[4]["y"] == 4
    assert copy.deepcopy(cached)[5]["y"] == 5
    assert cached.hits == again.hits == 3
    assert drawn.reads == list(range(10))


def test_a_pickle_outlives_its_process(tmp_path: Path, warm_torch: WarmPython) -> None:
    program = f"""
import pickle, sys
from castore.adapters.torch.cached import CachedDataset
cached = CachedDataset(["a", "b"], {str(tmp_path / "store")!r})
cached.fill()
print(pickle.dumps(cached).hex())
"""
    cached = pickle.loads(bytes.fromhex(warm_torch.output(["-c", program])))
    assert list(cached) == ["a", "b"]
    assert (cached.hits, cached.misses) == (2, 0)


def test_attributes_of_the_dataset_show_through(drawn: Drawn, store: Store) -> None:
    cached = CachedDataset(drawn, store)
    assert cached.classes == ("even", "odd")
    assert cached.length == 10
    with pytest.raises(AttributeError, match="colours"):
        _ = cached.colours
    assert not hasattr(cached, "__array__")
    assert not hasattr(CachedDataset(np.zeros(3), store), "__array_interface__")


def test_a_wrapper_around_a_wrapper_has_a_key(drawn: Drawn, store: Store, tmp_path: Path) -> None:
    inner = CachedDataset(drawn, store)
    with CachedDataset(inner, tmp_path / "outer") as outer:
        assert numbers(outer) == list(range(10))
        assert outer.key == CachedDataset(CachedDataset(drawn, store), store).key


def sources() -> dict[str, Any]:
    """Datasets of other libraries."""
    rows = datasets.Dataset.from_dict({"ids": [[1, 2, 3], [4], [5, 6]], "text": ["a", "b", "c"]})
    of_libraries = {
        "Hugging Face": rows,
        "Hugging Face as tensors": rows.with_format("torch"),
        "NumPy": np.arange(12, dtype="f4").reshape(3, 4),
        "list": [(1, "a"), (2, "b"), (3, "c")],
    }
    if find_spec("zarr") is not None:  # not on Python 3.10
        import zarr

        of_libraries["zarr"] = zarr.array(np.arange(12).reshape(3, 4))
    return of_libraries


@pytest.mark.parametrize("name", sources())
def test_any_source_with_indices_can_be_cached(name: str, store: Store) -> None:
    source = sources()[name]
    cached = CachedDataset(source, store)
    for _ in range(2):
        assert repr([cached[2], *cached.__getitems__([1, 0])]) == repr([source[2], source[1], source[0]])
    assert (cached.hits, cached.misses) == (3, 3)


def test_what_cannot_be_kept_is_refused_with_its_place(store: Store) -> None:
    cached = CachedDataset([{"x": object()}], store, key="k")
    with pytest.raises(SerializationError, match=r"sample\['x'\]"):
        cached[0]
    with pytest.raises(SerializationError, match=r"sample\['x'\]"):
        cached.__getitems__([0])
    assert list(store.entries()) == []


def test_data_without_a_fingerprint_is_refused_with_the_way_out(store: Store, tmp_path: Path) -> None:
    class Lines:
        def __init__(self, file: IO[str]) -> None:
            self.handle = file

        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> str:
            return self.handle.readline()

    (tmp_path / "file").write_text("line")
    with open(tmp_path / "file") as file:
        with pytest.raises(UnhashableError, match=r"dataset\.handle: .*TextIOWrapper.*key="):
            CachedDataset(Lines(file), store)
        assert CachedDataset(Lines(file), store, key="k")[0] == "line"


def test_a_folder_that_cannot_be_used_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        CachedDataset([1], tmp_path / "file")


def test_a_store_without_room_gives_the_samples_and_one_warning(tmp_path: Path) -> None:
    data = [os.urandom(300_000 if number == 1 else 1000) for number in range(4)]
    with Store(tmp_path / "store", max_size=100_000, memory=0) as store:
        cached = CachedDataset(data, store, key="bytes")
        with pytest.warns(RuntimeWarning, match="no more samples are kept for now") as caught:
            read = cached.__getitems__([0, 1, 2, 3]) + [cached[index] for index in range(4)]
        assert read == data + data
        assert len(caught) == 1
        assert (cached.hits, cached.misses) == (3, 5)  # one sample that does not fit costs itself alone
        cached.close()
