"""Files that entries were made from: remembering them, watching them, and putting links into a mount in their place.

`sources` is for everybody: it remembers files in an entry's metadata and tells whether they have changed since. The
rest is what `castore watch` runs: `task` is what it is given, `watcher` runs, `events` tells it where to look, `looking`
is what a look does, `folder` knows which files count and what they are called, `adding` puts them, `replacing` swaps them
for links and `restoring` takes that back, `links` keeps the book of links, `live` finds the mount that they lead into,
`quiet` asks who writes, `telling` is what is said of it all.

Knows stores and files. Must never import the command line, the adapters or the mount's own package.
"""
