"""gc under a mount: open files keep their bytes, whatever is removed; a pinned mount keeps every name."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import castore_fuse
from castore import Store
from castore.gc import collect, mount_barrier
from castore.objects.codecs import FRAME_SIZE
from castore_fuse import mountpoints
from castore_fuse.daemon import DaemonRecord
from tests.clocks import pass_time
from tests.helpers import mixed, noise, text
from tests.mount.conftest import finish, forget_pages, program, until
from tests.warm import WarmPython

pytestmark = pytest.mark.usefixtures("forked_processes")

KINDS = {
    "zstd": (mixed(5 * FRAME_SIZE + 5), "zstd"),
    "lz4": (mixed(3 * FRAME_SIZE, 1), "lz4"),
    "gzip": (text(FRAME_SIZE + 9, 2), "gzip"),
    "raw": (noise(4 * FRAME_SIZE + 1, 3), "none"),
    "packed": (text(3000, 4), "zstd"),
    "packed raw": (noise(3000, 5), "none"),
}


def put_kinds(store: Store) -> None:
    for name, (data, codec) in KINDS.items():
        store.put(f"kinds/{name}", data, codec=codec)


def remove_everything(store: Store) -> list[str]:
    return store.gc(max_size=0, grace=0).evicted


def test_open_files_and_maps_keep_their_bytes_when_gc_removes_everything(store: Store) -> None:
    put_kinds(store)
    with castore_fuse.mounted(store) as root, contextlib.ExitStack() as stack:
        held = {}
        for name in KINDS:
            file = stack.enter_context((root / "kinds" / name).open("rb", buffering=0))
            held[name] = file, stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        assert sorted(remove_everything(store)) == sorted(f"kinds/{name}" for name in KINDS)
        assert store.stat().stored == 0
        for name, (file, mapped) in held.items():
            data = KINDS[name][0]
            forget_pages(file.fileno())
            assert mapped[len(data) // 2 :] == data[len(data) // 2 :], name
            assert file.read() == data, name
        until(lambda: os.listdir(root) == [])
        until(lambda: not any((root / "kinds" / name).exists() for name in KINDS))


def test_a_name_that_came_back_and_went_again_around_a_gc_is_read_to_the_end(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = mixed(3 * FRAME_SIZE, 1), mixed(3 * FRAME_SIZE, 2)
    ask, digest = mount_barrier._ask, store.put("a", old).digest
    store.put("a", new)  # gc chooses the old bytes now
    with castore_fuse.mounted(store) as root:
        store.put("a", old)
        with (root / "a").open("rb", buffering=0) as file:

            def replaced_once_it_has_answered(path: Path) -> None:
                ask(path)
                if store.index.find_digest("a") == bytes.fromhex(digest):
                    store.put("a", new)

            monkeypatch.setattr(mount_barrier, "_ask", replaced_once_it_has_answered)
            collect.remove_blobs(store.parts, [bytes.fromhex(digest)])
            assert file.read() == old
            store.gc(grace=0)
            forget_pages(file.fileno())
            file.seek(0)
            assert file.read() == old
        until(lambda: (root / "a").read_bytes() == new)


def test_file_that_gc_removed_a_moment_ago_cannot_be_opened(store: Store) -> None:
    put_kinds(store)
    with castore_fuse.mounted(store) as root:
        sizes = {name: (root / "kinds" / name).stat().st_size for name in KINDS}
        assert all(sizes.values())
        remove_everything(store)
        for name in KINDS:  # the kernel may still know the names: none may open as something else
            with pytest.raises(FileNotFoundError):
                (root / "kinds" / name).open()


def test_mapped_data_loader_goes_on_while_gc_removes_everything(
    store: Store, tmp_path: Path, warm_torch: WarmPython
) -> None:
    pytest.importorskip("torch")
    tokens = np.random.default_rng(0).integers(0, 50_000, 600_000, dtype=np.int32)
    np.save(tmp_path / "tokens.npy", tokens)
    store.put_file("tokens.npy", tmp_path / "tokens.npy")
    with (
        castore_fuse.mounted(store) as root,
        program(warm_torch, "tests.mount.training", root / "tokens.npy", "epochs") as process,
    ):
        assert remove_everything(store) == ["tokens.npy"]
        forget_all_pages()
        assert finish(process, "go on\n") == f"{int(tokens.sum(dtype=np.int64))}\ngood\n"


def forget_all_pages() -> None:
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError, OSError):
            Path("/proc/sys/vm/drop_caches").write_text("1")


def test_pinned_mount_keeps_its_prefix_and_nothing_else(store: Store) -> None:
    put_kinds(store)
    store.put("kinds2/other", noise(5000))
    with castore_fuse.mounted(store, prefix="kinds", pin=True) as root:
        assert remove_everything(store) == ["kinds2/other"]
        for name, (data, _) in KINDS.items():
            assert (root / name).read_bytes() == data
    assert len(remove_everything(store)) == len(KINDS)


def test_pinned_mount_keeps_bytes_that_lost_their_name(store: Store) -> None:
    put_kinds(store)
    with castore_fuse.mounted(store, pin=True) as root, contextlib.ExitStack() as stack:
        held = {name: stack.enter_context((root / "kinds" / name).open("rb", buffering=0)) for name in KINDS}
        store.put_many((f"kinds/{name}", b"new " + name.encode()) for name in KINDS)
        remove_everything(store)
        until(lambda: all((root / "kinds" / name).read_bytes() == b"new " + name.encode() for name in KINDS))
        for name, file in held.items():
            forget_pages(file.fileno())
            assert file.read() == KINDS[name][0]


def test_killed_pinned_mount_holds_nothing(store: Store, mountpoint: Path) -> None:
    put_kinds(store)
    castore_fuse.mount(store, mountpoint, pin=True)
    assert remove_everything(store) == []
    record = DaemonRecord.read(next((store.path / "locks").glob("mount-*.json")))
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    until(lambda: mountpoints.is_dead(mountpoint) and not record.alive())
    assert len(remove_everything(store)) == len(KINDS)
    assert store.stat().mounts == []


@pytest.mark.parametrize("live", ["default", pytest.param("pinned", marks=pytest.mark.matrix)], indirect=True)
def test_small_files_read_right_while_gc_compacts_their_packs(
    live: Path, store: Store, tmp_path: Path, warm_castore: WarmPython
) -> None:
    kept = {f"kept/{number}": text(2000 + number, number) for number in range(120)}
    lines = [f"{live / name} {hashlib.sha256(data).hexdigest()}\n" for name, data in kept.items()]
    (tmp_path / "list").write_text("".join(lines))

    def churn(number: int) -> list[int]:
        """Let most of the kept ones' pack die: gc moves the rest into the pack that this process fills."""
        dead = [(f"dead/{number}/{n}", noise(3000, 1000 * number + n)) for n in range(150)]
        store.put_many(dead)
        if number == 0:
            store.put_many(kept.items())
        store.delete_many(name for name, _ in dead)
        return store.gc(grace=0).packs

    compacted = churn(0)
    with (
        program(warm_castore, "tests.mount.reading", tmp_path / "list") as one,
        program(warm_castore, "tests.mount.reading", tmp_path / "list") as other,
    ):
        for number in range(1, 12):
            compacted += churn(number)
        assert int(finish(one, "\n")) > len(kept)
        assert int(finish(other, "\n")) > len(kept)
    assert len(compacted) > 3


