"""Shared memory between the processes of one user on one machine, for adapters that keep samples in RAM once a node.

A *segment* is a named piece of ``/dev/shm``; what lies in it (slots, an arena, tallies) is laid out by the modules
beside it. Nothing here knows of torch, of datasets or of the store.
"""
