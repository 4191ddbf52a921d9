"""Operators that clean, select and deduplicate texts in any language, without models and downloads.

The operators have the names, parameters, statistics and methods (`process`, `compute_stats`, `compute_hash`)
of Data-Juicer's operators, in castore's own code. So Data-Juicer's recipes run here, and these operators run
there. Each module is one family. `castore.recipes.registry` finds operators by name, and imports a family at
its first use.

May import: errors; `base` and the other families. Nothing of the store.
Must never: fetch a model, a word list or anything else from a network.
"""

from __future__ import annotations
