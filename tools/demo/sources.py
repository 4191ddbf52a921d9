"""The demo's files, made from Python's standard library in the formats that training jobs read.

Writes only below the given folder, and needs no network.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import sysconfig
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

VOCABULARY = 100_000
SAMPLES_A_SHARD = 400

Text = tuple[str, bytes]


def standard_library() -> list[Text]:
    """Relative path and bytes of every module, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    paths = sorted(path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts))
    return [(path.relative_to(root).as_posix(), path.read_bytes()) for path in paths if path.stat().st_size]


def make_files(folder: Path, texts: list[Text]) -> None:
    """A folder of small files, one a sample."""
    for name, data in texts:
        target = folder / "files" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def make_shards(folder: Path, texts: list[Text]) -> None:
    """Tar shards in WebDataset's layout: `000017.py` and `000017.json` are one sample."""
    (folder / "shards").mkdir()
    for first in range(0, len(texts), SAMPLES_A_SHARD):
        shard = folder / "shards" / f"stdlib-{first // SAMPLES_A_SHARD:05}.tar"
        with tarfile.open(shard, "w") as tar:
            for number, (name, data) in enumerate(texts[first : first + SAMPLES_A_SHARD], first):
                about = json.dumps({"path": name, "lines": data.count(b"\n")}).encode()
                for suffix, content in (("json", about), ("py", data)):
                    info = tarfile.TarInfo(f"{number:06}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


def make_parquet(folder: Path, texts: list[Text]) -> None:
    """One table with a row a module, in row groups of 256."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "path": [name for name, _ in texts],
        "text": [data.decode(errors="replace") for _, data in texts],
        "size": [len(data) for _, data in texts],
    }
    pq.write_table(pa.table(columns), folder / "stdlib.parquet", row_group_size=256)


def token_ids(data: bytes) -> list[int]:
    """Words and signs as ids by hashing: a tokenizer that needs no vocabulary file."""
    return [zlib.crc32(word) % VOCABULARY for word in re.findall(rb"\w+|[^\w\s]", data)]


def make_tokens(folder: Path, texts: list[Text]) -> None:
    """All token ids in one flat array, for training that maps it into memory."""
    import numpy as np

    np.save(
        folder / "tokens.npy", np.concatenate([np.array(token_ids(data), np.uint32) for _, data in texts])
    )


def make_dataset(folder: Path, texts: list[Text]) -> None:
    """A folder in the format of `Dataset.save_to_disk`: Arrow files and their description."""
    import datasets

    datasets.disable_progress_bars()
    columns = {
        "path": [name for name, _ in texts],
        "text": [data.decode(errors="replace") for _, data in texts],
        "input_ids": [token_ids(data) for _, data in texts],
    }
    features = datasets.Features(
        path=datasets.Value("string"),
        text=datasets.Value("string"),
        input_ids=datasets.Sequence(datasets.Value("int32")),
    )
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(folder / "dataset"))


#: The sources: place below the data folder, description, and maker.
MAKERS: list[tuple[str, str, Callable[[Path, list[Text]], None]]] = [
    ("files", "small files, one a sample", make_files),
    ("shards", "tar shards, WebDataset's layout", make_shards),
    ("stdlib.parquet", "a Parquet file, one row each", make_parquet),
    ("tokens.npy", "token ids, one flat array", make_tokens),
    ("dataset", "a datasets folder (Arrow)", make_dataset),
]


def fresh_folder(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def files_below(folder: Path) -> list[Path]:
    """All files below the folder, or the file itself, sorted."""
    return [folder] if folder.is_file() else sorted(path for path in folder.rglob("*") if path.is_file())


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_below(folder))
