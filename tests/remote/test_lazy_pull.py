"""A lazy pull brings names alone. Bytes come when they are read, and go when the budget wants their room."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import datasets
import pytest

import castore_fuse
from castore import Store
from castore.adapters.datasets import cached_map, wait
from castore.errors import FullError, InvalidValueError, NotFoundError, RemoteError, RemoteMissingError
from castore.remote.messages import SOCKET
from castore.watch.adder import is_current
from tests.helpers import agrees_with_disk, flip, in_processes, noise, records
from tests.mount.conftest import until
from tests.remote.nodes import CONTENTS, end_fetcher, fetchers, here, know, move, node, read
from tests.torture.test_full_disk import fill_up
from tests.warm import PYTHON

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.fixture(scope="module")
def pulled(pushed: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that has pulled names, and no bytes, for tests to copy."""
    path = tmp_path_factory.mktemp("pulled") / "store"
    with node(path, pushed.path.with_name("bucket").as_uri()) as store:
        pulled = store.pull(remote="team", lazy=True)
        assert (pulled.added, pulled.fetched) == (len(CONTENTS), 0)
    return path


@pytest.fixture
def lazy(pulled: Path, copied: Path, tmp_path: Path) -> Iterator[Store]:
    """A node that has pulled names, and no bytes. Its fetcher starts when it reads."""
    path = tmp_path / "other"
    # A fetcher that was killed leaves its socket, which is nothing to copy.
    shutil.copytree(pulled, path, ignore=shutil.ignore_patterns(Path(SOCKET).name))
    with Store(path) as store:
        move(store, "team", copied.as_uri())
    with node(path, copied.as_uri()) as store:
        yield store


def test_names_are_there_before_any_byte_is(lazy: Store) -> None:
    assert set(lazy) == set(CONTENTS)
    assert len(lazy) == len(CONTENTS)
    assert lazy.totals().stored == 0
    for entry in lazy.entries():
        assert (entry.size, entry.stored, entry.away) == (len(CONTENTS[entry.name]), 0, True)
    assert "large" in lazy
    assert lazy.stat().away.blobs == len({bytes(data) for data in CONTENTS.values()})
    agrees_with_disk(lazy)


def test_the_fetcher_starts_with_the_pull_and_serves_the_first_read(other: Store) -> None:
    other.pull(remote="team", lazy=True)
    until((other.path / SOCKET).exists)
    until(lambda: len(fetchers(other)) == 1)  # the process that started it is gone
    [began] = fetchers(other)
    assert other.get("one") == b"1"
    assert fetchers(other) == [began]


def test_a_batch_that_is_read_brings_the_rest_of_its_pack(tmp_path: Path) -> None:
    contents = {f"{number:04d}": b"%d" % number for number in range(5000)}
    with Store(tmp_path / "one") as one:
        one.put_many(contents.items())
        know(one, "team", (tmp_path / "bucket").as_uri()).push()
    with node(tmp_path / "two", (tmp_path / "bucket").as_uri()) as two:
        two.pull(remote="team", lazy=True)
        names = random.Random(1).sample(sorted(contents), 64)
        assert two.get_many(names) == [contents[name] for name in names]
        until(lambda: two.stat().away.blobs == 0)
        agrees_with_disk(two)


def _get(store: Store) -> dict[str, bytes | None]:
    return {name: store.get(name) for name in store}


def _get_many(store: Store) -> dict[str, bytes | None]:
    return dict(zip(store, store.get_many(list(store)), strict=True))


def _open(store: Store) -> dict[str, bytes | None]:
    found: dict[str, bytes | None] = {}
    for name in store:
        with store.open(name) as file:
            found[name] = file.read(100_000) + file.read()
    return found


def _open_blob(store: Store) -> dict[str, bytes | None]:
    found: dict[str, bytes | None] = {}
    for entry in store.entries():
        with store.open_blob(entry.digest) as blob:
            found[entry.name] = b"".join(blob.pieces())
    return found


