"""Keys move like tensors, and refuse every other operation."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from castore.adapters.embeddings import Keys
from castore.errors import InvalidValueError

KEYS = Keys.of(torch.arange(6).reshape(3, 2))


@pytest.mark.parametrize(
    "move",
    [
        lambda keys: keys.to("cpu"),
        lambda keys: keys.to("cpu", non_blocking=True),
        lambda keys: keys.clone().detach().contiguous(),
        lambda keys: keys[1:],
        lambda keys: keys[torch.tensor([2, 0])],
        lambda keys: torch.cat([keys, keys]),
        lambda keys: torch.split(keys, 2)[0],
        lambda keys: keys.chunk(3)[0],
        lambda keys: pickle.loads(pickle.dumps(keys)),
        copy.deepcopy,
        lambda keys: keys.index_select(0, torch.tensor([1])),
        lambda keys: keys[1:, :],
        lambda keys: keys[torch.tensor([True, False, True]), ...],
        lambda keys: keys.narrow(0, 1, 2),
        lambda keys: torch.cat([keys, keys], dim=0),
    ],
)
def test_what_moves_keys_gives_keys(move: Callable[[Any], Any]) -> None:
    moved = move(KEYS)
    assert type(moved) is Keys
    assert moved.tolist() == move(torch.arange(6).reshape(3, 2)).tolist()


def test_keys_tell_their_shape_and_device() -> None:
    assert (len(KEYS), KEYS.shape, KEYS.size(0), KEYS.ndim, KEYS.device.type) == (3, (3, 2), 3, 2, "cpu")
    assert repr(KEYS) == "Keys([[0, 1], [2, 3], [4, 5]])"
    assert type(KEYS.column(1)) is torch.Tensor
    assert KEYS.column(1).tolist() == [1, 3, 5]


@pytest.mark.parametrize(
    "compute",
    [
        lambda keys: keys + 1,
        lambda keys: 2 * keys,
        lambda keys: keys.float(),
        lambda keys: keys.to(torch.float32),
        lambda keys: keys.to(torch.int32),
        lambda keys: keys.mean(),
        lambda keys: keys @ torch.ones(2, dtype=torch.int64),
        nn.Linear(2, 2),
        nn.Embedding(10, 2),
        lambda keys: keys.flatten(1),
        lambda keys: keys.add_(1),
        lambda keys: keys.zero_(),
        lambda keys: torch.stack([keys, keys]),
        lambda keys: keys == 3,
        # Of features these are other things than of the Keys in their place.
        lambda keys: keys[:, :1],
        lambda keys: keys[..., :1],
        lambda keys: keys[:, [0]],
        lambda keys: keys.narrow(1, 0, 1),
        lambda keys: keys.split(1, 1)[0],
        lambda keys: keys.chunk(2, dim=1)[0],
        lambda keys: keys.unbind(dim=-1)[0],
        lambda keys: keys.index_select(1, torch.tensor([0])),
        lambda keys: torch.cat([keys, keys], 1),
        lambda keys: torch.cat([keys, keys], dim=-1),
    ],
)
def test_what_computes_with_keys_is_refused(compute: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidValueError, match="of Keys: this batch holds keys of cached embeddings"):
        compute(KEYS)
    assert KEYS.tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    "move",
    [
        lambda keys: keys.to("meta"),
        lambda keys: keys.to("meta").clone().detach().contiguous(),
        lambda keys: copy.deepcopy(keys.to("meta", non_blocking=True)),
        lambda keys: torch.clone(input=keys.to(device="meta")),
    ],
)
def test_keys_on_a_device_are_known_in_memory_as_well(move: Callable[[Any], Any]) -> None:
    """A look-up that read them from the device would wait for all that the device has to do before."""
    memory = torch.arange(6).reshape(3, 2)
    moved = move(Keys.of(memory))
    memory.zero_()  # a loader takes the same memory for its next batch
    assert moved.column(1).device.type == "meta"
    assert moved.column_in_memory(1).tolist() == [1, 3, 5]
    with pytest.raises(NotImplementedError):
        moved[1:].column_in_memory(1)  # a part of them is read from the device, which here has no data


def test_keys_of_one_item_without_a_batch_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="without the dimension of the batch"):
        KEYS[0].column(0)  # type: ignore[attr-defined]


def test_keys_are_made_of_whole_numbers_only() -> None:
    with pytest.raises(InvalidValueError, match="keys are int64"):
        Keys.of(torch.zeros(3, 2))
