"""A put: bytes become a blob and a name.

`putter` puts one blob or many under the store's defaults, and `batch` commits several puts and deletes at
once; `arguments` has the checks of both. `writer` hashes, looks up, compresses, places and names. `staging`
has bytes that are ready and not placed yet, `incoming` bytes that still arrive. `open_pack` appends to this
process's pack. `prefixes` maps names to dictionaries.

May import: index, objects, serialize, system, settings, and the values at the top of castore.
Must never: read a blob for a user, decide what gc removes, or know the `Store`.
"""
