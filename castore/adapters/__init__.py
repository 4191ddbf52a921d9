"""Adapters: castore under the interfaces that training code uses already. Each needs its own extra.

The adapters that map whole objects share `mapped_check`: each object is read once before it is mapped. Those
that tell arguments apart by their bytes share `left_out`: what the bytes leave out counts as well.

May import: the store and all below it, and names that another adapter's `__init__.py` has.
Must never: import another adapter's modules, or the command line.
"""
