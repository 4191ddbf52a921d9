"""stocaching: a module of that name, whose `SharedCache` and `get_shm_size` are castore's."""

from __future__ import annotations

import sys
import types

from castore.adapters.torch import SharedCache, get_shm_size

_module = types.ModuleType("stocaching")
_module.SharedCache = SharedCache  # type: ignore[attr-defined]
_module.get_shm_size = get_shm_size  # type: ignore[attr-defined]
sys.modules["stocaching"] = _module
