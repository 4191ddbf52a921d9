"""Garbage collection: a pure function of records chooses what to remove, and readers go on meanwhile.

`collect` chooses and removes. `compaction` rewrites packs that are mostly dead. `leftovers` finds files that
dead processes left. `mount_barrier` has live mounts open the blobs that the kernel may still read,
and lists a mount so that gc finds it.

May import: write, index, objects, system, the parts of a store, and the values at the top of castore.
Must never: know the `Store`, or remove what a live process holds.
"""

#: Seconds for which a blob stays after its last name was deleted or replaced, for callers that know the
#: digest. Here, so that a store that collects nothing imports nothing to collect with.
GRACE_SECONDS = 60.0
