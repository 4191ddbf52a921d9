"""The index: SQLite in WAL mode, the one record of which names and blobs there are, and the journal beside it.

`database` is the door: what every read and write asks, and the file it asks. `transaction` changes rows. What single rooms
ask has a module for each idea: `eviction` and `pack_rows` for gc, `rebuild_rows` and `soundness` for repair, `figures` for
reports, `name_ranges` for folders and prefixes, `noted` for metadata, `mounts`, `deferred_refs`. `schema` makes the
tables, `connections` open files and survive forks. `journal` keeps names beside the objects, so that the index can be
rebuilt. `beacon` is a few mapped words that tell readers what has changed.

May import: system, and the values at the top of castore.
Must never: open an object, or know a codec. All SQL of castore is here, and a test holds that.
"""
