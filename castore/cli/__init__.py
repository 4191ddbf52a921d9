"""The command line: one module a command, named after it.

A command's module may import what it needs inside its function only, so that starting up costs little.

May import: everything.
Must never: hold knowledge of its own about stores. Commands use the library as anybody else would.
"""
