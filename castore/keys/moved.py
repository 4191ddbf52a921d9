"""Names of modules in keys: former ones of castore's own modules, and one name for the program's main module.

Keys in existing stores contain the names that castore's modules had then.

A row is needed where a class or a function of the module can count in a key. Must never lose a row: every
result that is stored under such a key would be computed again.
"""

from __future__ import annotations

# The first row that fits counts.
_MOVED = {
    "castore.recipes.operators.cleaners": "castore.adapters.datasets.ops.cleaning",
    "castore.recipes.operators.unicode_repair": "castore.adapters.datasets.ops.repairing",
    "castore.recipes.operators": "castore.adapters.datasets.ops",
    "castore.adapters.embeddings.batch_places": "castore.adapters.embeddings.batches",
    "castore.adapters.embeddings.encoder_inputs": "castore.adapters.embeddings.inputs",
}


def name_in_keys(module: str) -> str:
    """The name under which a module counts in keys: for one of castore's that moved, the former name. Spawned
    workers have another name for the program's main module.

    >>> name_in_keys("castore.recipes.operators.lengths"), name_in_keys("castore.store")
    ('castore.adapters.datasets.ops.lengths', 'castore.store')
    """
    if module == "__mp_main__":
        return "__main__"
    if module.startswith("castore."):
        for now, before in _MOVED.items():
            if f"{module}.".startswith(f"{now}."):
                return before + module.removeprefix(now)
    return module
