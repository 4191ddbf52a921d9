"""A statement of many rows does what the same statement does row by row."""

from __future__ import annotations

import sqlite3

import pytest

from castore.index.many_rows import ManyRows

COUNTS = (0, 1, 2, 15, 16, 17, 127, 128, 129, 145, 300)


@pytest.fixture
def db() -> sqlite3.Connection:
    made = sqlite3.connect(":memory:", isolation_level=None)
    made.execute("CREATE TABLE t (name TEXT PRIMARY KEY, value INTEGER) WITHOUT ROWID")
    return made


def rows(db: sqlite3.Connection) -> list[tuple[str, int]]:
    return db.execute("SELECT name, value FROM t ORDER BY name").fetchall()


@pytest.mark.parametrize("count", COUNTS)
def test_all_rows_are_written_and_counted_however_many_there_are(db: sqlite3.Connection, count: int) -> None:
    wanted = [(f"{number:03}", number) for number in range(count)]
    insert = ManyRows("INSERT INTO t VALUES ", "(?, ?)", " ON CONFLICT (name) DO NOTHING")
    assert insert.run(db, wanted) == count
    assert rows(db) == wanted
    assert insert.run(db, [*wanted, ("new", 1)]) == 1
    update = ManyRows("UPDATE t SET value = column2 FROM (VALUES ", "(?, ?)", ") WHERE name = column1")
    assert update.run(db, [*((name, -number) for name, number in wanted), ("none", 1)]) == count
    assert rows(db)[:-1] == [(name, -number) for name, number in wanted]
    assert (
        ManyRows("DELETE FROM t WHERE name IN (", "?", ")").run(db, [(name,) for name, _ in wanted]) == count
    )
    assert rows(db) == [("new", 1)]


@pytest.mark.parametrize("count", COUNTS)
def test_of_two_rows_with_one_name_the_later_counts(db: sqlite3.Connection, count: int) -> None:
    replace = ManyRows("INSERT OR REPLACE INTO t VALUES ", "(?, ?)")
    replace.run(db, [("same", number) for number in range(count)])
    assert rows(db) == [("same", count - 1)][: min(count, 1)]


def test_a_row_that_cannot_be_is_an_error(db: sqlite3.Connection) -> None:
    insert = ManyRows("INSERT INTO t VALUES ", "(?, ?)")
    with pytest.raises(sqlite3.IntegrityError):
        insert.run(db, [("a", number) for number in range(20)])
