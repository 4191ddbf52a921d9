"""Bytes that the castore of November 2026 made of values of every kind are read, and are made again."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from PIL import Image

from castore.adapters.torch.samples import unpack
from castore.serialize.serializers import load
from tests.adapters.torch.test_samples import bits
from tests.adapters.torch.test_samples import same as same_image
from tests.serialize.kinds.values import same as same_value
from tests.serialize.old_values import values, written

ARCHIVE = Path(__file__).with_name("bytes-2026-11.xz")
OLD: dict[str, list[Any]] = msgpack.unpackb(lzma.decompress(ARCHIVE.read_bytes()))
VALUES = values()


def same(one: Any, two: Any) -> bool:
    """Whether two values are equal in type and value; of tensors, in their bits."""
    if isinstance(two, Image.Image):
        return same_image(one, two)
    if type(one) is type(two) is torch.Tensor and two.layout is torch.strided:
        plain = two.resolve_conj().contiguous()
        return (one.dtype, one.shape) == (two.dtype, two.shape) and bits(one) == bits(plain)
    if type(two) is dict and all(type(part) is torch.Tensor for part in two.values()):
        return list(one) == list(two) and all(map(same, one.values(), two.values()))
    return same_value(one, two)


def test_the_archive_has_all_values() -> None:
    assert list(OLD) == list(VALUES)


@pytest.mark.parametrize("name", OLD)
def test_old_bytes_of_a_value_are_read(name: str) -> None:
    record, serializer, data, inside = OLD[name]
    for found in (unpack(record), load(data, serializer), load(inside, "msgpack")[0]):
        assert same(found, VALUES[name])


@pytest.mark.parametrize("name", [name for name in OLD if not name.startswith("kind")])
def test_a_value_makes_the_bytes_that_it_made_before(name: str) -> None:
    """The kinds are left out, for libraries write some of them: each version of Arrow its own streams."""
    for _ in range(2):  # the second time, headers come from a cache
        assert written(VALUES[name]) == OLD[name]
