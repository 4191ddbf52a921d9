"""`castore://` as a file system: paths, files that are whole or absent, and instances that cross threads and
processes.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import gzip
import io
import json
import lzma
import os
import pickle
import subprocess
import sys
import tarfile
import threading
import time
import warnings
import zipfile
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.compression import compr

from castore import CorruptError, Store, StoreError
from castore.adapters.filesystem import CastoreFileSystem
from castore.objects.codecs import FRAME_SIZE
from tests.clocks import pass_time
from tests.helpers import (
    agrees_with_disk,
    files_up_to,
    flip,
    in_processes,
    mixed,
    noise,
    payload,
    statements_of,
)

BIG = mixed(12 * FRAME_SIZE + 4_321)


@pytest.fixture
def fs(tmp_path: Path) -> Iterator[CastoreFileSystem]:
    """A file system over a new store."""
    yield CastoreFileSystem(tmp_path / "store")
    CastoreFileSystem.clear_instance_cache()


def in_tmp(fs: CastoreFileSystem) -> list[Path]:
    return [path for path in (fs.store.path / "tmp").iterdir() if path.is_file()]


def _write(file: Any, data: Any, error: Exception | None = None) -> None:
    file.write(data)
    if error is not None:
        raise error


def damage(fs: CastoreFileSystem, name: str) -> None:
    path, offset, length = payload(fs.store, name)
    flip(path, offset + length // 2)


# Finding it


def test_fsspec_finds_it_and_imports_nothing_of_it_before_it_is_asked_for(tmp_path: Path) -> None:
    script = (
        "import sys, fsspec; assert 'castore' not in sys.modules, 'too early';"
        "fs = fsspec.filesystem('castore'); fs.pipe('a/b', b'x');"
        "print(fs.store.path, fs.cat('castore://a/b'))"
    )
    environment = os.environ | {
        "CASTORE_DIR": str(tmp_path / "s"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr) == (f"{tmp_path / 's'} b'x'\n", "")


def test_the_store_is_that_of_the_environment_and_not_of_the_first_who_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "other", "one"):
        monkeypatch.setenv("CASTORE_DIR", str(tmp_path / name))
        fs = fsspec.filesystem("castore")
        assert fs.store.path == tmp_path / name
        assert pickle.loads(pickle.dumps(fs)).store.path == tmp_path / name


def test_one_store_is_one_instance_however_its_path_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CASTORE_DIR", "store")
    ways: list[Any] = [tmp_path / "store", str(tmp_path / "store"), "store", "./x/../store", None]
    first, *others = (CastoreFileSystem(way) for way in ways)
    assert all(other is first for other in others)
    assert fsspec.filesystem("castore", store="store") is first
    monkeypatch.chdir("/")
    assert pickle.loads(pickle.dumps(first)) is first


def test_other_options_are_another_instance_over_the_same_open_store(tmp_path: Path) -> None:
    plain, short = CastoreFileSystem(tmp_path / "s"), CastoreFileSystem(tmp_path / "s", ttl="1h")
    assert plain is not short
    assert plain != short
    assert plain.store is short.store


def test_a_store_that_is_given_is_used_with_its_options(tmp_path: Path) -> None:
    Store(tmp_path / "s").close()
    with Store(tmp_path / "s", ttl="1h", memory=0) as one, Store(tmp_path / "s", memory=0) as other:
        short, plain = CastoreFileSystem(store=one), CastoreFileSystem(store=other)
        assert (short.store, plain.store) == (one, other)
        short.pipe("a", b"x")
        plain.pipe("b", b"x")
        assert [short.info(name)["expires"] is None for name in "ab"] == [False, True]
        again = pickle.loads(pickle.dumps(short))
        assert again.store.settings.ttl == 3600.0
        again.store.close()


def test_options_of_other_file_systems_are_ignored_as_by_those_of_fsspec(tmp_path: Path) -> None:
    """Libraries pass such options: `datasets` passes ``client_kwargs`` for streams."""
    foreign: dict[str, Any] = {"client_kwargs": {"trust_env": True}, "auto_mkdir": True, "errors": "strict"}
    fs = fsspec.filesystem("castore", store=tmp_path / "s", encoding="utf-8", **foreign)
    with fs.open("a", "wb", client_kwargs={}, block_size=5) as file:
        file.write(b"x")
    with fsspec.open("castore://a", store=tmp_path / "s", **foreign) as file:
        assert file.read() == b"x"


def test_a_store_and_no_cache_of_instances_go_together(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        fs = fsspec.filesystem("castore", store=store, skip_instance_cache=True)
        assert fs.store is store


def test_a_store_is_closed_when_nobody_has_its_file_system_any_more(tmp_path: Path) -> None:
    def files() -> int:
        return sum(
            str(tmp_path) in os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{fd}")
        )

    fs = CastoreFileSystem(tmp_path / "s")
    fs.pipe("a", b"x")
    assert files() > 0
    CastoreFileSystem.clear_instance_cache()
    del fs
    gc.collect()
    assert files() == 0


def test_what_a_short_program_reads_counts_as_used(tmp_path: Path) -> None:
    with Store(tmp_path / "s", memory=0) as store:
        store.put("a", b"x")
    script = f"import fsspec; fsspec.filesystem('castore', store={str(tmp_path / 's')!r}).cat('a')"
    subprocess.run([sys.executable, "-c", script], check=True)
    with Store(tmp_path / "s", memory=0) as store:
        assert store.stat().disk_hits == 1


# Paths


def test_folders_are_the_parts_of_names(fs: CastoreFileSystem) -> None:
    fs.pipe({"a/b/c": b"1", "a/b-d": b"22", "a/e": b"333", "f": b""})
    assert fs.ls("", detail=False) == ["a", "f"]
    assert fs.ls("castore://a/", detail=False) == ["a/b", "a/b-d", "a/e"]
    assert [(one["name"], one["type"], one["size"]) for one in fs.ls("a")] == [
        ("a/b", "directory", 0), ("a/b-d", "file", 2), ("a/e", "file", 3),
    ]  # fmt: skip
    assert fs.ls("a/e", detail=False) == ["a/e"]
    assert fs.glob("a/*") == ["a/b", "a/b-d", "a/e"]
    assert fs.glob("**/[c-e]") == ["a/b/c", "a/e"]
    assert fs.find("a") == ["a/b-d", "a/b/c", "a/e"]
    assert fs.find("a", maxdepth=1, withdirs=True) == ["a", "a/b", "a/b-d", "a/e"]
    assert list(fs.walk("a")) == [("a", ["b"], ["b-d", "e"]), ("a/b", [], ["c"])]
    assert fs.du("a") == 6
    for missing in ("a/b/", "a/x", "no/such", "a/e/inside", "../a", "a//b"):
        assert fs.exists(missing) is (missing == "a/b/")
    with pytest.raises(FileNotFoundError):
        fs.ls("no/such")
    with pytest.raises(FileNotFoundError):
        fs.info("a//b")


def test_listing_a_folder_skips_what_lies_below_its_folders(fs: CastoreFileSystem) -> None:
    fs.store.put_many((f"big/{n % 3}/{n}", b"x") for n in range(9_000))
    fs.store.put_many((f"big/file-{n:04}", b"x") for n in range(2_500))
    names: list[str] = []
    asked = statements_of(fs.store, lambda: names.extend(fs.ls("big", detail=False)))
    assert names == [f"big/{n}" for n in range(3)] + [f"big/file-{n:04}" for n in range(2_500)]
    assert len(asked) < 15


def test_a_file_tells_what_is_known_of_it(fs: CastoreFileSystem) -> None:
    fs.pipe_file("a", b"hello", metadata={"k": 1}, ttl="1h", codec="lz4", pin=True)
    info, entry = fs.info("a"), fs.store.entry("a")
    assert entry is not None
    assert {**info, "mtime": info["created"]} == info
    assert (info["size"], info["digest"], info["codec"], info["metadata"]) == (
        5,
        entry.digest,
        entry.codec,
        {"k": 1},
    )
    assert entry.pinned
    assert fs.created("a") == fs.modified("a")
    assert fs.created("a").timestamp() == pytest.approx(entry.created)
    before = fs.ukey("a"), fs.checksum("a")
    fs.pipe_file("a", b"other")
    assert (fs.ukey("a"), fs.checksum("a")) != before
    fs.pipe_file("b", b"other")
    assert fs.checksum("b") == fs.checksum("a")


def test_what_has_expired_is_no_file(fs: CastoreFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    fs.store.put("d/expired", b"x", ttl=60)
    pass_time(monkeypatch, 120)
    assert not fs.exists("d/expired")
    for ask in (fs.info, fs.cat_file, fs.open, fs.rm, fs.ukey, lambda name: fs.cat_file(name, 0, 1)):
        with pytest.raises(FileNotFoundError, match="castore://d/expired"):
            ask("d/expired")
    assert fs.find("") == fs.ls("") == []
    with pytest.raises(FileNotFoundError):
        fs.ls("d")


def _reads(fs: CastoreFileSystem) -> list[Any]:
    """All ways to read a file whole or in part."""
    mapper = fs.get_mapper("d")
    return [
        fs.cat_file,
        fs.cat,
        fs.head,
        fs.open,
        lambda name: fs.cat([name]),
        lambda name: fs.cat_file(name, 1, 2_999_999),
        lambda name: fs.get_file(name, os.devnull),
        lambda name: fs.cat_ranges([name], 0, 3_000_000, on_error="raise"),
        lambda name: mapper[name[2:]],
        lambda name: mapper.getitems([name[2:]]),
        lambda name: mapper.getitems([name[2:]], on_error="omit"),
        lambda name: pickle.loads(pickle.dumps(mapper)).getitems([name[2:]], on_error="omit"),
    ]


@pytest.mark.parametrize("whole", [0, 1, 4, 10])
def test_the_first_read_of_a_whole_damaged_file_is_an_error_and_no_missing_file(
    fs: CastoreFileSystem, whole: int
) -> None:
    fs.store.put("d/a", noise(3_000_000))
    damage(fs, "d/a")
    with pytest.raises(CorruptError, match="castore://d/a") as caught:
        _reads(fs)[whole]("d/a")
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == errno.EIO


def test_a_damaged_frame_is_no_error_of_the_other_ranges(fs: CastoreFileSystem) -> None:
    data = noise(5 * FRAME_SIZE)
    fs.store.put("d/a", data)
    damage(fs, "d/a")  # in the third of five frames
    starts = [0, 2 * FRAME_SIZE, 4 * FRAME_SIZE]
    first, damaged, last = fs.cat_ranges(["d/a"] * 3, starts, [start + 100 for start in starts])
    assert (first, last) == (data[:100], data[4 * FRAME_SIZE :][:100])
    assert isinstance(damaged, CorruptError)


@pytest.mark.parametrize("found_by", ["verify", "reader", "gone"])
def test_a_damaged_file_is_listed_and_each_read_of_it_is_an_error(
    fs: CastoreFileSystem, found_by: str
) -> None:
    fs.pipe({f"d/{n}": b"%d" % n for n in range(3)})
    fs.store.put("d/bad", noise(3_000_000))
    fs.store.put("e/f/bad", noise(3_000_000))
    if found_by == "gone":
        payload(fs.store, "d/bad")[0].unlink()
    else:
        damage(fs, "d/bad")
    if found_by == "verify":
        assert fs.store.verify().bad != []
    else:
        assert fs.store.get("d/bad") is None
    assert fs.store.get("e/f/bad") is None
    assert fs.ls("d", detail=False) == [one["name"] for one in fs.ls("d")] == ["d/0", "d/1", "d/2", "d/bad"]
    assert fs.find("") == ["d/0", "d/1", "d/2", "d/bad", "e/f/bad"]
    assert (fs.glob("d/b*"), fs.glob("**/bad")) == (["d/bad"], ["d/bad", "e/f/bad"])
    assert (fs.ls("", detail=False), fs.ls("e", detail=False)) == (["d", "e"], ["e/f"])
    assert list(fs.walk("e")) == [("e", ["f"], []), ("e/f", [], ["bad"])]
    assert (fs.exists("d/bad"), fs.isfile("d/bad"), fs.isdir("e/f")) == (True, True, True)
    assert (fs.info("d/bad")["size"], fs.info("d/bad")["type"]) == (3_000_000, "file")
    assert fs.du("d") == 3_000_003
    assert "bad" in fs.get_mapper("d")
    for read in [*_reads(fs), lambda name: fs.cp_file(name, "copy"), lambda name: fs.open(name, "ab")]:
        with pytest.raises(CorruptError, match="castore://d/bad") as caught:
            read("d/bad")
        assert isinstance(caught.value, OSError)
        assert caught.value.errno == errno.EIO
    for create in (
        lambda: fs.open("d/bad", "xb"),
        lambda: fs.pipe_file("d/bad", b"", mode="create"),
        lambda: fs.put_file(__file__, "d/bad", mode="create"),
    ):
        with pytest.raises(FileExistsError, match="castore://d/bad"):
            create()


def test_a_damaged_file_can_be_written_over_and_removed(fs: CastoreFileSystem) -> None:
    def write(name: str) -> None:
        with fs.open(name, "wb") as file:
            file.write(b"anew")

    names = ["d/opened", "d/piped", "d/put", "d/removed"]
    for number, name in enumerate(names):
        fs.store.put(name, noise(300_000, number))
        damage(fs, name)
    assert len(fs.store.verify().bad) == 4
    write("d/opened")
    fs.pipe_file("d/piped", b"anew")
    fs.put_file(__file__, "d/put")
    fs.rm("d/removed")
    assert fs.find("d") == ["d/opened", "d/piped", "d/put"]
    assert [fs.cat(name) for name in names[:2]] == [b"anew"] * 2
    assert fs.cat("d/put") == Path(__file__).read_bytes()


# Reading


@pytest.mark.parametrize("mode", ["rb", "br", "r", "rt", "tr"])
def test_modes_of_reading_are_those_of_python(fs: CastoreFileSystem, mode: str) -> None:
    fs.store.put("text", b"line\n")
    with fs.open("text", mode) as file:
        assert file.read() == (b"line\n" if "b" in mode else "line\n")


@pytest.mark.parametrize("codec", ["zstd", "none"])
def test_files_are_read_in_any_order(fs: CastoreFileSystem, codec: str) -> None:
    fs.store.put("a", BIG, codec=codec)
    with fs.open("a") as file:
        assert (file.size, file.seekable(), file.mode, file.path) == (len(BIG), True, "rb", "a")
        assert file.info()["size"] == len(BIG)
        assert file.read(10) == BIG[:10]
        file.seek(-7, os.SEEK_END)
        assert file.read() == BIG[-7:]
        for start in (FRAME_SIZE - 3, 5 * FRAME_SIZE, 0, len(BIG) - 1, 7 * FRAME_SIZE + 1):
            file.seek(start)
            assert file.read(50_000) == BIG[start : start + 50_000]
        file.seek(0)
        pieces = iter(lambda: file.read(10_000), b"")
        assert b"".join(pieces) == BIG
    with fs.open("a", "rt", encoding="latin-1", newline="") as lines:
        assert lines.read() == BIG.decode("latin-1")


def test_ranges_of_many_files_come_in_the_order_in_which_they_are_asked_for(fs: CastoreFileSystem) -> None:
    fs.store.put("a", BIG)
    fs.store.put("b", b"0123456789")
    paths = ["b", "a", "castore://b", "a", "a", "b"]
    starts = [2, 5 * FRAME_SIZE - 9, -3, 0, len(BIG) - 5, 8]
    ends = [5, 5 * FRAME_SIZE + 9, None, 1, None, 100]
    data = {"a": BIG, "b": b"0123456789"}
    expected = [data[path[-1]][start:end] for path, start, end in zip(paths, starts, ends, strict=True)]
    assert fs.cat_ranges(paths, starts, ends) == expected
    assert fs.cat_ranges(["b", "b"], 1, 3) == [b"12", b"12"]
    assert [
        fs.cat_file(path, start, end) for path, start, end in zip(paths, starts, ends, strict=True)
    ] == expected
    found = fs.cat_ranges(["b", "missing", "b"], 0, 2)
    assert [found[0], found[2]] == [b"01", b"01"]
    assert isinstance(found[1], FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(["b", "missing"], 0, 2, on_error="raise")
    with pytest.raises(ValueError, match="2 paths, 1 starts"):
        fs.cat_ranges(["b", "b"], [0], [1])


def test_an_open_file_keeps_its_bytes_whatever_becomes_of_its_path(fs: CastoreFileSystem) -> None:
    fs.store.put("a", BIG)
    with fs.open("a") as file:
        file.read(10)
        fs.rm("a")
        fs.store.gc(grace=0)
        assert file.read() == BIG[10:]


def test_an_open_file_pickles_as_its_place(fs: CastoreFileSystem) -> None:
    fs.store.put("a", BIG)
    with fs.open("a") as file:
        file.seek(1_234_567)
        pickled = pickle.dumps(file)
        assert len(pickled) < 500
        with pickle.loads(pickled) as again:
            assert again.read(100) == BIG[1_234_567:1_234_667]


# Writing


@pytest.mark.parametrize("size", [0, 10, 20_000_000])
def test_a_file_is_seen_whole_when_it_is_closed(fs: CastoreFileSystem, size: int) -> None:
    data = noise(size)
    with fs.open("a", "wb", metadata={"k": 1}, codec="none") as file:
        file.write(data)
        assert file.tell() == size
        assert not fs.exists("a")
        assert fs.ls("") == []
    assert fs.cat("a") == data
    assert fs.info("a")["metadata"] == {"k": 1}
    assert file.entry == fs.store.entry("a")


@pytest.mark.parametrize("size", [10, 20_000_000])
@pytest.mark.parametrize("mode", ["wb", "w", "wt", "xb"])
@pytest.mark.parametrize("opener", ["fs", "fsspec"])
def test_an_error_keeps_nothing_and_what_was_there(
    fs: CastoreFileSystem, opener: str, mode: str, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    if mode != "xb":
        fs.pipe("a", b"before")
    opened = fs.open("a", mode) if opener == "fs" else fsspec.open("castore://a", mode, store=fs.store.path)
    with pytest.raises(KeyError, match="the writer fails"), opened as file:
        _write(file, "x" * size if mode in ("w", "wt") else noise(size), KeyError("the writer fails"))
    assert fs.store.get("a") == (None if mode == "xb" else b"before")
    assert in_tmp(fs) == []


def test_an_error_keeps_nothing_through_layers_of_text_and_compression(fs: CastoreFileSystem) -> None:
    place = fsspec.open("castore://a.gz", "wt", compression="gzip", store=fs.store.path)
    with pytest.raises(KeyError), place as file:
        _write(file, "x" * 100_000, KeyError())
    assert not fs.exists("a.gz")
    with place as file:
        file.write("x" * 100_000)
    with fsspec.open("castore://a.gz", "rt", compression="infer", store=fs.store.path) as file:
        assert file.read() == "x" * 100_000


def test_a_file_that_is_written_while_an_error_is_handled_is_kept(fs: CastoreFileSystem) -> None:
    try:
        raise KeyError
    except KeyError:
        with fs.open("a", "w") as file:
            file.write("what went wrong")
    assert fs.cat("a") == b"what went wrong"


def _handle(fs: CastoreFileSystem, file: Any, way: str) -> None:
    try:
        next(iter([]))
    except StopIteration:
        if way == "close":
            file.close()
        elif way == "with":
            with file:
                pass
        else:
            with open(os.devnull, "w"):
                file.close()


@pytest.mark.parametrize("way", ["close", "with", "inside another block"])
@pytest.mark.parametrize("mode", ["wb", "w", "ab"])
def test_a_file_that_is_closed_where_an_error_is_handled_is_kept(
    fs: CastoreFileSystem, mode: str, way: str
) -> None:
    file = fs.open("a", mode)
    file.write("rows" if mode == "w" else b"rows")
    _handle(fs, file, way)
    assert fs.cat("a") == b"rows"


class _Wrapper:
    """Like a library's file: closes the file that it writes, whatever ends its block."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __enter__(self) -> _Wrapper:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.write(b"the end")
        self.file.close()


