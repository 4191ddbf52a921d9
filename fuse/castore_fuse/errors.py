"""The errors of mounting. Each message is one sentence: what, where, what to do.

Leaf module: it imports only `castore.errors`.
"""

from __future__ import annotations

from castore.errors import CastoreError


class MountError(CastoreError):
    """A mount could not be made, found or ended."""


class BusyError(MountError):
    """A mount cannot be ended because processes still use files in it."""
