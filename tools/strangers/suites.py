"""The table of suites: the project of each, the files it needs of the checkout, and how it is run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Suite(NamedTuple):
    """A stranger's suite.

    Attributes:
        name: in the table and for `--only`.
        shows: in a few words, the part of castore that replaces the stranger's code.
        folder: of the checkout, below the folder given to `make strangers`.
        url: of the checkout's repository.
        needs: files that the checkout must have.
        tests: test files for pytest; empty for a program.
        plugin: the module that puts castore in the place of the stranger's code, or that runs the program.
    """

    name: str
    shows: str
    folder: str
    url: str
    needs: tuple[str, ...]
    tests: tuple[str, ...]
    plugin: str


_HUGGING_FACE = ("datasets", "https://github.com/huggingface/datasets")

SUITES = (
    Suite(
        "datasets",
        "`Dataset.map` and `filter` are `cached_map` and `cached_filter`",
        *_HUGGING_FACE,
        ("tests/test_arrow_dataset.py", "tests/test_fingerprint.py", "tests/conftest.py"),
        ("tests/test_arrow_dataset.py", "tests/test_fingerprint.py"),
        "tools.strangers.for_datasets",
    ),
    Suite(
        "datasets, kept",
        "the same, and every result is the one that the store gives back",
        *_HUGGING_FACE,
        ("tests/test_arrow_dataset.py", "tests/conftest.py"),
        ("tests/test_arrow_dataset.py",),
        "tools.strangers.for_datasets_kept",
    ),
    Suite(
        "datasets, in blocks",
        "the same as the first, and blocks have four rows or so",
        *_HUGGING_FACE,
        ("tests/test_arrow_dataset.py", "tests/conftest.py"),
        ("tests/test_arrow_dataset.py",),
        "tools.strangers.for_datasets_in_blocks",
    ),
    Suite(
        "fingerprints",
        "`Hasher.hash` is `operator_fingerprint`",
        *_HUGGING_FACE,
        ("tests/test_fingerprint.py", "tests/conftest.py"),
        ("tests/test_fingerprint.py",),
        "tools.strangers.for_fingerprints",
    ),
    Suite(
        "diskcache",
        "`Cache` is a `Store`",
        "python-diskcache",
        "https://github.com/grantjenks/python-diskcache",
        ("tests/test_core.py", "diskcache/__init__.py"),
        ("tests/test_core.py",),
        "tools.strangers.for_diskcache",
    ),
    Suite(
        "stocaching",
        "`SharedCache` is castore's",
        "stochastic-caching",
        "https://github.com/Charl-AI/stochastic-caching",
        ("tests/test_shared_cache.py",),
        ("tests/test_shared_cache.py",),
        "tools.strangers.for_stocaching",
    ),
    Suite(
        "data-juicer",
        "operators that castore has are castore's",
        "data-juicer",
        "https://github.com/datajuicer/data-juicer",
        ("data_juicer/__init__.py", "tests/ops/filter/test_text_length_filter.py"),
        ("tests/ops",),
        "tools.strangers.for_data_juicer",
    ),
    Suite(
        "erofs-utils",
        "`stress.c` compares a mount with the folder that was added",
        "erofs-utils",
        "https://git.kernel.org/pub/scm/linux/kernel/git/xiang/erofs-utils.git",
        ("contrib/stress.c", "include/erofs/defs.h"),
        (),
        "tools.strangers.for_erofs",
    ),
)


def missing(suite: Suite, repos: Path) -> str | None:
    """One sentence on what a checkout lacks and how to get it, or None if it is complete."""
    folder = repos / suite.folder
    lacking = [name for name in suite.needs if not (folder / name).is_file()]
    if not lacking:
        return None
    what = f"{folder / lacking[0]} is missing" if folder.is_dir() else f"there is no {folder}"
    return f"{what}; get it with: git clone {suite.url} {folder}"
