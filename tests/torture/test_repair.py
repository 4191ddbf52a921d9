"""Repair: verify and doctor mend and report what they find, do not find it again, and leave sound data alone.

Random damage of all kinds at once, then an operator's repair. The second repair finds nothing. Data that was
not hit is there with its bytes and its name. Data that was hit is there or gone. Bytes are never other ones.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from castore import Store
from castore.repair import doctor
from tests.helpers import flip, noise, overwrite, payload, recount
from tests.torture.hurting import fill, stored

Scale = Callable[[int, int], int]
Figure = Callable[[str], None]


class Patient:
    """A copy of a store, the bytes that were put into it, and the names that damage may have cost."""

    def __init__(self, path: Path, values: dict[str, bytes], chance: random.Random) -> None:
        self.path = path
        self.values = values
        self.chance = chance
        self.hit: set[str] = set()

    def some(self) -> str:
        return self.chance.choice(sorted(self.values))

    def place(self, name: str) -> Path:
        with Store(self.path, memory=0) as store:
            return payload(store, name)[0]


def flipped_bit(patient: Patient) -> None:
    name = patient.some()
    with Store(patient.path, memory=0) as store:
        place = stored(store, name)
    if place.path.exists() and place.path.stat().st_size >= place.end:
        patient.hit.add(name)
        flip(place.path, patient.chance.randrange(place.start, place.end), patient.chance.randrange(8))


def truncated_object(patient: Patient) -> None:
    loose = sorted((patient.path / "objects").glob("??/*"))
    target = patient.chance.choice(loose)
    patient.hit |= names_in(patient, target)
    target.chmod(0o600)
    os.truncate(target, patient.chance.randrange(target.stat().st_size + 1))


def missing_object(patient: Patient) -> None:
    target = patient.chance.choice(sorted((patient.path / "objects").glob("??/*")))
    patient.hit |= names_in(patient, target)
    target.unlink()


def zeroed_page(patient: Patient) -> None:
    pack = next((patient.path / "objects" / "packs").iterdir())
    page = patient.chance.randrange(pack.stat().st_size // 4096) * 4096
    with Store(patient.path, memory=0) as store:
        for name in patient.values:
            if store.index.find(name) is not None:
                place = stored(store, name)
                if place.path == pack and place.start < page + 4096 and place.end > page:
                    patient.hit.add(name)
    overwrite(pack, page, bytes(4096))


def names_in(patient: Patient, target: Path) -> set[str]:
    with Store(patient.path, memory=0) as store:
        return set(store.index.names_of(bytes.fromhex(target.name[:64])))


def journal_bytes(patient: Patient) -> None:
    segment = next((patient.path / "objects" / "names").glob("*.names"))
    if segment.stat().st_size:
        overwrite(segment, patient.chance.randrange(segment.stat().st_size), patient.chance.randbytes(1))


def counts_off(patient: Patient) -> None:
    with closing(sqlite3.connect(patient.path / "index.sqlite")) as db:
        db.execute("UPDATE totals SET stored = stored + 7")
        db.execute("UPDATE blobs SET refs = refs + 1 WHERE pack = 0")
        db.commit()


def rows_off(patient: Patient) -> None:
    column = patient.chance.choice(["size = size + 1", "codec = 'lz4'", "stored = stored - 1"])
    with closing(sqlite3.connect(patient.path / "index.sqlite")) as db:
        db.execute(f"UPDATE blobs SET {column} WHERE pack = 0")
        db.commit()


def index_gone(patient: Patient) -> None:
    (patient.path / "index.sqlite").unlink()


def index_page(patient: Patient) -> None:
    index = patient.path / "index.sqlite"
    overwrite(index, 2048 * patient.chance.randrange(index.stat().st_size // 2048), noise(2048))


def beacon_bytes(patient: Patient) -> None:
    (patient.path / "locks" / "beacon").write_bytes(patient.chance.randbytes(32))


def planted(patient: Patient) -> None:
    (patient.path / "objects" / "packs" / "zzzzzzzz.pack").write_bytes(b"x")
    (patient.path / "objects" / "names" / "abcdefgh.names").write_bytes(b"x")
    (patient.path / "objects" / "nothing").write_bytes(b"x")
    (patient.path / "tmp" / "folder").mkdir()
    (patient.path / "objects" / "packs" / "000000aa.pack").symlink_to("/etc/hostname")


def leftover_files(patient: Patient) -> None:
    (patient.path / "tmp" / "1-999999-1-abc.part").write_bytes(b"x" * 5000)
    old = patient.path / "tmp" / "whatever"
    old.write_bytes(b"x")
    os.utime(old, (1e9, 1e9))
    (patient.path / "objects" / "packs" / "000000ab.pack").write_bytes(b"x")


INDEX_LAST = [index_gone, index_page, rows_off, counts_off]
HURTS = [
    flipped_bit, truncated_object, missing_object, zeroed_page, journal_bytes, beacon_bytes, planted,
    leftover_files
]  # fmt: skip


def operate(path: Path) -> Counter[str]:
    """An operator's repair; counts the findings of each step."""
    found: Counter[str] = Counter()
    findings = doctor.examine(path)
    if any("rebuild-index" in finding.advice for finding in findings):
        findings += doctor.rebuild_index(path)[0]
    found["doctor"] = len(findings)
    with Store(path, memory=0) as store:
        found["verify"] = len(store.verify(repair=True).bad)
    found["doctor after verify"] = len(doctor.examine(path))
    return found


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    path = tmp_path_factory.mktemp("healthy") / "store"
    with Store(path, memory=0) as store:
        values = fill(store, 60)
    return path, values


