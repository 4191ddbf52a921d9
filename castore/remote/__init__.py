"""A remote: names and blobs in a bucket or on a shared file system, for several stores.

`bucket` is the interface of a place for objects; `folder_bucket` (a shared file system) and `cloud_bucket`
(S3, GCS, Azure) are the two kinds. `keys` has the paths in a bucket. `pages` and `tree` keep a table of names
as immutable pages, `commits` gives a tree its history and its name. `push` (by `send`) and `pull` (by
`fetch`) move what is missing. `check` finds what is missing or damaged, `collect` removes garbage. `probe`
finds out what a bucket can do, `remotes` keeps which remotes a store knows. `calls` does it all, in the
process of `transfer`, and `remote` is the door.

Readers have bytes brought by a process that lives longer, the `fetcher`, which `fetcher_client` asks. Readers
are of two kinds: `remote_tree` shows names of a commit that are not in the index, and `origin` serves names
that are. Both modules keep bytes that come by the rules of `kept_bytes`, and read large blobs in parts by
`lazy_reader`. `unkept_frames` serves bytes for which the store has no room.

Stores share the results of computations over `shared_results`, their door, which asks the fetcher as well:
`result_sharing` looks results up and offers them, `result_records` has their form, and `claims` keeps nodes
from computing one thing at once.

May import: the parts of a store and the rooms below them; gc, to make room for what comes.
Must never: know the `Store`; write a credential anywhere; let bytes into a store that were not checked.
"""
