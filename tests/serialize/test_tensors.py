"""Tensors come back as they were, alone and among other values."""

from __future__ import annotations

import math
import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from castore.errors import CorruptError, SerializationError
from castore.serialize.serializers import dump, load
from tests.serialize.test_serializers import LIMITED, round_trip, safe, same
from tests.warm import WarmPython

VALUES: list[tuple[str, Any]] = [
    ("msgpack", {"x": torch.arange(3), "y": 3}), ("msgpack", (np.arange(3), [torch.zeros(2)])),
    ("safetensors", torch.arange(6).reshape(2, 3)), ("safetensors", torch.tensor(1.5)),
    ("safetensors", torch.zeros(0, 3)),
    ("safetensors", torch.tensor([1.5, math.nan], dtype=torch.bfloat16)),
    ("safetensors", torch.ones(2, dtype=torch.float16)),
    ("safetensors", torch.tensor([True, False])), ("safetensors", torch.arange(6).reshape(2, 3).T),
    ("safetensors", torch.arange(10)[::3]),
    ("safetensors", torch.zeros(2, requires_grad=True)),
    ("safetensors", {"b": torch.zeros(2), "a": torch.ones(3, dtype=torch.int8)}),
    ("safetensors", {"tensor": torch.zeros(1)}), ("safetensors", {"": torch.zeros(1)}),
    ("msgpack", {1: torch.zeros(2)}), ("msgpack", {"a": np.zeros(2), "b": torch.zeros(2)}),
]  # fmt: skip


@pytest.mark.parametrize(("serializer", "value"), VALUES)
def test_tensors_come_back_as_they_were(serializer: str, value: Any) -> None:
    name, data = dump(value)
    assert name == serializer
    assert same(load(data, name), value)
    assert dump(value, name) == (name, data)


def test_what_autograd_and_views_made_comes_back_by_its_values() -> None:
    weights = torch.ones(2, requires_grad=True)
    assert same(round_trip(weights * 2), torch.tensor([2.0, 2.0], requires_grad=True))
    assert same(
        round_trip(torch.tensor([1 + 2j], dtype=torch.complex64).conj()),
        torch.tensor([1 - 2j], dtype=torch.complex64),
    )


def test_tensors_that_share_memory_come_back_apart_and_whole() -> None:
    base = torch.arange(6.0)
    value = {"whole": base, "half": base[3:], "again": base, "rows": base.reshape(2, 3)}
    back = round_trip(value)
    assert same(back, value)
    back["whole"][0] = 9
    assert back["again"][0] == 0


def test_equal_tensors_give_equal_bytes() -> None:
    value = {"b": torch.zeros(2), "a": torch.ones(2)}
    assert len({dump(value)[1] for _ in range(20)}) == 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([torch.nn.Parameter(torch.zeros(1))], r"value\[0\]: .*Parameter"),
        (torch.zeros(2, device="meta"), "value: is a meta tensor"),
    ],
)
def test_a_tensor_that_would_not_come_back_is_refused_with_its_path(value: Any, message: str) -> None:
    with pytest.raises(SerializationError, match=message):
        dump(value)


def test_hostile_bytes_of_tensors_give_a_clear_error_in_bounded_memory(warm_torch: WarmPython) -> None:
    told = (
        '{"__metadata__":{"castore":"{\\"kind\\":\\"torch\\",\\"bare\\":true,\\"order\\":[],\\"grad\\":[]}"}}'
    )
    hostile = [("safetensors", safe(told)), ("safetensors", dump(torch.zeros(9))[1][:-1])]
    script = "import torch, safetensors.torch\n" + LIMITED
    done = warm_torch.run(["-c", script], sent=pickle.dumps(hostile))
    assert (done.returncode, done.stdout.decode(), done.stderr.decode()) == (0, "", "")


def test_cut_and_flipped_bytes_of_a_tensor_give_a_value_or_a_clear_error() -> None:
    data = dump(torch.arange(6).reshape(2, 3))[1]
    for at in range(len(data)):
        with pytest.raises(CorruptError):
            load(data[:at], "safetensors")
        for bit in (1, 16, 128):
            hurt = bytearray(data)
            hurt[at] ^= bit
            try:
                load(bytes(hurt), "safetensors")
            except (CorruptError, SerializationError):
                continue


def test_the_safetensors_package_reads_what_is_saved() -> None:
    names = ["bool", "uint8", "int16", "uint32", "int64", "bfloat16", "float32", "complex64", "float8_e4m3fn"]
    value = {f"{name} é": torch.ones(3).to(getattr(torch, name)) for name in names}
    found = safetensors.torch.load(dump(value)[1])
    assert found.keys() == value.keys()
    for name, tensor in value.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_tensor_that_is_kept_keeps_no_other_of_its_file() -> None:
    name, data = dump({"large": torch.ones(1 << 20), "small": torch.ones(2)})
    tracemalloc.start()
    try:
        small = load(data, name)["small"]
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()
    assert small.sum() == 2
