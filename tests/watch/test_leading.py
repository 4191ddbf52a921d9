"""A folder of links into a mount that is gone: one loud message, for other tools compute the files anew."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import castore_fuse
from castore import Store
from castore.repair import doctor
from castore.system.temporary import is_running
from castore.watch import dangling_links
from tests.watch.conftest import Watch, make_file, replace_files, run


def kill_mount(store: Store) -> None:
    """Kill the daemon, as the kernel does when memory is short: the mountpoint stays, without answers."""
    ((pid, started),) = list(store.index.file.rows("SELECT pid, started FROM mounts"))
    os.kill(pid, signal.SIGKILL)
    while is_running(pid, started):  # a busy machine takes a moment
        time.sleep(0.001)


def test_a_watcher_reports_that_its_links_lead_to_nothing_and_when_they_do_again(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    """Nothing happens in the folder meanwhile: the watcher must not need a new file to find out."""
    make_file(folder, "a", b"a")
    sooner = "from castore.watch import dangling_links; dangling_links._CHECK_SECONDS = 0.1"
    watching = watch("--replace", period=sooner)
    make_file(folder, "b", b"b")
    watching.until("replaced", "in/a")
    watching.until("replaced", "in/b")
    kill_mount(store)
    told = watching.until("unmounted")
    assert told["path"] == str(mountpoint)
    assert told["reason"] == (
        f"2 files, {folder}/a first, are links to nothing, since no live mount at {mountpoint} shows their "
        "bytes: other tools take such files for missing, and compute them anew; `castore --store "
        f"{store.path} mount {mountpoint}` brings them back; `castore watch DIR --as PREFIX --restore` puts "
        "the files in their place"
    )
    castore_fuse.mount(store, mountpoint)
    assert watching.until("mounted")["path"] == str(mountpoint)
    assert (folder / "a").read_bytes() == b"a"
    castore_fuse.umount(mountpoint)
    watching.until("unmounted")
    assert watching.end() == 0
    assert (watching.told("unmounted"), watching.told("mounted")) == (["", ""], [""])


def test_it_is_reported_at_the_start_whatever_the_watcher_is_to_do(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    make_file(folder, "a", b"a")
    watch("--replace").end_after("replaced")
    kill_mount(store)
    for words in ([], ["--mirror"]):
        watching = watch(*words)
        assert f"{folder}/a is a link to nothing" in watching.until("unmounted")["reason"]
        assert watching.end() == 0
        assert watching.told("unmounted") == [""]
    refused = run(store.path, "watch", folder, "--as", "in", "--replace")
    assert refused.returncode == 1
    first, second = refused.stderr.splitlines()
    assert first.startswith(
        f"castore: {folder}/a is a link to nothing, since no live mount at {mountpoint} shows "
    )
    assert second.startswith(f"castore: no live mount of {store.path} shows 'in'")


def test_doctor_reports_it_with_what_to_do(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    make_file(folder, "a", b"a")
    watch("--replace").end_after("replaced")
    store.put("another/file", b"that no link stands for", metadata={"link": "my own"})
    assert doctor.examine(store.path, [dangling_links.examine]) == []
    kill_mount(store)
    ran = run(store.path, "doctor", "--json")
    assert ran.returncode == 1
    (forgotten, finding) = json.loads(ran.stdout)["findings"]
    assert forgotten["mended"]
    assert f"{folder}/a is a link to nothing" in finding["what"]
    assert f"castore --store {store.path} mount {mountpoint}" in finding["advice"]
    assert "--restore" in finding["advice"]
    castore_fuse.mount(store, mountpoint)
    assert run(store.path, "doctor").stdout == f"{store.path}: all in order\n"


def test_the_advice_does_what_it_says(store: Store, folder: Path, mountpoint: Path, watch: Watch) -> None:
    castore_fuse.umount(mountpoint)
    castore_fuse.mount(store, mountpoint, prefix="in")
    path = make_file(folder, "deep/a", b"a")
    watch("--replace").end_after("replaced")
    kill_mount(store)
    (finding,) = [
        finding for finding in doctor.examine(store.path, [dangling_links.examine]) if finding.left_to_do
    ]
    command = finding.advice.split("`")[1].split()
    assert command[:4] == ["castore", "--store", str(store.path), "mount"]
    assert run(store.path, *command[3:]).returncode == 0
    assert path.read_bytes() == b"a"
    assert doctor.examine(store.path, [dangling_links.examine]) == []
    castore_fuse.umount(mountpoint)
    assert run(store.path, "watch", folder, "--as", "in", "--restore").returncode == 0
    assert not path.is_symlink()
    assert doctor.examine(store.path, [dangling_links.examine]) == []


def test_bytes_of_links_that_are_gone_for_good_can_be_let_go_of(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    for name in "ab":
        make_file(folder, name, name.encode())
    replace_files(watch, "in/a", "in/b")
    castore_fuse.umount(mountpoint)
    (folder / "a").unlink()
    (folder / "b").unlink()
    (folder / "b").write_bytes(b"a tool has computed it anew")
    shutil.rmtree(folder)
    found = run(store.path, "doctor")
    assert (found.returncode, found.stdout.count("\n")) == (1, 2)
    assert "2 B are kept for links of `castore watch --replace` that are not where they" in found.stdout
    assert f" were last seen (2, '{folder}/" in found.stdout
    assert f"{folder}/" in found.stdout
    forgotten = run(store.path, "doctor", "--forget-links")
    assert (forgotten.returncode, forgotten.stderr) == (0, "")
    assert forgotten.stdout == "mended: let go of the bytes of 2 lost links (2 B)\n"
    assert run(store.path, "doctor", "--forget-links").stdout == f"{store.path}: all in order\n"
    assert not any(entry.pinned for entry in store.entries())
    assert run(store.path, "rm", "-r", "in").returncode == 0
    assert store.gc(grace=0).blobs == 2


def test_a_link_under_a_temporary_name_holds_its_bytes_again_after_they_were_let_go_of(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    path = make_file(folder, "a", b"a" * 100)
    watch("--replace").end_after("replaced")
    make_file(folder, "b", b"b")
    parked = path.rename(folder / "a.tmp")
    forgotten = run(store.path, "doctor", "--forget-links")
    assert forgotten.stdout.startswith("mended: let go of the bytes of 1 lost link (")
    assert watch("--replace", "--mirror").end() == 0
    assert store.entry("in/a") is None
    assert store.gc(grace=0).blobs == 0
    assert parked.read_bytes() == b"a" * 100


def test_rm_and_unpin_tell_of_the_links_that_stand_for_what_they_let_go(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    for name in "abc":
        make_file(folder, name, name.encode() * 100)
    replace_files(watch, "in/a", "in/b", "in/c")
    (folder / "c").unlink()
    (folder / "c").write_bytes(b"a tool has computed it anew")
    unpinned = run(store.path, "unpin", "in/a", "in/c")
    assert unpinned.stderr == (
        f"castore: {folder}/a is a link that stands for 'in/a': the bytes stay as long as the link does;"
        " `castore rm in/a` lets go of them\n"
    )
    entry = store.entry("in/a")
    assert entry is not None
    removed = run(store.path, "rm", "in/a")
    assert removed.returncode == 0
    assert removed.stderr == (
        f"castore: {folder}/a is a link that stood for 'in/a', and leads to nothing now; until gc, "
        f"`castore get {entry.digest} -o FILE` has the file's bytes\n"
    )
    assert run(store.path, "cat", entry.digest).stdout == "a" * 100
    below = run(store.path, "rm", "-r", "in", "--json")
    assert [link["path"] for link in json.loads(below.stdout)["links"]] == [f"{folder}/b"]
    assert json.loads(below.stdout)["removed"] == 2


def test_restoring_with_another_prefix_says_which_there_are(
    store: Store, folder: Path, mountpoint: Path, watch: Watch
) -> None:
    make_file(folder, "a", b"a")
    make_file(folder, "deep/b", b"b")
    replace_files(watch, "in/a", "in/deep/b")
    wrong = run(store.path, "watch", folder, "--as", "out", "--restore")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr == (
        f"castore: no link in {folder} was made with --as out; there are 2 links with --as in\n"
    )
    assert (folder / "a").is_symlink()
    assert run(store.path, "watch", folder, "--as", "in", "--restore").returncode == 0
    assert not (folder / "a").is_symlink()
    again = run(store.path, "watch", folder, "--as", "out", "--restore")
    assert (again.returncode, again.stdout) == (0, "nothing to do\n")
