"""A store that cannot be written (read-only media, another user's) is read as any other, and refuses changes.

As root the store lies on a read-only bind mount; as an ordinary user its folders and files have no write
permission.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import castore_fuse
from castore import Batch, Store, StoreError
from castore.adapters.tree import TreeCacheManager
from castore.cli.main import main
from castore.errors import CastoreError
from castore.repair import doctor
from castore_fuse.lifecycle import check_fuse
from tests.helpers import in_processes, noise, text

LARGE = text(700_000)
Freeze = Callable[[], Path]


def _fill(folder: Path) -> None:
    with Store(folder) as store:
        store.put_many([("data/a.txt", b"alpha"), ("data/b.txt", b"beta")])
        store.put("large.bin", LARGE)
        store.put("raw.bin", noise(400_000))


def _chmod(folder: Path, remove: int, add: int) -> None:
    for place, _, files in os.walk(folder):
        for path in (place, *(os.path.join(place, name) for name in files)):
            os.chmod(path, os.stat(path).st_mode & ~remove | add)


@pytest.fixture
def freeze(tmp_path: Path) -> Iterator[Freeze]:
    """Make the store at ``tmp_path/store`` read-only, and return its path."""
    there, shown = tmp_path / "store", tmp_path / "shown"
    mounted = []

    def frozen() -> Path:
        if os.geteuid():
            _chmod(there, 0o222, 0)
            return there
        shown.mkdir(exist_ok=True)
        subprocess.run(["mount", "--bind", there, shown], check=True)
        mounted.append(shown)
        subprocess.run(["mount", "-o", "remount,bind,ro", shown], check=True)
        return shown

    yield frozen
    if os.geteuid():
        _chmod(there, 0, 0o200)
    else:
        for _ in mounted:
            subprocess.run(["umount", "--lazy", shown], check=True)  # its mappings keep the mount in use


@pytest.fixture
def shown(tmp_path: Path, freeze: Freeze) -> Path:
    """A filled store that cannot be written."""
    _fill(tmp_path / "store")
    return freeze()


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for place, _, files in os.walk(folder):
        for name in files:
            status = os.stat(os.path.join(place, name))
            found[os.path.join(place, name)] = status.st_size, status.st_mtime_ns
    return found


def test_everything_can_be_read(shown: Path) -> None:
    before = _files(shown)
    with Store(shown, shared_memory="16MB") as store:
        assert store.read_only
        assert store.get("data/a.txt") == b"alpha"
        assert store.get_many(["data/b.txt", "nothing"]) == [b"beta", None]
        with store.open("large.bin") as file:
            file.seek(500_000)
            assert file.read(1000) == LARGE[500_000:501_000]
        assert store.get("raw.bin") == noise(400_000)
        assert [entry.name for entry in store.entries("data")] == ["data/a.txt", "data/b.txt"]
        assert store.stat().entries == 4
        assert store.verify().bad == []
        assert store.gc(max_size=0, dry_run=True).evicted != []
        assert store.get_or_compute("data/a.txt", lambda: pytest.fail("it is there")) == b"alpha"
    assert _files(shown) == before


def in_a_batch(store: Store, change: Callable[[Batch], object]) -> None:
    with store.batch() as batch:
        change(batch)


@pytest.mark.parametrize(
    "change",
    [
        lambda store: store.put("new", b"new"),
        lambda store: store.put("new", noise(500_000)),
        lambda store: store.put("data/a.txt", b"alpha"),
        lambda store: store.put_many([("new", b"new")]),
        lambda store: store.put_file("new", __file__),
        lambda store: store.put_if(("new", None), [("new", b"new", None)]),
        lambda store: in_a_batch(store, lambda batch: batch.put("new", b"new")),
        lambda store: in_a_batch(store, lambda batch: batch.put("new", noise(500_000))),
        lambda store: in_a_batch(store, lambda batch: batch.delete("data/a.txt")),
        lambda store: store.save("new", {"a": 1}),
        lambda store: store.get_or_compute("new", lambda: b"new"),
        lambda store: store.delete("data/a.txt"),
        lambda store: store.delete_many(["data/a.txt"]),
        lambda store: store.pin("data/a.txt"),
        lambda store: store.drop_dictionary("data"),
        lambda store: store.gc(),
        lambda store: store.require_writable(),
        lambda store: store.delete_unchanged(store.entry("data/a.txt")),
        lambda store: store.verify(repair=True),
    ],
)
def test_every_change_is_refused_in_one_sentence(shown: Path, change: Callable[[Store], object]) -> None:
    with Store(shown) as store, pytest.raises(StoreError, match=f"{shown} can be read and not changed"):
        change(store)


def test_an_index_with_a_log_is_read_whole(tmp_path: Path, freeze: Freeze) -> None:
    _fill(tmp_path / "store")
    with Store(tmp_path / "store") as writer:
        writer.put("late", b"in the log")
        with Store(freeze()) as store:
            assert store.get("late") == b"in the log"
            if os.geteuid() == 0:  # the writer uses another path
                writer.put("later", b"while it is read")
                writer.delete("data/a.txt")
                assert store.get("later") == b"while it is read"
                assert store.get("data/a.txt") is None


def test_a_writer_that_comes_later_is_seen(tmp_path: Path, shown: Path) -> None:
    if os.geteuid():
        pytest.skip("there is one way to the store, and it is closed")
    with Store(shown) as store:
        assert store.get("data/a.txt") == b"alpha"
        assert store.get("new") is None
        with Store(tmp_path / "store") as writer:
            writer.put("new", b"new")
            writer.put("data/a.txt", b"another")
            assert store.get("new") == b"new"
            assert store.get("data/a.txt") == b"another"
        assert store.get("new") == b"new"


def test_a_wal_without_its_shared_memory_file_is_reported(tmp_path: Path, freeze: Freeze) -> None:
    folder = tmp_path / "store"
    _fill(folder)
    with Store(folder) as writer:
        writer.put("late", b"in the log")
        log = (folder / "index.sqlite-wal").read_bytes()
    (folder / "index.sqlite-wal").write_bytes(log)
    shown = freeze()
    with pytest.raises(StoreError, match="has a WAL, which cannot be read"):
        Store(shown)


def test_damage_is_found_and_reported_though_nothing_is_set_aside(tmp_path: Path, freeze: Freeze) -> None:
    folder = tmp_path / "store"
    _fill(folder)
    [loose] = [path for path in folder.glob("objects/??/*") if path.stat().st_size == 400_000]
    loose.chmod(0o600)
    with loose.open("r+b") as file:
        file.seek(300_000)
        file.write(b"damage")
    with Store(freeze()) as store:
        [finding] = store.verify().bad
        assert finding.names == ["raw.bin"]
        assert store.get("raw.bin") is None


def test_commands_read_it(shown: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        code = main(["--store", str(shown), *words])
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    for words in (
        ["ls", "-l"], ["cat", "data/a.txt"], ["get", "large.bin", "-o", str(tmp_path / "out")], ["stat"],
        ["stat", "data/a.txt"], ["stat", "--prometheus"], ["verify"], ["gc", "--dry-run"],
    ):  # fmt: skip
        ran = run(*words)
        assert (ran.returncode, ran.stderr) == (0, ""), words
    assert (tmp_path / "out").read_bytes() == LARGE
    for words in (
        ["add", __file__], ["rm", "data/a.txt"], ["pin", "data/a.txt"], ["gc"], ["verify", "--repair"],
        ["train-dict", "data", "--off"], ["watch", str(tmp_path), "--as", "x"],
        ["doctor"], ["doctor", "--rebuild-index"], ["init", "--codec", "lz4"],
    ):  # fmt: skip
        ran = run(*words)
        assert ran.returncode == 1, words
        assert f"the store {shown} can be read and not changed" in ran.stderr, words
        assert ran.stderr.count("\n") == 1, words


def test_doctor_leaves_a_store_that_its_owner_closed_to_himself_as_it_is() -> None:
    if os.geteuid():
        pytest.skip("needs root, who may be anybody")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "store"
        _fill(folder)
        os.chmod(place, 0o755)
        _chmod(folder, 0o222, 0)
        paths = [folder, *folder.rglob("*")]
        for path in paths:
            os.chown(path, 65534, 65534)
        modes = [path.stat().st_mode for path in paths]

        def look(_: int) -> list[object]:
            os.setgid(65534)
            os.setuid(65534)
            said: list[object] = []
            for work in (doctor.examine, doctor.rebuild_index):
                try:
                    said.append(work(folder))
                except StoreError as error:
                    said.append(str(error))
            with Store(folder) as store:
                return [*said, store.get("data/a.txt")]

        [(*said, got)] = in_processes(1, look)
        assert all(f"{folder} can be read and not changed" in str(sentence) for sentence in said), said
        assert got == b"alpha"
        assert [path.stat().st_mode for path in paths] == modes


def test_a_tree_cache_over_it_refuses_what_it_would_have_to_keep(shown: Path) -> None:
    cache = TreeCacheManager(shown)
    with pytest.raises(StoreError, match="can be read and not changed"):
        cache.get_or_compute("missing", lambda: pytest.fail("nothing could keep it"))
    with pytest.raises(StoreError, match="can be read and not changed"):
        cache.put("missing", 1)


def test_it_is_mounted_and_a_pin_is_refused(shown: Path, tmp_path: Path) -> None:
    try:
        check_fuse()
    except CastoreError as error:
        pytest.skip(str(error))
    castore_fuse.mount(shown, tmp_path / "mnt")
    try:
        assert (tmp_path / "mnt" / "data" / "a.txt").read_bytes() == b"alpha"
        assert (tmp_path / "mnt" / "large.bin").read_bytes() == LARGE
    finally:
        castore_fuse.umount(tmp_path / "mnt")
    with pytest.raises(CastoreError, match="leave it out"):
        castore_fuse.mount(shown, tmp_path / "mnt", pin=True)


def test_another_users_store_is_read_where_its_owner_lets_him() -> None:
    if os.geteuid():
        pytest.skip("needs root, who may be anybody")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "store"
        _fill(folder)
        os.chmod(place, 0o755)
        _chmod(folder, 0, 0o044)
        for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
            path.chmod(0o755)

        def read(_: int) -> tuple[bool, bytes | None, bytes | None]:
            os.setgid(65534)
            os.setuid(65534)
            with Store(folder) as store:
                return store.read_only, store.get("data/a.txt"), store.get("large.bin")

        assert in_processes(1, read) == [(True, b"alpha", LARGE)]


def test_a_pipeline_takes_what_is_kept_and_says_that_it_can_keep_nothing(
    tmp_path: Path, freeze: Freeze
) -> None:
    datasets = pytest.importorskip("datasets")
    from castore.adapters.datasets import Pipeline, cached_map

    data = datasets.Dataset.from_dict({"text": ["one", "two"]})
    with Store(tmp_path / "store") as store:
        Pipeline([_shout], store=store).run(data)
    with Store(freeze()) as store:
        result = Pipeline([_shout], store=store).run(data)
        assert (result.hits, result.dataset["text"][:]) == (1, ["ONE", "TWO"])
        with pytest.raises(StoreError, match="can be read and not changed"):
            Pipeline([_shout, _whisper], store=store).run(data)
        with pytest.raises(StoreError, match="can be read and not changed"):
            cached_map(data, _whisper, store=store)


def _shout(sample: dict[str, str]) -> dict[str, str]:
    return {"text": sample["text"].upper()}


def _whisper(sample: dict[str, str]) -> dict[str, str]:
    return {"text": sample["text"].lower()}
