"""Garbage collection: what goes is chosen by a pure function of records, and removed while readers go on.

`collect` chooses and removes. `compaction` rewrites packs that are mostly dead. `leftovers` finds what dead processes
left. `mount_barrier` has live mounts take hold of what the kernel may still read.

May import: write, index, objects, system, and the parts of a store.
Must never: know the `Store`, or remove what a live process holds.
"""
