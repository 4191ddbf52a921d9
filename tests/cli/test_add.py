"""`castore add`: the files that it takes, their names, and its messages about other files."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from castore import Store
from tests.cli.conftest import Cli
from tests.helpers import mixed, noise


@pytest.fixture
def data(tmp_path: Path, folder: Path) -> Path:
    """A folder with small files, a large one, and a folder in it."""
    root = tmp_path / "data"
    (root / "sub").mkdir(parents=True)
    (root / "a.txt").write_bytes(b"alpha")
    (root / "sub" / "b.txt").write_bytes(b"beta")
    (root / "sub" / "large.bin").write_bytes(os.urandom(3 << 20))
    (root / "empty").write_bytes(b"")
    return root


def names(folder: Path, prefix: str = "") -> list[str]:
    with Store(folder) as store:
        return [entry.name for entry in store.entries(prefix)]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["data"], ["data/a.txt", "data/empty", "data/sub/b.txt", "data/sub/large.bin"]),
        (["data/"], ["data/a.txt", "data/empty", "data/sub/b.txt", "data/sub/large.bin"]),
        (["data/../data/sub"], ["sub/b.txt", "sub/large.bin"]),
        (["data/sub", "--as", "x/y"], ["x/y/b.txt", "x/y/large.bin"]),
        (["data/sub", "--as", "x/"], ["x/b.txt", "x/large.bin"]),
        (["data/sub", "--as", ""], ["b.txt", "large.bin"]),
        (["data/a.txt"], ["a.txt"]),
        (["data/a.txt", "--as", "x/other"], ["x/other"]),
        (["data/a.txt", "--as", "x/"], ["x/a.txt"]),
        (["data/a.txt", "data/sub", "--as", "x"], ["x/a.txt", "x/sub/b.txt", "x/sub/large.bin"]),
    ],
)
def test_names_come_from_paths_and_as(
    cli: Cli, data: Path, folder: Path, words: list[str], named: list[str]
) -> None:
    ran = cli("add", *words)
    assert (ran.code, ran.err) == (0, "")
    assert names(folder) == named


def test_the_folder_one_is_in_has_its_own_name(
    cli: Cli, data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data / "sub")
    assert cli("add", ".").code == 0
    assert names(folder) == ["sub/b.txt", "sub/large.bin"]


def test_bytes_are_those_of_the_files(cli: Cli, data: Path, folder: Path) -> None:
    cli("add", "data")
    with Store(folder) as store:
        for name in ("a.txt", "empty", "sub/b.txt", "sub/large.bin"):
            assert store.get(f"data/{name}") == (data / name).read_bytes()


def test_report_distinguishes_new_from_known(cli: Cli, data: Path) -> None:
    size = sum(path.stat().st_size for path in data.rglob("*") if path.is_file())
    first = cli("add", "data", "--json").json
    assert (first["files"], first["bytes"], first["new_blobs"], first["failed"]) == (4, size, 4, 0)
    assert first["stored_bytes"] >= 3 << 20
    second = cli("add", "data", "--as", "again", "--json").json
    assert (second["files"], second["new_blobs"], second["stored_bytes"]) == (4, 0, 0)
    assert "4 known already" in cli("add", "data").out


def test_report_calls_nothing_known_that_the_budget_has_taken(cli: Cli, tmp_path: Path) -> None:
    cli("init", "--max-size", "3MB")
    (tmp_path / "many").mkdir()
    for number in range(8):
        (tmp_path / "many" / f"{number}.bin").write_bytes(os.urandom(1_000_000))
    ran = cli("add", "many")
    assert (ran.code, "evicted to stay under the budget" in ran.out, "known" in ran.out) == (1, True, False)
    assert ran.out.count("\n") == 2


def test_two_paths_of_one_name_are_refused_before_anything_is_put(
    cli: Cli, tmp_path: Path, folder: Path
) -> None:
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "x.txt").write_text(place)
    ran = cli("add", "one/x.txt", "two/x.txt")
    assert ran.code == 2
    assert "would both be named 'x.txt'" in ran.err
    assert not folder.exists()


def test_options_reach_every_entry_small_and_large(cli: Cli, data: Path, folder: Path) -> None:
    ran = cli("add", "data", "--codec", "lz4", "--ttl", "1h", "--meta", "a=b=c", "--meta", "d=", "--pin")
    assert ran.code == 0
    with Store(folder) as store:
        entries = list(store.entries())
        assert len(entries) == 4
        for entry in entries:
            assert entry.pinned
            assert {"a": "b=c", "d": ""}.items() <= entry.metadata.items()
            assert entry.expires is not None
            assert 3590 < entry.expires - entry.accessed <= 3600
        assert {entry.codec for entry in entries} <= {"lz4", "none"}


@pytest.mark.parametrize("wrong", [["--meta", "a"], ["--codec", "rar"], ["--ttl", "soon"], ["--as", "../x"]])
def test_wrong_options_are_refused_before_anything_is_put(
    cli: Cli, data: Path, folder: Path, wrong: list[str]
) -> None:
    assert cli("add", "data", *wrong).code == 2
    assert not folder.exists()


def test_links_are_followed_and_loops_and_strange_things_are_named(
    cli: Cli, data: Path, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "c.txt").write_text("gamma")
    (data / "to-file").symlink_to(data / "a.txt")
    (data / "to-folder").symlink_to(tmp_path / "elsewhere")
    (data / "sub" / "up").symlink_to("..")
    (data / "nowhere").symlink_to("gone")
    (data / "itself").symlink_to("itself")
    os.mkfifo(data / "pipe")
    os.mknod(data / "socket", stat.S_IFSOCK | 0o600)  # a bound one may have no long path
    ran = cli("add", "data")
    assert ran.code == 1
    complaints = ran.err.splitlines()
    assert len(complaints) == 5
    for name, why in {
        "sub/up": (
            "links to a folder that it lies in"
        ), "nowhere": "links to nothing", "itself": "symbolic links",
        "pipe": "neither a file nor a folder", "socket": "neither a file nor a folder",
    }.items():  # fmt: skip
        assert any(f"data/{name}" in line and why in line for line in complaints), name
    put = names(folder, "data")
    assert {"data/to-file", "data/to-folder/c.txt"} <= set(put)
    assert len(put) == 6


def test_one_bad_file_spoils_nothing_for_the_others(cli: Cli, data: Path, folder: Path) -> None:
    (data / os.fsdecode(b"latin-\xe9")).write_bytes(b"x")
    (data / "line\nbreak").write_bytes(b"x")
    ran = cli("add", "data", "nosuch", "--as", "d")
    assert ran.code == 1
    assert len(ran.err.splitlines()) == 3  # however strange the names are
    assert "added 4 files" in ran.out
    assert len(names(folder)) == 4


def test_name_conflict_names_the_file_and_keeps_the_rest(cli: Cli, data: Path, folder: Path) -> None:
    with Store(folder) as store:
        store.put("data/sub", b"in the way")
    ran = cli("add", "data")
    assert ran.code == 1
    assert sorted(line.split(":")[1].strip() for line in ran.err.splitlines()) == [
        "data/sub/b.txt",
        "data/sub/large.bin",
    ]
    assert names(folder) == ["data/a.txt", "data/empty", "data/sub"]


def test_the_store_is_never_taken_into_itself(cli: Cli, data: Path, folder: Path, tmp_path: Path) -> None:
    cli("init")
    ran = cli("add", tmp_path, "--as", "all")
    assert ran.code == 1
    assert "is the store itself" in ran.err
    assert {name.split("/")[1] for name in names(folder)} == {"data"}
    for part in (folder, folder / "objects", folder / "index.sqlite"):
        ran = cli("add", part, "--as", "own")
        assert ran.code == 1
        assert f"{part} is the store itself, or lies in it; skipped" in ran.err
    assert {name.split("/")[1] for name in names(folder)} == {"data"}


def test_full_budget_ends_it_with_one_line(cli: Cli, folder: Path, tmp_path: Path) -> None:
    cli("init", "--max-size", "100KB")
    with Store(folder) as store:
        store.put("pinned", os.urandom(90_000), pin=True)
    (tmp_path / "many").mkdir()
    for number in range(50):
        (tmp_path / "many" / str(number)).write_bytes(os.urandom(5000))
    ran = cli("add", "many")
    assert ran.code == 1
    assert ran.err.count("\n") == 1
    assert "--max-size" in ran.err


def test_thousands_of_small_files_are_all_there(cli: Cli, folder: Path, tmp_path: Path) -> None:
    for number in range(3000):
        place = tmp_path / "many" / str(number % 7)
        place.mkdir(parents=True, exist_ok=True)
        (place / str(number)).write_bytes(b"%d" % number * 50)
    assert cli("add", "many", "--json").json["files"] == 3000
    with Store(folder) as store:
        for number in range(3000):
            assert store.get(f"many/{number % 7}/{number}") == b"%d" % number * 50


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Path]:
    """A file below more folders than Python may nest calls, which pytest could not remove either."""
    place = tmp_path / "deep"
    for _ in range(1200):
        place.mkdir()
        place /= "d"
    place.write_bytes(b"x")
    yield tmp_path / "deep"
    subprocess.run(["rm", "-r", str(tmp_path / "deep")], check=True)


def test_deep_folders_do_not_end_in_a_recursion_error(cli: Cli, deep: Path, folder: Path) -> None:
    assert cli("add", deep).code == 0
    assert len(names(folder)) == 1


def test_the_report_names_only_what_something_was_put_for(cli: Cli, data: Path) -> None:
    ran = cli("add", "data/a.txt", "missing", "--as", "q")
    assert ran.code == 1
    assert ran.out.startswith("added 1 file (5 B) as q/a.txt in ")
    assert ran.err == "castore: missing: No such file or directory; skipped\n"


def test_a_file_that_opens_and_cannot_be_read_is_named(cli: Cli, folder: Path) -> None:
    ran = cli("add", "/proc/self/mem", "--as", "mem")
    assert (ran.code, ran.err) == (1, "castore: /proc/self/mem: Input/output error; skipped\n")
    with Store(folder) as store, pytest.raises(OSError, match=r"Input/output error: '/proc/self/mem'"):
        store.put_file("mem", "/proc/self/mem")


def test_empty_folders_are_reported_and_are_no_failure(cli: Cli, data: Path) -> None:
    for name in ("hollow/inner", "none"):
        (data / name).mkdir(parents=True)
    ran = cli("add", "data")
    assert ran.code == 0
    assert ran.err == (
        "castore: 2 empty folders left out, since a store keeps only files: data/hollow/inner, data/none\n"
    )
    assert cli("add", "data", "--json").json["empty_folders"] == 2


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB, in a folder with a file of another one."""
    disk = tmp_path / "all" / "disk"
    disk.mkdir(parents=True)
    (tmp_path / "all" / "beside").write_bytes(b"beside")
    command = ["mount", "-t", "tmpfs", "-o", "size=8M", "tmpfs", str(disk)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a disk takes root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_other_file_systems_are_entered_when_asked_for(cli: Cli, disk: Path, folder: Path) -> None:
    (disk / "inside").write_bytes(b"inside")
    ran = cli("add", "all")
    assert ran.code == 1
    assert ran.err == ("castore: all/disk is on another file system, which --cross-mounts enters; skipped\n")
    assert names(folder) == ["all/beside"]
    assert cli("add", "all", "--cross-mounts").code == 0
    assert names(folder) == ["all/beside", "all/disk/inside"]


def test_a_link_to_another_file_system_is_followed_and_so_is_a_disk_that_is_named(
    cli: Cli, disk: Path, folder: Path, tmp_path: Path
) -> None:
    (disk / "inside").write_bytes(b"inside")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "there").symlink_to(disk)
    assert cli("add", "links", disk).code == 0
    assert names(folder) == ["disk/inside", "links/there/inside"]


