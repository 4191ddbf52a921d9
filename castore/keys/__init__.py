"""Keys: turns configs, functions, objects and tokenizers into names, the same in all processes and machines.

`encoder` encodes plain values. `functions` follows code through the user's modules. `objects` adds the state
of objects as pickle sees it. `values` is the table of types that pickle's protocol describes badly. `doubts`
and `addresses` find values that are random. `moved` has former names of castore's modules, which keys keep.

May import: names, errors.
Must never: run a user's code, or give two different computations one key.
"""
