"""Keys: configs, functions, objects and tokenizers become names, the same in every process and on every machine.

`encoder` writes plain values. `functions` follows code through the user's own modules, `objects` adds what pickle would
keep, `values` is the one table of values that pickle tells badly of. `doubts` and `addresses` find values that are
random.

May import: names, errors.
Must never: run a user's code, or give two different computations one key.
"""
