"""Where bytes live: codecs, frames, loose objects, packs and dictionaries, and reading any range of them back.

`directory` is the door: it hides whether a blob is a loose object or a record in a pack. `encode` and `decode` use all
cores. `codecs` turn one frame into bytes and back, `frames` is the seek table over them.

May import: system, shm, and the values at the top of castore.
Must never: know a name or the index, or hand out a byte that was not checked.
"""
