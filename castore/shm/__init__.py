"""Shared memory between the processes of one user on one machine.

A *segment* is a named piece of ``/dev/shm``. `slots`, `arena` and `tallies` say how a segment is laid out.
`shared_frames` keeps decoded frames of large blobs in one.

May import: system, units, errors.
Must never: know of torch, of datasets or of the store.
"""
