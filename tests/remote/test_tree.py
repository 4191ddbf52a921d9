"""Trees of names: what is put in is found, a tree depends on its rows alone, and a change costs little."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from castore.errors import CorruptError
from castore.remote import tree as trees
from castore.remote.pages import FRAME, Place, Row, decode, digest_of, encode_leaf
from castore.remote.tree import Tree, build, difference, edit
from castore.write.arguments import dump_metadata


def row(name: str, seed: int = 0, frames: int = 1) -> Row:
    """A row that follows from its name and seed."""
    digest = blake3(f"{name} {seed}".encode()).digest()
    size = (frames - 1) * 262_144 + 100
    stored = b"".join(FRAME.pack(50, digest[:16]) for _ in range(frames))
    place = Place(blake3(digest).digest(), 80 if frames == 1 else 0, 50 * frames, "zstd", stored)
    return Row(name, digest, size, "bytes", None, 1.5, None, place)


class Pages(dict[bytes, bytes]):
    """Pages in memory, with a count of those that were read."""

    reads = 0

    def read(self, digest: bytes) -> bytes:
        self.reads += 1
        return self[digest]

    def tree(self, rows: dict[str, Row]) -> Tree:
        return Tree(build((rows[name] for name in sorted(rows)), self.__setitem__), self.read)


@pytest.fixture(params=[600, trees.PAGE_BYTES], ids=["small pages", "pages as shipped"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Small pages give a few hundred names a tree of four levels."""
    monkeypatch.setattr(trees, "PAGE_BYTES", request.param)
    monkeypatch.setattr(trees, "LONGEST", 8 * request.param)
    return int(request.param)


def names(count: int) -> dict[str, Row]:
    return {name: row(name) for name in (f"set/{number:06d}.jpg" for number in range(count))}


@pytest.mark.usefixtures("sizes")
def test_what_was_put_into_a_tree_is_found_listed_and_counted() -> None:
    rows = names(3000) | {"other": row("other", frames=40), "a": row("a")}
    pages = Pages()
    tree = pages.tree(rows)
    assert list(tree.rows()) == [rows[name] for name in sorted(rows)]
    assert list(tree.rows("set")) == [rows[name] for name in sorted(rows) if name.startswith("set/")]
    assert list(tree.rows("other")) == [rows["other"]]
    assert list(tree.rows("se")) == []
    assert all(tree.find(name) == one for name, one in islice(rows.items(), 0, None, 97))
    assert tree.find("set/000001") is None
    assert tree.find("") is None
    assert tree.totals() == (
        len(rows),
        sum(one.size for one in rows.values()),
        sum(one.place.stored for one in rows.values()),
    )


def test_a_tree_without_names_is_a_tree() -> None:
    pages = Pages()
    tree = pages.tree({})
    assert (list(tree.rows()), tree.find("a"), tree.totals()) == ([], None, (0, 0, 0))
    assert list(difference(tree, pages.tree({"a": row("a")}))) == [("a", None, row("a"))]
    assert edit(tree, [("a", row("a")), ("b", None)], pages.__setitem__) == pages.tree({"a": row("a")}).root
    assert edit(pages.tree({"a": row("a")}), [("a", None)], pages.__setitem__) == tree.root


_SMALL = st.dictionaries(
    st.integers(0, 400).map(lambda number: f"n/{number:03d}"),
    st.sampled_from([1, 1, 1, 30, 300]),
    max_size=120,
)


