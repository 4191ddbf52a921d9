"""Python objects to bytes and back, exactly, and without running code from the cache.

`serializers` chooses the format. `leaves` takes apart values that are one run of bytes into a description
and a buffer, and builds them again without a copy, for the samples of datasets too. `safetensors_files`,
`npy` and `arrow` are formats of files. `kinds` takes apart values that are more than numbers, text and
containers, and lets users register types.

May import: errors.
Must never: unpickle, unless the store was opened with ``allow_pickle``.
"""
