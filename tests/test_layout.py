"""The one list of a store's possible contents is that of docs/format.md, and other files are not touched."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path
from subprocess import PIPE

import pytest

from castore import Store, layout, settings
from castore.adapters.tree import DiskCache, TreeCacheManager
from castore.cli.main import main
from castore.errors import LostSettingsWarning, NestedStoreWarning, StoreError
from castore.layout import Kind
from castore.repair import doctor
from castore.system.temporary import pid_namespace, process_started
from tests.warm import WarmPython

PAGE = (Path(__file__).parents[1] / "docs" / "format.md").read_text()


def page_paths() -> dict[str, str]:
    """The paths of the page's first table, each with its mode."""
    table = (
        PAGE.split("## The folder")[1].split("| path | what | mode |\n|---|---|---|\n")[1].split("\n\n")[0]
    )
    rows = [re.split(r" \|(?: |$)", line.removeprefix("| ")) for line in table.splitlines()]
    return {path: row[2].strip(" |") for row in rows for path in re.findall("`([^`]+)`", row[0])}


def test_the_list_is_the_pages_table() -> None:
    assert list(page_paths()) == [place.path for place in layout.PLACES]
    for path, mode in page_paths().items():
        (place,) = (place for place in layout.PLACES if place.path == path)
        assert (mode == "0700") == (place.kind in (Kind.FOLDER, Kind.TREE)), path
        assert path.endswith("/") == (place.kind in (Kind.FOLDER, Kind.TREE)), path


def test_each_path_of_the_page_is_known_by_its_own_line() -> None:
    filled = {
        "abcd…": "ab" * 32,
        "N-P-S-U.T": (f"1-2-3-{'f' * 32}.{'e' * 32}"),
        "N-P-S-U": f"1-2-3-{'f' * 32}",
    }
    filled |= {"N-P": "1-2", "-H": f"-{'a' * 16}", "json.P": "json.77"}
    filled |= {
        "REF@H": f"{'e' * 100}@{'a' * 16}",
        "REF@seen": f"{'e' * 100}@seen",
        "/R": f"/{'r' * 100}",
    }  # no name is longer
    for place in layout.PLACES:
        path = place.path.rstrip("/")
        for letters, example in filled.items():
            path = path.replace(letters, example)
        assert layout.place_of(path) == place, path
        assert layout.place_of(f"{path}x") is None, path
        assert layout.place_of(f"x{path}") is None, path


def test_what_is_made_with_a_store_is_what_the_list_says(tmp_path: Path) -> None:
    Store(tmp_path / "store").close()
    folders = {str(path.relative_to(tmp_path / "store")) for path in tmp_path.glob("store/**/")}
    assert folders - {"."} == set(layout.CREATED)
    assert {path.name for path in (tmp_path / "store").iterdir()} <= layout.TOP


def test_a_linked_work_folder_is_refused_like_any_other(tmp_path: Path) -> None:
    Store(tmp_path / "store").close()
    (tmp_path / "outside").mkdir()
    (tmp_path / "store/work").symlink_to(tmp_path / "outside")
    with pytest.raises(StoreError, match="work is a link or a file where a folder of the store belongs"):
        Store(tmp_path / "store")


