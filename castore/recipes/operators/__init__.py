"""Operators that clean, choose and deduplicate texts in any language, without models and word lists.

They have Data-Juicer's names, parameters, statistics and methods (`process`, `compute_stats`,
`compute_hash`), in own code, so its recipes run here and these run there. One file a family.
`castore.recipes.registry` finds them by name and imports a family only when it is asked for.
"""

from __future__ import annotations
