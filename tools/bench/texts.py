"""Documents: text files of this machine as a `datasets` folder, one row a file.

Program text and prose, each content once. A machine with too little text repeats it, far beyond any codec's
window. Never fetches anything.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import datasets
from blake3 import blake3

from tools.bench import corpus

_SUFFIXES = {
    ".py",
    ".pyi",
    ".md",
    ".rst",
    ".txt",
    ".html",
    ".h",
    ".hpp",
    ".c",
    ".cpp",
    ".js",
    ".pl",
    ".pm",
    ".pod",
}
# Shorter files are licences of one line and empty modules; longer ones are generated tables.
_LEAST, _MOST = 200, 1_000_000


def documents(size: int) -> Iterator[dict[str, str]]:
    """Rows of ``name`` and ``text``, until there are ``size`` bytes of text."""
    taken = 0
    while taken < size:
        before = taken
        for row in _each():
            yield row
            taken += len(row["text"].encode())
            if taken >= size:
                return
        if taken == before:
            raise RuntimeError("this machine has no text files")


def _each() -> Iterator[dict[str, str]]:
    seen = set()
    for file in itertools.chain.from_iterable(map(corpus._files, corpus._roots().values())):
        if file.suffix not in _SUFFIXES or not _LEAST <= file.stat().st_size <= _MOST:
            continue
        data = file.read_bytes()
        digest = blake3(data).digest()
        if digest in seen:
            continue
        seen.add(digest)
        try:
            yield {"name": str(file), "text": data.decode()}
        except UnicodeDecodeError:
            continue


def saved(folder: Path, size: int) -> Path:
    """A folder of `Dataset.save_to_disk` with ``size`` bytes of text in one Arrow file.

    It is made once per folder.
    """
    target = folder / f"texts-{size // 10**6}MB"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = datasets.Dataset.from_generator(documents, gen_kwargs={"size": size}, cache_dir=scratch)
        made.save_to_disk(Path(scratch, "saved"), num_shards=1)
        Path(scratch, "saved").rename(target)
    return target


def shards(folder: Path, count: int, size: int) -> list[Path]:
    """JSON Lines of documents in `count` files of `size` bytes each."""
    folder.mkdir(parents=True)
    # With a number in each line no two shards are the same, also where the documents are repeated.
    rows = enumerate(documents(2 * count * size))
    lines = (json.dumps({"id": number, **row}).encode() + b"\n" for number, row in rows)
    paths = [folder / f"{number:03}.jsonl" for number in range(count)]
    for path in paths:
        with path.open("wb") as file:
            while file.tell() < size:
                file.write(next(lines))
            file.truncate(size)
    return paths


def copy(source: Path, target: Path) -> Path:
    """A hard-linked copy of the folder: `datasets` keeps its cache files beside the data."""
    shutil.copytree(source, target, copy_function=lambda old, new: Path(new).hardlink_to(old))
    return target
