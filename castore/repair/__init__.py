"""Repair: looks a store over, and mends what can be mended without losing anything.

`doctor` looks from outside. `verify` reads blobs back. `rebuild` makes the index anew from the objects and the journal.
`journal_check` compares both. `misplaced_files` sets aside what does not belong. `dictionary_repair` mends dictionaries.

May import: gc, read, write, index, objects, serialize, system, and the parts of a store.
Must never: touch what a live process uses, or delete what could be somebody's data: that goes to quarantine.
"""
