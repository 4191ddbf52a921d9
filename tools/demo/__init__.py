"""`make demo`: the main job of castore, shown on files that every machine has.

The demo makes shards, a Parquet file, token ids and a `datasets` folder from Python's own standard library.
It stores and mounts them with the castore command line, and reads all of them through the mount with loaders
that know nothing of castore. It compares the results with those for the plain files.
"""
