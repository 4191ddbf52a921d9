"""Files that entries were made from: remembering them, watching them, and putting links into a mount in their place.

`entry_sources` is for everybody: it remembers files in an entry's metadata and tells whether they have changed since. The
rest is what `castore watch` runs. `task` is what a watcher is given, and `watcher` runs it. `events` tells where to look,
`scanner` looks at one path, `folder` knows which files count and their names. `add` puts files, `replace` swaps files for
links, `restore` takes that back. `link_registry` keeps the list of links, `find_mount` finds the mount that links lead
into, `dangling_links` finds links that lead nowhere, `file_lease` asks who writes, `reports` is what a watcher tells.

May import: the store and all below it.
Must never: import the command line, the adapters or the mount's own package.
"""