def test_links_of_processes_do_not_lead_over_the_disk(cli: Cli, folder: Path) -> None:
    ran = cli("add", f"/proc/{os.getpid()}/task/{os.getpid()}", "--as", "task")
    for link in ("cwd", "root"):
        assert f"/{link} is a link of a process that leads out of /proc; skipped" in ran.err
    assert not {"cwd", "root"} & {name.split("/")[1] for name in names(folder)}


def test_a_full_disk_says_how_many_got_in_and_the_same_command_goes_on(
    cli: Cli, disk: Path, tmp_path: Path
) -> None:
    # Files are put in batches of 8 MB, two at a time: two batches fit, and four do not.
    subprocess.run(["mount", "-o", "remount,size=24M", str(disk)], check=True)
    (tmp_path / "many").mkdir()
    for number in range(150):
        (tmp_path / "many" / f"{number:03}").write_bytes(os.urandom(200_000))
    store = str(disk / "store")
    words = ("--store", store, "add", "many", "--json")
    ran = cli(*words)
    report = ran.json
    assert ran.code == 1
    assert 0 < report["files"] < 150
    assert report["error"].startswith("the disk of ")
    assert f"; {report['files']} files added; the same command goes on from there\n" in ran.err
    with Store(store) as kept:
        assert len(list(kept.entries())) == report["files"]
    subprocess.run(["mount", "-o", "remount,size=80M", str(disk)], check=True)
    ran = cli(*words)
    assert (ran.code, ran.json["files"], ran.json["error"]) == (0, 150, None)
    assert ran.json["new_blobs"] == 150 - report["files"]


