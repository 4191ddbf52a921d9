"""`castore stat`."""

from __future__ import annotations

import re
from pathlib import Path

from castore import Store
from tests.cli.conftest import Cli


def test_panel_shows_what_there_is(cli: Cli, store: Store, folder: Path) -> None:
    store.put("copy", store.get("large.bin") or b"")
    store.put("soon", b"x", ttl="1h")
    store.get("nosuch")
    store.flush()
    cli("init", "--max-size", "1GB")
    out = cli("stat").out
    assert str(folder) in out
    assert "5 entries of 4 blobs" in out
    assert re.search(r"logical +6.3 MB", out)
    assert re.search(r"unique +3.1 MB +without duplicates: 2.00x smaller", out)
    assert "% saved in all" in out
    assert re.search(r"budget +1 GB", out)
    assert "1 misses" in out
    assert re.search(r"expires in +(59m\d+s|1h) +soon", out)
    assert re.search(r"largest +3.1 MB .*\n.* 3.1 MB .*\n.* data \(2\)", out)
    assert "\x1b" not in out  # no colours without a terminal


def test_panel_of_an_empty_store(cli: Cli) -> None:
    cli("init")
    ran = cli("stat")
    assert ran.code == 0
    assert "0 entries of 0 blobs" in ran.out


def test_json_has_the_figures_and_ratios(cli: Cli, store: Store, folder: Path) -> None:
    figures = cli("stat", "--json").json
    stat = store.stat()
    assert (figures["entries"], figures["logical"], figures["stored"]) == (3, stat.logical, stat.stored)
    assert figures["path"] == str(folder)
    assert figures["compression_ratio"] == round(stat.compression_ratio, 4)
    assert [prefix["prefix"] for prefix in figures["prefixes"]] == ["large.bin", "data"]


def test_hits_and_misses_add_up_over_processes(cli: Cli, store: Store) -> None:
    store.get("data/a.txt")
    store.get("nosuch")
    store.close()
    with Store(store.path) as other:
        other.get("data/a.txt")
    figures = cli("stat", "--json").json
    assert (figures["disk_hits"], figures["misses"]) == (2, 1)


def test_prometheus_format_is_whole(cli: Cli, store: Store, folder: Path) -> None:
    lines = cli("stat", "--prometheus").out.splitlines()
    described: set[str] = set()
    for line in lines:
        if line.startswith("# "):
            described.add(" ".join(line.split()[1:3]))
            continue
        labels = r'store="([^"]+)"(?:,(?:tier|kind|direction)="[a-z]+")?'
        sample = re.fullmatch(rf"(castore_[a-z_]+)\{{{labels}\}} (\d+(?:\.\d+)?)", line)
        assert sample, line
        assert sample[2] == str(folder)
        assert {f"HELP {sample[1]}", f"TYPE {sample[1]}"} <= described
    assert f'castore_entries{{store="{folder}"}} 3' in lines
    assert f'castore_hits_total{{store="{folder}",tier="disk"}} 0' in lines


def test_one_entry_in_words_and_in_json(cli: Cli, store: Store) -> None:
    store.put("one", b"x" * 5000, metadata={"k": "v", "l": [1, None]}, ttl="1d", pin=True)
    out = cli("stat", "one").out
    entry = store.entry("one")
    assert entry is not None
    assert re.search(rf"^digest +{entry.digest}$", out, re.M)
    assert "5 KB (5,000 bytes)" in out
    assert "in 23h59m" in out or "in 1d" in out
    assert re.search(r"^metadata +k=v, l=\[1, null\]$", out, re.M)
    assert re.search(r"^pinned +yes$", out, re.M)
    assert cli("stat", "one", "--json").json == entry._asdict()


def test_unknown_name_is_an_error(cli: Cli, store: Store) -> None:
    ran = cli("stat", "nosuch")
    assert ran.code == 1
    assert "no entry 'nosuch'" in ran.err
