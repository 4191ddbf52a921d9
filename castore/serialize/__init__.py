"""Python objects to bytes and back, exactly, and without running code from the cache.

`serializers` chooses the form. `arrays` does NumPy, torch and Arrow. `kinds` takes apart what is more than numbers, text
and containers, and lets users register types.

May import: errors.
Must never: unpickle, unless the store was opened with ``allow_pickle``.
"""
