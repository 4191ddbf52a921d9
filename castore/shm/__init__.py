"""Shared memory between the processes of one user on one machine.

A *segment* is a named file in ``/dev/shm``. An *arena* is a segment with a fixed layout: counters
(`tallies`), tables, a state for each slot (`slots`), and the slots' bytes, which `extents` allocates to
records of any length. `shared_frames` keeps decoded frames of large blobs in an arena. The torch adapter
keeps samples in arenas. A `buffer_pool` is memory without a name, which a worker fills again and again for
its parent. `free_space` reports how much memory is free.

May import: system, records, units, errors.
Must never: know of torch, of datasets or of the store.
"""
