"""Programs that know nothing of castore read a mount as they read a folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.mount.conftest import files
from tests.warm import WarmPython

HERE = Path(__file__).resolve().parents[2]


def run(*words: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def same(one: Path, other: Path) -> bool:
    return {path.relative_to(one): path.read_bytes() for path in files(one)} == {
        path.relative_to(other): path.read_bytes() for path in files(other)
    }


def test_cp_copies_everything(root: Path, plain: Path, tmp_path: Path) -> None:
    run("cp", "-r", root, tmp_path / "copy")
    assert same(tmp_path / "copy", plain)
    run("cp", "-a", root / "tree", tmp_path / "archive")
    one = next(path for path in files(tmp_path / "archive"))
    assert (
        one.stat().st_mtime_ns == (root / "tree" / one.relative_to(tmp_path / "archive")).stat().st_mtime_ns
    )


def test_tar_packs_and_unpacks(root: Path, plain: Path, tmp_path: Path) -> None:
    run("tar", "-C", root, "-cf", tmp_path / "all.tar", ".")
    (tmp_path / "out").mkdir()
    run("tar", "-C", tmp_path / "out", "-xf", tmp_path / "all.tar")
    assert same(tmp_path / "out", plain)
    assert run("tar", "-C", root, "-df", tmp_path / "all.tar") == ""


def test_second_rsync_transfers_nothing(root: Path, plain: Path, tmp_path: Path) -> None:
    if shutil.which("rsync") is None:
        pytest.skip("rsync is not installed")
    run("rsync", "-a", f"{root}/", tmp_path / "copy")
    assert same(tmp_path / "copy", plain)
    assert run("rsync", "-ai", f"{root}/", tmp_path / "copy") == ""
    assert run("rsync", "-ain", "--checksum", f"{plain}/tree/", f"{root}/tree").count(">fc") == 0


def test_find_sees_the_same_tree(root: Path, plain: Path) -> None:
    listing = ("find", ".", "-type", "f", "-printf", "%P %s\\n")
    assert sorted(run(*listing, cwd=root).splitlines()) == sorted(run(*listing, cwd=plain).splitlines())
    folders = ("find", ".", "-type", "d")
    assert sorted(run(*folders, cwd=root).splitlines()) == sorted(run(*folders, cwd=plain).splitlines())
    assert run("find", ".", "-name", ".castore", cwd=root) == ""


def test_grep_finds_the_same_lines(root: Path, plain: Path) -> None:
    search = ("grep", "-rc", "needle", "tree")
    assert sorted(run(*search, cwd=root).splitlines()) == sorted(run(*search, cwd=plain).splitlines())


def test_sha256sum_agrees(root: Path, plain: Path) -> None:
    names = [path.relative_to(plain).as_posix() for path in files(plain)]
    sums = run("sha256sum", *names, cwd=root)
    lines = [f"{hashlib.sha256((plain / name).read_bytes()).hexdigest()}  {name}" for name in names]
    assert sums.splitlines() == lines


def test_data_loader_reads_with_every_start_method(
    roots: dict[str, Path], plain: Path, warm_torch: WarmPython
) -> None:
    pytest.importorskip("torch")
    # One program for all mounts: each start method imports torch once, which takes longer than to read.
    mounted = [root / "tree" for root in roots.values()]
    done = warm_torch.run(
        ["-m", "tests.mount.training", plain / "tree", "methods", *mounted],
        cwd=HERE,
        env=os.environ | {"PYTHONPATH": os.fspath(HERE)},
        text=True,
    )
    assert done.stdout == "good\n", done.stderr