@pytest.mark.parametrize("words", [("--ttl", "0"), ("--ttl", "0ms")])
def test_a_life_of_no_length_is_refused(cli: Cli, data: Path, folder: Path, words: tuple[str, ...]) -> None:
    ran = cli("add", "data", *words)
    assert ran.code == 2
    assert "expire before they can be read" in ran.err
    assert not folder.exists()


def test_files_are_added_for_good_where_the_store_has_a_lifetime(cli: Cli, data: Path, folder: Path) -> None:
    cli("init", "--ttl", "1h")
    cli("add", str(data), "--as", "kept", "--ttl", "never")
    cli("add", str(data), "--as", "for-an-hour")
    with Store(folder) as store:
        assert {entry.expires for entry in store.entries("kept")} == {None}
        assert None not in {entry.expires for entry in store.entries("for-an-hour")}


@pytest.mark.parametrize("size", [0, 5, 20_000_000])
def test_standard_input_is_added_under_a_name(
    castore: Callable[..., subprocess.Popen[bytes]], cli: Cli, folder: Path, size: int
) -> None:
    data = mixed(size)
    words = (
        "add",
        "-",
        "--as",
        "piped/in",
        "--meta",
        "k=v",
        "--ttl",
        "1d",
        "--pin",
        "--codec",
        "lz4",
        "--json",
    )
    out, err = castore(*words, stdin=subprocess.PIPE).communicate(data)
    assert err == b""
    report = json.loads(out)
    assert (report["files"], report["bytes"], report["new_blobs"]) == (1, size, 1)
    assert cli("cat", "piped/in").raw == data
    with Store(folder) as store:
        entry = store.entry("piped/in")
        assert entry is not None
        assert (entry.metadata, entry.pinned, entry.expires is None) == ({"k": "v"}, True, False)


