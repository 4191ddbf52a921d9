"""BiLevelCachedDataset in training loops: right samples, read from the source once, whoever asks."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import castore_fuse
from castore import Store
from castore.adapters.torch import BiLevelCachedDataset
from castore.adapters.torch.tiers import fixed_bytes
from castore.errors import (
    InvalidValueError,
    OutOfRangeError,
    SerializationError,
)
from tests.adapters.torch.conftest import same_batch
from tests.helpers import in_processes


class Squares(Dataset[Any]):
    """Samples that cost a read each, counted in a file, so in all processes."""

    def __init__(self, log: Path, length: int = 40) -> None:
        self.log = log
        self.length = length

    def __castore_key__(self) -> Any:
        return ("squares", self.length)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        fd = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, b"%d\n" % index)
        os.close(fd)
        return self.sample(index)

    @staticmethod
    def sample(index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 8, 8), index, dtype=torch.uint8), index**2

    def reads(self) -> list[int]:
        return sorted(map(int, self.log.read_text().split())) if self.log.exists() else []


@pytest.fixture
def squares(tmp_path: Path) -> Squares:
    return Squares(tmp_path / "log")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


# There may be no GPU here, which torch has a word for.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_the_seeds_example_runs_with_only_the_import_changed(squares: Squares, folder: Path) -> None:
    path = str(folder)
    data = squares
    cached_dataset = BiLevelCachedDataset(
        data,
        memory_cache_size=100_000_000_000,
        disk_cache_size=300_000_000_000,
        disk_cache_path=path
    )  # fmt: skip
    loader_kwargs: Any = {
        "batch_size": 4,
        "num_workers": 2,
        "pin_memory": True,
        "shuffle": True,
    }
    loader = DataLoader(cached_dataset, **loader_kwargs)
    for _ in range(2):
        seen = [int(number) for _, numbers in loader for number in numbers]
        assert sorted(seen) == [index**2 for index in range(40)]
    assert squares.reads() == list(range(40))
    shutil.rmtree(path)


def test_both_levels_serve_what_one_cannot_hold(squares: Squares, folder: Path) -> None:
    with BiLevelCachedDataset(squares, fixed_bytes(40) + 10 * 512, "1MB", folder, codec="none") as cached:
        loader = DataLoader(cached, batch_size=4, num_workers=2, persistent_workers=True)
        for _ in range(3):
            assert [int(number) for _, numbers in loader for number in numbers] == [i**2 for i in range(40)]
        assert squares.reads() == list(range(40))
        stats = cached.stats()
        assert stats.memory is not None
        assert stats.disk is not None
        assert 0 < stats.memory.samples < 40
        assert stats.memory.samples + stats.disk.samples == 40
        assert stats.memory.hits + stats.disk.hits == 80
        assert stats.reads == 40


KINDS: list[Any] = [
    torch.arange(6.0).reshape(2, 3),
    torch.ones(3, dtype=torch.bfloat16),
    np.arange(4, dtype=np.int16),
    7,
    2.5,
    "text",
    b"bytes",
    (torch.zeros(2), {"label": 3, "name": "x"}),
    [1, 2, [3.0]],
    {"a": torch.ones(1), "b": (np.float32(2), "y")},
]


@pytest.mark.parametrize("sample", KINDS, ids=lambda sample: type(sample).__name__)
def test_samples_of_every_kind_come_back_equal(sample: Any, folder: Path) -> None:
    with BiLevelCachedDataset([sample] * 3, "8MB", "1MB", folder, key="kinds") as cached:
        for _ in range(2):
            for index in range(3):
                same_sample(cached[index], sample)


def same_sample(first: Any, second: Any) -> None:
    if isinstance(first, np.ndarray):
        assert first.dtype == second.dtype
        assert np.array_equal(first, second)
    elif isinstance(first, dict | list | tuple):
        assert type(first) is type(second)
        keys = list(first) if isinstance(first, dict) else range(len(second))
        assert len(first) == len(second)
        for key in keys:
            same_sample(first[key], second[key])
    else:
        same_batch(first, second)


def test_images_come_back_as_images(folder: Path) -> None:
    image = Image.effect_noise((20, 10), 90).convert("RGB")
    with BiLevelCachedDataset([image], "8MB", "1MB", folder, key="images") as cached:
        for _ in range(2):
            assert cached[0].tobytes() == image.tobytes()
            assert (cached[0].mode, cached[0].size) == ("RGB", (20, 10))


def test_a_sample_is_nobodys_door_into_the_cache(squares: Squares) -> None:
    with BiLevelCachedDataset(squares, "8MB") as cached:
        for _ in range(2):
            cached[3][0].fill_(255)
            assert torch.equal(cached[3][0], squares.sample(3)[0])


def test_batches_keep_order_and_duplicates_and_read_each_once(squares: Squares) -> None:
    with BiLevelCachedDataset(squares, "8MB") as cached:
        cached[5]
        samples = cached.__getitems__([5, 3, 3, 9, 5, -1])
        assert [number for _, number in samples] == [25, 9, 9, 81, 25, 39**2]
        assert squares.reads() == [3, 5, 9, 39]


def test_the_wrapped_datasets_own_batches_are_used(folder: Path) -> None:
    class Batched(list[int]):
        calls = 0

        def __getitems__(self, indices: list[int]) -> list[int]:
            self.calls += 1
            return [self[index] for index in indices]

    data = Batched(range(100))
    with BiLevelCachedDataset(data, "8MB") as cached:
        assert cached.__getitems__(list(range(50))) == list(range(50))
        assert data.calls == 1


def test_a_second_run_finds_the_first_ones_samples(squares: Squares, folder: Path) -> None:
    with BiLevelCachedDataset(squares, "8MB", "1MB", folder, write_through=True) as cached:
        list(cached)
    with BiLevelCachedDataset(squares, "8MB", "1MB", folder) as cached:
        assert [number for _, number in cached] == [index**2 for index in range(40)]
        assert cached.misses == 0
    assert squares.reads() == list(range(40))


@pytest.mark.parametrize("memory", [0, "8MB"])
def test_an_entry_on_disk_that_is_no_sample_is_replaced_and_told(
    squares: Squares, folder: Path, memory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with BiLevelCachedDataset(squares, 0, "1MB", folder) as cached:
        cached.fill()
    names = [f"{cached.key}/000000/00000000{index}.safetensors" for index in (3, 5)]
    with Store(folder) as store:
        for name in names:
            store.put(name, b"not a sample")
    with BiLevelCachedDataset(squares, memory, "1MB", folder) as cached:
        assert cached[3][1] == 9
        assert [number for _, number in cached.__getitems__([4, 5, 5])] == [16, 25, 25]
        assert (cached.hits, cached.misses) == (1, 3)
        assert squares.reads() == sorted([*range(40), 3, 5])
        assert [number for _, number in cached] == [index**2 for index in range(40)]
        assert (cached.hits, cached.misses) == (41, 3)
    assert all(f"{name} is read from the dataset again" in caplog.text for name in names)


def test_an_edited_dataset_does_not_find_the_old_samples(folder: Path) -> None:
    with BiLevelCachedDataset([1, 2, 3], 0, "1MB", folder) as cached:
        assert list(cached) == [1, 2, 3]
    with BiLevelCachedDataset([1, 2, 4], 0, "1MB", folder) as cached:
        assert list(cached) == [1, 2, 4]


def test_fill_reads_what_is_missing_and_only_that(squares: Squares, folder: Path) -> None:
    with BiLevelCachedDataset(squares, "8MB", "1MB", folder) as cached:
        cached[7]
        assert cached.fill(num_workers=2, batch_size=4) == 39
        assert cached.fill() == 0
        assert squares.reads() == list(range(40))
        assert (cached.hits, cached.misses) == (0, 1), "filling is no use of a sample"


def test_fill_draws_no_number_of_the_programs_generator(squares: Squares, folder: Path) -> None:
    with BiLevelCachedDataset(squares, "1MB", disk_cache_path=folder, disk_cache_size="1MB") as cached:
        state = torch.get_rng_state()
        assert cached.fill() == len(squares)
        assert cached.fill(num_workers=1) == 0
        assert torch.equal(torch.get_rng_state(), state)


def test_fill_shows_a_bar_that_starts_at_what_is_there(
    squares: Squares, capsys: pytest.CaptureFixture[str]
) -> None:
    with BiLevelCachedDataset(squares, "8MB") as cached:
        cached.prefetch(range(10))
        capsys.readouterr()
        cached.fill(progress=True)
    shown = capsys.readouterr().err
    assert "10/40" in shown
    assert "40/40" in shown
    assert "samples/s" in shown


def test_fill_stops_where_nothing_more_fits(tmp_path: Path) -> None:
    squares = Squares(tmp_path / "log", 400)
    with BiLevelCachedDataset(squares, fixed_bytes(400) + 20 * 512) as cached:
        assert 10 <= cached.fill(batch_size=8) <= 30
    assert len(squares.reads()) < 50


def test_prefetch_caches_what_is_asked_for(squares: Squares) -> None:
    with BiLevelCachedDataset(squares, "8MB") as cached:
        assert cached.prefetch([1, 2, 2, -1]) == 3
        assert squares.reads() == [1, 2, 39]
        assert [cached[index][1] for index in (1, 2, 39)] == [1, 4, 39**2]
        assert cached.misses == 0
        with pytest.raises(OutOfRangeError):
            cached.prefetch([40])


def test_ranks_of_a_node_share_one_cache_without_a_word(
    squares: Squares, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = str(os.getpid())  # nobody listens there: it tells the jobs of two test runs apart

    def run(rank: int) -> tuple[int, int]:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost", "MASTER_PORT": job,
        }  # fmt: skip
        cached = BiLevelCachedDataset(squares, "8MB")
        sampler: Any = DistributedSampler(squares, num_replicas=2, rank=rank, seed=1)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for _ in DataLoader(cached, sampler=sampler, batch_size=4):
                pass
        barrier.wait(300)
        totals = cached.hits, cached.misses
        barrier.wait(300)
        return totals

    import multiprocessing

    barrier = multiprocessing.get_context("fork").Barrier(2)
    totals = in_processes(2, run)
    assert totals[0] == totals[1]
    assert sum(totals[0]) == 3 * 40
    # At most what both asked for at the same moment is read twice.
    assert len(set(squares.reads())) == 40
    assert len(squares.reads()) == totals[0][1] <= 80


def test_samples_on_disk_are_files_in_the_mount(squares: Squares, folder: Path) -> None:
    from safetensors import safe_open

    with BiLevelCachedDataset(squares, 0, "1MB", folder) as cached:
        list(cached)
        with (
            castore_fuse.mounted(Store(folder)) as root,
            safe_open(root / cached.key / "000000" / "000000003.safetensors", "pt") as file,
        ):
            assert file.get_tensor("0").tolist() == squares.sample(3)[0].tolist()


def test_other_attributes_pass_through(squares: Squares) -> None:
    with BiLevelCachedDataset(squares, "8MB") as cached:
        assert cached.log == squares.log
        assert len(cached) == 40
        with pytest.raises(AttributeError):
            _ = cached.nonsense


def test_a_pickle_is_small_and_finds_the_same_cache(squares: Squares, folder: Path) -> None:
    with BiLevelCachedDataset(squares, "8MB", "1MB", folder) as cached:
        list(cached)
        pickled = pickle.dumps(cached)
        assert len(pickled) < 3000
        again = pickle.loads(pickled)
        assert [number for _, number in again] == [index**2 for index in range(40)]
        again.close()
    assert squares.reads() == list(range(40))


@pytest.mark.parametrize("index", [40, -41, 10**12])
def test_an_index_out_of_range_is_an_index_error(squares: Squares, index: int) -> None:
    with BiLevelCachedDataset(squares, "8MB") as cached:
        with pytest.raises(IndexError, match=f"index {index} is out of range: there are 40 samples"):
            cached[index]
        with pytest.raises(OutOfRangeError):
            cached.__getitems__([0, index])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0,), InvalidValueError, "both 0: there is nowhere to keep samples"),
        (("8MB", "1MB"), InvalidValueError, "disk_cache_size needs a disk_cache_path"),
        (("eight",), InvalidValueError, "memory_cache_size: 'eight' is not a size"),
        ((1.5,), InvalidValueError, "a float is the fraction of what is free"),
        ((10,), InvalidValueError, "memory_cache_size"),
    ],
)
def test_bad_sizes_are_clear_errors(squares: Squares, arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        BiLevelCachedDataset(squares, *arguments)


def test_a_sample_that_cannot_be_kept_says_where() -> None:
    cached = BiLevelCachedDataset([{"x": [1, object()]}], "8MB")
    with cached, pytest.raises(SerializationError, match=r"sample\['x'\]\[1\]"):
        cached[0]
