"""The command line: one module a command, named after it.

A command's module may import what it needs inside its function only, so that starting up costs little. Commands use the
library as anybody else would and hold no knowledge of their own about stores.
"""
