"""Files that entries were made from: remembers them, watches them, and replaces them by links into a mount.

`entry_sources` is public: it remembers files in an entry's metadata and compares the metadata with the files
of now. The other modules are the code of `castore watch`. `task` describes a watcher's job, and `watcher`
runs it. `events` collects the paths that changed, `scanner` scans one path, `folder` decides which files
count and names them. `adder` puts files, `replace` swaps files for links, `restore` swaps links back.
`link_registry` keeps the list of links, `find_mount` finds the mount that links lead into, `dangling_links`
finds links that lead nowhere, `file_lease` detects writers, `reports` has the events that a watcher reports.

May import: the store and all below it.
Must never: import the command line, the adapters or the mount's own package.
"""