def test_bytes_that_gc_removed_from_under_a_known_digest_are_not_there(store: Store) -> None:
    digest = store.put("name", mixed(2 * FRAME_SIZE)).digest
    with castore_fuse.mounted(store) as root:
        blob = root / ".castore" / "objects" / digest[:2] / digest
        assert blob.stat().st_size == 2 * FRAME_SIZE
        remove_everything(store)
        with pytest.raises(OSError) as caught:  # noqa: PT011
            blob.read_bytes()
        assert caught.value.errno in (errno.ENOENT, errno.ESTALE)


def test_gc_soon_knows_of_all_that_a_mount_has_read_however_much(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"many/{number:05}" for number in range(16_000)]
    store.put_many((name, name.encode()) for name in names)
    # A single time may be long because the machine stood still.
    assert any(
        _seconds_until_known(store, names) < 12 + 3 * _seconds_to_write(store, names, monkeypatch)
        for _ in range(4)
    )


def _seconds_until_known(store: Store, names: list[str]) -> float:
    """Seconds from the last of many reads until the index has all their uses.

    Uses are flushed every five seconds, all at once; a hundred names at each scan would take 16 seconds
    longer than writing them.
    """

    def are_known() -> bool:
        # One number, and not all entries: this is asked hundreds of times.
        [(last,)] = store.index.file.all("SELECT min(accessed) FROM entries", ())
        return bool(last >= began)

    began = time.time()
    with castore_fuse.mounted(store) as root:
        for name in names:
            assert (root / name).read_bytes() == name.encode()
        read = time.monotonic()
        until(are_known, seconds=120)
        return time.monotonic() - read


def _seconds_to_write(store: Store, names: list[str], monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds that this machine takes now to write the uses of so many names, a hundred at a time."""
    store.flush()
    store.get_many(names)
    with monkeypatch.context() as patch:
        pass_time(patch, 10, "time")  # the uses are due
        began = time.monotonic()
        store.flush(seconds=100)
        return time.monotonic() - began
