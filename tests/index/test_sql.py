"""All SQL of the project stands in castore/index: a look at the source of everything that is shipped."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path.relative_to(ROOT) for folder in ("castore", "fuse") for path in (ROOT / folder).rglob("*.py")
)
#: The beginning of a statement. A sentence may begin with "Select" or "Update"; SQL is written in capitals
#: here.
STATEMENT = re.compile(
    r"\s*(SELECT|INSERT|UPDATE|DELETE|REPLACE|WITH|PRAGMA|CREATE|DROP|ALTER"
    r"|BEGIN|COMMIT|ROLLBACK|VACUUM|ATTACH)\b"
)
#: The methods that run a statement, on a connection, a cursor, a transaction, or the index.
RUNS = {"execute", "executemany", "executescript"}
#: Where SQLite's errors are told apart, which takes their classes and no SQL.
ERRORS_OF_SQLITE = re.compile(r"sqlite3\.(Error|OperationalError|DatabaseError)\b")


def sql_in(source: str) -> Iterator[tuple[int, str]]:
    """Every line of Python that holds SQL or runs it."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and STATEMENT.match(node.value):
            yield node.lineno, node.value
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in RUNS:
            yield node.lineno, ast.unparse(node)
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "sqlite3"
        ):
            used = f"sqlite3.{node.attr}"
            if not ERRORS_OF_SQLITE.match(used):
                yield node.lineno, used


def test_no_file_outside_the_index_holds_or_runs_sql() -> None:
    outside = [path for path in SOURCES if path.parts[:2] != ("castore", "index")]
    assert len(outside) > 200
    found = [(path, *one) for path in outside for one in sql_in((ROOT / path).read_text())]
    assert [f"{path}:{line}: {what}" for path, line, what in found] == []


@pytest.mark.parametrize(
    "source",
    [
        "rows = index.rows('SELECT 1')",
        "txn.execute(sql)",
        "db.executemany(sql, rows)",
        "_SQL = (\n    f'INSERT INTO {table} '\n    'VALUES (1)'\n)",
        "_SQL = '\\n  WITH x AS (SELECT 1) SELECT * FROM x'",
        "db = sqlite3.connect(path)",
        "import sqlite3\ndef f(db: sqlite3.Connection) -> None: ...",
    ],
)
def test_the_look_finds_sql_however_it_is_written(source: str) -> None:
    assert list(sql_in(source))


@pytest.mark.parametrize(
    "source",
    [
        "'''Select what goes.'''",
        "raise ValueError('Update castore first')",
        "try:\n    pass\nexcept sqlite3.OperationalError:\n    pass",
        "'SELECTED'",
    ],
)
def test_the_look_passes_over_what_is_no_sql(source: str) -> None:
    assert not list(sql_in(source))


def test_the_look_sees_the_sql_of_the_index() -> None:
    holding = {path.name for path in (ROOT / "castore/index").glob("*.py") if any(sql_in(path.read_text()))}
    assert {
        "database.py",
        "transaction.py",
        "statements.py",
        "schema.py",
        "eviction.py",
        "mounts.py",
    } <= holding
