"""The operating system: temporary files, processes, forks, file locks, disk errors, and caches in memory.

`forks` decides when this process may fork. `temporary` creates unfinished files, named so that leftovers of
dead processes are recognised. `single_flight` computes a missing value once for all callers. `ram_cache` is a
bounded LRU. `ballast` reserves space on the disk. `local_files` replaces files outside of stores.
`thread_pools` starts threads that a Ctrl-C cannot cost. `mount_table` lists the mounts of the machine,
`birth_time` tells when a file was made.

`ownership` checks that a user may use a store's files. `frame_columns`, no matter of the system's, reads
frames of pandas for `castore.keys` and `castore.serialize`, which lie beside this package and may not use
each other.

May import: errors, units, and layout, the table of the files of a store.
Must never: know of blobs, of names, or of anything that is in those files.
"""
