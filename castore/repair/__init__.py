"""Repair: checks a store, and mends what can be mended without loss.

`doctor` checks a store from outside. `verify` reads blobs back. `rebuild` rebuilds the index from the objects
and the journal. `journal_check` compares index and journal. `misplaced_files` sets foreign files aside.
`dictionary_repair` mends dictionaries.

May import: gc, read, write, index, objects, serialize, system, settings, the parts of a store, and the
values at the top of castore.
Must never: touch what a live process uses, or delete what could be somebody's data: that goes to quarantine.
"""
