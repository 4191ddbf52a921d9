"""An ordinary Hugging Face datasets job, without castore: loads text, maps, filters, prints a digest.

Each call of the mapped and of the filtering function appends a byte to a file of its own, so that a test can
count the computed samples. With ``--wait`` the job prints, waits for a line, and prints the digest again from
its open dataset.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

import datasets


def leave_a_mark(kind: str) -> None:
    with open(os.path.join(os.environ["MARKS"], kind), "ab") as file:
        file.write(b".")


def measure(row: dict[str, Any]) -> dict[str, Any]:
    leave_a_mark("map")
    return {"length": len(row["text"]), "upper": row["text"].upper(), "words": row["text"].split()}


def is_long(row: dict[str, Any]) -> bool:
    leave_a_mark("filter")
    return bool(row["length"] > 20)


def digest(dataset: Any) -> str:
    hasher = hashlib.sha256(str(dataset.features).encode())
    for batch in dataset.iter(1000):
        hasher.update(json.dumps(batch).encode())
    return hasher.hexdigest()


def main() -> None:
    datasets.disable_progress_bars()
    loaded = datasets.load_dataset("text", data_files=sys.argv[1], split="train")
    mapped = loaded.map(measure)
    kept = mapped.filter(is_long)
    print(len(loaded), len(kept), digest(mapped), digest(kept), flush=True)
    if "--wait" in sys.argv:
        sys.stdin.readline()
        print(len(loaded), len(kept), digest(mapped), digest(kept), flush=True)


if __name__ == "__main__":
    main()