def test_a_pipe_of_programs_ends_in_the_store(cli: Cli, data: Path, folder: Path) -> None:
    cli("init")
    command = f"tar c -C {data} . | {sys.executable} -m castore --store {folder} add - --as all.tar"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert "as all.tar" in done.stdout
    with Store(folder) as store, tarfile.open(fileobj=store.open("all.tar")) as tar:
        assert len(tar.getnames()) > 1


def test_an_input_that_is_cut_short_leaves_nothing(
    castore: Callable[..., subprocess.Popen[bytes]], folder: Path
) -> None:
    Store(folder).close()
    for number in (signal.SIGINT, signal.SIGKILL):
        with castore("add", "-", "--as", "piped", fresh=True, stdin=subprocess.PIPE) as adding:
            assert adding.stdin is not None
            adding.stdin.write(noise(20_000_000))
            adding.stdin.flush()  # the pipe is far smaller: all but its rest has been read
            adding.send_signal(number)
            adding.wait()
        with Store(folder) as store:
            assert list(store) == []
            store.gc()
            assert [path for path in (folder / "tmp").iterdir() if path.is_file()] == []


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("-",), "castore add - --as NAME"),
        (("-", "--as", "folder/"), "castore add - --as NAME"),
        (("-", "--as", ""), "castore add - --as NAME"),
        (
            ("-", "file", "--as", "x"),
            "goes alone; add the other paths with another command (a file of that name is ./-)",
        ),
        (("-", "--as", "../x"), "names cannot lead out of their folder"),
        (("-", "--as", "x", "--dict"), "--dict is for folders of small files"),
    ],
)
def test_standard_input_wants_a_name_and_goes_alone(
    cli: Cli, folder: Path, words: tuple[str, ...], problem: str
) -> None:
    ran = cli("add", *words)
    assert ran.code == 2
    assert problem in ran.err
    assert not folder.exists()


def test_an_input_that_is_closed_is_said(castore: Callable[..., subprocess.Popen[bytes]]) -> None:
    closed = castore("add", "-", "--as", "x", closed=(0,))
    assert b"standard input is closed" in closed.communicate()[1]
    assert closed.returncode == 1


def test_files_that_do_not_fit_together_are_a_failure(tmp_path: Path, cli: Cli) -> None:
    """Regression: "added 3 files", exit code 0, and one of them was there."""
    files = {f"many/{number}": noise(400_000, number) for number in range(3)}
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert cli("init", "--max-size", "1MB").code == 0
    ran = cli("add", tmp_path / "many", "--json")
    assert (ran.code, ran.json["files"], ran.json["failed"]) == (1, 3, 1)
    assert "1 of 3 files had to go again to make room for the others; raise the budget" in ran.err
    assert cli("add", tmp_path / "many" / "2", "--as", "many/2").code == 0
