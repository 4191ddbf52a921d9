"""Files that others take the place of while a wrapped dataset is in use: what is read of them is handed out,
and is never found by a later run under the key of the files before.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

from castore.adapters.torch import BiLevelCachedDataset, CachedDataset, CachedIterableDataset

WRAPPERS: dict[str, Callable[..., Any]] = {
    "simple": CachedDataset,
    "bilevel": lambda data, folder, **given: BiLevelCachedDataset(
        data, "1MB", "10MB", folder, write_through=True, **given
    ),
}
COUNT = 20
OTHER = r"is another file, or has changed, since the dataset was wrapped"


class Texts(Dataset[str]):
    """Puts the names of its files together while reading."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> str:
        return Path(f"{self.root}/{index:02d}.txt").read_text()


class Listed(Texts):
    """Lists its files with a label each, as folder datasets do."""

    def __init__(self, root: Path) -> None:
        self.samples = [(f"{root}/{index:02d}.txt", index) for index in range(COUNT)]

    def __getitem__(self, index: int) -> str:
        return Path(self.samples[index][0]).read_text()


class Logged(Texts):
    """Writes a line to a log for each sample."""

    def __init__(self, root: Path, log: Path) -> None:
        super().__init__(root)
        self.log = log
        log.touch()

    def __getitem__(self, index: int) -> str:
        with self.log.open("a") as log:
            log.write(f"{index}\n")
        return super().__getitem__(index)


def write_version(folder: Path, version: str) -> Path:
    folder.mkdir()
    for index in range(COUNT):
        (folder / f"{index:02d}.txt").write_text(f"{version} {index}")
    return folder


def point(link: Path, folder: Path) -> None:
    new = link.with_name("new")
    new.symlink_to(folder)
    new.replace(link)


@pytest.fixture(params=WRAPPERS)
def wrap(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return WRAPPERS[request.param]


@pytest.fixture
def versions(tmp_path: Path) -> tuple[Path, Path]:
    return write_version(tmp_path / "v1", "one"), write_version(tmp_path / "v2", "another")


@pytest.mark.parametrize("kind", [Texts, Listed])
def test_a_link_that_was_pointed_elsewhere_and_back_leaves_no_samples_of_elsewhere(
    wrap: Callable[..., Any], kind: Any, versions: tuple[Path, Path], tmp_path: Path
) -> None:
    one, another = versions
    latest = tmp_path / "latest"
    point(latest, one)
    with wrap(kind(latest), tmp_path / "cache") as cached:
        assert [cached[index] for index in range(5)] == [f"one {index}" for index in range(5)]
        point(latest, another)
        with pytest.warns(RuntimeWarning, match=OTHER):
            assert cached[5] == "another 5"
        assert cached.__getitems__([6, 7]) == ["another 6", "another 7"]  # told once
        assert cached[0] == "one 0"
        assert cached.prefetch([8, 9]) == 0
    point(latest, one)
    with wrap(kind(latest), tmp_path / "cache") as again:
        assert [again[index] for index in range(COUNT)] == [f"one {index}" for index in range(COUNT)]
        assert again.hits == 5


@pytest.mark.parametrize("text", ["edit", "much longer than before"])
def test_a_file_that_was_written_anew_in_its_place_leaves_nothing_either(
    wrap: Callable[..., Any], versions: tuple[Path, Path], tmp_path: Path, text: str
) -> None:
    one, _ = versions
    first = one / "00.txt"
    before = first.stat()
    with wrap(Listed(one), tmp_path / "cache") as cached:
        first.write_text(text)
        with pytest.warns(RuntimeWarning, match=rf"00\.txt {OTHER}.*wrap the dataset anew.*key="):
            assert cached[0] == text
    first.write_text("one 0")
    os.utime(first, ns=(before.st_atime_ns, before.st_mtime_ns))
    with wrap(Listed(one), tmp_path / "cache") as again:
        assert again[0] == "one 0"


def test_workers_keep_nothing_of_other_files(
    wrap: Callable[..., Any], versions: tuple[Path, Path], tmp_path: Path
) -> None:
    one, another = versions
    latest = tmp_path / "latest"
    point(latest, one)
    with wrap(Texts(latest), tmp_path / "cache") as cached:
        point(latest, another)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the workers inherit this
            loader = DataLoader(cached, batch_size=None, num_workers=2)
            assert [*loader] == [f"another {index}" for index in range(COUNT)]
    point(latest, one)
    with wrap(Texts(latest), tmp_path / "cache") as again:
        assert [again[index] for index in range(COUNT)] == [f"one {index}" for index in range(COUNT)]


def test_a_log_that_the_dataset_writes_is_no_change(
    wrap: Callable[..., Any], versions: tuple[Path, Path], tmp_path: Path
) -> None:
    with wrap(Logged(versions[0], tmp_path / "a.log"), tmp_path / "cache") as cached:
        for _ in range(2):
            assert [cached[index] for index in range(COUNT)] == [f"one {index}" for index in range(COUNT)]
        assert (cached.misses, cached.hits) == (COUNT, COUNT)
    assert (tmp_path / "a.log").read_text().split() == [str(index) for index in range(COUNT)]


def test_a_log_that_the_trainer_writes_is_no_change(
    wrap: Callable[..., Any], versions: tuple[Path, Path], tmp_path: Path
) -> None:
    data = Texts(versions[0])
    log = tmp_path / "train.log"
    log.write_text("begins\n")
    data.log = str(log)  # type: ignore[attr-defined]
    with wrap(data, tmp_path / "cache") as cached:
        for index in range(5):
            assert cached[index] == f"one {index}"
            with log.open("a") as file:
                file.write(f"step {index}\n")
        assert [cached[index] for index in range(5)] == [f"one {index}" for index in range(5)]
        assert cached.hits == 5


def test_with_a_key_of_the_users_own_no_file_is_compared(
    wrap: Callable[..., Any], versions: tuple[Path, Path], tmp_path: Path
) -> None:
    one, another = versions
    latest = tmp_path / "latest"
    point(latest, one)
    with wrap(Texts(latest), tmp_path / "cache", key="mine") as cached:
        point(latest, another)
        assert [cached[0], cached[0], cached.hits] == ["another 0", "another 0", 1]


class Words(IterableDataset[str]):
    def __iter__(self) -> Any:
        yield from ("a", "b", "c")


class Prefixed:
    """Reads a file for each item."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, word: str) -> str:
        return self.path.read_text() + word


def test_a_function_of_a_stream_whose_file_was_exchanged_leaves_nothing(
    versions: tuple[Path, Path], tmp_path: Path
) -> None:
    one, another = versions
    latest = tmp_path / "latest"
    point(latest, one)
    function = Prefixed(latest / "03.txt")
    with CachedIterableDataset(Words(), function, tmp_path / "cache") as cached:
        samples = iter(cached)
        assert next(samples) == "one 3a"
        point(latest, another)
        with pytest.warns(RuntimeWarning, match=OTHER):
            assert [*samples] == ["another 3b", "another 3c"]
    point(latest, one)
    with CachedIterableDataset(Words(), function, tmp_path / "cache") as again:
        assert [*again] == ["one 3a", "one 3b", "one 3c"]
        assert again.hits == 1
