"""Adapters: castore under the interfaces that training code uses already. Each needs its own extra.

`mapped_check` is shared by those that map whole objects: each object is read once before it is mapped.

May import: the store and all below it, and another adapter's public names.
Must never: import another adapter's insides, or the command line.
"""
