"""Keys: turns configs, functions, objects and tokenizers into names, the same in all processes and machines.

`encoder` walks through a value, and has the rules for configs. `registry` has tables of types and rules,
which list what counts of which type. `objects` puts together the rules for any value: `functions` follows
code through the user's modules (`bytecode` reads it), `beside_code` has annotations and docstrings,
`declared` the classes of pydantic and msgspec. `pickled` is the state of objects as pickle sees it,
`values` is the table of types that pickle's protocol describes badly. `tracing` encodes by such rules and
finds, with `doubts` and `addresses`, values that are random. `moved` has former names of castore's modules,
which keys keep.

May import: system, names, errors.
Must never: run a user's code, or give two different computations one key.
"""
