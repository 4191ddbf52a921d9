"""A program that reads a folder of files into a store, and stops within the last file until it is killed."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import datasets

from castore import Store
from castore.recipes import file_reader, runner, sources


def main() -> None:
    """Read the folder; tell when the file of that number is being read, and read no further."""
    folder, store, number, told = sys.argv[1:]
    datasets.disable_progress_bars()
    read = file_reader.read_tables

    def read_and_stop(kind, files, *rest):  # type: ignore[no-untyped-def]
        for table in read(kind, files, *rest):
            if Path(files[0]).stem == number:
                Path(told).touch()
                time.sleep(600)
            yield table

    file_reader.read_tables = read_and_stop
    with Store(store, memory=0) as opened:
        runner.open_source(sources.find(folder), opened, cached=True, codec="zstd")


if __name__ == "__main__":
    main()
