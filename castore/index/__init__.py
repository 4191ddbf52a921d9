"""The index: SQLite in WAL mode, the one record of names and blobs, and the journal beside it.

`database` is the door: it reads names, blobs and totals. `transaction` changes rows. `index_file` keeps the
connections to the file and runs queries on them. The queries of single rooms have a module for each idea:
`eviction` and `pack_rows` for gc, `rebuild_rows` and `soundness` for repair, `figures` for reports,
`name_ranges` for folders and prefixes, `places` for bytes that are in remotes, `mounts`, `deferred_refs`.
`schema` makes the tables, `connections` opens files and survives forks, `many_rows` runs a statement for many
rows at once. `journal` keeps names beside the objects, so that the index can be rebuilt. `beacon` is a few
mapped words that show readers what has changed.

May import: system, and the values at the top of castore.
Must never: open an object, or know a codec. All SQL of castore is here, and a test holds that.
"""
