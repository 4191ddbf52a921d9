"""`castore gc`, `verify` and `doctor`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from castore import Store
from tests.cli.conftest import Cli
from tests.clocks import pass_time
from tests.helpers import noise
from tests.remote.nodes import end_fetcher, know


def damage(folder: Path) -> None:
    """Flip a bit in the one large object."""
    (target,) = (path for path in folder.glob("objects/??/*") if path.stat().st_size > 100_000)
    target.chmod(0o600)
    content = bytearray(target.read_bytes())
    content[len(content) // 2] ^= 1
    target.write_bytes(content)


def test_gc_dry_run_says_what_a_run_then_does(
    cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("noise", os.urandom(300_000))
    store.put("over", b"x", ttl="1h")
    pass_time(monkeypatch, 7200)
    dry = cli("gc", "--max-size", "200KB", "--dry-run", "--json").json
    assert store.entry("noise") is not None
    wet = cli("gc", "--max-size", "200KB", "--json").json
    assert (dry.pop("dry_run"), wet.pop("dry_run")) == (True, False)
    assert dry == wet
    assert wet["expired"] == ["over"]
    assert "noise" in wet["evicted"]
    assert store.entry("noise") is None
    assert wet["remaining"] <= 200_000


def test_gc_in_words(cli: Cli, store: Store) -> None:
    store.put_many((f"noise/{number}", os.urandom(30_000)) for number in range(10))
    out = cli("gc", "--max-size", "0", "--dry-run").out
    assert out.startswith("would remove: 13 entries, 13 blobs, ")
    assert "least recently used: 13\n" in out
    assert "  and 8 more\n" in out
    assert cli("gc").out.startswith("nothing to remove: ")


def test_gc_reports_what_waits_and_how_to_free_it_now(cli: Cli, store: Store) -> None:
    store.put("noise", os.urandom(300_000))
    cli("rm", "noise")
    out = cli("gc").out
    assert "waiting: 300 KB that no name points to any more; `castore gc --grace 0` frees them at once" in out
    assert "removed: 0 entries, 1 blob, 300 KB" in cli("gc", "--grace", "0").out


def test_gc_uses_the_budget_of_the_store(cli: Cli, store: Store) -> None:
    store.put("noise", os.urandom(300_000))
    cli("init", "--max-size", "100KB")
    assert "noise" in cli("gc", "--json").json["evicted"]


def test_verify_of_a_sound_store(cli: Cli, store: Store) -> None:
    ran = cli("verify")
    assert ran.code == 0
    assert ran.out.startswith("3 blobs (")
    assert ran.out.endswith("read: all as they were put\n")
    assert cli("verify", "--sample", "1%", "--json").code == 0
    assert cli("verify", "--sample", "0.00000001%").out == (
        "0 blobs (0 B as stored) read: too small a sample of so few\n"
    )


@pytest.mark.parametrize("sample", ["0", "101%", "-5%", "nan", "half"])
def test_verify_refuses_a_sample_that_is_no_part(cli: Cli, store: Store, sample: str) -> None:
    assert cli("verify", "--sample", sample).code == 2


def test_verify_finds_damage_names_it_and_repair_drops_it(cli: Cli, store: Store, folder: Path) -> None:
    store.put("noise", os.urandom(300_000))
    store.close()
    damage(folder)
    ran = cli("verify")
    assert ran.code == 1
    assert "1 bad and set aside in quarantine/" in ran.out
    assert "noise" in ran.out
    assert "1 of them is a miss now" in ran.out
    assert len(list((folder / "quarantine").iterdir())) == 1
    again = cli("verify", "--repair", "--json")
    assert again.code == 1
    assert again.json["dropped"] == ["noise"]
    assert cli("verify").code == 0
    assert "noise" not in cli("ls").out


def test_verify_tells_what_a_remote_has_from_what_is_lost(
    cli: Cli, store: Store, folder: Path, tmp_path: Path
) -> None:
    bucket = (tmp_path / "bucket").as_uri()
    with Store(tmp_path / "one") as one:
        one.put("noise", os.urandom(300_000))
        know(one, "team", bucket).push()
        data = one.get("noise")
    know(store, "team", bucket, read_only=True).pull(lazy=True)
    for command in (("verify",), ("verify", "--repair")):
        assert store.get("noise") == data
        store.close()
        damage(folder)
        ran = cli(*command)
        assert ran.code == 1
        assert "fetched when they are read" in ran.out
        assert "of them" not in ran.out
        assert "dropped" not in ran.out
        store = Store(folder, memory=0)
    end_fetcher(store)
    store.close()


def test_doctor_finds_a_sound_store_in_order(cli: Cli, store: Store, folder: Path) -> None:
    ran = cli("doctor")
    assert (ran.code, ran.out) == (0, f"{folder}: all in order\n")
    assert cli("doctor", "--json").json == {"findings": []}


def test_doctor_reports_what_is_lost_and_what_to_do(cli: Cli, store: Store, folder: Path) -> None:
    store.put("noise", os.urandom(300_000))
    damage(folder)
    assert store.get("noise") is None
    ran = cli("doctor")
    assert ran.code == 1
    assert "to do: 1 blob" in ran.out
    assert "castore verify --repair" in ran.out
    cli("verify", "--repair")
    assert cli("doctor").code == 0


def test_doctor_rebuilds_an_index_that_is_gone(cli: Cli, store: Store, folder: Path) -> None:
    store.put("soon", b"x", ttl="1h", metadata={"k": "v"}, pin=True)
    before = cli("ls", "--json").out
    store.close()
    for file in folder.glob("index.sqlite*"):
        file.unlink()
    ran = cli("doctor", "--rebuild-index")
    assert ran.code == 0
    assert "a new index of 4 entries and 4 blobs" in ran.out
    names = [line.split('"')[3] for line in before.splitlines()]
    assert cli("ls").out.split() == names
    assert cli("stat", "soon", "--json").json["metadata"] == {"k": "v"}
    assert cli("verify").code == 0


def test_gc_says_that_pins_hold_more_than_the_budget_and_how_much(cli: Cli, store: Store) -> None:
    store.put("pinned", os.urandom(300_000), pin=True)
    store.put("free", os.urandom(300_000))
    ran = cli("gc", "--max-size", "100KB")
    assert ran.code == 1
    assert ran.err == (
        "castore: pins hold 300 KB, more than the budget of 100 KB: `castore unpin` entries,"
        " or end mounts that were made with --pin; links of `castore watch --replace` keep their bytes, too\n"
    )
    assert [entry.name for entry in store.entries()] == ["pinned"]
    assert cli("gc", "--max-size", "100KB", "--json").json["pinned"] == 300_000
    assert cli("gc", "--max-size", "300KB", "--json").json["pinned"] == 0
    assert cli("gc", "--max-size", "300KB").code == 0


def test_gc_without_a_bound_leaves_what_passes_the_budget(cli: Cli, store: Store) -> None:
    store.put_many((f"n{number}", noise(100_000, number)) for number in range(5))
    cli("init", "--max-size", "100KB")
    assert cli("gc", "--max-size", "unlimited", "--json").json["evicted"] == []
    assert cli("gc", "--json").json["evicted"] != []
