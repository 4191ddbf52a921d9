"""`Remote.check(deep=True)` compares objects with their names, and blobs with what the tree says of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from castore import CorruptError, RemoteError, RemoteMissingError, Store
from castore.objects.codecs import FRAME_SIZE
from castore.remote import commits, deep_check
from castore.remote.bucket import Bucket
from castore.remote.deep_check import Claim, DeepCheck, claim_of
from castore.remote.keys import commit_key, object_key
from castore.remote.pages import FRAME, Row, decode, digest_of, encode_leaf
from castore.remote.tree import Tree
from tests.helpers import flip, noise, text
from tests.remote.conftest import MakeNode, Node
from tests.remote.nodes import know, put_tree
from tests.remote.test_transfer import ENVIRONMENT

pytestmark = pytest.mark.usefixtures("forked_processes")

#: Sizes of blobs of one frame and of several, in packs and of their own, empty, and with a whole last frame.
SIZES = [0, 10, 5_000, 30_000, 1 << 18, 300_000, 3_000_000]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])


@pytest.fixture
def one(node: MakeNode) -> Node:
    """A node that has pushed blobs of all codecs and sizes, some of them with a dictionary."""
    made = node("one")
    made.store.put_many((f"rec/{at}", text(400, at)) for at in range(300))
    made.store.train_dictionary("rec")
    made.store.put_many((f"rec/new/{at}", text(500, at)) for at in range(10))
    for number, codec in enumerate(("zstd", "lz4", "gzip", "none")):
        for at, size in enumerate(
            SIZES, start=10 * number
        ):  # others for each codec: equal ones are kept once
            made.store.put(f"{codec}/text/{size}", text(size, at), codec=codec)
            made.store.put(f"{codec}/noise/{size}", noise(size, at), codec=codec)
    made.push()
    return made


def rows_of(made: Node, bucket: Bucket, ref: str = "main") -> list[Row]:
    head = commits.read_ref(bucket, ref)
    assert head is not None
    return list(Tree(commits.read_commit(bucket, head.commit).tree, made.pages.read).rows())


class InPieces:
    """A bucket whose objects come in pieces of any size."""

    def __init__(self, bucket: Bucket, seed: int) -> None:
        self._bucket, self._chance = bucket, random.Random(seed)
        self.get = bucket.get

    def stream(self, key: str) -> Iterator[bytes]:
        for data in self._bucket.stream(key):
            at = 0
            while at < len(data):
                size = self._chance.choice([1, 7, 1000, 70_000, 1 << 20])
                yield data[at : at + size]
                at += size


def by_object(rows: list[Row]) -> dict[str, dict[Claim, Row]]:
    found: dict[str, dict[Claim, Row]] = {}
    for row in rows:
        key = object_key(row.place.object, packed=row.place.is_packed)
        found.setdefault(key, {})[claim_of(row)] = row
    return found


@pytest.mark.parametrize("seed", range(3))
def test_what_a_push_says_is_so_in_whatever_pieces_it_comes(one: Node, bucket: Bucket, seed: int) -> None:
    check = DeepCheck(InPieces(bucket, seed))  # type: ignore[arg-type]
    found = by_object(rows_of(one, bucket))
    assert {row.place.codec for claims in found.values() for row in claims.values()} == {
        "zstd", "lz4", "gzip", "none",
    }  # fmt: skip
    for key, claims in found.items():
        assert check.damage(key, claims) == (None, [], {}), key


def _other(frames: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(frames))
    return frames[:at] + bytes([frames[at] ^ (1 << chance.randrange(8))]) + frames[at + 1 :]


LIES: dict[str, Callable[[Row, random.Random], Row]] = {
    "digest": lambda row, chance: row._replace(digest=blake3(chance.randbytes(9)).digest()),
    "size": lambda row, chance: row._replace(size=row.size ^ (1 << chance.randrange(17))),
    "frames": lambda row, chance: row._replace(
        place=row.place._replace(frames=_other(row.place.frames, chance))
    ),
    "offset": lambda row, chance: row._replace(
        place=row.place._replace(offset=max(0, row.place.offset + chance.choice([-1, 1, 50])))
    ),
    "stored": lambda row, chance: row._replace(
        place=row.place._replace(stored=row.place.stored + chance.choice([-3, -1, 1]))
    ),
    "codec": lambda row, chance: row._replace(
        place=row.place._replace(codec=chance.choice([c for c in ("zstd", "lz4", "gzip", "none")
                                                      if c != row.place.codec]))
    ),
}  # fmt: skip


def _can_be(row: Row) -> bool:
    """Whether a page takes the row."""
    try:
        decode(page := encode_leaf([row]), digest_of(page))
    except CorruptError:
        return False
    return True


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("seed", range(4))
def test_any_lie_about_any_blob_is_seen_and_costs_that_claim_alone(
    one: Node, bucket: Bucket, lie: str, seed: int
) -> None:
    chance, told = random.Random(seed), 0
    check = DeepCheck(InPieces(bucket, seed))  # type: ignore[arg-type]
    for key, claims in by_object(rows_of(one, bucket)).items():
        lies: set[Claim] = set()
        for row in claims.values():
            changed = (LIES[lie](row, chance) for _ in range(20))
            lies.update(claim_of(one) for one in changed if row.size and one != row and _can_be(one))
        found = check.damage(key, [*claims, *lies])
        assert (found.why, set(found.untrue), found.dictionaries) == (None, lies, {}), key
        told += len(lies)
    assert told


def test_no_claim_has_more_memory_kept_than_two_frames(one: Node, bucket: Bucket) -> None:
    """A frame that claims gigabytes is none, and nobody waits for its end."""
    row = max(rows_of(one, bucket), key=lambda row: row.place.stored)
    frames = FRAME.pack(2_000_000, b"x" * 16) + row.place.frames[FRAME.size :]
    claim = claim_of(row._replace(place=row.place._replace(frames=frames)))
    window = deep_check._Window(deep_check._pieces([claim]))
    assert [(frame, stored) for _, frame, stored in window.take(bytes(1_000_000))][:1] == [(0, None)]
    assert len(window._kept) < 4 * FRAME_SIZE
    key = object_key(row.place.object, packed=False)
    assert DeepCheck(bucket).damage(key, [claim, claim_of(row)]).untrue == [claim]


# Through the remote


def _lying(one: Node, bucket: Bucket, change: Callable[[Row], Row], name: str) -> None:
    """`main` again, with another row of that name."""
    put_tree(bucket, [change(row) if row.name == name else row for row in rows_of(one, bucket)], "main")


@pytest.mark.parametrize("name", ["zstd/text/5000", "lz4/text/300000", "none/noise/3000000"])
def test_a_tree_that_lies_is_told_and_mended_by_a_store_that_has_the_bytes(
    one: Node, bucket: Bucket, name: str, tmp_path: Path
) -> None:
    data = one.store.get(name)
    honest = next(row for row in rows_of(one, bucket) if row.name == name)
    _lying(one, bucket, lambda row: row._replace(place=row.place._replace(
        frames=_other(row.place.frames, random.Random(1))
    )), name)  # fmt: skip
    team = one.store.remote("team")
    assert team.check().problems == [], "only the bytes tell"
    checked = team.check(deep=True)
    key = object_key(honest.place.object, packed=honest.place.is_packed)
    assert [(problem.ref, problem.key, problem.names) for problem in checked.problems] == [
        ("main", key, (name,))
    ]
    assert "the tree has another digest, size or frames for 1 of the blobs" in checked.problems[0].why
    assert team.repair(checked)[0].ref == "main"
    checked = team.check(deep=True)
    assert checked.problems == []
    assert [problem.names for problem in checked.history] == [(name,)], "the commit before lies still"
    with Store(tmp_path / "other", memory=0) as other:
        know(other, "team", bucket.url).pull("main")
        assert other.get(name) == data


def test_a_lie_of_a_former_commit_is_a_matter_of_history(one: Node, bucket: Bucket) -> None:
    name = "gzip/text/5000"
    _lying(one, bucket, lambda row: row._replace(digest=blake3(b"other").digest()), name)
    one.store.put("more", b"more")
    one.store.put(name, b"another")
    team = one.store.remote("team")
    team.pull(replace=True, lazy=True)
    one.store.put(name, b"another")
    team.push()
    checked = team.check(deep=True)
    assert checked.problems == []
    assert [problem.names for problem in checked.history] == [(name,)]
    assert "of its history needs it" in checked.history[0].why


MENDED: dict[str, tuple[str, Callable[[Row], Row]]] = {
    "the digest of another": (
        "gzip/noise/3000000", lambda row: row._replace(digest=blake3(text(30_000, 13)).digest()),
    ),
    "longer": ("lz4/text/5000", lambda row: row._replace(size=row.size + 1)),
    "shorter, with a dictionary": ("rec/new/3", lambda row: row._replace(size=row.size - 1)),
    "of several frames": ("gzip/noise/3000000", lambda row: row._replace(size=row.size + 1)),
}  # fmt: skip


@pytest.mark.parametrize("lie", MENDED)
def test_rows_that_lie_about_size_or_digest_get_those_of_the_blob_that_the_store_has(
    one: Node, bucket: Bucket, lie: str, tmp_path: Path
) -> None:
    """Regression: the lying size went into the new row, which was no better, or no page at all."""
    name, change = MENDED[lie]
    right = text(30_000, 13) if "digest" in lie else one.store.get(name)
    _lying(one, bucket, change, name)
    team = one.store.remote("team")
    checked = team.check(deep=True)
    assert [problem.names for problem in checked.problems] == [(name,)]
    team.repair(checked)
    assert team.check(deep=True).problems == []
    with Store(tmp_path / "other", memory=0) as other:
        know(other, "team", bucket.url).pull("main")
        assert other.get(name) == right


def test_a_size_that_only_an_older_tree_needs_is_a_matter_of_history(one: Node, bucket: Bucket) -> None:
    """Regression: the newest commit was blamed for it, and each repair uploaded the object again."""
    name = "gzip/noise/3000000"
    _lying(
        one, bucket, lambda row: row._replace(place=row.place._replace(stored=row.place.stored + 99)), name
    )
    team = one.store.remote("team")
    checked = team.check()
    assert [problem.names for problem in checked.problems] == [(name,)]
    assert "and the tree needs" in checked.problems[0].why
    team.repair(checked)
    for deep in (False, True):
        checked = team.check(deep=deep)
        assert checked.problems == []
        assert [problem.names for problem in checked.history] == [(name,)]


def test_what_a_store_cannot_mend_of_one_ref_keeps_no_other_from_being_mended(
    one: Node, bucket: Bucket
) -> None:
    one.store.put("a/large", noise(2_000_000, 101))
    one.store.put("b/large", noise(2_000_000, 102))
    for ref in "ab":
        one.push(ref, ref=ref)
    for row in (*rows_of(one, bucket, "a"), *rows_of(one, bucket, "b")):
        Path(bucket.url.removeprefix("file://"), object_key(row.place.object, packed=False)).unlink()
    entry = one.store.entry("a/large")
    assert entry is not None
    [file] = (one.store.path / "objects").rglob(f"{entry.digest}*")
    flip(file, 1_000_000)
    team = one.store.remote("team")
    checked = team.check()
    assert {problem.ref for problem in checked.problems} == {"a", "b"}
    with pytest.raises(CorruptError, match=entry.digest):
        team.repair(checked)
    assert [problem.names for problem in team.check().problems] == [("a/large",)]


@pytest.mark.parametrize(
    "number", ['"entries": 1e999', f'"time": 1{400 * "0"}', '"time": NaN', '"size": -1', '"entries": "many"']
)
def test_a_commit_with_numbers_that_cannot_be_is_told(one: Node, bucket: Bucket, number: str) -> None:
    """Regression: `check`, `pull` and `log` ended with the traceback of another process."""
    key, value = number.split(": ")
    head = commits.read_ref(bucket, "main")
    assert head is not None
    fields = json.loads(bucket.get(commit_key(head.commit)).data)
    assert json.loads(key) in fields
    data = json.dumps(fields | {json.loads(key): 4711}).replace("4711", value).encode()
    bucket.put(commit_key(digest_of(data)), data)
    assert commits.move_ref(bucket, "main", head, digest_of(data), 1.0)
    team = one.store.remote("team")
    [problem] = team.check().problems
    assert problem.ref == "main"
    assert "none that castore wrote" in problem.why
    for call in (team.pull, team.log):
        with pytest.raises(RemoteError, match="none that castore wrote"):
            call()


@pytest.mark.parametrize("how", ["gone", "flipped"])
def test_a_dictionary_that_is_damaged_or_gone_is_told_and_uploaded_again(
    one: Node, bucket: Bucket, how: str, tmp_path: Path
) -> None:
    [path] = Path(bucket.url.removeprefix("file://")).joinpath("dicts").iterdir()
    if how == "gone":
        path.unlink()
    else:
        flip(path, path.stat().st_size // 2)
    team = one.store.remote("team")
    checked = team.check(deep=True)
    [problem] = checked.problems
    assert problem.key == f"dicts/{path.name}"
    assert problem.why == ("it is missing" if how == "gone" else "its bytes are not those of its number")
    assert problem.names
    team.repair(checked)
    assert team.check(deep=True).problems == []
    with Store(tmp_path / "other", memory=0) as other:
        know(other, "team", bucket.url).pull("main")
        assert other.get("rec/new/3") == text(500, 3)


def test_a_store_without_that_dictionary_mends_nothing(one: Node, bucket: Bucket, tmp_path: Path) -> None:
    [path] = Path(bucket.url.removeprefix("file://")).joinpath("dicts").iterdir()
    path.unlink()
    with Store(tmp_path / "other", memory=0) as other:
        team = know(other, "team", bucket.url)
        with pytest.raises(RemoteMissingError, match=r"remote check --deep` says .* and with --repair"):
            team.pull()
        checked: Any = team.check(deep=True)
        team.repair(checked)
        assert [problem.key for problem in team.check(deep=True).problems] == [f"dicts/{path.name}"]
