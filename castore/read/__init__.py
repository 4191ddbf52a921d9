"""A get: turns a name into checked bytes, or a miss.

`source` asks the RAM cache, then the index, then the object. `blob_file` is a seekable file over one blob.
`open_blob` reads ranges of a blob, or all of it in order. `tree_reader` is what a mount reads: names as a
tree of files. Bytes that are only in a remote come from an `origin`, which the store gives to this room.
`usage` counts hits and last accesses, and writes the counts in batches.

May import: index, objects, shm, system, and the values at the top of castore.
Must never: write a blob, or return a byte that was not checked.
"""
