"""The index's tables: made at once in a new index, brought up to date by migrations of sqlite-utils in an
older one.

sqlite-utils is imported only for an older index: where pandas is installed, it imports pandas, which takes
half a second. A new version of the schema is a new migration at the end. No migration is ever changed.

SQLite keeps no checksums of its pages, so each entry keeps one (`checked`, `records.entry_check`): a flipped
bit must not give one name another's bytes. Some values are derived from other rows: how many entries name a
blob (`refs`), `totals`, and how many bytes of a pack are dead (`dead`). With them, `stat` and a gc that finds
little cost the same at ten entries and at ten million. Only `transaction.Write` changes rows, and it updates
these values in the same transaction. Triggers could do it too, at twice the cost of a put (measured).
"""

from __future__ import annotations

import sqlite3
from functools import cache
from typing import TYPE_CHECKING

from castore.records import HEAD_SIZE

if TYPE_CHECKING:
    from sqlite_utils import Database

# Existing indexes hold these texts word for word: a backslash ends a line that goes on.
_TABLES = """
CREATE TABLE blobs (
    digest BLOB PRIMARY KEY, size INTEGER NOT NULL, stored INTEGER NOT NULL, codec TEXT NOT NULL,
    pack INTEGER NOT NULL, offset INTEGER NOT NULL, refs INTEGER NOT NULL DEFAULT 0, orphaned REAL
) WITHOUT ROWID;
CREATE TABLE entries (
    name TEXT PRIMARY KEY, digest BLOB NOT NULL, size INTEGER NOT NULL, serializer TEXT NOT NULL, \
metadata TEXT,
    created REAL NOT NULL, expires REAL, accessed REAL NOT NULL, pinned INTEGER NOT NULL DEFAULT 0,
    checked INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE checksums (digest BLOB PRIMARY KEY, frames BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE packs (id INTEGER PRIMARY KEY AUTOINCREMENT, created REAL NOT NULL);
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE mounts (
    id INTEGER PRIMARY KEY, mountpoint TEXT NOT NULL, prefix TEXT NOT NULL, pinned INTEGER NOT NULL,
    namespace INTEGER NOT NULL, pid INTEGER NOT NULL, started INTEGER NOT NULL, \
since REAL NOT NULL, seen REAL NOT NULL
);
CREATE TABLE totals (
    id INTEGER PRIMARY KEY CHECK (id = 1), entries INTEGER NOT NULL, logical INTEGER NOT NULL,
    blobs INTEGER NOT NULL, uniq INTEGER NOT NULL, stored INTEGER NOT NULL
);
INSERT INTO totals VALUES (1, 0, 0, 0, 0, 0);
CREATE INDEX entries_expires ON entries (expires) WHERE expires IS NOT NULL;
CREATE INDEX blobs_orphaned ON blobs (orphaned) WHERE orphaned IS NOT NULL;
CREATE INDEX blobs_loose ON blobs (size) WHERE pack = 0;
"""
_RELEASED_TABLE = "CREATE TABLE released (id INTEGER PRIMARY KEY AUTOINCREMENT, digests BLOB NOT NULL);\n"
_DEAD_COLUMNS = f"""\
ALTER TABLE packs ADD COLUMN dead INTEGER NOT NULL DEFAULT 0;
ALTER TABLE totals ADD COLUMN packed INTEGER NOT NULL DEFAULT 0;
UPDATE totals SET packed = (SELECT coalesce(sum(stored + {HEAD_SIZE}), 0) FROM blobs WHERE pack > 0);
"""
_PLACES_TABLES = """\
CREATE TABLE origins (id INTEGER PRIMARY KEY, remote TEXT NOT NULL, object BLOB NOT NULL);
CREATE TABLE places (
    digest BLOB PRIMARY KEY, origin INTEGER NOT NULL, offset INTEGER NOT NULL, stored INTEGER NOT NULL,
    codec TEXT NOT NULL, frames BLOB NOT NULL, fetched REAL NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE UNIQUE INDEX origins_object ON origins (object, remote);
CREATE INDEX places_origin ON places (origin, offset);
"""
#: Names and statements of the migrations. The first is that to version 1.
_MIGRATIONS = (
    ("tables", _TABLES), ("released", _RELEASED_TABLE), ("dead", _DEAD_COLUMNS), ("places", _PLACES_TABLES),
)  # fmt: skip
#: `PRAGMA user_version` of an index that has all of them.
SCHEMA_VERSION = len(_MIGRATIONS)


def find_mismatch(connection: sqlite3.Connection) -> str | None:
    """A few words on tables that the file lacks, or has beside those above; None if there are none.

    A foreign trigger or view would run as part of castore's statements.
    """
    known = _expected_statements()
    sql = (
        "SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite^_%' ESCAPE '^' AND NOT"
        " (tbl_name = '_sqlite_migrations' AND type IN ('table', 'index') AND sql NOT LIKE 'CREATE VIRTUAL%')"
    )
    found = dict(connection.execute(sql).fetchall())
    if missing := known.keys() - found.keys():
        return f"it lacks {', '.join(sorted(missing))}"
    if others := [name for name, text in found.items() if known.get(name) != text]:
        return f"{', '.join(sorted(map(repr, others)))} in it was not made by castore"
    (totals,) = connection.execute("SELECT count(*) FROM totals").fetchone()
    return None if totals == 1 else f"it has {totals} rows of totals instead of one"


@cache
def _expected_statements() -> dict[str, str]:
    """The CREATE statement of each table and index, by name."""
    known: dict[str, str] = {}
    for statement in _statements("".join(script for _, script in _MIGRATIONS)):
        text = statement.strip().removesuffix(";")
        match text.split(maxsplit=3):
            case ["CREATE", "UNIQUE", _, rest]:
                known[rest.split(maxsplit=1)[0]] = text
            case ["CREATE", _, name, _]:
                known[name] = text
            case ["ALTER", _, name, column]:  # as SQLite writes it into sqlite_master
                known[name] = f"{known[name][:-1]}, {column.removeprefix('ADD COLUMN ')})"
    return known


def _statements(script: str) -> list[str]:
    statements, pending = [], ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            statements.append(pending)
            pending = ""
    return statements


def migrate(connection: sqlite3.Connection) -> None:
    """Bring an index, new or old, to SCHEMA_VERSION. Safe against another process doing the same."""
    # One write transaction covers the check and the migrations: else two processes would both find the tables
    # missing.
    connection.execute("BEGIN IMMEDIATE")
    try:
        apply_migrations(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def apply_migrations(connection: sqlite3.Connection) -> None:
    """`migrate` within the transaction that the caller has begun."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if version == SCHEMA_VERSION:
        return  # another process was faster
    if tables:
        _bring_up_to_date(connection, version)
    else:
        for _, script in _MIGRATIONS:
            _run(connection, script)
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _bring_up_to_date(connection: sqlite3.Connection, version: int) -> None:
    from sqlite_utils import Database, Migrations

    migrations = Migrations("castore")
    for number, (name, script) in enumerate(_MIGRATIONS, start=1):

        @migrations(name=name)
        def apply(db: Database, number: int = number, script: str = script) -> None:
            # sqlite-utils has no record of what a new index had from the start.
            if number > version:
                _run(connection, script)

    migrations.apply(Database(connection))


def _run(connection: sqlite3.Connection, script: str) -> None:
    for statement in _statements(script):
        connection.execute(statement)