def _mount(store: Store) -> dict[str, bytes | None]:
    with castore_fuse.mounted(store) as root:
        return dict(read(root))


def _fsspec(store: Store) -> dict[str, bytes | None]:
    import fsspec

    system = fsspec.filesystem("castore", store=str(store.path))
    return {name: system.cat_file(name) for name in system.find("")}


def test_every_way_to_read_brings_the_bytes(lazy: Store, copied: Path) -> None:
    for read_all in (_get, _get_many, _open, _open_blob, _mount, _fsspec):
        assert lazy.totals().stored == 0
        with Store(lazy.path, memory=0) as fresh:
            assert read_all(fresh) == CONTENTS, read_all
        copied.rename(copied.with_name("gone"))
        with Store(lazy.path, memory=0) as again:
            assert read_all(again) == CONTENTS, read_all
        agrees_with_disk(lazy)
        copied.with_name("gone").rename(copied)
        end_fetcher(lazy)  # it may still bring neighbours of what was read
        lazy.gc(max_size=0, grace=0)


def test_the_budget_drops_bytes_and_keeps_names(lazy: Store) -> None:
    assert _get(lazy) == CONTENTS
    lazy.put("mine", noise(1000))
    lazy.pin("middle")
    end_fetcher(lazy)  # it may still bring neighbours of what was read
    before = lazy.totals().stored
    planned = lazy.gc(max_size=0, dry_run=True)
    collected = lazy.gc(max_size=0)
    assert collected.evicted == planned.evicted
    assert [name for name in collected.evicted if not name.startswith(".castore/")] == ["mine"]
    assert collected.away == planned.away > 200
    assert collected.freed == planned.freed
    assert lazy.totals().stored == before - collected.freed
    assert "mine" not in lazy
    assert set(lazy) == set(CONTENTS)
    agrees_with_disk(lazy)
    away = {entry.name for entry in lazy.entries() if entry.away}
    assert away == set(CONTENTS) - {"middle", "dup"}
    with Store(lazy.path, memory=0) as again:
        assert _get(again) == CONTENTS
    agrees_with_disk(lazy)


def test_a_small_budget_is_kept_while_more_is_read_than_fits(copied: Path, tmp_path: Path) -> None:
    budget = 6_000_000
    with node(tmp_path / "small", copied.as_uri(), max_size=budget, memory=0) as store:
        store.pull(remote="team", lazy=True)
        for _ in range(2):
            for name, data in CONTENTS.items():
                with store.open(name) as file:
                    assert file.read() == data
                assert store.totals().stored <= budget
        assert set(store) == set(CONTENTS)
        agrees_with_disk(store)


def _fill(store: Store) -> None:
    """Leave no room within the budget."""
    budget = store.settings.max_size
    assert budget is not None
    store.put("mine", noise(budget - 1000), codec="none")
    store.pin("mine")


def _mount_of_the_remote(store: Store) -> dict[str, bytes | None]:
    with castore_fuse.mounted(store, remote="team") as root:
        return dict(read(root))


def test_bytes_for_which_pins_leave_no_room_are_served_and_not_kept(copied: Path, tmp_path: Path) -> None:
    with node(tmp_path / "full", copied.as_uri(), max_size=1_000_000, memory=0) as store:
        _fill(store)
        store.pull(remote="team", lazy=True)
        for read_all in (_get, _get_many, _open, _open_blob, _mount, _mount_of_the_remote):
            found = read_all(store)
            assert found.pop("mine", None) in (None, store.get("mine"))
            assert found == CONTENTS, read_all
            assert store.totals().stored <= 1_000_000
            kept = [entry.name for entry in store.entries() if not entry.away and entry.stored > 1000]
            assert kept == ["mine"], read_all
        with pytest.raises(FullError, match="the rest is pinned"):
            store.pull(remote="team", prefix="small")
        store.unpin("mine")
        with Store(store.path, memory=0) as again:
            assert again.get("small/000") == CONTENTS["small/000"]
            assert not next(again.entries("small/000")).away
        agrees_with_disk(store)