def test_repair_of_any_damage_leaves_nothing_to_be_found_and_costs_nothing_else(
    healthy: tuple[Path, dict[str, bytes]], tmp_path: Path, scale: Scale, figure: Figure
) -> None:
    source, values = healthy
    turns = scale(12, 400)
    done: Counter[str] = Counter()
    kept = lost = 0
    for turn in range(turns):
        chance = random.Random(f"repair {turn}")
        path = tmp_path / "patient"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(source, path)
        patient = Patient(path, values, chance)
        hurts = chance.sample(HURTS, chance.randrange(1, 5))
        hurts += chance.sample(INDEX_LAST, 1) if chance.random() < 0.6 else []
        for hurt in hurts:
            hurt(patient)
            done[hurt.__name__] += 1
        first = operate(path)
        second = operate(path)
        told = f"turn {turn}, {[hurt.__name__ for hurt in hurts]}"
        assert second.total() == 0, f"{told}: found again: {second}"
        assert first.total() > 0 or hurts == [beacon_bytes], f"{told}: nobody noticed"
        # Only the journal can give a name back: with both hit, the names in the damaged stretch may be gone.
        unnamed = journal_bytes in hurts and any(hurt in hurts for hurt in (index_gone, index_page))
        with Store(path, memory=0) as store:
            missing = set()
            for name, data in values.items():
                got = store.get(name)
                assert got in (None, data), f"{told}: other bytes under {name}"
                missing |= {name} if got is None else set()
            assert len(missing - patient.hit) <= (1 if unnamed else 0), (
                f"{told}: cost {missing - patient.hit}"
            )
            assert {entry.name for entry in store.entries()} == set(values) - missing, told
            recount(store)
            store.gc(grace=0)
            assert all(store.get(name) == values[name] for name in set(values) - missing), told
        kept += len(values) - len(missing)
        lost += len(missing)
    assert set(done) == {hurt.__name__ for hurt in HURTS + INDEX_LAST}
    figure(
        f"{turns} stores with {done.total()} damages of {len(done)} kinds: the second repair found nothing "
        f"in any; {kept} entries kept, {lost} of those hit were lost, none else, no other bytes"
    )


def test_a_bad_head_of_a_record_is_written_again_and_its_bytes_are_kept(store: Store) -> None:
    values = fill(store, 24)
    packed = [name for name in values if stored(store, name).path.suffix == ".pack"]
    for name in packed[:5]:
        flip(store.objects.packs.path(1), stored(store, name).start + 20)
    report = store.verify()
    assert sorted(name for finding in report.bad for name in finding.names) == sorted(packed[:5])
    assert all("have been written again" in finding.why for finding in report.bad)
    assert {name: store.get(name) for name in values} == values
    assert store.verify().bad == []
    recount(store)
