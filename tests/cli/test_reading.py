"""`castore ls`, `cat` and `get`."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from castore import Store
from tests.cli.conftest import Cli

Start = Callable[..., subprocess.Popen[bytes]]
LARGE = bytes(range(256)) * 4096 * 3


def test_ls_prints_plain_names_a_line_each(cli: Cli, store: Store) -> None:
    assert cli("ls").out == "data/a.txt\ndata/b.txt\nlarge.bin\n"
    assert cli("ls", "data").out == "data/a.txt\ndata/b.txt\n"
    assert cli("ls", "data/a.txt").out == "data/a.txt\n"


def test_ls_lists_several_prefixes_and_names_those_without_entries(cli: Cli, store: Store) -> None:
    ran = cli("ls", "large.bin", "nothing", "data/")
    assert (ran.code, ran.out) == (1, "large.bin\ndata/a.txt\ndata/b.txt\n")
    assert ran.err == f"castore: there is no entry at or below 'nothing' in {store.path}\n"
    assert [line.split()[-1] for line in cli("ls", "-l", "data/b.txt", "large.bin").out.splitlines()] == [
        "NAME", "data/b.txt", "large.bin",
    ]  # fmt: skip
    assert cli("ls", "data", "../x") == (2, b"", cli("ls", "../x").err)


def test_ls_of_an_empty_store_is_empty_and_of_an_unknown_prefix_an_error(cli: Cli) -> None:
    cli("init")
    assert cli("ls") == (0, b"", "")
    ran = cli("ls", "dat")
    assert (ran.code, ran.out) == (1, "")
    assert "no entry at or below 'dat'" in ran.err


def test_ls_long_lists_sizes_codec_ages_and_pins(cli: Cli, store: Store) -> None:
    store.put("soon", b"x" * 2000, ttl="1h30m", pin=True)
    head, line = cli("ls", "-l", "soon").out.splitlines()
    assert head.split() == ["SIZE", "STORED", "CODEC", "AGE", "EXPIRES", "IN", "PIN", "NAME"]
    assert line.startswith("     2 KB")
    assert "1h29m" in line or "1h30m" in line
    assert line.endswith("pin  soon")


def test_ls_json_is_one_object_a_line(cli: Cli, store: Store) -> None:
    lines = [json.loads(line) for line in cli("ls", "--json").out.splitlines()]
    assert [line["name"] for line in lines] == ["data/a.txt", "data/b.txt", "large.bin"]
    entry = store.entry("large.bin")
    assert entry is not None
    assert lines[2] == entry._asdict()


def test_cat_writes_the_bytes_of_all_names(cli: Cli, store: Store) -> None:
    assert cli("cat", "data/a.txt", "large.bin", "data/b.txt").raw == b"alpha" + LARGE + b"beta"


def test_cat_goes_on_after_a_missing_name(cli: Cli, store: Store) -> None:
    ran = cli("cat", "data/a.txt", "nosuch", "data", "data/b.txt")
    assert (ran.code, ran.raw) == (1, b"alphabeta")
    missing, folder = ran.err.splitlines()
    assert "no entry 'nosuch'" in missing
    assert "`castore ls data`" in folder


@pytest.mark.parametrize("length", [64, 8, 9, 63])
def test_digest_serves_where_a_name_does(cli: Cli, store: Store, length: int) -> None:
    entry = store.entry("large.bin")
    assert entry is not None
    digest = entry.digest[:length]
    assert cli("cat", digest).raw == LARGE
    assert cli("get", digest, "-o", "out").code == 0
    assert Path("out").read_bytes() == LARGE
    assert cli("stat", digest, "--json").json["names"] == ["large.bin"]


def test_short_digest_is_no_digest_and_names_come_first(cli: Cli, store: Store) -> None:
    entry = store.entry("large.bin")
    assert entry is not None
    assert cli("cat", entry.digest[:7]).code == 1
    store.put(entry.digest[:8], b"a name that looks like a digest")
    assert cli("cat", entry.digest[:8]).raw == b"a name that looks like a digest"


def test_ambiguous_digest_is_an_error_that_says_so(cli: Cli, store: Store) -> None:
    # Digests with eight common digits cannot be found by trying: the rows are made by hand.
    with store.index.write() as txn:
        for last in (b"\x01", b"\x02"):
            txn.execute(
                "INSERT INTO blobs (digest, size, stored, codec, pack, "
                "offset) VALUES (?, 1, 1, 'none', 0, 0)",
                (bytes.fromhex("abcdef12") + bytes(27) + last,),
            )
    ran = cli("cat", "abcdef12")
    assert ran.code == 1
    assert "several digests begin with abcdef12" in ran.err
    assert cli("cat", "nosuch", "abcdef12", "data/a.txt").raw == b"alpha"


def test_cat_takes_constant_memory(castore: Start, store: Store, tmp_path: Path) -> None:
    size = 256 << 20
    with open(tmp_path / "zeros", "wb") as file:
        file.truncate(size)
    store.put_file("zeros", tmp_path / "zeros")
    program = (
        "import resource, subprocess, sys; out = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL);"
        "print(out.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    process = castore("cat", "zeros", fresh=True, stdout=subprocess.DEVNULL)
    command = list(map(str, process.args))  # type: ignore[arg-type]
    process.communicate()
    path = os.pathsep.join(entry for entry in sys.path if entry)
    out = subprocess.check_output(
        [sys.executable, "-c", program, *command], env=os.environ | {"PYTHONPATH": path}, text=True
    )
    code, kilobytes = map(int, out.split())
    assert code == 0
    assert kilobytes < 160_000


def test_get_writes_the_file_with_the_usual_rights(cli: Cli, store: Store, tmp_path: Path) -> None:
    ran = cli("get", "large.bin", "-o", "out.bin")
    assert (ran.code, ran.raw) == (0, b"")
    assert Path("out.bin").read_bytes() == LARGE
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(Path("out.bin").stat().st_mode) == 0o666 & ~umask


def test_get_to_standard_output(cli: Cli, store: Store) -> None:
    assert cli("get", "large.bin", "-o", "-").raw == LARGE


def test_get_replaces_a_file_only_by_a_whole_one(cli: Cli, store: Store, folder: Path) -> None:
    store.put("bad", hashlib.shake_256(b"noise").digest(3 << 20))
    entry = store.entry("bad")
    assert entry is not None
    (target,) = folder.glob(f"objects/*/{entry.digest}*")
    target.chmod(0o600)
    with open(target, "r+b") as file:
        file.seek(2 << 20)
        file.write(b"damage")
    Path("out.bin").write_bytes(b"old")
    ran = cli("get", "bad", "-o", "out.bin")
    assert ran.code == 1
    assert "damaged" in ran.err
    assert Path("out.bin").read_bytes() == b"old"
    assert list(Path().glob("*.part")) == list(Path().glob(".*.part")) == []
    assert cli("cat", "bad").err.startswith("castore: the bytes of 'bad' were found damaged")


def test_get_writes_through_links_and_into_devices(cli: Cli, store: Store) -> None:
    Path("real").write_bytes(b"old")
    Path("link").symlink_to("real")
    assert cli("get", "data/a.txt", "-o", "link").code == 0
    assert Path("link").is_symlink()
    assert Path("real").read_bytes() == b"alpha"
    assert cli("get", "data/a.txt", "-o", "/dev/null").code == 0
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("place", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_get_to_the_path_of_standard_output_goes_on_behind_what_is_there(
    castore: Start, store: Store, tmp_path: Path, place: str
) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"before\n")
    with open(log, "ab") as file:
        process = castore("get", "data/a.txt", "-o", place, stdout=file)
        assert process.communicate(timeout=300)[1] == b""
        file.write(b"after")
    assert (process.returncode, log.read_bytes()) == (0, b"before\nalphaafter")
    process = castore("get", "large.bin", "-o", place)
    assert process.communicate(timeout=300) == (LARGE, b"")
    assert process.returncode == 0


def test_get_that_is_told_to_end_leaves_no_part_of_a_file(
    castore: Start, store: Store, tmp_path: Path
) -> None:
    store.put("huge", bytes(1 << 20) * 256, codec="none")
    folder = tmp_path / "out"
    folder.mkdir()
    for _ in range(50):
        process = castore("get", "huge", "-o", folder / "huge", fresh=True)
        while not any(folder.glob(".castore-*.part")) and process.poll() is None:
            pass
        process.terminate()
        _, err = process.communicate(timeout=300)
        assert not any(folder.glob(".castore-*.part"))
        if process.returncode == 143:  # else the file was whole before the signal came
            break
    assert (process.returncode, err) == (143, b"castore: terminated\n")


def test_get_into_a_place_that_cannot_be_written_names_the_file(
    cli: Cli, store: Store, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", disk]).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        ran = cli("get", "data/a.txt", "-o", disk / "x")
    finally:
        subprocess.run(["umount", disk], check=True)
    assert (ran.code, ran.err) == (1, f"castore: {disk / 'x'}: Read-only file system\n")


def test_get_says_what_is_wrong_with_the_place(cli: Cli, store: Store, tmp_path: Path) -> None:
    assert "is a folder" in cli("get", "data/a.txt", "-o", str(tmp_path)).err
    assert "there is no folder" in cli("get", "data/a.txt", "-o", f"{tmp_path}/new/").err
    assert not (tmp_path / "new").exists()
    assert "make it first" in cli("get", "data/a.txt", "-o", "nodir/x").err
    assert not Path("nodir").exists()


def _files_below(folder: str) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()
    }


def test_get_of_a_folder_writes_its_files(cli: Cli, store: Store) -> None:
    store.put("data/deep/c.bin", LARGE)
    store.put("database", b"not below data")
    store.put("data/gone", b"", ttl=1e-9)
    wanted = {"a.txt": b"alpha", "b.txt": b"beta", "deep/c.bin": LARGE}
    for word in ("data", "data/"):
        ran = cli("get", "-r", word, "-o", f"out-{word[-1] == '/'}")
        assert (ran.code, ran.err) == (0, "")
        assert ran.out.startswith("wrote 3 files (3.1 MB) into out-")
    assert _files_below("out-True") == _files_below("out-False") == wanted
    everything = cli("get", "-r", "", "-o", "all", "--json").json
    assert everything["files"] == 5
    assert everything["problems"] == []
    assert _files_below("all") == {entry.name: store.get(entry.name) for entry in store.entries()}


def test_get_of_a_folder_goes_on_behind_files_that_cannot_be_written(cli: Cli, store: Store) -> None:
    Path("out/data/a.txt").mkdir(parents=True)
    Path("out/data/other").write_bytes(b"stays")
    ran = cli("get", "-r", "", "-o", "out", "--json")
    assert ran.code == 1
    assert (ran.json["files"], len(ran.json["problems"])) == (2, 1)
    assert "out/data/a.txt" in ran.err
    assert _files_below("out") == {
        "data/b.txt": store.get("data/b.txt"), "data/other": b"stays", "large.bin": LARGE,
    }  # fmt: skip


def test_get_of_a_folder_says_what_is_wrong(cli: Cli, store: Store) -> None:
    Path("file").write_bytes(b"")
    assert "file is no folder; give a folder with -o" in cli("get", "-r", "data", "-o", "file").err
    assert "'large.bin' is a file; leave out -r" in cli("get", "-r", "large.bin", "-o", "out").err
    assert "there is no entry at or below 'dat' in" in cli("get", "-r", "dat", "-o", "out").err
    assert cli("get", "-r", "../x", "-o", "out").code == 2
    assert "name a folder with -o" in cli("get", "-r", "data", "-o", "-").err
    assert "without -r there is nothing to report" in cli("get", "large.bin", "-o", "out", "--json").err
    assert "`castore get -r data -o FOLDER` writes its files" in cli("get", "data", "-o", "out").err
    assert not Path("out").exists()


def test_get_of_a_folder_ends_at_a_full_disk(cli: Cli, store: Store) -> None:
    os.mkdir("small")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", "small"], check=True)
    try:
        store.put("z", b"behind it")
        ran = cli("get", "-r", "", "-o", "small")
        assert ran.code == 1
        assert ran.err.count("\n") == 1
        assert "small/large.bin: No space left on device" in ran.err
        assert sorted(_files_below("small")) == ["data/a.txt", "data/b.txt"]
        assert ran.out.startswith("wrote 2 files (")
    finally:
        subprocess.run(["umount", "small"], check=True)
