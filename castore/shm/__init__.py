"""Shared memory between the processes of one user on one machine.

A *segment* is a named file in ``/dev/shm``. `slots`, `arena` and `tallies` define how a segment is laid out.
`shared_frames` keeps decoded frames of large blobs in a segment. `room` reports how much memory is free.

May import: system, units, errors.
Must never: know of torch, of datasets or of the store.
"""
