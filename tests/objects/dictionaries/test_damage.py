"""Dictionaries that are damaged, missing, hostile, or gone at the wrong moment: misses and errors only.

Never other bytes, and nothing else is lost.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from castore import CorruptError, Store, StoreError
from castore.objects.dictionaries import LARGEST, Dictionary, derive_number, with_number
from castore.records import LOST
from castore.repair import doctor
from castore.repair.verify import Finding
from tests.clocks import pass_time
from tests.helpers import flip, noise, overwrite, payload, records
from tests.objects.dictionaries.samples import (
    NEW,
    SEEN,
    all_read,
    files,
    number_in,
)


@pytest.mark.parametrize("suffix", ["zdict", "spare"])
def test_one_bad_copy_costs_nothing_and_is_written_again(trained: Store, suffix: str) -> None:
    (path,) = (trained.path / "objects" / "dicts").glob(f"*.{suffix}")
    whole = path.read_bytes()
    flip(path, 2000)
    with Store(trained.path, memory=0) as other:
        assert all_read(other)
        report = other.verify()
        assert report.bad == [
            Finding(path.stem, str(path), f"{path} is damaged; it has been written again", [])
        ]
        assert path.read_bytes() == whole
        assert path.stat().st_mode & 0o777 == 0o400
        assert other.verify().bad == []
    path.unlink()
    (finding,) = doctor.examine(trained.path)
    assert finding.mended
    assert path.read_bytes() == whole
    assert doctor.examine(trained.path) == []


@pytest.mark.parametrize("damage", ["missing", "flipped", "cut", "swapped", "folder", "link"])
def test_without_any_whole_copy_its_blobs_are_misses_and_heal(
    trained: Store, tmp_path: Path, damage: str
) -> None:
    other = with_number(b"\0" * 8 + noise(3000))
    for path in files(trained):
        if damage == "missing":
            path.unlink()
        elif damage == "flipped":
            flip(path, 100)
        elif damage == "cut":
            path.chmod(0o600)
            os.truncate(path, 1000)
        elif damage == "swapped":
            path.chmod(0o600)
            path.write_bytes(other)
        else:
            kept = tmp_path / path.name
            path.rename(kept)
            path.mkdir() if damage == "folder" else path.symlink_to(kept)
    trained.put("plain/x", NEW[0] + b"!")
    with Store(trained.path, memory=0) as store:
        found = store.index.find("rec/0")
        assert found is not None
        with pytest.raises(CorruptError, match=r"dictionary [0-9a-f]{8}, .*has no intact copy left"):
            store.objects.read_small(found.blob)
        assert store.get("rec/0") is None
        assert store.get("plain/x") == NEW[0] + b"!"
        with store.open("rec/1") as file, pytest.raises(CorruptError, match="no intact copy"):
            file.read(10)
        assert len([f for f in store.verify().bad if len(f.digest) == 64]) == len(NEW)
        findings = doctor.examine(store.path)
        assert any("dictionary" in finding.what for finding in findings), findings
        # Put again, they are whole, without a dictionary.
        store.put("rec/0", NEW[0])
        assert store.get("rec/0") == NEW[0]
        assert number_in(store, "rec/0") == 0
        store.verify(repair=True)
        assert [
            blob for blob in store.index.blobs() if blob.pack == LOST and store.index.names_of(blob.digest)
        ] == []


@pytest.mark.parametrize("by_hand", [False, True])
def test_what_was_staged_with_a_dictionary_that_goes_meanwhile_is_compressed_without(
    store: Store, by_hand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dictionary goes between compressing and committing: the bytes must not be committed as they are."""
    store.train_dictionary("rec", SEEN)
    dictionary = store.prefixes.dictionary("rec")
    noises = [store.writer.stage(noise(500, n), "auto", None, dictionary=dictionary) for n in (1, 2)]
    commit = store.writer.commit

    def late(staged: Any, on_begin: Any = None) -> Any:
        # These do not need the dictionary, but their commit checks that it is there.
        commit([(staged[0][0]._replace(name="rec/noise"), noises.pop())])
        if by_hand:
            for path in files(store):
                path.unlink()
            pass_time(monkeypatch, 1.1)
        else:
            store.drop_dictionary("rec")
            commit([(staged[0][0]._replace(name="rec/noise 2"), noises.pop())])
            doctor.examine(store.path)
        store.writer.commit = commit  # type: ignore[method-assign]
        assert files(store) == []
        return commit(staged, on_begin)

    store.writer.commit = late  # type: ignore[method-assign]
    told = pytest.warns(RuntimeWarning, match="'rec' are compressed without their dictionary")
    with told if by_hand else contextlib.nullcontext():
        store.put("rec/late", SEEN[1])
    assert number_in(store, "rec/late") == 0
    with Store(store.path, memory=0) as other:
        assert other.get("rec/late") == SEEN[1]