@given(before=_SMALL, after=_SMALL)
def test_an_edited_tree_is_the_tree_of_its_rows_and_tells_what_differs(
    before: dict[str, int], after: dict[str, int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trees, "PAGE_BYTES", 500)
        patch.setattr(trees, "LONGEST", 2000)
        pages = Pages()
        old = {name: row(name, frames=frames) for name, frames in before.items()}
        new = {name: row(name, frames=frames) for name, frames in after.items()}
        old_tree, new_tree = pages.tree(old), pages.tree(new)
        every = sorted({*old, *new})
        wanted = [(name, old.get(name), new.get(name)) for name in every if old.get(name) != new.get(name)]
        assert list(difference(old_tree, new_tree)) == wanted
        assert edit(old_tree, ((name, one) for name, _, one in wanted), pages.__setitem__) == new_tree.root
        assert edit(old_tree, ((name, new.get(name)) for name in every), pages.__setitem__) == new_tree.root


def test_a_change_of_one_name_costs_the_pages_above_it() -> None:
    pages, rows = Pages(), names(50_000)
    tree = pages.tree(rows)
    before, reads = len(pages), pages.reads
    assert before > 30
    changed = row("set/025000.jpg", seed=1)
    root = edit(tree, [(changed.name, changed)], pages.__setitem__)
    assert len(pages) - before <= 3
    assert pages.reads - reads <= 4
    reads = pages.reads
    assert list(difference(tree, Tree(root, pages.read))) == [(changed.name, rows[changed.name], changed)]
    assert pages.reads - reads <= 6
    reads = pages.reads
    assert tree.find("set/010000.jpg") == rows["set/010000.jpg"]
    assert pages.reads - reads <= 3


def test_trees_made_in_any_order_of_changes_are_one(sizes: int) -> None:
    pages, rows, chance = Pages(), names(2000), random.Random(sizes)
    shuffled = list(rows)
    chance.shuffle(shuffled)
    root = build([], pages.__setitem__)
    for start in range(0, 2000, 400):
        part = sorted(shuffled[start : start + 400])
        root = edit(Tree(root, pages.read), ((name, rows[name]) for name in part), pages.__setitem__)
    assert root == pages.tree(rows).root


def flipped(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), max(1, len(data) // 60)):
        yield data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
    yield from (b"", data[:-1], data + b"x")


def test_a_damaged_page_is_refused() -> None:
    data = encode_leaf([row("a"), row("b")])
    for bad in flipped(data):
        with pytest.raises(CorruptError, match="another digest"):
            decode(bad, digest_of(data))


def test_a_page_that_lies_under_its_own_digest_is_refused_or_sound() -> None:
    data = encode_leaf([row("a"), row("b")])
    for bad in flipped(data):
        try:
            page = decode(bad, digest_of(bad))
        except CorruptError as error:
            assert "none that castore wrote" in str(error)  # noqa: PT017
        else:
            # Other bytes of a sound page are another page: its digest, which the parent knows, tells it
            # apart.
            assert len(page.rows) == 2
            assert digest_of(bad) != digest_of(data)


@pytest.mark.parametrize(
    "bad",
    [
        row("../a"),
        row("/a"),
        row("a")._replace(size=-1),
        row("a")._replace(size=1 << 62),
        row("a")._replace(size=10_000_000),
        row("a")._replace(digest=b"short"),
        row("a")._replace(serializer=None),  # type: ignore[arg-type]
        row("a")._replace(metadata=5),  # type: ignore[arg-type]
        row("a")._replace(metadata="[" * 100_000),
        row("a")._replace(metadata='{"a":' + "[" * 100 + "]" * 100 + "}"),
        row("a")._replace(metadata="{not json"),
        row("a")._replace(metadata="[1,2]"),
        row("a")._replace(metadata=""),
        row("a")._replace(metadata='{"a":' + "9" * 5000 + "}"),
        row("a")._replace(metadata='{"a":NaN}'),
        row("a")._replace(metadata='{"a":1e999}'),
        row("a")._replace(metadata='{"a":"\\udc80"}'),
        row("a")._replace(created="now"),  # type: ignore[arg-type]
        row("a")._replace(place=row("a").place._replace(offset=-1)),
        row("a")._replace(place=row("a").place._replace(stored=10)),
        row("a")._replace(place=row("a").place._replace(object=b"x")),
        row("a")._replace(place=row("a").place._replace(frames=b"")),
        row("a", frames=3)._replace(place=row("a", frames=3).place._replace(offset=20, stored=2_000_000)),
    ],
)
def test_a_row_that_cannot_be_is_refused(bad: Row) -> None:
    data = encode_leaf([bad])
    with pytest.raises(CorruptError, match="none that castore wrote"):
        decode(data, digest_of(data))


def test_metadata_comes_as_it_was_written() -> None:
    metadata = {"a": [[{"b": 1.5e300}]] * 100, "ü\n": "\\u", "c": None}
    texts = [None, "{}", dump_metadata(metadata), json.dumps(metadata)]
    rows = [row(f"{number}")._replace(metadata=text) for number, text in enumerate(texts)]
    data = encode_leaf(rows)
    assert decode(data, digest_of(data)).rows == rows


def test_names_out_of_order_or_twice_are_refused() -> None:
    for rows in ([row("b"), row("a")], [row("a"), row("a")]):
        data = encode_leaf(rows)
        with pytest.raises(CorruptError, match="not in order"):
            decode(data, digest_of(data))


def test_pages_in_the_place_of_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "PAGE_BYTES", 600)
    pages = Pages()
    tree = pages.tree(names(200))
    other = encode_leaf([row("zzz")])
    leaf = next(tree.leaves())
    lying = Tree(tree.root, lambda digest: other if digest == leaf.page else pages[digest])
    with pytest.raises(CorruptError):
        list(lying.rows())
