"""Root works in another user's store, and the store still belongs to its owner.

This holds for every file in it; doctor reports one that does not.
"""

from __future__ import annotations

import grp
import os
import pwd
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from castore import Store, StoreError, settings
from castore.gc.mount_barrier import Listener
from castore.repair import doctor
from castore_fuse.daemon import DaemonRecord
from tests.helpers import flip, in_processes, noise, payload, records, text

OTHER = 65534
NAMES = [f"small/{number}" for number in range(20)]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may be anybody")


def as_owner(task: Callable[[], Any]) -> Any:
    """The result of ``task`` in a process of the store's owner."""

    def run(_: int) -> Any:
        os.setgroups([])
        os.setgid(OTHER)
        os.setuid(OTHER)
        return task()

    (answer,) = in_processes(1, run)
    return answer


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A store of another user's."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        home = Path(place) / "home"
        with Store(home / "store", memory=0) as store:
            store.put_many((name, name.encode() * 40) for name in NAMES)
            store.put("large", text(700_000))
        for path in (home, *home.rglob("*")):
            os.chown(path, OTHER, OTHER)
        yield home / "store"


def roots(folder: Path) -> list[str]:
    """The files in a folder that do not belong to its owner."""
    paths = [Path(place, name) for place, folders, files in os.walk(folder) for name in (*folders, *files)]
    return [
        str(path.relative_to(folder))
        for path in paths
        if (path.lstat().st_uid, path.lstat().st_gid) != (OTHER, OTHER)
    ]


@needs_root
def test_what_root_makes_in_anothers_store_is_the_owners(theirs: Path) -> None:
    (theirs / "locks/compute").unlink(missing_ok=True)
    (theirs / "ballast").unlink()
    with Store(theirs, memory=0) as store:
        store.put_many((f"root/{number}", record) for number, record in enumerate(records(400)))
        store.put("root/large", noise(700_000))
        store.get_or_compute("root/computed", lambda: 7)
        store.train_dictionary("root")
        path, offset, _ = payload(store, NAMES[0])
        flip(path, offset)
        assert store.get(NAMES[0]) is None
        assert list((theirs / "quarantine").iterdir())
        listener = Listener(theirs / "locks", 0o600)
        DaemonRecord(str(theirs.parent / "mnt"), os.getpid(), 1).write(
            theirs / "locks" / f"mount-{'a' * 16}.json"
        )
        from castore.adapters.datasets import scratch

        file = scratch.new_file(store)
        assert (theirs / "index.sqlite-wal").exists()
        assert (theirs / "index.sqlite-shm").exists()
        assert roots(theirs) == []
        listener.close()
        scratch.remove(file)
    for path in theirs.glob("index.sqlite*"):
        path.unlink()
    doctor.rebuild_index(theirs)
    settings.save(theirs, settings.Settings(codec="zstd"))
    assert roots(theirs) == []

    def use() -> tuple[list[doctor.Diagnosis], bytes | None]:
        found = [finding for finding in doctor.examine(theirs) if finding.left_to_do]
        with Store(theirs, memory=0) as store:
            store.put("mine", b"again")
            return found, store.get("root/1")

    assert as_owner(use) == ([], records(400)[1])


@needs_root
def test_nothing_that_was_there_before_is_given_away(theirs: Path) -> None:
    """The owner could give root's own file another name, that of a file of the store, to get it."""
    secret = theirs.parent / "secret"
    secret.write_bytes(b"")
    secret.chmod(0o600)
    (theirs / "locks/compute").unlink(missing_ok=True)
    os.link(secret, theirs / "locks/compute")
    with Store(theirs, memory=0) as store:
        store.get_or_compute("computed", lambda: 7)
    assert secret.stat().st_uid == 0


@needs_root
@pytest.mark.parametrize(
    "which",
    [
        "index.sqlite",
        "locks/beacon",
        "ballast",
        "objects/packs/00000001.pack",
        "objects/names/00000001.names",
        "objects",
    ],
)
def test_doctor_reports_what_the_owner_may_not_use(theirs: Path, which: str) -> None:
    os.chown(theirs / which, 0, 0)

    def look() -> tuple[list[doctor.Diagnosis], str]:
        found = doctor.examine(theirs)
        with pytest.raises(StoreError) as told:
            doctor.rebuild_index(theirs)
        return found, str(told.value)

    user, group = pwd.getpwuid(OTHER).pw_name, grp.getgrgid(OTHER).gr_name
    command = f"chown -R {user}:{group} {theirs}"
    (finding,), refused = as_owner(look)
    assert finding.left_to_do
    assert finding.what == f"the user {user} may not use {which} of the store {theirs}: owned by root"
    assert command in finding.advice
    assert command in refused
    assert doctor.examine(theirs) == [finding], "root hears the same"
    assert os.system(command) == 0
    assert as_owner(lambda: doctor.examine(theirs)) == []
    assert as_owner(lambda: Store(theirs, memory=0).get(NAMES[0])) == NAMES[0].encode() * 40


@needs_root
def test_settings_that_root_has_closed_name_the_command(theirs: Path) -> None:
    os.chown(theirs / "castore.json", 0, 0)

    def look() -> str:
        with pytest.raises(StoreError) as told:
            doctor.examine(theirs)
        return str(told.value)

    assert "to whom the store belongs; run `chown -R " in as_owner(look)


@needs_root
def test_an_index_that_its_owner_may_not_write_is_mended(theirs: Path) -> None:
    (theirs / "index.sqlite").chmod(0o400)
    (theirs / "objects/names/00000001.names").chmod(0o400)

    def look() -> tuple[list[doctor.Diagnosis], list[doctor.Diagnosis]]:
        found = doctor.examine(theirs), doctor.examine(theirs)
        with Store(theirs, memory=0) as store:
            store.put("mine", b"again")
        return found

    (finding,), again = as_owner(look)
    assert finding.mended
    assert "and 1 more had too few permission bits" in finding.what
    assert again == []
