"""Adapters: castore under the interfaces that training code already speaks. Each needs its own extra installed.

`mapped_check` is shared by those that map whole objects: each object is read once before it is mapped.

May import: the store and all below it, and another adapter's public names.
Must never: import another adapter's insides, or the command line.
"""
