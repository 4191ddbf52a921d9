"""One bad thing in a store never breaks the rest: in the library, gc, verify, ls, or a mount."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import castore_fuse
from castore import Store
from castore.cli.main import main
from castore.records import entry_check
from castore.repair import doctor
from tests.helpers import flip, mixed, noise, overwrite, payload, text
from tests.mount.conftest import forget_pages, until
from tests.torture.hurting import errno_of

Figure = Callable[[str], None]


def filled(path: Path) -> dict[str, bytes]:
    kept = {f"folder-{n % 3}/small/{n:03d}": text(2_000, n) + b"%d" % n for n in range(60)}
    kept |= {f"large/{n}": mixed(300_000 + n, n) for n in range(6)} | {"raw/1": noise(600_000)}
    with Store(path, memory=0) as store:
        store.put_many(kept.items())
    return kept


def execute(path: Path, sql: str, *values: object) -> None:
    with closing(sqlite3.connect(path / "index.sqlite")) as db:
        db.execute(sql, values)
        db.commit()


def file_of(path: Path, name: str) -> Path:
    with Store(path, memory=0) as store:
        return payload(store, name)[0]


def bad_object(path: Path) -> set[str]:
    flip(file_of(path, "large/1"), 1_000)
    return {"large/1"}


def missing_object(path: Path) -> set[str]:
    file_of(path, "large/1").unlink()
    return {"large/1"}


def folder_for_an_object(path: Path) -> set[str]:
    place = file_of(path, "large/1")
    place.unlink()
    place.mkdir()
    return {"large/1"}


def bad_record(path: Path) -> set[str]:
    with Store(path, memory=0) as store:
        pack, offset, _ = (
            payload(store, "folder-1/small/007")
            if store.entry("folder-1/small/007")
            else payload(store, "folder-1/small/001")
        )
        name = "folder-1/small/007" if store.entry("folder-1/small/007") else "folder-1/small/001"
    flip(pack, offset + 20)
    return {name}


def missing_pack(path: Path) -> set[str]:
    pack = file_of(path, "folder-0/small/000")
    with Store(path, memory=0) as store:
        names = {entry.name for entry in store.entries() if payload(store, entry.name)[0] == pack}
    pack.unlink()
    return names


def bad_row(path: Path) -> set[str]:
    execute(
        path,
        "UPDATE blobs SET size = 'x', offset = -7 WHERE digest = (SELECT digest FROM entries WHERE name = ?)",
        "large/1",
    )
    return {"large/1"}


def bad_metadata(path: Path) -> set[str]:
    execute(path, "UPDATE entries SET metadata = '{' WHERE name = ?", "large/1")
    return set()


def bad_names(path: Path) -> set[str]:
    with Store(path, memory=0) as store:
        entry = store.entry("raw/1")
        assert entry is not None
        digest = bytes.fromhex(entry.digest)
    for name in (
        "../up",
        "/etc/x",
        "folder-0//x",
        "folder-0/./x",
        "folder-0/small/a\0b",
        "folder-0/small/" + "x" * 2_000,
        "",
        "folder-0/small/..",
    ):
        sql = (
            "INSERT INTO entries SELECT ?, digest, size, serializer, metadata, created, "
            "expires, accessed, 0, ? FROM entries WHERE name = 'raw/1'"
        )
        execute(path, sql, name, entry_check(name, digest))
    return set()


def file_for_a_folder(path: Path) -> set[str]:
    folder = file_of(path, "large/1").parent
    with Store(path, memory=0) as store:
        names = {entry.name for entry in store.entries() if payload(store, entry.name)[0].parent == folder}
    shutil.rmtree(folder)
    folder.write_bytes(b"x")
    return names


def strange_files(path: Path) -> set[str]:
    (path / "tmp" / "folder").mkdir()
    (path / "objects" / "packs" / "zzzzzzzz.pack").write_bytes(b"x")
    (path / "objects" / "names" / "abcdefgh.names").mkdir()
    (path / "objects" / "names" / "00000001.snapshot").mkdir()
    os.mkfifo(path / "objects" / "packs" / "00000077.pack")
    return set()


def bad_journal(path: Path) -> set[str]:
    segment = path / "objects" / "names" / "00000001.names"
    overwrite(segment, 500, bytes(1_000))
    return set()


HURTS = [
    bad_object, missing_object, folder_for_an_object, bad_record, missing_pack, bad_row, bad_metadata,
    bad_names,
    file_for_a_folder, strange_files, bad_journal,
]  # fmt: skip


@pytest.mark.parametrize("hurt", HURTS, ids=lambda hurt: hurt.__name__)
def test_one_bad_thing_costs_itself_and_nothing_else(
    tmp_path: Path, hurt: Callable[[Path], set[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "store"
    kept = filled(path)
    hit = hurt(path)
    whole = {name: data for name, data in kept.items() if name not in hit}
    with castore_fuse.mounted(path) as root:
        for name, data in whole.items():
            assert (root / name).read_bytes() == data
        for name in hit:
            assert errno_of((root / name).read_bytes) in (None, 5, 2)
        listed = {
            os.path.relpath(os.path.join(here, file), root)
            for here, _, files in os.walk(root)
            for file in files
        }
        assert set(whole) <= listed
    assert main(["--store", os.fspath(path), "ls"]) == 0
    assert set(whole) <= set(capsys.readouterr().out.splitlines())
    assert main(["--store", os.fspath(path), "stat"]) == 0
    with Store(path, memory=0) as store:
        for name in kept:
            assert store.get(name) in ((kept[name],) if name in whole else (None, kept[name]))
        store.verify()
        store.put("new", noise(50_000, 9))
        store.delete("raw/1")
        whole.pop("raw/1")
        store.gc(grace=0)
        assert {name: store.get(name) for name in whole} == whole
        store.gc(max_size=0, grace=0)
        assert list(store.entries()) == []
    assert list((path / "objects").glob("??/*")) == []
    doctor.examine(path)
    again = doctor.examine(path)
    assert again == [] or all("rebuild-index" in finding.advice for finding in again)


def test_a_mount_over_a_store_whose_files_went_away_recovers_with_them(
    tmp_path: Path, figure: Figure
) -> None:
    path = tmp_path / "store"
    kept = filled(path)
    with castore_fuse.mounted(path) as root, (root / "large/0").open("rb", buffering=0) as held:
        assert held.read(10) == kept["large/0"][:10]
        (path / "objects").rename(path / "elsewhere")
        errors = {errno_of((root / name).read_bytes) for name in ("large/2", "large/3")}
        assert errors == {5}
        forget_pages(held.fileno())
        held.seek(0)
        assert held.read(1_000) == kept["large/0"][:1_000]  # an open file stays readable
        (path / "elsewhere").rename(path / "objects")
        with Store(path, memory=0) as store:
            assert store.verify().checked == len(kept)
        doctor.rebuild_index(path)
        until(lambda: errno_of((root / "large/2").read_bytes) is None)
        assert {name: (root / name).read_bytes() for name in kept} == kept
    figure("a mount whose objects went away: EIO; with them back and a rebuild, every file again")
