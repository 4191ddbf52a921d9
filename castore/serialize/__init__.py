"""Python objects to bytes and back, exactly, and without running code from the cache.

`serializers` chooses the format. `arrays` stores NumPy arrays, torch tensors and Arrow tables. `kinds` takes
apart values that are more than numbers, text and containers, and lets users register types.

May import: errors.
Must never: unpickle, unless the store was opened with ``allow_pickle``.
"""
