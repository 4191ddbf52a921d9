"""A program that reads a folder of files into a store, each file as a unit of its own.

It prints the names of the files that it read. It may stop within a file, until it is killed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import datasets

from castore import Store
from castore.recipes import by_file, file_reader, runner, sources


def main() -> None:
    """Read the folder; within the file of that stem, touch a file, and read no further."""
    folder, store, stem, told = sys.argv[1:]
    datasets.disable_progress_bars()
    by_file.UNIT_BYTES = 1
    read = file_reader.read_tables

    def read_and_tell(kind, files, *rest):  # type: ignore[no-untyped-def]
        print(*(Path(file).name for file in files), flush=True)
        for table in read(kind, files, *rest):
            if Path(files[0]).stem == stem:
                Path(told).touch()
                time.sleep(600)
            yield table

    file_reader.read_tables = read_and_tell
    with Store(store, memory=0) as opened:
        runner.open_source(sources.find(folder), opened, cached=True, codec="zstd")


if __name__ == "__main__":
    main()
