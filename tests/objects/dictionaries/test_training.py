"""Dictionaries: small similar blobs take much less room, and are as safe as others, also without it."""

from __future__ import annotations

import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from castore import DictionaryError, InvalidValueError, Store
from castore.repair import doctor
from tests.helpers import agrees_with_disk, in_processes, noise, payload, records, text
from tests.objects.dictionaries.samples import (
    NEW,
    SEEN,
    all_read,
    files,
    number_in,
)

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
    with pytest.raises(DictionaryError, match=r"samples below 'few' .* at least 100 different .* found 90;"):
        store.train_dictionary("few")
    with pytest.raises(DictionaryError, match=r"does not pay below 'noise'.* nothing was changed"):
        store.train_dictionary("noise")
    with pytest.raises(DictionaryError, match="found 0;"):
        store.train_dictionary("large")
    with pytest.raises(DictionaryError, match="found 0;"):
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


def test_a_store_of_another_codec_has_none(tmp_path: Path) -> None:
    with Store(tmp_path / "store", codec="lz4") as store:
        with pytest.raises(InvalidValueError, match=r"dictionaries are for zstd, and the codec of .* is lz4"):
            store.train_dictionary("rec", SEEN)
        assert files(store) == []


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


def test_recompress_rewrites_what_is_there_and_gc_frees_the_rest(store: Store) -> None:
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
    assert after._replace(stored=before.stored, packed=before.packed) == before
    assert before.packed - after.packed == before.stored - after.stored
    assert before.stored - after.stored == done.before - done.after > 0.3 * done.before
    assert {number_in(store, f"rec/{place}") for place in range(len(NEW))} == {number}
    assert all_read(store)
    assert store.recompress("rec").blobs == 0
    agrees_with_disk(store)
    assert all_read(store)


# Uses of a dictionary


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
    """No put may rely on a dictionary that a doctor took for unneeded."""

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

    assert in_processes(4, work, timeout=300) == [0, 400, 400, 400]
    for turn in (1, 2, 3):
        for number, data in enumerate(records(400, 1000 + turn)):
            assert store.get(f"rec/{turn}/{number}") == data
    agrees_with_disk(store)