def test_damage_that_passes_through_is_found(copied: Path, tmp_path: Path) -> None:
    for path in (copied / "packs").iterdir():
        flip(path, path.stat().st_size // 2)
    with node(tmp_path / "full", copied.as_uri(), max_size=1_000_000, memory=0) as store:
        _fill(store)
        store.pull(remote="team", lazy=True)
        found = _get(store)
        assert found.pop("mine")
        missed = [name for name, data in found.items() if data is None]
        assert len(missed) == 1
        assert {name: CONTENTS[name] for name in found if name not in missed} == {
            name: data for name, data in found.items() if data is not None
        }


def test_bytes_that_one_ref_has_lost_are_found_again_by_a_pull_of_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = (tmp_path / "bucket").as_uri()
    for number, ref in enumerate(("main", "dev")):  # each packs the bytes beside others of its own
        with Store(tmp_path / ref) as store:
            store.put_many([("shared", b"the same"), (f"own/{number}", noise(500, number))])
            know(store, "team", url).push(ref=ref)
    packs = sorted((tmp_path / "bucket" / "packs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    with node(tmp_path / "reader", url) as reader:
        reader.pull("main", remote="team", lazy=True)
        reader.pull("dev", remote="team", lazy=True, below="dev")
        packs[-1].unlink()
        assert reader.get("shared") is None
        assert "castore pull REF --lazy" in caplog.text
        reader.pull("main", remote="team", lazy=True)
        assert reader.get("shared") == reader.get("dev/shared") == b"the same"


def test_bytes_that_pass_through_bring_the_dictionary_that_they_need(tmp_path: Path) -> None:
    samples, contents = records(400, 1), dict(zip(("rec/1", "rec/2"), records(2, 2), strict=True))
    with Store(tmp_path / "one") as one:
        one.train_dictionary("rec", samples)
        one.put_many(contents.items())
        know(one, "team", (tmp_path / "bucket").as_uri()).push()
    with node(tmp_path / "full", (tmp_path / "bucket").as_uri(), max_size=100_000, memory=0) as store:
        store.put("mine", noise(100_000), codec="none")
        store.pin("mine")
        store.pull(remote="team", lazy=True)
        assert store.get_many(list(contents)) == list(contents.values())
        assert all(entry.away for entry in store.entries("rec"))


def test_bytes_are_served_though_the_disk_is_full(copied: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16M", "tmpfs", disk], capture_output=True
    ).returncode:
        pytest.skip("mounting a small disk takes root")
    try:
        with node(disk / "store", copied.as_uri(), memory=0) as store:
            store.pull(remote="team", lazy=True)
            filler = fill_up(disk)
            assert _get(store) == CONTENTS
            filler.unlink()
            agrees_with_disk(store)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_damaged_bytes_are_fetched_again(lazy: Store, tmp_path: Path) -> None:
    assert lazy.get("middle") == CONTENTS["middle"]
    [entry] = list(lazy.entries("middle"))
    blob = lazy.blob(entry.digest)
    assert blob is not None
    flip(Path(lazy.path_of(blob)), 1000)
    with Store(lazy.path, memory=0) as again:
        assert again.get("middle") == CONTENTS["middle"]
        flip(Path(again.path_of(blob)), 1000)
        [finding] = again.verify().bad
        assert "fetched when they are read" in finding.why
        assert not finding.lost
        assert again.get("middle") == CONTENTS["middle"]
        assert again.stat().corrupt == 2


@pytest.mark.parametrize("left", [39, 20, 0])
def test_a_truncated_pack_costs_what_lay_behind_its_end(tmp_path: Path, left: int) -> None:
    """Regression: one byte less made all names of a request unreadable, and each read an error."""
    contents = {f"{number:03d}": noise(9000, number) for number in range(40)}
    with Store(tmp_path / "one", codec="none") as one:
        one.put_many(contents.items())
        know(one, "team", (tmp_path / "bucket").as_uri()).push()
    [pack] = [path for path in (tmp_path / "bucket" / "packs").rglob("*") if path.is_file()]
    os.truncate(pack, pack.stat().st_size * (left + 1) // 40 - 1 if left else 0)  # the last one lacks a byte
    with node(tmp_path / "two", (tmp_path / "bucket").as_uri()) as two:
        two.pull(remote="team", lazy=True)
        found = {name: two.get(name) for name in contents}
        assert two.get_many(list(contents)) == list(found.values())
        assert all(data in (None, contents[name]) for name, data in found.items())
        assert sum(data is not None for data in found.values()) == left
        missed = next(name for name, data in found.items() if data is None)
        assert two.get_or_compute(missed, lambda: b"made anew") == b"made anew"


def test_bytes_that_the_remote_lost_are_a_miss_and_a_network_that_is_down_is_an_error(
    lazy: Store, copied: Path, pushed: Store
) -> None:
    for place in ("objects", "packs"):
        for path in (copied / place).rglob("*"):
            if path.is_file():
                path.unlink()
    assert lazy.get("large", b"none") == b"none" == lazy.get("one", b"none")
    assert "one" in lazy, "no remote is asked"
    assert lazy.get_many(["one", "middle"]) == [None, None]
    with pytest.raises(NotFoundError):
        lazy.open("middle")
    with lazy.open("large") as file, pytest.raises(RemoteMissingError):  # comes in parts
        file.read()
    assert lazy.get_or_compute("middle", lambda: b"again") == b"again"
    for path in pushed.path.with_name("bucket").glob("packs/*"):
        shutil.copy(path, copied / "packs")
    assert lazy.get("one") == b"1", "such a miss does not stick"
    shutil.rmtree(copied)
    with pytest.raises(RemoteError):
        lazy.get("large")


def test_bytes_that_are_put_are_here_and_a_pull_brings_the_others(lazy: Store, copied: Path) -> None:
    lazy.put("copy", CONTENTS["middle"])
    assert lazy.entry("middle").away is False  # type: ignore[union-attr]
    pulled = lazy.pull(remote="team")
    assert (pulled.added, pulled.changed, pulled.unchanged) == (0, 0, len(CONTENTS))
    assert pulled.fetched > 0
    assert not any(entry.away for entry in lazy.entries())
    shutil.rmtree(copied)
    assert _get(lazy) == {**CONTENTS, "copy": CONTENTS["middle"]}
    agrees_with_disk(lazy)


def test_a_lazy_pull_takes_new_commits_and_new_places(lazy: Store, copied: Path, tmp_path: Path) -> None:
    with node(tmp_path / "writer", copied.as_uri()) as writer:
        writer.remove_remote("team")
        team = know(writer, "team", copied.as_uri())
        team.pull()
        writer.put("one", b"another")
        writer.put("new/name", b"new")
        team.push()
    pulled = lazy.pull(remote="team", lazy=True)
    assert (pulled.added, pulled.changed) == (1, 1)
    assert lazy.get("one") == b"another"
    assert lazy.get("new/name") == b"new"
    assert lazy.get("small/000") == CONTENTS["small/000"]


def test_what_is_away_can_be_pushed_elsewhere(lazy: Store, tmp_path: Path) -> None:
    there = know(lazy, "elsewhere", (tmp_path / "elsewhere").as_uri())
    assert there.push("small").added == 200
    assert there.check(deep=True).problems == []


def test_a_push_says_whose_bytes_are_lost(lazy: Store, copied: Path, tmp_path: Path) -> None:
    """Regression: it spoke of the budget."""
    for path in (copied / "packs").iterdir():
        path.unlink()
    remote = lazy.add_remote("elsewhere", (tmp_path / "elsewhere").as_uri())
    with pytest.raises(RemoteError, match=r"needs bytes that are gone: remote 'team' has lost"):
        remote.push()


def test_a_deleted_name_takes_its_place_along(lazy: Store) -> None:
    with pytest.raises(InvalidValueError, match="only in remote 'team'"):
        lazy.remove_remote("team")
    lazy.delete_many(list(lazy))
    lazy.gc(grace=0)
    assert lazy.totals() == (0, 0, 0, 0, 0, 0)
    assert lazy.index.file.all("SELECT count(*) FROM places", ()) == [(0,)]
    assert lazy.index.file.all("SELECT count(*) FROM origins", ()) == [(0,)]
    lazy.remove_remote("team")


def _read_some(path: Path, part: int) -> bool:
    with Store(path, memory=0) as store:
        names = list(store)[part::4]
        return store.get_many(names) == [CONTENTS[name] for name in names]


def test_processes_share_one_download(lazy: Store) -> None:
    assert all(in_processes(4, partial(_read_some, lazy.path)))
    received = lazy.stat().remotes.received
    assert received < 1.2 * sum(entry.stored for entry in lazy.entries())


def test_a_child_that_is_forked_after_its_parent_has_read_reads_on(lazy: Store) -> None:
    assert lazy.get("one") == b"1"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = int(_get(lazy) != CONTENTS)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_mount_says_where_bytes_are(lazy: Store) -> None:
    with castore_fuse.mounted(lazy) as root:
        assert here(root / "large") == 0
        assert os.getxattr(root / "large", "user.castore.remote") == b"team"
        assert (root / "large").stat().st_size == len(CONTENTS["large"])
        with open(root / "large", "rb") as file:
            file.seek(5 << 20)
            assert file.read(10) == CONTENTS["large"][5 << 20 :][:10]
        assert 0 < here(root / "large") < len(CONTENTS["large"])
        assert lazy.entry("large").away  # type: ignore[union-attr]


def test_a_name_without_bytes_is_copied_renamed_and_expires(lazy: Store) -> None:
    assert lazy.copy("middle", "copies/middle").away
    assert lazy.rename("one", "renamed").away
    assert lazy.totals().stored == 0
    assert lazy.get("copies/middle") == CONTENTS["middle"]
    assert lazy.get("renamed") == b"1"
    assert "one" not in lazy
    agrees_with_disk(lazy)


def test_a_name_without_bytes_expires(copied: Path, tmp_path: Path) -> None:
    with (
        node(tmp_path / "writer", copied.as_uri()) as writer,
        node(tmp_path / "b", copied.as_uri()) as reader,
    ):
        writer.remove_remote("team")
        writer.put("short", b"soon gone", ttl=3600)
        know(writer, "team", copied.as_uri()).push()
        reader.pull(remote="team", lazy=True, prefix="short")
        [entry] = reader.entries()
        assert entry.away
        assert entry.expires == writer.entry("short").expires  # type: ignore[union-attr]
        with reader.index.write() as txn:
            txn.execute("UPDATE entries SET expires = 1.0")
        assert reader.get("short") is None
        assert reader.gc(grace=0).expired == ["short"]
        assert reader.totals() == (0, 0, 0, 0, 0, 0)


def test_results_of_another_node_are_hits(tmp_path: Path) -> None:
    url = (tmp_path / "shared").as_uri()
    rows = datasets.Dataset.from_dict({"text": [noise(500, number).hex() for number in range(5_000)]})
    with Store(tmp_path / "one") as one, Store(tmp_path / "two") as two:
        first = cached_map(rows, _count, store=one)
        wait()
        assert one.cached(_double)(21) == 42
        know(one, "all", url).push()
        know(two, "all", url).pull(lazy=True)
        assert all(entry.away for entry in two.entries())
        before = _results(two)
        second = cached_map(rows, _count, store=two)
        assert second["count"] == first["count"]
        assert two.cached(_double)(21) == 42
        wait()
        assert _results(two) == before
        del second
        end_fetcher(two)


def _results(store: Store) -> dict[str, float]:
    """Results with the times at which they were put. Adapters put notes of their own beside them."""
    return {entry.name: entry.created for entry in store.entries() if not entry.name.startswith(".")}


def _count(row: dict[str, str]) -> dict[str, int]:
    return {"count": len(row["text"])}


def _double(number: int) -> int:
    return 2 * number


def test_a_repair_uploads_nothing_that_is_only_there(copied: Path, tmp_path: Path) -> None:
    with Store(tmp_path / "third") as third:
        team = know(third, "team", copied.as_uri())
        team.pull(lazy=True)
        largest = max((copied / "objects").rglob("*/*"), key=lambda path: path.stat().st_size)
        flip(largest, 1000)
        checked = team.check(deep=True)
        assert len(checked.problems) == 1
        team.repair(checked)
        assert team.check(deep=True).problems == checked.problems
        end_fetcher(third)


def test_a_remote_that_is_not_there_takes_no_push(copied: Path, tmp_path: Path) -> None:
    with Store(tmp_path / "one") as one:
        team = know(one, "team", copied.as_uri())
        team.pull()
        copied.rename(tmp_path / "unmounted")
        copied.mkdir()
        one.put("another", b"1")
        for use in (team.push, team.pull, team.log, team.refs):
            with pytest.raises(RemoteMissingError, match="is its file system mounted"):
                use()
        assert not any(copied.iterdir())
        copied.rmdir()
        (tmp_path / "unmounted").rename(copied)
        assert team.push().added == 1


def test_no_file_of_the_current_folder_is_run(
    lazy: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("castore", "json", "obstore"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'was run')!r}, 'w')\n")
    monkeypatch.setattr(sys, "executable", PYTHON)  # a process that has imported them would not look
    # An empty entry there names the current folder on purpose.
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, entries)))
    monkeypatch.chdir(tmp_path)
    assert lazy.remote("team").log()
    assert lazy.get("one") == b"1"
    assert not (tmp_path / "was run").exists()