def test_a_wrapper_that_an_exception_closes_keeps_nothing_and_says_so(
    fs: CastoreFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyError), _Wrapper(fs.open("a", "wb")):
        raise KeyError("k")
    assert not fs.exists("a")
    assert "castore://a was discarded: KeyError('k') ended" in caplog.text


def test_a_layer_that_an_exception_ends_is_not_kept_by_a_close_on_the_way_out(fs: CastoreFileSystem) -> None:
    """pandas closes a Parquet file in ``finally``, after pyarrow has written a footer for the rows so far."""

    def write(file: Any) -> None:
        try:
            _gzip(file, KeyError())
        finally:
            file.close()

    with pytest.raises(KeyError):
        write(fs.open("a", "wb"))
    assert not fs.exists("a")


def test_a_file_goes_on_after_an_exception_that_its_writer_has_handled(fs: CastoreFileSystem) -> None:
    with fs.open("a", "wb") as file:
        for name in (b"one", b"two"):
            with contextlib.suppress(KeyError), contextlib.ExitStack() as stack:
                stack.callback(file.write, b"</%s>" % name)
                file.write(b"<%s>" % name)
                raise KeyError
    assert fs.cat("a") == b"<one></one><two></two>"


def test_a_file_of_an_exit_that_an_exception_calls_is_kept(fs: CastoreFileSystem) -> None:
    class Report:
        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            with fsspec.open("castore://report", "w", store=fs.store.path) as file:
                file.write("what went wrong")

    with pytest.raises(KeyError), Report():
        raise KeyError
    assert fs.cat("report") == b"what went wrong"


