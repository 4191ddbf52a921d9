"""A put: bytes become a blob and a name.

`batch` checks what a caller gives, cuts it into batches, and commits several puts and deletes at once. `writer`
hashes, looks up, compresses, places and names. `staging` holds bytes that are ready and not placed yet,
`incoming` those that still come. `prefixes` knows which names have which dictionary.

May import: index, objects, serialize, system, and the values at the top of castore.
Must never: read a blob for a user, decide what gc removes, or know the `Store`.
"""
