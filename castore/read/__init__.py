"""A get: a name becomes bytes again, checked, or a miss.

`source` asks the RAM cache, then the index, then the object. `blob_file` is a seekable file over one blob, and
`open_blob` gives ranges of one, or all of it in order. `usage` counts hits and last accesses, and writes the counts in
batches.

May import: index, objects, shm, system, and the values at the top of castore.
Must never: write a blob, or hand out a byte that was not checked.
"""