def _lines(file: Any) -> Iterator[None]:
    with file:
        while True:
            file.write((yield))


def test_a_generator_that_is_closed_while_it_writes_keeps_nothing_and_says_so(
    fs: CastoreFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    lines: Any = _lines(fs.open("a", "wb"))
    next(lines)
    lines.send(b"half")
    lines.close()
    assert not fs.exists("a")
    assert "the generator that writes it was closed" in caplog.text


@pytest.mark.parametrize("compression", sorted({"gzip", "bz2", "xz", "zstd"} & set(compr)))
@pytest.mark.parametrize("mode", ["wb", "wt"])
def test_open_with_compression_keeps_its_file_and_nothing_after_an_error(
    fs: CastoreFileSystem, mode: str, compression: str
) -> None:
    data: Any = "x" * 100_000 if mode == "wt" else b"x" * 100_000
    with pytest.raises(KeyError), fs.open("a", mode, compression=compression) as file:
        _write(file, data, KeyError())
    assert not fs.exists("a")
    del file
    gc.collect()  # a finaliser that raises fails the test
    with fs.open("a", mode, compression=compression) as file:
        file.write(data)
    with fs.open("a", mode.replace("w", "r"), compression=compression) as file:
        assert file.read() == data
    assert in_tmp(fs) == []


def _gzip(file: Any, error: Exception | None) -> None:
    with gzip.open(file, "wb") as layer:
        _write(layer, b"inside", error)


def _lzma(file: Any, error: Exception | None) -> None:
    with lzma.open(file, "wb") as layer:
        _write(layer, b"inside", error)


def _zip(file: Any, error: Exception | None) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a", b"inside")
        if error is not None:
            raise error


def _tar(file: Any, error: Exception | None) -> None:
    with tarfile.open(fileobj=file, mode="w|") as tar:
        tar.add(__file__, "a")
        if error is not None:
            raise error


@pytest.mark.parametrize("writer", [_gzip, _lzma, _zip, _tar])
def test_a_file_that_its_layer_leaves_open_is_kept_and_nothing_after_an_error(
    fs: CastoreFileSystem, writer: Any
) -> None:
    """Compressors and archives never close a file that they were given."""

    def write(name: str, fails: bool) -> None:
        with contextlib.suppress(KeyError):
            writer(fs.open(name, "wb"), KeyError() if fails else None)
        gc.collect()

    with pytest.warns(ResourceWarning, match="castore://a was never closed"):
        write("a", False)
    assert fs.info("a")["size"] > 0
    with pytest.warns(ResourceWarning, match="castore://b was never closed"):
        write("b", True)
    assert not fs.exists("b")
    assert in_tmp(fs) == []


def test_a_file_that_is_collected_inside_the_store_is_kept(fs: CastoreFileSystem) -> None:
    """The collector may run at any time, also while this thread holds a lock of the store."""
    files = [fs.open("a", "wb")]
    files[0].write(noise(20_000_000))

    def first(txn: Any) -> None:
        files.clear()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        fs.store.index.transact(first)
        assert files == []
        deadline = time.monotonic() + 240
        while not fs.exists("a") and time.monotonic() < deadline:
            time.sleep(0.01)
    assert fs.info("a")["size"] == 20_000_000


def test_a_file_that_a_forked_child_collects_stays_its_parents(fs: CastoreFileSystem) -> None:
    files = [fs.open("a", "wb"), fs.open("b", "ab")]
    for file in files:
        file.write(b"mine")

    def collect(_: int) -> bool:
        files.clear()
        return fs.ls("") == []

    assert in_processes(1, collect) == [True]
    for file in files:
        file.close()
    assert fs.cat(["a", "b"]) == {"a": b"mine", "b": b"mine"}


@pytest.mark.parametrize("end", ["", "; 1 / 0"])
def test_a_file_that_is_open_when_the_program_ends_is_not_kept_and_that_is_said(
    tmp_path: Path, end: str
) -> None:
    """The layers above the file may hold some of its bytes."""
    script = "import fsspec; file = fsspec.open('castore://a', 'w').open(); file.write('x' * 10)" + end
    environment = os.environ | {
        "CASTORE_DIR": str(tmp_path / "s"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    with Store(tmp_path / "s") as store:
        assert store.get("a") is None
    assert "castore://a was discarded: the program ended" in done.stderr


def test_files_that_are_collected_in_the_middle_of_other_writes_harm_neither(fs: CastoreFileSystem) -> None:
    """The finaliser of a layer closes its file wherever the collector runs, also inside a transaction."""
    problems: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(100):
                cycle: list[Any] = [io.TextIOWrapper(fs.open(f"c/{number}/{turn}", "wb"))]
                cycle[0].write("held by a layer")
                cycle.append(cycle)
                del cycle
                fs.pipe(f"d/{number}/{turn}", b"%d" % turn)
        except BaseException as error:
            problems.append(error)

    before = gc.get_threshold()
    gc.set_threshold(50)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            gc.collect()
            deadline = time.monotonic() + 240
            while len(fs.find("c")) < 300 and time.monotonic() < deadline:
                time.sleep(0.01)
    finally:
        gc.set_threshold(*before)
    assert problems == []
    assert (len(fs.find("c")), len(fs.find("d"))) == (300, 300)
    assert set(fs.cat(fs.find("c")).values()) == {b"held by a layer"}
    agrees_with_disk(fs.store)


def test_a_file_that_is_collected_with_its_layers_has_all_that_they_held(fs: CastoreFileSystem) -> None:
    file = io.TextIOWrapper(fs.open("a", "wb"))
    file.write("held by a layer")
    cycle: list[Any] = [file]
    cycle.append(cycle)
    del file, cycle
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    assert fs.cat("a") == b"held by a layer"


@pytest.mark.parametrize("encoding", ["utf-16", "UTF_32", "utf-8-sig", "utf-16-be", "utf-8"])
def test_text_has_the_byte_order_mark_of_its_encoding_once(fs: CastoreFileSystem, encoding: str) -> None:
    for mode in ("w", "a"):
        with fs.open("a", mode, encoding=encoding) as file:
            file.write("é" if mode == "w" else "ü")
    assert fs.cat("a").startswith("é".encode(encoding))
    assert fs.cat("a").decode(encoding) == "éü"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_text_file_tells_its_position_as_a_local_one(
    fs: CastoreFileSystem, encoding: str, tmp_path: Path
) -> None:
    def positions(opener: Any, path: str) -> list[int]:
        found = []
        for mode in ("a", "a", "w", "a"):
            with opener(path, mode, encoding=encoding) as file:
                if file.tell() == 0 and encoding == "utf-8":
                    file.write("header\n")
                file.write("é")
                found.append(file.tell())
        return found

    assert positions(fs.open, "a") == positions(open, str(tmp_path / "a"))
    assert fs.cat("a") == (tmp_path / "a").read_bytes()


def test_a_transaction_covers_what_is_piped_and_put(fs: CastoreFileSystem) -> None:
    def write(error: Exception | None = None) -> None:
        fs.pipe("piped", b"x")
        fs.touch("touched")
        fs.put_file(__file__, "put")
        assert fs.find("") == []
        if error is not None:
            raise error

    with pytest.raises(KeyError), fs.transaction:
        write(KeyError())
    assert fs.find("") == []
    with fs.transaction:
        write()
    assert fs.cat(["piped", "touched"]) == {"piped": b"x", "touched": b""}
    assert fs.cat("put") == Path(__file__).read_bytes()
    assert in_tmp(fs) == []


@pytest.mark.parametrize("how", ["made anew", "another link"])
def test_a_store_that_takes_the_place_of_another_is_read_and_written(tmp_path: Path, how: str) -> None:
    """Regression: the old one was, by whoever had asked before and by whoever asked anew."""
    place = tmp_path / "store"
    (tmp_path / "one").mkdir()
    if how == "another link":
        place.symlink_to("one")
    fs = fsspec.filesystem("castore", store=place)
    fs.pipe("name", b"old")
    assert fs.cat("name") == b"old"
    with fs.open("name") as opened:
        if how == "another link":
            place.unlink()
            place.symlink_to("two")
        else:
            place.rename(tmp_path / "gone")
        with Store(tmp_path / "two" if how == "another link" else place) as store:
            store.put("name", b"new")
        for found in (fs, fsspec.filesystem("castore", store=place), CastoreFileSystem(place)):
            assert (found.cat("name"), found.info("name")["size"], found.find("")) == (b"new", 3, ["name"])
        assert opened.read() == b"old"
    fs.pipe("more", b"1")
    with Store(place) as store:
        assert store.get("more") == b"1"


def test_no_folder_is_made_below_a_file_and_none_removed_that_is_not_there(fs: CastoreFileSystem) -> None:
    fs.pipe("f/a", b"x")
    for make in (fs.mkdir, fs.makedirs, lambda path: fs.makedirs(path, exist_ok=True)):
        with pytest.raises(NotADirectoryError, match="castore://f/a"):
            make("f/a/b/c")
    assert fs.find("", withdirs=True) == ["f", "f/a"]
    with pytest.raises(FileNotFoundError, match="castore://no/such"):
        fs.rmdir("no/such")


def test_what_is_discarded_is_not_kept(fs: CastoreFileSystem) -> None:
    file = fs.open("a", "wb")
    file.write(b"x")
    file.discard()
    file.close()
    assert file.closed
    assert not fs.exists("a")


def test_a_transaction_keeps_its_files_at_its_end_or_none(fs: CastoreFileSystem) -> None:
    with fs.transaction:
        for name in "ab":
            with fs.open(name, "wb") as file:
                file.write(b"x")
        assert fs.ls("") == []
    assert fs.ls("", detail=False) == ["a", "b"]
    with pytest.raises(KeyError), fs.transaction, fs.open("c", "wb") as file:
        _write(file, noise(20_000_000), KeyError())
    fs.start_transaction()
    with fs.open("c", "wb") as file:
        file.write(noise(20_000_000))
    fs.transaction.complete(commit=False)
    fs.end_transaction()
    assert fs.ls("", detail=False) == ["a", "b"]
    assert in_tmp(fs) == []


def test_appending_goes_on_from_what_is_there(fs: CastoreFileSystem) -> None:
    with fs.open("log", "a") as file:
        file.write("one\n")
    with fs.open("log", "ab") as file:
        assert file.tell() == 4
        file.write(b"two\n")
        assert fs.cat("log") == b"one\n"
    assert fs.cat("log") == b"one\ntwo\n"


def test_appending_at_the_same_time_loses_nothing(fs: CastoreFileSystem) -> None:
    def append(number: int) -> bool:
        for turn in range(10):
            with fs.open("log", "a") as file:
                file.write(f"{number} {turn}\n")
        return True

    first, second = fs.open("log", "ab"), fs.open("log", "ab")
    for file in (second, first):
        file.write(noise(20_000_000))
        file.close()
    assert fs.cat("log") == noise(20_000_000) * 2
    fs.rm("log")
    in_processes(4, append)
    lines = fs.cat("log").decode().splitlines()
    assert sorted(lines) == sorted(f"{number} {turn}" for number in range(4) for turn in range(10))
    assert in_tmp(fs) == []


def test_appending_keeps_what_is_known_of_the_entry_but_for_what_is_given(tmp_path: Path) -> None:
    fs = CastoreFileSystem(tmp_path / "s", ttl="1d", metadata={"of": "all"})
    fs.pipe_file("a", b"1", ttl="1h", metadata={"k": 1}, pin=True)
    before = fs.store.entry("a")
    assert before is not None
    with fs.open("a", "ab") as file:
        file.write(b"2")
    after = fs.store.entry("a")
    assert after is not None
    assert (after.expires, after.metadata, after.pinned) == (before.expires, {"k": 1}, True)
    with fs.open("a", "ab", ttl="never", metadata={"k": 2}) as file:
        file.write(b"3")
    assert (fs.info("a")["expires"], fs.info("a")["metadata"]) == (None, {"k": 2})
    with fs.open("new", "ab") as file:
        file.write(b"1")
    assert fs.info("new")["metadata"] == {"of": "all"}


def test_nothing_is_appended_to_bytes_that_are_gone(fs: CastoreFileSystem) -> None:
    fs.store.put("a", noise(1_000_000))
    path, _, _ = payload(fs.store, "a")
    os.unlink(path)
    for _ in range(2):
        with pytest.raises(CorruptError, match="castore://a"):
            fs.open("a", "ab")
    fs.pipe("a", b"anew")
    with fs.open("a", "ab") as file:
        file.write(b"!")
    assert fs.cat("a") == b"anew!"


def test_damage_that_a_read_meets_is_an_error_of_the_system_and_of_castore(fs: CastoreFileSystem) -> None:
    ways: list[Any] = [lambda name: fs.open(name).read(), lambda name: fs.open(name).read(10)]
    for read in ways:
        fs.store.put("a", noise(1_000_000))
        path, offset, _ = payload(fs.store, "a")
        flip(path, offset + 3)
        with pytest.raises(OSError, match=r"castore://a: .*damaged") as caught:
            read("a")
        assert (type(caught.value).__mro__[1], caught.value.errno) == (CorruptError, errno.EIO)
        with pytest.raises(OSError, match=r"castore://a: .*damaged"):
            read("a")
    fs.store.put("a", noise(1_000_000))


def test_a_file_that_is_written_cannot_seek_and_says_what_to_do(fs: CastoreFileSystem) -> None:
    with fs.open("a", "wb") as file:
        assert not file.seekable()
        with pytest.raises(io.UnsupportedOperation, match="write a local file"):
            file.seek(0)


def test_touching_makes_an_empty_file_and_can_leave_what_is_there(fs: CastoreFileSystem) -> None:
    fs.pipe("a", b"x")
    fs.touch("a", truncate=False)
    fs.touch("b", truncate=False)
    assert fs.cat(["a", "b"]) == {"a": b"x", "b": b""}
    fs.touch("a")
    assert fs.cat("a") == b""
    assert repr(fs) == f"CastoreFileSystem({str(fs.store.path)!r})"


def test_exclusive_means_until_the_end(fs: CastoreFileSystem) -> None:
    with pytest.raises(FileExistsError, match="castore://a"), fs.open("a", "xb") as file:
        _write(file, fs.pipe("a", b"somebody else's") or b"mine")
    with pytest.raises(FileExistsError):
        fs.pipe_file("a", b"mine", mode="create")
    with pytest.raises(FileExistsError):
        fs.put_file(__file__, "a", mode="create")
    assert fs.cat("a") == b"somebody else's"


def test_a_file_is_no_folder(fs: CastoreFileSystem) -> None:
    fs.pipe("f/a", b"x")
    for act in (
        lambda: fs.open("f", "wb"),
        lambda: fs.pipe_file("f", b""),
        lambda: fs.open("f"),
        lambda: fs.cat_file("f"),
    ):
        with pytest.raises(IsADirectoryError, match="castore://f"):
            act()
    with pytest.raises(NotADirectoryError, match="f/a/b"):
        fs.pipe_file("f/a/b", b"")
    with pytest.raises(NotADirectoryError, match="f/a/b"), fs.open("f/a/b", "wb") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match="not as 'r\\+b'"):
        fs.open("f/a", "r+b")


def test_options_of_what_is_written_are_those_of_the_file_then_of_the_file_system(tmp_path: Path) -> None:
    fs = fsspec.filesystem("castore", store=tmp_path / "s", ttl="1h", codec="lz4", metadata={"k": 1})
    (tmp_path / "local").write_bytes(mixed(50_000))
    fs.pipe_file("piped", mixed(50_000))
    fs.put_file(str(tmp_path / "local"), "put")
    with fs.open("opened", "wb") as file:
        file.write(mixed(50_000))
    with fsspec.open(
        "castore://url", "wb", store=tmp_path / "s", ttl="1h", codec="lz4", metadata={"k": 1}
    ) as file:
        file.write(mixed(50_000))
    for name in ("piped", "put", "opened", "url"):
        info = fs.info(name)
        assert (info["codec"], info["metadata"]) == ("lz4", {"k": 1})
        assert info["expires"] - info["created"] == pytest.approx(3600, abs=60)
    with fs.open("for good", "wb", ttl="never", codec="gzip") as file:
        file.write(mixed(50_000, 1))
    assert (fs.info("for good")["expires"], fs.info("for good")["codec"]) == (None, "gzip")


# Moving, copying, removing


def test_copies_take_no_room_and_keep_what_is_known(fs: CastoreFileSystem) -> None:
    fs.store.put("a", noise(3_000_000), metadata={"k": 1}, ttl="1h", pin=True)
    before = fs.store.stat()
    fs.cp_file("a", "copy")
    fs.mv("a", "moved/a")
    after = fs.store.stat()
    assert (after.blobs, after.stored) == (before.blobs, before.stored)
    assert fs.find("") == ["copy", "moved/a"]
    copy, moved = fs.store.entry("copy"), fs.store.entry("moved/a")
    assert copy is not None
    assert moved is not None
    assert copy.metadata == moved.metadata == {"k": 1}
    assert copy.expires == moved.expires
    assert (copy.pinned, moved.pinned) == (False, True)
    assert fs.cat("moved/a") == fs.cat("copy") == noise(3_000_000)
    agrees_with_disk(fs.store)


def test_folders_are_moved_and_copied_with_all_below_them(fs: CastoreFileSystem) -> None:
    fs.pipe({"a/b/c": b"1", "a/d": b"2"})
    fs.cp("a", "copy", recursive=True)
    fs.mv("a", "moved", recursive=True)
    assert fs.find("") == ["copy/b/c", "copy/d", "moved/b/c", "moved/d"]
    fs.mv("copy/d", "moved/b/")
    assert fs.find("moved") == ["moved/b/c", "moved/b/d", "moved/d"]
    with pytest.raises(FileNotFoundError):
        fs.mv("no/such", "x")
    with pytest.raises(FileNotFoundError):
        fs.cp_file("no/such", "x")


@pytest.mark.parametrize("above", ["", "n/"])
def test_names_at_the_top_are_copied_and_moved_as_those_below(
    fs: CastoreFileSystem, above: str, tmp_path: Path
) -> None:
    fs.pipe({f"{above}top": b"1", f"{above}tip": b"2", f"{above}gd/a/1": b"3", "d/x": b"4"})
    fs.cp(f"{above}top", "d/")
    fs.cp(f"{above}top", "d2/")
    fs.cp(f"{above}top", "d")
    fs.cp(f"{above}t*", "d3/")
    fs.cp(f"{above}gd", "d", recursive=True)
    fs.cp(f"{above}gd", "new", recursive=True)
    fs.cp(f"{above}gd/", "d4/", recursive=True)
    assert fs.find("d") == ["d/gd/a/1", "d/top", "d/x"]
    assert fs.find("d2") + fs.find("d3") == ["d2/top", "d3/tip", "d3/top"]
    assert fs.find("new") + fs.find("d4") == ["new/a/1", "d4/a/1"]
    (tmp_path / "out").mkdir()
    fs.get(f"{above}top", str(tmp_path / "out"))
    fs.get(f"{above}top", f"{tmp_path}/out/new/")
    fs.get(f"{above}gd", str(tmp_path / "out"), recursive=True)
    found = sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*"))
    assert found == ["gd", "gd/a", "gd/a/1", "new", "new/top", "top"]
    fs.mv(f"{above}tip", "d")
    fs.mv(f"{above}top", "d5/")
    fs.mv(f"{above}gd", "d2", recursive=True)
    assert fs.find("d") == ["d/gd/a/1", "d/tip", "d/top", "d/x"]
    assert fs.find("d2") + fs.find("d5") == ["d2/gd/a/1", "d2/top", "d5/top"]


def test_a_folder_that_was_made_is_there_for_the_instance_that_made_it(fs: CastoreFileSystem) -> None:
    fs.makedirs("a/b/c")
    assert fs.ls("a/b/c") == []
    assert (fs.ls("", detail=False), fs.ls("a", detail=False)) == (["a"], ["a/b"])
    assert [fs.isdir("a/b"), fs.exists("a/b/c"), fs.isfile("a/b"), fs.isdir("a/x")] == [
        True,
        True,
        False,
        False,
    ]
    assert fs.info("a/b/c") == {"name": "a/b/c", "size": 0, "type": "directory"}
    assert (fs.find("a", withdirs=True), fs.glob("a/*"), fs.find("a")) == (["a", "a/b", "a/b/c"], ["a/b"], [])
    with pytest.raises(FileExistsError):
        fs.mkdir("a/b/c")
    fs.makedirs("a/b/c", exist_ok=True)
    with pytest.raises(OSError, match="not empty"):
        fs.rmdir("a/b")
    fs.pipe("a/b/c/file", b"x")
    assert fs.ls("a/b", detail=False) == ["a/b/c"]
    other = CastoreFileSystem(fs.store.path, ttl="1h")
    assert other.find("a", withdirs=True) == ["a", "a/b", "a/b/c", "a/b/c/file"]
    fs.rm("a/b/c/file")
    assert (fs.ls("a/b/c"), other.exists("a")) == ([], False)
    fs.rmdir("a/b/c")
    assert not fs.exists("a/b/c")
    fs.rm("a", recursive=True)
    assert (fs.exists("a"), fs.ls("")) == (False, [])


def test_no_move_loses_a_file_where_source_and_target_overlap(fs: CastoreFileSystem) -> None:
    files = {"d/a.txt": b"a", "d/b.txt": b"b", "d/e/c.txt": b"c", "x/a.txt": b"other"}
    fs.pipe(files)
    moves: list[tuple[Any, Any]] = [
        ("d/e/c.txt", "d/e"),
        ("d/e/c.txt", "d/e/"),
        ("d/e", "d"),
        ("d", "d/sub"),
        ("d", "d/"),
        ("", "new"),
        ("d/*", "d"),
        (["d/a.txt", "d/b.txt"], ["d/b.txt", "d/a.txt"]),
        (["d/a.txt", "d/b.txt"], ["d/b.txt", "d/z.txt"]),
        (["d/a.txt", "x/a.txt"], "y/"),
        (["d/a.txt", "x/a.txt"], ["y", "y"]),
        (["d/a.txt", "d/b.txt"], ["y"]),
    ]
    for source, target in moves:
        with pytest.raises(ValueError, match=r"; |mv has"):
            fs.mv(source, target, recursive=not isinstance(source, list) and not source.endswith(".txt"))
        assert fs.cat(fs.find("")) == files
    for source, target in (("d", "d"), ("d", "castore://d"), ("d/a.txt", "d/a.txt")):
        fs.mv(source, target, recursive=True)
        assert fs.cat(fs.find("")) == files
    with pytest.raises(IsADirectoryError):
        fs.mv("d", "n")
    fs.mv("d", "n", recursive=True, maxdepth=1)
    assert fs.find("") == ["d/e/c.txt", "n/a.txt", "n/b.txt", "x/a.txt"]
    fs.makedirs("made/inner")
    fs.mv("made", "moved", recursive=True)
    assert fs.find("", withdirs=True, maxdepth=2)[:3] == ["d", "d/e", "moved"]
    assert (fs.exists("made"), fs.isdir("moved/inner")) == (False, True)


def test_a_folder_with_a_damaged_file_is_not_moved_in_part(fs: CastoreFileSystem) -> None:
    fs.pipe({"d/1": b"1", "d/3": b"3"})
    fs.store.put("d/2", noise(300_000))
    damage(fs, "d/2")
    assert fs.store.verify().bad != []
    for source in ("d", "d/2"):
        with pytest.raises(CorruptError, match="castore://d/2"):
            fs.mv(source, "new", recursive=True)
    assert fs.find("") == ["d/1", "d/2", "d/3"]


def test_a_file_is_moved_into_a_folder_of_its_own_name(fs: CastoreFileSystem) -> None:
    fs.pipe("a", b"x")
    fs.mv("a", "a/a")
    assert fs.find("") == ["a/a"]
    fs.mv("a/a", "a/a")
    assert fs.cat("a/a") == b"x"


def test_removing_wants_what_is_there_and_folders_to_be_meant(fs: CastoreFileSystem) -> None:
    fs.pipe({"a/b/c": b"1", "a/d": b"2", "e": b"3"})
    with pytest.raises(IsADirectoryError):
        fs.rm("a")
    with pytest.raises(FileNotFoundError):
        fs.rm(["e", "no/such"])
    with pytest.raises(OSError, match="not empty"):
        fs.rmdir("a")
    assert fs.find("") == ["a/b/c", "a/d", "e"]
    fs.rm("a/*", recursive=True)
    fs.rm_file("e")
    assert fs.find("") == []
    fs.makedirs("a/b", exist_ok=True)
    fs.rmdir("a/b")


def test_local_files_go_in_and_out(fs: CastoreFileSystem, tmp_path: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "a").write_bytes(BIG)
    (tmp_path / "in" / "sub" / "b").write_bytes(b"b")
    seen = fsspec.callbacks.Callback()
    fs.put_file(str(tmp_path / "in" / "a"), "one", callback=seen)
    assert (seen.size, seen.value) == (len(BIG), len(BIG))
    fs.put(str(tmp_path / "in"), "all", recursive=True)
    fs.get("all", str(tmp_path / "out"), recursive=True)
    assert (tmp_path / "out" / "a").read_bytes() == BIG
    assert (tmp_path / "out" / "sub" / "b").read_bytes() == b"b"


def test_a_local_file_is_replaced_when_all_bytes_are_there_and_stays_after_an_error(
    fs: CastoreFileSystem, tmp_path: Path
) -> None:
    fs.store.put("good", BIG)
    (tmp_path / "out").mkdir()
    target, link = tmp_path / "out" / "target", tmp_path / "link"
    target.write_bytes(b"before")
    target.chmod(0o640)
    link.symlink_to(target)
    ways: list[Any] = [fs.get_file, fs.get]
    for get in ways:
        fs.store.put("bad", noise(3_000_000))
        damage(fs, "bad")
        for place in (target, link, tmp_path / "out" / "new"):
            with pytest.raises(OSError, match="castore://bad"):
                get("bad", str(place))
        assert (os.listdir(tmp_path / "out"), target.read_bytes()) == (["target"], b"before")
    fs.get_file("good", str(link))
    assert (target.read_bytes(), target.stat().st_mode & 0o777, link.is_symlink()) == (BIG, 0o640, True)
    with pytest.raises(FileNotFoundError, match="castore://no/such"):
        fs.get_file("no/such", str(target))
    with pytest.raises(IsADirectoryError, match=str(tmp_path / "out")):
        fs.get_file("good", str(tmp_path / "out"))
    assert target.read_bytes() == BIG


def test_open_files_and_devices_take_the_bytes_of_a_file(fs: CastoreFileSystem) -> None:
    fs.store.put("a", BIG)
    for options in ({"lpath": io.BytesIO()}, {"outfile": io.BytesIO()}):
        seen = fsspec.callbacks.Callback()
        fs.get_file("a", callback=seen, **options)
        (file,) = options.values()
        assert (file.getvalue(), seen.size, seen.value) == (BIG, len(BIG), len(BIG))
    fs.get_file("a", os.devnull)
    assert not os.path.isfile(os.devnull)


@pytest.mark.parametrize("cache", ["simplecache", "filecache"])
def test_caches_of_fsspec_never_serve_a_part_of_a_damaged_file(
    fs: CastoreFileSystem, cache: str, tmp_path: Path
) -> None:
    fs.store.put("a", noise(3_000_000))
    damage(fs, "a")
    options: dict[str, Any] = {cache: {"cache_storage": str(tmp_path / "cache")}}
    for _ in range(2):
        place = fsspec.open(f"{cache}::castore://a", castore={"store": fs.store}, **options)
        with pytest.raises(OSError), place as file:  # noqa: PT011 - what it says is fsspec's affair
            file.read()


# Threads and processes


def test_threads_share_an_instance_and_threads_of_their_own_share_the_store(fs: CastoreFileSystem) -> None:
    fs.store.put("a", BIG)
    stores, problems = [], []

    def work(number: int) -> None:
        try:
            own = CastoreFileSystem(fs.store.path)
            stores.append(own.store)
            for turn in range(10):
                start = (number * 7 + turn) * 12_345 % len(BIG)
                assert fs.cat_file("a", start, start + 5_000) == BIG[start : start + 5_000]
                with own.open(f"t/{number}/{turn}", "wb") as file:
                    file.write(b"%d" % turn)
                assert own.cat(f"t/{number}/{turn}") == b"%d" % turn
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert {id(store) for store in stores} == {id(fs.store)}
    assert len(fs.find("t")) == 80


def test_a_forked_child_goes_on_with_the_instance_and_with_open_files(fs: CastoreFileSystem) -> None:
    fs.store.put("a", BIG)
    with fs.open("a") as file:
        for _ in range(6):
            file.read(FRAME_SIZE)  # frames are then being read ahead at the fork

        def work(number: int) -> bool:
            with fs.open(f"child/{number}", "wb") as mine:
                mine.write(BIG[:number])
            CastoreFileSystem(fs.store.path).pipe(f"own/{number}", b"x")
            file.seek(number * FRAME_SIZE)
            return bool(file.read() == BIG[number * FRAME_SIZE :] and fs.cat("a") == BIG)

        assert in_processes(4, work) == [True] * 4
        file.seek(3)
        assert file.read() == BIG[3:]
    assert [fs.info(f"child/{number}")["size"] for number in range(4)] == [0, 1, 2, 3]


def _in_another(fs: CastoreFileSystem, place: Any) -> tuple[bytes, int, str]:
    with place as file:
        return fs.cat_file("a", 0, 5), len(file.read()), str(fs.store.path)


def test_it_goes_to_other_processes_as_a_path(fs: CastoreFileSystem) -> None:
    fs.store.put("a", BIG)
    assert len(pickle.dumps(fs)) < 300
    place = fsspec.open("castore://a", store=fs.store.path)
    with get_context("spawn").Pool(1) as pool:
        assert pool.apply(_in_another, (fs, place)) == (BIG[:5], len(BIG), str(fs.store.path))
    assert json.loads(fs.to_json())["store"] == str(fs.store.path)
    assert fsspec.AbstractFileSystem.from_json(fs.to_json()) is fs


def test_as_a_mapping_it_holds_bytes_by_name(fs: CastoreFileSystem) -> None:
    mapper = fs.get_mapper("m")
    mapper["a/b"] = b"x"
    assert (dict(mapper), "a/b" in mapper, len(mapper)) == ({"a/b": b"x"}, True, 1)
    assert mapper.getitems(["a/b", "c"], on_error="omit") == {"a/b": b"x"}
    del mapper["a/b"]
    with pytest.raises(KeyError):
        mapper["a/b"]


@pytest.mark.parametrize(
    "read",
    [
        lambda fs: fs.open("a/b"),
        lambda fs: fs.cat("a/b"),
        lambda fs: fs.info("a"),
        lambda fs: fs.ls(""),
        lambda fs: fs.get("a/b", "copy"),
        lambda fs: fs.cp("a/b", "c"),
        lambda fs: fs.rm("a/b"),
    ],
)
def test_reading_makes_no_store_and_says_that_there_is_none(tmp_path: Path, read: Any) -> None:
    """Its path may be mistyped."""
    fs = fsspec.filesystem("castore", store=tmp_path / "typo")
    with pytest.raises(FileNotFoundError, match=f"there is no store at {tmp_path}/typo; `castore init`"):
        read(fs)
    assert [fs.exists("a/b"), fs.isdir(""), fs.find(""), fs.glob("**")] == [False, False, [], []]
    assert not (tmp_path / "typo").exists()


def test_writing_makes_the_store(tmp_path: Path) -> None:
    fs = fsspec.filesystem("castore", store=tmp_path / "new")
    fs.makedirs("a/c")
    assert fs.ls("a", detail=False) == ["a/c"]
    assert not (tmp_path / "new").exists()
    again = pickle.loads(pickle.dumps(fs))
    again.pipe("a/b", b"1")
    assert fs.cat("a/b") == b"1"
    assert sorted(fs.ls("a", detail=False)) == ["a/b", "a/c"]


@pytest.mark.parametrize("mode", ["wb", "ab"])
def test_a_file_that_is_closed_after_a_write_that_failed_leaves_the_old_one(
    fs: CastoreFileSystem, mode: str
) -> None:
    fs.pipe("a", b"old")
    file = fs.open("a", mode)
    with files_up_to(4 << 20), contextlib.suppress(OSError):
        for number in range(40):
            file.write(noise(1 << 20, number))
    with pytest.raises(StoreError, match="an earlier write of this file failed"):
        file.close()
    assert fs.cat("a") == b"old"
    assert in_tmp(fs) == []
    agrees_with_disk(fs.store)
