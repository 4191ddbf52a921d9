"""Where bytes live: codecs, frames, loose objects, packs, dictionaries, and reads of any range.

`directory` is the door: it hides whether a blob is a loose object or a record in a pack. `encode` and
`decode` use all cores. `codecs` compresses and decompresses one frame; `frames` is the seek table over them.

May import: system, shm, and the values at the top of castore.
Must never: know a name or the index, or return a byte that was not checked.
"""