def test_what_was_warmed_is_read_whole_without_a_network_and_pulled_once(lazy: Store, copied: Path) -> None:
    lazy.remote("team").warm()
    before = lazy.totals().stored
    assert _get(lazy) == CONTENTS
    assert lazy.totals().stored == before, "nothing is kept twice"
    end_fetcher(lazy)
    copied.rename(copied.with_name("gone"))
    with Store(lazy.path, memory=0) as again:
        assert _get(again) == CONTENTS
        assert again.get_many(["large", "text"]) == [CONTENTS["large"], CONTENTS["text"]]
    end_fetcher(lazy)
    copied.with_name("gone").rename(copied)
    assert lazy.pull(remote="team").fetched < 10_000, "seek tables alone, which are in no part"
    lazy.gc(grace=0)
    assert lazy.totals().stored <= before * 1.01


def test_what_is_warmed_comes_but_for_what_the_remote_has_lost(tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    contents = {
        f"{number}/{name}": noise(4000, 10 * number + name) for number in range(4) for name in range(9)
    }
    contents["2/large"] = noise(3_000_000, 1)
    with Store(tmp_path / "one") as one:
        remote = know(one, "team", url)
        for number in range(4):
            one.put_many((name, data) for name, data in contents.items() if name.startswith(f"{number}/"))
            remote.push()
    objects = {path for path in (tmp_path / "bucket" / "objects").rglob("*") if path.is_file()}
    packs = {path for path in (tmp_path / "bucket" / "packs").rglob("*") if path.is_file()}
    with node(tmp_path / "two", url) as two:
        two.pull(remote="team", lazy=True)
        gone = [objects.pop(), packs.pop()]
        for path in gone:
            path.rename(tmp_path / path.name)
        with pytest.raises(
            RemoteMissingError, match=r"^all bytes have come but some that are damaged or gone"
        ):
            two.remote("team").warm()
        lacking = [entry.name for entry in two.entries() if entry.away]
        assert len(lacking) == 10
        assert len({name.split("/")[0] for name in lacking if name != "2/large"}) == 1
        for path in gone:
            (tmp_path / path.name).rename(path)
        two.remote("team").warm()
        assert not any(entry.away for entry in two.entries())
        assert _get_all(two, contents) == contents


def _get_all(store: Store, names: Iterable[str]) -> dict[str, bytes | None]:
    return {name: store.get(name) for name in names}


@pytest.mark.parametrize("damaged", [False, True], ids=["sound", "damaged"])
def test_a_pull_takes_the_parts_that_readers_have_kept(other: Store, damaged: bool) -> None:
    mounted = castore_fuse.mounted(other, other.path.with_name("mnt"), remote="team")
    with mounted as root, open(root / "large", "rb") as file:
        for at in (3 << 20, 6 << 20):
            assert os.pread(file.fileno(), 4, at) == CONTENTS["large"][at : at + 4]
    end_fetcher(other)
    kept = other.totals()
    assert kept.entries >= 2
    assert 2 << 20 <= kept.stored < 7 << 20
    missing = (8 << 20) - kept.stored
    if damaged:
        part = max((other.path / "objects").rglob("*"), key=lambda path: path.stat().st_size)
        flip(part, 1000)
        missing += part.stat().st_size
    assert other.pull(prefix="large", remote="team").fetched == pytest.approx(missing, abs=10_000)
    assert other.get("large") == CONTENTS["large"]
    assert other.totals().entries == 1
    other.gc(grace=0)
    agrees_with_disk(other)


def test_a_blob_that_is_brought_whole_leaves_no_parts_behind(lazy: Store) -> None:
    with lazy.open("large") as file:
        assert file.read(10) == CONTENTS["large"][:10]
    end_fetcher(lazy)
    assert lazy.totals().entries > len(CONTENTS), "parts are here"
    entry = lazy.entry("large")
    assert entry is not None
    blob = lazy.blob(entry.digest)
    assert blob is not None
    assert lazy.bring(blob).is_here
    assert lazy.totals().entries == len(CONTENTS)
    assert lazy.get("large") == CONTENTS["large"]
    agrees_with_disk(lazy)


def test_a_blob_larger_than_the_budget_is_read_in_parts(copied: Path, tmp_path: Path) -> None:
    with node(tmp_path / "small", copied.as_uri(), max_size=6_000_000, memory=0) as store:
        store.pull(remote="team", lazy=True)
        assert store.get("large") == CONTENTS["large"]
        assert store.get_many(["large", "one"]) == [CONTENTS["large"], b"1"]


def test_a_push_to_another_ref_brings_nothing_that_is_there(copied: Path, tmp_path: Path) -> None:
    with Store(tmp_path / "third") as third:
        team = know(third, "team", copied.as_uri())
        team.pull(lazy=True)
        pushed = team.push(ref="copy")
        assert pushed.added == len(CONTENTS)
        assert third.totals().stored == 0
        assert team.check(deep=True).problems == []
        end_fetcher(third)
    with node(tmp_path / "fourth", copied.as_uri()) as fourth:
        fourth.pull("copy", remote="team")
        assert _get(fourth) == CONTENTS


def test_a_remote_can_be_forgotten_once_no_name_needs_it(lazy: Store) -> None:
    lazy.delete_many(list(lazy))
    lazy.remove_remote("team")
    lazy.gc(grace=0)
    assert lazy.totals() == (0, 0, 0, 0, 0, 0)


def test_a_watched_file_is_as_it_was_though_its_bytes_are_away(tmp_path: Path) -> None:
    file, url = tmp_path / "one.txt", (tmp_path / "shared").as_uri()
    file.write_bytes(noise(5000))
    status = file.stat()
    source = {"path": str(file), "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    with Store(tmp_path / "one") as one, Store(tmp_path / "two") as two:
        one.put_file("one", file, metadata={"source": source})
        know(one, "team", url).push()
        know(two, "team", url).pull(lazy=True)
        entry = two.entry("one")
        assert entry is not None
        assert entry.away
        assert is_current(two, entry, str(file), status.st_size, status.st_mtime_ns)
