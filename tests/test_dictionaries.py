"""Dictionaries: small blobs that are alike take much less, and are as safe as all others, whatever becomes of the dictionary."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from castore import CorruptError, DictionaryError, InvalidValueError, Store, StoreError, doctor
from castore.objects.dictionaries import LARGEST, Dictionary, number_of, numbered
from castore.records import LOST
from castore.verify import Finding
from tests.helpers import agrees_with_disk, flip, in_processes, noise, overwrite, payload, records, text

SEEN = records(600, 1)
NEW = records(300, 2)
PLAIN = 32_768


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Store]:
    """A store with a dictionary for `rec`, and blobs there that need it."""
    with Store(tmp_path / "store", memory=0) as store:
        store.train_dictionary("rec", SEEN)
        store.put_many((f"rec/{number}", data) for number, data in enumerate(NEW))
        yield store


def number_in(store: Store, name: str) -> int:
    """The dictionary that the frame of an entry asks for; 0 for none."""
    path, offset, length = payload(store, name)
    with path.open("rb") as file:
        file.seek(offset)
        frame = file.read(length)
    return zstandard.get_frame_parameters(frame).dict_id if frame.startswith(b"\x28\xb5\x2f\xfd") else 0


def files(store: Store) -> list[Path]:
    return sorted((store.path / "objects" / "dicts").glob("*[0-9a-f].[sz]*"))


def all_read(store: Store) -> bool:
    return store.get_many([f"rec/{number}" for number in range(len(NEW))]) == list(NEW)


# Training


def test_new_blobs_below_the_prefix_take_less_and_read_back(store: Store) -> None:
    for number, data in enumerate(SEEN):
        store.put(f"rec/old/{number}", data)
    trained = store.train_dictionary("rec/")
    assert (trained.prefix, trained.samples, trained.held_out) == ("rec", 480, 120)
    assert trained.after < 0.6 * trained.before < 0.6 * trained.plain
    number = int(trained.id, 16)
    with_it, without = store.put("rec/new/a", NEW[0]), store.put("other/a", NEW[1])
    assert with_it.stored < 0.7 * without.stored
    assert (number_in(store, "rec/new/a"), number_in(store, "other/a")) == (number, 0)
    assert number_in(store, "rec/old/0") == 0, "a blob that was there was changed"
    store.put_many((f"rec/many/{place}", data) for place, data in enumerate(NEW[2:50]))
    assert {number_in(store, f"rec/many/{place}") for place in range(48)} == {number}
    assert store.get("rec/new/a") == NEW[0]
    assert store.get_many([f"rec/many/{place}" for place in range(48)]) == NEW[2:50]
    agrees_with_disk(store)


def test_the_same_samples_make_the_same_dictionary(tmp_path: Path) -> None:
    with Store(tmp_path / "one") as one, Store(tmp_path / "two") as two:
        one.put_many((f"a/{number}", data) for number, data in enumerate(SEEN))
        two.put_many((f"a/{number}", data) for number, data in enumerate(reversed(SEEN)))
        assert one.train_dictionary("a") == two.train_dictionary("a") == one.train_dictionary("a")
        assert [path.read_bytes() for path in files(one)] == [path.read_bytes() for path in files(two)]


def test_too_few_samples_or_too_little_gain_change_nothing(store: Store) -> None:
    for number in range(200):
        store.put(f"few/{number % 90}", SEEN[number % 90])
        store.put(f"noise/{number}", noise(1000, number))
        store.put(f"large/{number}", text(20_000, number))
    with pytest.raises(DictionaryError, match=r"90 different samples .* below 'few', and 100 is the least"):
        store.train_dictionary("few")
    with pytest.raises(DictionaryError, match=r"does not pay below 'noise'.* nothing was changed"):
        store.train_dictionary("noise")
    with pytest.raises(DictionaryError, match="0 different samples"):
        store.train_dictionary("large")
    with pytest.raises(DictionaryError, match="0 different samples"):
        store.train_dictionary("few", [SEEN[0] * 100] * 500)
    with pytest.raises(DictionaryError, match=r"no dictionary can be made|does not pay"):
        store.train_dictionary("tiny", [b"%d" % number for number in range(100)])
    for size in (10, "2MB"):
        with pytest.raises(InvalidValueError, match="a dictionary has 256 B to"):
            store.train_dictionary("few", size=size)
    with pytest.raises(InvalidValueError, match="samples must be 1 or more"):
        store.train_dictionary("few", samples=0)
    with pytest.raises(InvalidValueError, match="levels"):
        store.train_dictionary("few", level=99)
    assert files(store) == []
    assert store.stat().dictionaries == []


def test_a_dictionary_is_no_larger_than_asked_nor_than_what_it_is_made_of_warrants(store: Store) -> None:
    assert store.train_dictionary("a", SEEN, size=2000).size <= 2000
    assert store.train_dictionary("b", SEEN).size <= sum(map(len, SEEN)) / 20


def test_the_longest_prefix_counts_and_whole_parts_only(store: Store) -> None:
    outer = int(store.train_dictionary("", SEEN).id, 16)
    inner = int(store.train_dictionary("a/b", NEW).id, 16)
    fresh = iter(records(20, 3))
    wanted = {"x": outer, "a/bc": outer, "a/b/c/d": inner, "a/x": outer, "a/b": inner}
    for name, number in wanted.items():
        if name == "a/b":
            store.delete("a/b/c/d")
        store.put(name, next(fresh))
        assert number_in(store, name) == number, name
    assert store.drop_dictionary("a/b")
    assert not store.drop_dictionary("a/b")
    store.put("a/c/d", next(fresh))
    assert number_in(store, "a/c/d") == outer


def test_only_small_zstd_blobs_are_compressed_with_it(store: Store, tmp_path: Path) -> None:
    number = int(store.train_dictionary("", SEEN).id, 16)
    for codec in ("lz4", "gzip", "none"):
        store.put(codec, NEW[0] + codec.encode(), codec=codec)
        assert number_in(store, codec) == 0
    store.put("noise", noise(3000))
    store.put("noise zstd", noise(16_384), codec="zstd")
    store.put("large", b"".join(NEW[:100]), codec="zstd")
    assert [number_in(store, name) for name in ("noise", "noise zstd", "large")] == [0, 0, 0]
    store.put("empty", b"")
    (tmp_path / "file").write_bytes(NEW[1])
    store.put_file("file", tmp_path / "file", level=19)
    store.save(
        "object", {"identifier": "x", "collection": "crawl", "licence": "public domain"}, serializer="msgpack"
    )
    assert number_in(store, "file") == number
    names = ["empty", "noise", "noise zstd", "large", "file"]
    assert [store.get(name) for name in names] == [
        b"",
        noise(3000),
        noise(16_384),
        b"".join(NEW[:100]),
        NEW[1],
    ]
    assert store.load("object")["collection"] == "crawl"


def test_known_bytes_stay_as_they_are(trained: Store) -> None:
    entry = trained.put("plain/1", SEEN[0])
    assert trained.put("rec/again", SEEN[0]).stored == entry.stored
    assert number_in(trained, "rec/again") == 0


def test_recompress_writes_what_is_there_anew_and_gc_frees_the_rest(store: Store) -> None:
    store.put_many((f"rec/{number}", data) for number, data in enumerate(NEW))
    store.put("rec/lz4", NEW[0] + b"!", codec="lz4")
    store.put("rec/noise", noise(2000))
    before = store.index.totals()
    number = int(store.train_dictionary("rec", SEEN).id, 16)
    seen: list[int] = []
    done = store.recompress("rec", progress=seen.append)
    assert (done.looked_at, done.blobs) == (len(NEW) + 1, len(NEW))
    assert sum(seen) == before.logical
    after = store.index.totals()
    assert after._replace(stored=before.stored) == before
    assert before.stored - after.stored == done.before - done.after > 0.3 * done.before
    assert {number_in(store, f"rec/{place}") for place in range(len(NEW))} == {number}
    assert all_read(store)
    assert store.recompress("rec").blobs == 0
    agrees_with_disk(store)
    assert all_read(store)


# What hangs on a dictionary


def test_the_dictionary_is_an_ordinary_one_and_the_stock_tool_decodes_with_it(
    trained: Store, tmp_path: Path
) -> None:
    tool = shutil.which("zstd")
    if tool is None:
        pytest.skip("zstd is not installed")
    path, offset, length = payload(trained, "rec/0")
    frame = tmp_path / "frame.zst"
    frame.write_bytes(path.read_bytes()[offset : offset + length])
    number = number_in(trained, "rec/0")
    (dictionary,) = (trained.path / "objects" / "dicts").glob(f"{number:08x}.zdict")
    ran = subprocess.run([tool, "-dc", "-D", dictionary, frame], capture_output=True, check=True)
    assert ran.stdout == NEW[0]


def test_ranges_files_and_the_ram_tier_read_what_needs_a_dictionary(trained: Store) -> None:
    with trained.open("rec/0") as file:
        file.seek(10)
        assert file.read(20) == NEW[0][10:30]
    with Store(trained.path, memory="1MB") as other:
        assert other.get("rec/0") == other.get("rec/0") == NEW[0]


def test_gc_and_compaction_leave_dictionaries_alone(trained: Store) -> None:
    there = files(trained)
    trained.drop_dictionary("rec")
    trained.delete_many([f"rec/{number}" for number in range(200)])
    trained.gc(grace=0)
    assert files(trained) == there
    assert trained.get("rec/250") == NEW[250]
    agrees_with_disk(trained)


def test_a_rebuilt_index_reads_what_needs_a_dictionary(trained: Store) -> None:
    trained.close()
    (trained.path / "index.sqlite").unlink()
    _, rebuilt = doctor.rebuild_index(trained.path)
    assert (rebuilt.entries, rebuilt.lost, rebuilt.damaged) == (len(NEW), [], [])
    with Store(trained.path, memory=0) as store:
        assert all_read(store)
        store.put("rec/after", SEEN[3])
        assert number_in(store, "rec/after") == number_in(store, "rec/0")
        agrees_with_disk(store)


def test_threads_read_and_write_with_one_dictionary(trained: Store) -> None:
    wrong: list[object] = []

    def work(turn: int) -> None:
        mine = records(60, 100 + turn)
        try:
            for number, data in enumerate(mine):
                trained.put(f"rec/thread/{turn}/{number}", data, level=1 + turn)
                if (
                    trained.get(f"rec/thread/{turn}/{number}") != data
                    or trained.get(f"rec/{number}") != NEW[number]
                ):
                    wrong.append(number)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Processes


def test_forked_children_read_write_and_train(trained: Store) -> None:
    assert trained.get("rec/0") == NEW[0]  # the dictionary is loaded before the fork

    def child(turn: int) -> bool:
        mine = records(200, 50 + turn)
        trained.put_many((f"rec/child/{turn}/{number}", data) for number, data in enumerate(mine))
        trained.train_dictionary(f"own/{turn}", mine)
        trained.put(f"own/{turn}/x", mine[0] + b" ")
        good = (
            trained.get(f"rec/child/{turn}/7") == mine[7] and trained.get(f"own/{turn}/x") == mine[0] + b" "
        )
        return good and number_in(trained, f"own/{turn}/x") != 0 and all_read(trained)

    assert in_processes(4, child) == [True] * 4
    assert [found.prefix for found in trained.stat().dictionaries] == [
        "own/0",
        "own/1",
        "own/2",
        "own/3",
        "rec",
    ]
    agrees_with_disk(trained)


def test_another_process_that_has_the_store_open_uses_it_at_once(store: Store) -> None:
    with Store(store.path, memory=0) as other:
        other.put("rec/before", NEW[0])
        (trained,) = in_processes(1, lambda _: store.train_dictionary("rec", SEEN))
        other.put("rec/after", NEW[1])
        assert (number_in(other, "rec/before"), number_in(other, "rec/after")) == (0, int(trained.id, 16))
        in_processes(1, lambda _: store.drop_dictionary("rec"))
        other.put("rec/later", NEW[2])
        assert number_in(other, "rec/later") == 0


def test_one_process_trains_and_drops_while_others_put_and_a_doctor_cleans_up(store: Store) -> None:
    """Nothing that was put may need a dictionary that a doctor took for unneeded."""

    def work(turn: int) -> int:
        if turn == 0:
            for round_ in range(12):
                store.train_dictionary("rec", records(150, round_))
                store.drop_dictionary("rec")
                doctor.examine(store.path)
            return 0
        for number, data in enumerate(records(400, 1000 + turn)):
            store.put(f"rec/{turn}/{number}", data)
            if number % 40 == 0:
                store.put_many((f"rec/{turn}/many/{number}/{i}", data + b"%d" % i) for i in range(30))
        return 400

    assert in_processes(4, work, timeout=100) == [0, 400, 400, 400]
    for turn in (1, 2, 3):
        for number, data in enumerate(records(400, 1000 + turn)):
            assert store.get(f"rec/{turn}/{number}") == data
    agrees_with_disk(store)


# Damage


@pytest.mark.parametrize("suffix", ["zdict", "spare"])
def test_one_bad_copy_costs_nothing_and_is_made_anew(trained: Store, suffix: str) -> None:
    (path,) = (trained.path / "objects" / "dicts").glob(f"*.{suffix}")
    whole = path.read_bytes()
    flip(path, 2000)
    with Store(trained.path, memory=0) as other:
        assert all_read(other)
        report = other.verify()
        assert report.bad == [Finding(path.stem, str(path), f"{path} is damaged; it has been made anew", [])]
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
    other = numbered(b"\0" * 8 + noise(3000))
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
        with pytest.raises(CorruptError, match=r"dictionary [0-9a-f]{8}, of which no whole copy is left"):
            store.objects.read_packed(found.blob)
        assert store.get("rec/0") is None
        assert store.get("plain/x") == NEW[0] + b"!"
        with store.open("rec/1") as file, pytest.raises(CorruptError, match="no whole copy"):
            file.read(10)
        assert len([f for f in store.verify().bad if len(f.digest) == 64]) == len(NEW)
        findings = doctor.examine(store.path)
        assert any("dictionary" in finding.what for finding in findings), findings
        # Put again they are whole again, without a dictionary.
        store.put("rec/0", NEW[0])
        assert store.get("rec/0") == NEW[0]
        assert number_in(store, "rec/0") == 0
        store.verify(repair=True)
        assert [
            blob for blob in store.index.blobs() if blob.pack == LOST and store.index.names_of(blob.digest)
        ] == []


@pytest.mark.parametrize("by_hand", [False, True])
def test_what_was_staged_with_a_dictionary_that_goes_meanwhile_is_compressed_without(
    store: Store, by_hand: bool
) -> None:
    """Between compressing and committing somebody removes it: the bytes must not be committed as they are."""
    store.train_dictionary("rec", SEEN)
    dictionary = store.prefixes.dictionary("rec")
    noises = [store.writer.stage(noise(500, n), "auto", None, dictionary=dictionary) for n in (1, 2)]
    commit = store.writer.commit

    def late(staged: Any, first: Any = None) -> Any:
        # These do not need it; but it has been looked for then.
        commit([(staged[0][0]._replace(name="rec/noise"), noises.pop())])
        if by_hand:
            for path in files(store):
                path.unlink()
            time.sleep(1.1)
        else:
            store.drop_dictionary("rec")
            commit([(staged[0][0]._replace(name="rec/noise 2"), noises.pop())])
            doctor.examine(store.path)
        store.writer.commit = commit  # type: ignore[method-assign]
        assert files(store) == []
        return commit(staged, first)

    store.writer.commit = late  # type: ignore[method-assign]
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
    store.train_dictionary("a", NEW)  # nothing is put with the first one any more
    store.drop_dictionary("a")
    assert len(files(store)) == 4
    (finding,) = doctor.examine(store.path)
    assert "dictionaries that nothing needs: 1" in finding.what
    assert files(store) == needed
    store.delete("a/1")
    # A record that no row means any more may come back with a rebuilt index: it keeps its dictionary, till it has gone.
    assert doctor.examine(store.path) == []
    assert files(store) == needed
    store.gc(grace=0)
    doctor.examine(store.path)
    assert files(store) == []


def test_hostile_dictionaries_are_errors_in_bounded_memory(trained: Store) -> None:
    """Whoever may write to a shared store can plant files; their numbers then fit their bytes."""
    path, offset, _ = payload(trained, "rec/5")
    for body in (b"\xff" * 4000, noise(5000), b"\0" * 300, noise(LARGEST)):
        planted = numbered(b"\x37\xa4\x30\xec" + b"\0" * 4 + body)
        if len(planted) <= LARGEST:
            with pytest.raises(CorruptError, match="none that zstd can use"):
                Dictionary(planted)
        number = number_of(planted)
        for file in trained.objects.dictionaries.paths(number):
            file.write_bytes(planted)
        with pytest.raises(CorruptError):
            trained.objects.dictionaries.load(number)
        # A frame that asks for it, and one whose number is that of no file.
        overwrite(path, offset + 6, number.to_bytes(4, "little"))
        assert trained.get("rec/5") is None
        trained.put("rec/5", NEW[5])
        assert trained.get("rec/5") == NEW[5]
        path, offset, _ = payload(trained, "rec/5")
        trained.prefixes.set("evil", number)
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
                trained.objects.read_packed(record._replace(stored=len(header), size=size))


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
