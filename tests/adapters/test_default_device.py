"""Tensors that castore makes for itself lie on the CPU, whatever ``torch.set_default_device`` says.

Programs for a GPU call it with "cuda". Here it is "meta": a tensor that lands there has no data, so any use
of it is an error. tests/gpu has the same with CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from castore import Store
from castore.adapters.embeddings import EmbeddingCache
from castore.adapters.torch import BiLevelCachedDataset, SharedCache


@pytest.fixture(autouse=True)
def elsewhere() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def _here(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu")


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(
    "make",
    [
        lambda: _here(1, 2, 3),
        lambda: torch.empty(0, 3, dtype=torch.bfloat16, device="cpu"),
        lambda: _here(0, 2, 0).to_sparse(),
        lambda: torch.eye(3, device="cpu").to_sparse_csr(),
        lambda: _here(1, 2).requires_grad_(),
    ],
)
def test_saved_tensors_come_back_on_the_cpu(store: Store, make: Any) -> None:
    value = make()
    store.save("value", {"x": value, "n": 1})
    found = store.load("value")["x"]
    assert found.device.type == "cpu"
    assert found.layout is value.layout
    assert torch.equal(found.to_dense(), value.to_dense())


@pytest.mark.parametrize("dims", [(2,), (None,), None])
def test_slots_are_read(dims: Any) -> None:
    cache = SharedCache(0.01, 4, dims, torch.float32)
    cache.set_slot(1, _here(3, 4))
    assert cache.get_slot(1).tolist() == [3, 4]
    assert [value if value is None else value.tolist() for value in cache.get_slots([1, 0])] == [[3, 4], None]
    if dims == (2,):
        assert cache.get_batch([1, 1]).tolist() == [[3, 4]] * 2
        assert cache.array[1].tolist() == [3, 4]
    assert cache.aux_array.tolist() == [0, 1, 0, 0]
    cache.close()


class _Samples(Dataset[Any]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return {"x": _here(*range(index)), "name": str(index)}


@pytest.mark.parametrize("memory", ["4MB", 0])
def test_samples_are_read(tmp_path: Path, memory: Any) -> None:
    dataset = BiLevelCachedDataset(_Samples(), memory, "40MB", tmp_path / "samples", key="samples")
    for _ in range(2):
        assert [dataset[index]["x"].tolist() for index in range(5)] == [[*range(n)] for n in range(5)]
    dataset.close()


@pytest.mark.parametrize("resident", [False, True])
def test_embeddings_are_read(store: Store, resident: bool) -> None:
    def encode(items: Any) -> dict[str, Any]:
        return {
            "fixed": torch.stack([_here(item, item + 1) for item in items]),
            "ragged": [_here(*range(item)) for item in items],
            "text": [str(item) for item in items],
            "number": [item / 2 for item in items],
        }

    EmbeddingCache("table", store).fill(range(5), range(5), encode, batch_size=2)
    cache = EmbeddingCache("table", store, resident=resident)
    cache.fill(range(7), range(7), encode, batch_size=2)
    found = cache.get([6, 0, 3])
    assert found["fixed"].tolist() == [[6, 7], [0, 1], [3, 4]]
    assert [value.tolist() for value in found["ragged"]] == [[*range(6)], [], [0, 1, 2]]
    assert found["text"] == ["6", "0", "3"]
    assert [float(value) for value in found["number"]] == [3, 0, 1.5]
    assert cache.find([1, 9]).tolist()[1] == -1