def test_a_store_that_lost_its_settings_is_made_again_around_its_work(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        store.put("a", b"kept")
    (tmp_path / "store/work").mkdir()
    (tmp_path / "store/castore.json").unlink()
    with pytest.warns(LostSettingsWarning), Store(tmp_path / "store") as store:
        assert store.get("a") == b"kept"


# --- strangers ----------------------------------------------------------------------------------------------


def test_what_stands_in_the_place_of_a_file_or_among_files_goes_to_quarantine(tmp_path: Path) -> None:
    Store(tmp_path / "store").close()
    path = tmp_path / "store"
    places = [
        "ballast",
        "objects/packs/000000aa.pack",
        "objects/pictures",
        "tmp/scratch",
        "locks/datasets",
        "work/x",
    ]
    (path / "ballast").unlink()
    (path / "work").mkdir()
    for place in places:
        (path / place).mkdir()
        (path / place / "inside").write_text("mine")
    found = doctor.examine(path)
    assert sorted(finding.what.split()[0] for finding in found) == sorted(places)
    assert all(finding.mended for finding in found)
    assert len(list(path.glob("quarantine/*/inside"))) == len(places)
    assert doctor.examine(path) == []


def test_what_is_in_nobodys_way_is_left_and_reported(tmp_path: Path) -> None:
    Store(tmp_path / "store").close()
    path = tmp_path / "store"
    (path / "my pictures").mkdir()
    (path / "shortcut").symlink_to(tmp_path)
    (path / "README").write_text("files of any name hurt nobody")
    for _ in range(2):
        found = doctor.examine(path)
        assert sorted(finding.what for finding in found) == [
            "my pictures was not made by castore, and is left where it is",
            "shortcut was not made by castore, and is left where it is",
        ]
        assert not any(finding.mended or finding.left_to_do for finding in found)
    assert (path / "my pictures").is_dir()


@pytest.mark.parametrize("command", [["doctor"], ["doctor", "--rebuild-index"], ["gc", "--grace", "0"]])
def test_a_folder_that_a_live_process_works_in_stays_wherever_it_lies(
    tmp_path: Path, command: list[str], warm_datasets: WarmPython
) -> None:
    """A user has named a folder of the store as `temp_dir`."""
    path = tmp_path / "store"
    program = (
        "import sys\nfrom castore import Store\nfrom castore.adapters.datasets import scratch as work\n"
        "print(work.new_file(Store(sys.argv[1]), sys.argv[1] + '/tmp/mine'), flush=True)\nsys.stdin.read()"
    )
    process = warm_datasets.start(["-c", program, path], stdin=PIPE, stdout=PIPE, text=True)
    assert process.stdout is not None
    file = Path(process.stdout.readline().strip())
    assert main(["--store", str(path), *command]) == 0
    assert file.parent.is_dir()
    process.communicate("")
    assert process.returncode == 0
    assert main(["--store", str(path), "doctor"]) == 0
    assert not file.parent.parent.exists()


def test_gc_moves_no_folder(tmp_path: Path) -> None:
    import os

    with Store(tmp_path / "store") as store:
        (store.path / "tmp/old").mkdir()
        os.utime(store.path / "tmp/old", (1e9, 1e9))
        assert store.gc().leftovers == []
        assert (store.path / "tmp/old").is_dir()


# --- stores inside stores -----------------------------------------------------------------------------------


def inner_paths() -> list[str]:
    """Folders of a store in which a user may make another store."""
    return ["disk", "run/3/cache", "work/cache", "tmp/cache", "objects/cache"]


@pytest.mark.parametrize("place", inner_paths())
def test_a_store_inside_a_store_is_left_alone_and_reported(tmp_path: Path, place: str) -> None:
    outer = tmp_path / "outer"
    with Store(outer) as store:
        store.put("outside", b"outer bytes")
    with pytest.warns(NestedStoreWarning, match=f"{place} lies inside the store {outer}"):
        inner = Store(outer / place)
    with inner:
        inner.put("inside", b"inner bytes")
        for _ in range(2):
            for findings in (doctor.examine(outer), doctor.rebuild_index(outer)[0]):
                (finding,) = findings
                assert "another store, or contains one; it is left alone" in finding.what
                assert finding.what.split()[0] in place
                assert not finding.mended
                assert not finding.left_to_do
            assert doctor.examine(outer / place) == []
        assert doctor.rebuild_index(outer / place)[1].entries == 1
        assert inner.get("inside") == b"inner bytes"
    with Store(outer) as store:
        store.gc(grace=0)
        assert store.get("outside") == b"outer bytes"
    with Store(outer / place) as inner:
        assert inner.get("inside") == b"inner bytes"


@pytest.mark.parametrize("place", layout.FOLDERS)
def test_no_store_is_made_of_a_folder_of_another(tmp_path: Path, place: str) -> None:
    Store(tmp_path / "outer").close()
    with pytest.raises(StoreError, match=f"{place} is a folder of the store .*outer, for its own files"):
        Store(tmp_path / "outer" / place)
    assert doctor.examine(tmp_path / "outer") == []


def test_it_is_reported_once_when_it_is_made(tmp_path: Path) -> None:
    outer = TreeCacheManager(tmp_path / "cache")
    with pytest.warns(NestedStoreWarning) as told:
        DiskCache(tmp_path / "cache/disk").put("key", 1)
    assert [warning.category for warning in told].count(NestedStoreWarning) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", NestedStoreWarning)
        DiskCache(tmp_path / "cache/disk").put("key", 2)
        Store(tmp_path / "cache-beside").close()
    outer.close()


def test_the_command_line_says_it_once_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--store", str(tmp_path / "outer"), "init"]) == 0
    assert capsys.readouterr().err == ""
    inner = tmp_path / "outer/inner"
    assert main(["--store", str(inner), "init"]) == 0
    said = capsys.readouterr().err
    assert said.startswith(f"castore: the new store {inner} lies inside the store {tmp_path / 'outer'}: ")
    assert said.count("\n") == 1
    assert main(["--store", str(inner), "init", "--ttl", "1d"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["--store", str(tmp_path / "outer"), "doctor"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("noted: inner is another store, or contains one; it is left alone")
    assert out.endswith("all in order\n")


def test_sharing_a_store_leaves_the_one_inside_as_it_is(tmp_path: Path) -> None:
    import grp
    import os

    Store(tmp_path / "outer").close()
    with pytest.warns(NestedStoreWarning):
        Store(tmp_path / "outer/inner").close()
    before = (tmp_path / "outer/inner/index.sqlite").stat().st_mode
    group = grp.getgrgid(os.getgid()).gr_name
    assert main(["--store", str(tmp_path / "outer"), "init", "--shared", group]) == 0
    assert (tmp_path / "outer/index.sqlite").stat().st_mode & 0o060
    assert (tmp_path / "outer/inner/index.sqlite").stat().st_mode == before
    assert settings.load(tmp_path / "outer/inner") == settings.Settings()


# --- users and processes ------------------------------------------------------------------------------------


def test_a_process_that_proc_hides_is_no_dead_one(tmp_path: Path) -> None:
    """With hidepid, `/proc` hides other users' processes: their temporary files are not leftovers."""
    import os

    if os.geteuid() != 0:
        pytest.skip("mounting /proc anew needs root")
    with subprocess.Popen(["sleep", "1000"]) as other:
        started = process_started(other.pid)
        name = f"{pid_namespace()}-{other.pid}-{started}-{'a' * 32}.part"
        # Imported before root is given up: the interpreter's own files may be closed to other users.
        program = (
            "import os\nfrom castore.system.temporary import is_of_live_process, is_running\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            f"assert not os.path.exists('/proc/{other.pid}')\n"
            f"assert is_running({other.pid}, {started}) and is_of_live_process({name!r})\n"
            "assert not is_running(2**22 + 1, 1)\nassert is_running(os.getpid())\n"
        )
        command = f'mount -t proc -o hidepid=2 proc /proc && exec {sys.executable} -c "$0"'
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", command, program], capture_output=True, text=True, timeout=60
        )
        other.kill()
    if "permission denied" in done.stderr.lower() and "mount" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
