"""`make demo`: the main job of castore, shown on files that every machine has.

Makes shards, a Parquet file, token ids and a `datasets` folder from Python's own standard library, stores and
mounts them with the castore command line, reads every one of them through the mount with loaders that know nothing
of castore, and compares what they gave with what they give for the plain files.
"""
