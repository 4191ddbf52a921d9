"""Real data that every machine has: program text, libraries and documents that are installed on it.

The same machine gives the same bytes until its packages change; each result carries their digest and make-up.
Never fetches anything. Never measures on zeros, which flatter every codec, and on random bytes only where a
row's name mentions them.
"""

from __future__ import annotations

import io
import json
import os
import random
import sysconfig
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blake3 import blake3

SEED = 20_26


def _roots() -> dict[str, Path]:
    """The folders from which bytes are taken, in this order, until there are enough."""
    paths = sysconfig.get_paths()
    wanted = {
        "Python's standard library": paths["stdlib"],
        "the installed Python packages": paths["purelib"],
        "/usr/lib": "/usr/lib",
        "/usr/share": "/usr/share",
    }
    return {name: Path(root).resolve() for name, root in wanted.items() if Path(root).is_dir()}


def _files(root: Path, suffix: str = "") -> Iterator[Path]:
    """Regular files under `root`, sorted, without the files that running a program changes there."""
    for folder, below, names in os.walk(root):
        below[:] = sorted(set(below) - {"__pycache__", "site-packages"})
        for name in sorted(names):
            path = Path(folder, name)
            if name.endswith(suffix) and path.is_file() and not path.is_symlink():
                yield path


def archive(folder: Path, size: int) -> Path:
    """A tar of real files, cut at exactly `size` bytes. It is made once per folder.

    Returns:
        Its path. Beside it lies `<name>.json`, with the digest and the bytes taken from each root.
    """
    path = folder / f"archive-{size // 10**6}MB.tar"
    facts = path.with_suffix(".json")
    if facts.exists() and path.exists() and path.stat().st_size == size:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    taken: Counter[str] = Counter()
    with path.open("wb") as raw:
        while (
            raw.tell() < size
        ):  # a machine with few installed files repeats them, far beyond any codec's window
            with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for name, root in _roots().items():
                    for file in _files(root):
                        if raw.tell() >= size:
                            break
                        taken[name] += _add(tar, file)
        raw.truncate(size)
    digest = blake3().update_mmap(path).hexdigest()
    facts.write_text(json.dumps({"size": size, "blake3": digest, "bytes_from": taken}, indent=2))
    return path


def _add(tar: tarfile.TarFile, file: Path) -> int:
    data = file.read_bytes()
    info = tarfile.TarInfo(str(file).lstrip("/"))
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
    return len(data)


def facts(path: Path) -> dict[str, Any]:
    """The facts that `archive` recorded about its data."""
    noted: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
    return noted


def small_files(folder: Path, count: int, size: int) -> list[str]:
    """Files of `size` bytes of Python source text each, 500 to a folder; returns their paths below it."""
    names = [f"{number // 500:02}/{number:05}.txt" for number in range(count)]
    if (folder / names[-1]).exists():
        return names
    text = b"".join(file.read_bytes() for root in list(_roots().values())[:2] for file in _files(root, ".py"))
    for number, name in enumerate(names):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        head = f"# {number}\n".encode()  # keeps every file different, also where the text is repeated
        start = number * size % (len(text) - size)
        target.write_bytes((head + text[start : start + size])[:size])
    return names


def records(count: int, size: int, stamp: str) -> list[bytes]:
    """JSON records of about `size` bytes, as a feature cache holds: an id, a few fields, words and numbers.

    Two calls with different stamps share no record, so no deduplication helps.
    """
    rng = random.Random(SEED)
    words = [word for word in _vocabulary() if word.isalpha()]
    made = []
    for number in range(count):
        record: dict[str, Any] = {"id": f"{stamp}/{number}", "split": rng.choice(["train", "valid"])}
        record["text"] = " ".join(rng.choices(words, k=size // 14))
        room = size - len(json.dumps(record)) - 16
        record["tokens"] = [rng.randrange(50_000) for _ in range(max(0, room) // 7)]
        made.append(json.dumps(record).encode())
    return made


def noise(count: int, size: int, stamp: str) -> list[bytes]:
    """Random bytes, which no codec makes smaller. Two calls with different stamps share nothing."""
    rng = random.Random(f"{SEED}/{stamp}")
    return [rng.randbytes(size) for _ in range(count)]


def _vocabulary() -> list[str]:
    text = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_text(encoding="utf-8")
    return sorted(set(text.split()))
