"""The operating system: temporary files, processes, forks, file locks, errors of disks, memory kept and computed once.

`forks` says when this process may fork. `temporary` names files on their way, so that those of the dead can be told.
`single_flight` computes once for all that ask. `ram_cache` is a bounded LRU. `ballast` holds room back on the disk.

May import: errors, units.
Must never: know of blobs, names or stores.
"""