def test_a_restored_dictionary_and_a_rebuild_bring_lost_blobs_back(trained: Store, tmp_path: Path) -> None:
    for path in files(trained):
        shutil.move(path, tmp_path / path.name)
    with Store(trained.path, memory=0) as store:
        assert store.get_many([f"rec/{number}" for number in range(len(NEW))]) == [None] * len(NEW)
    for path in tmp_path.glob("*.[sz]*"):
        shutil.move(path, trained.path / "objects" / "dicts" / path.name)
    trained.close()
    doctor.rebuild_index(trained.path)
    with Store(trained.path, memory=0) as store:
        assert all_read(store)


def test_a_bad_list_of_prefixes_makes_puts_go_without_and_doctor_sets_it_aside(trained: Store) -> None:
    path = trained.path / "objects" / "dicts" / "prefixes.json"
    good = path.read_text()
    for bad in (
        "{", "[]", '{"rec": 5}', '{"../x": "00000000"}', '{"rec": "0000000"}', "[" * 100_000,
        good.replace("rec", "r\\u0000"), "\udc80",
    ):  # fmt: skip
        path.write_bytes(bad.encode(errors="surrogateescape"))
        with Store(trained.path, memory=0) as store:
            name = f"rec/{abs(hash(bad))}"
            with pytest.warns(RuntimeWarning, match=r"compressed without dictionaries: .*castore doctor"):
                store.put(name, records(1, abs(hash(bad)))[0])
            assert number_in(store, name) == 0
            assert all_read(store)
            with pytest.raises(StoreError, match=r"prefixes\.json is damaged.*castore doctor"):
                store.drop_dictionary("rec")
        (finding,) = doctor.examine(trained.path)
        assert finding.mended
        assert "prefixes.json is damaged" in finding.what
        assert doctor.examine(trained.path) == []
        assert all_read(trained)


def test_doctor_removes_what_no_record_needs_and_nothing_else(store: Store) -> None:
    store.train_dictionary("a", SEEN)
    store.put("a/1", NEW[0])
    needed = files(store)
    store.train_dictionary("a", NEW)  # from now on nothing is put with the first one
    store.drop_dictionary("a")
    assert len(files(store)) == 4
    (finding,) = doctor.examine(store.path)
    assert "dictionaries that nothing needs: 1" in finding.what
    assert files(store) == needed
    store.delete("a/1")
    # A rebuilt index may bring back a record without a row, so the record keeps its dictionary until it is
    # gone.
    assert doctor.examine(store.path) == []
    assert files(store) == needed
    store.gc(grace=0)
    doctor.examine(store.path)
    assert files(store) == []


def test_hostile_dictionaries_are_errors_in_bounded_memory(trained: Store) -> None:
    """Every user who may write to a shared store can plant files whose numbers fit their bytes."""
    path, offset, _ = payload(trained, "rec/5")
    for body in (b"\xff" * 4000, noise(5000), b"\0" * 300, noise(LARGEST)):
        planted = with_number(b"\x37\xa4\x30\xec" + b"\0" * 4 + body)
        if len(planted) <= LARGEST:
            with pytest.raises(CorruptError, match="zstd cannot use dictionary"):
                Dictionary(planted)
        number = derive_number(planted)
        for file in trained.objects.dictionaries.paths(number):
            file.write_bytes(planted)
        with pytest.raises(CorruptError):
            trained.objects.dictionaries.load(number)
        # A frame that needs it, and a frame whose number is that of no file.
        overwrite(path, offset + 6, number.to_bytes(4, "little"))
        assert trained.get("rec/5") is None
        trained.put("rec/5", NEW[5])
        assert trained.get("rec/5") == NEW[5]
        path, offset, _ = payload(trained, "rec/5")
        trained.prefixes.set("evil", number)
        with pytest.warns(RuntimeWarning, match="'evil' are compressed without their dictionary"):
            trained.put("evil/1", NEW[6] + b"evil")
        assert number_in(trained, "evil/1") == 0
    for header in (
        b"\x28\xb5\x2f\xfd",
        b"\x50\x2a\x4d\x18",
        b"\x28\xb5\x2f\xfd\x03\x00",
        b"",
        b"\x50\x2a\x4d\x18\0\0\0\0",
    ):
        found = trained.index.find("rec/7")
        assert found is not None
        record = found.blob
        overwrite(path, record.offset, header + b"\0" * 10)
        for size in (0, 1, record.size):
            with pytest.raises(CorruptError):
                trained.objects.read_small(record._replace(stored=len(header), size=size))


def test_a_shared_stores_dictionaries_are_the_groups(tmp_path: Path) -> None:
    import grp

    group = grp.getgrgid(os.getgid()).gr_name
    from castore.cli.main import main

    assert main(["--store", str(tmp_path / "s"), "init", "--shared", group]) == 0
    old = os.umask(0o077)
    try:
        with Store(tmp_path / "s") as store:
            store.train_dictionary("a", SEEN)
    finally:
        os.umask(old)
    folder = tmp_path / "s" / "objects" / "dicts"
    modes = {path.suffix: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {".zdict": 0o440, ".spare": 0o440, ".json": 0o660}
