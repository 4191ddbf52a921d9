"""CacheType.GPU: a copy of the table on the encoder's device, or a part of the table on each rank's device.

The code is the same for every kind of device. So most tests use the CPU, and some repeat the check with CUDA.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from castore import Store
from castore.adapters.embeddings import CacheConfig, CacheType, EmbeddingCache, cache_embeddings
from castore.adapters.embeddings.devices import DeviceLookup
from castore.errors import InvalidValueError
from tests.adapters.embeddings.models import (
    Encoder,
    Model,
    data,
    features,
    loader,
)
from tests.adapters.embeddings.test_outputs import Tokens
from tests.adapters.embeddings.test_ranks import HERE, TWO, run
from tests.warm import WarmPython

CPU = torch.device("cpu")
WHOLE = CacheConfig(cache_type=CacheType.GPU)


def test_a_copy_on_the_device_gives_the_same_as_the_table(store: Store) -> None:
    model = Model()
    kept, _ = cache_embeddings(model, loader(shuffle=False), config=WHOLE, store=store)
    assert isinstance(next(iter(model.encoder._tables.values())), DeviceLookup)
    assert torch.allclose(torch.cat([model(x) for x, _ in kept]), Model()(features()), atol=1e-6)


def test_rows_with_gaps_are_found_in_a_copy(store: Store) -> None:
    cache = EmbeddingCache("squares", store)
    cache.fill(
        range(10),
        range(10),
        lambda items: {"square": torch.tensor(items) ** 2, "half": (torch.ones(len(items)),)},
    )
    copied = DeviceLookup(cache, torch.tensor([1, 4, 5, 9]))
    assert copied.take(torch.tensor([9, 4, 4]), CPU)["square"].tolist() == [81, 16, 16]


def test_embeddings_of_different_lengths_stay_off_the_device(store: Store) -> None:
    model = Model(Tokens())
    kept, _ = cache_embeddings(model, loader(), config=WHOLE, store=store)
    with pytest.raises(
        InvalidValueError, match=r"differ in length cannot be kept on a device; use CacheType.CPU"
    ):
        model.encoder(next(iter(kept))[0])


def test_a_split_needs_a_process_group(store: Store) -> None:
    config = CacheConfig(cache_type=CacheType.GPU, split=True)
    with pytest.raises(InvalidValueError, match="split=True needs a process group"):
        cache_embeddings(Model(), loader(), config=config, store=store)


def test_ranks_hold_a_half_each_and_look_up_in_both(tmp_path: Path, warm_torch: WarmPython) -> None:
    run(warm_torch, tmp_path, *TWO, str(HERE / "split_job.py"), str(tmp_path))
    assert sorted(path.name for path in tmp_path.glob("done-*")) == ["done-0", "done-1"]


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: CacheType.GPU and AUTO on one"
)
@pytest.mark.parametrize("kind", [CacheType.GPU, CacheType.AUTO, CacheType.CPU, CacheType.DISK])
@pytest.mark.parametrize("moved", [False, True])
def test_embeddings_come_out_on_the_encoder_s_cuda_device(store: Store, kind: CacheType, moved: bool) -> None:
    model = Model().to("cuda")
    raw = loader(data(), shuffle=False, pin_memory=moved)
    kept, _ = cache_embeddings(model, raw, config=CacheConfig(cache_type=kind), store=store)
    assert isinstance(next(iter(model.encoder._tables.values())), DeviceLookup) == (
        kind in (CacheType.GPU, CacheType.AUTO)
    )
    found = torch.cat([model.encoder(x.to("cuda", non_blocking=True) if moved else x) for x, _ in kept])
    assert found.device.type == "cuda"
    assert torch.allclose(found.cpu(), Encoder()(features()), atol=1e-5)
