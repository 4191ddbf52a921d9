"""Hugging Face datasets: `Hasher.hash` becomes `operator_fingerprint`, for the tests of what hashes alike."""

from __future__ import annotations

from typing import Any

from datasets.fingerprint import Hasher

from castore.adapters.datasets import operator_fingerprint


def _hash(cls: type, value: Any) -> str:
    return operator_fingerprint(value)


Hasher.hash = classmethod(_hash)
