"""The index: SQLite in WAL mode, the one record of which names and blobs there are, and the journal beside it.

`database` is the door. `queries` ask, `transaction` and `blob_rows` change, `schema` makes the tables, `connections`
open files and survive forks. `journal` keeps names beside the objects, so that the index can be rebuilt. `beacon` is a
few mapped words that tell readers what has changed.

May import: system, and the values at the top of castore.
Must never: open an object, or know a codec. All SQL of castore belongs here.
"""
