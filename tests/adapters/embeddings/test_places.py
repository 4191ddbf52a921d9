"""The encoders of a model that are cached or refused, and the part of a batch that is the input of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from castore import Store
from castore.adapters.embeddings import CacheConfig, CacheType, cache_embeddings
from castore.errors import InvalidValueError
from tests.adapters.embeddings.models import (
    CONFIG,
    Encoder,
    Made,
    Model,
    cached,
    data,
    features,
    fill,
    loader,
    losses,
)


class Two(nn.Module):
    """Two encoders over one batch with names."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = Encoder(seed=1), Encoder(seed=2)
        self.head = nn.Linear(8, 3)

    def forward(self, batch: Any) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.cat([self.text(batch["text"]), self.image(batch["image"])], 1))
        return out


def named_sample(i: int) -> dict[str, Any]:
    return {"text": features()[i], "image": features(seed=4)[i], "label": i % 3, "id": f"item {i}"}


def same_batches(raw: DataLoader[Any], kept: DataLoader[Any], names: list[str]) -> None:
    for expected, batch in zip(raw, kept, strict=True):
        assert list(expected) == list(batch)
        for name in names:
            assert (
                torch.equal(torch.as_tensor(expected[name]), torch.as_tensor(batch[name]))
                if name != "id"
                else (expected[name] == batch[name])
            )


def test_each_encoder_takes_its_own_place_of_a_batch_with_names(store: Store) -> None:
    model, raw = Two(), loader(Made(named_sample), shuffle=False)
    expected = [model(batch) for batch in raw]
    kept = cached(model, raw, store, encoders={"text": "text", "image": lambda batch: batch["image"]})
    for batch, out in zip(kept, expected, strict=True):
        assert torch.equal(model(batch), out)
    same_batches(raw, kept, ["label", "id"])


def test_a_batch_with_names_needs_to_be_told_the_places(store: Store) -> None:
    with pytest.raises(
        InvalidValueError, match=r"choose the input of the encoder with encoders={'text': \.\.\.}"
    ):
        cached(Two(), loader(Made(named_sample)), store)


def test_a_place_that_is_made_from_the_batch_is_refused(store: Store) -> None:
    with pytest.raises(InvalidValueError, match="is not a part of the batch but computed from it"):
        cached(Two(), loader(Made(named_sample)), store, encoders={"text": lambda batch: batch["text"] * 2})


def test_one_encoder_may_stay_as_it_is_and_gets_raw_features(store: Store) -> None:
    model, raw = Two(), loader(Made(named_sample), shuffle=False)
    model.image.requires_grad_(True)
    expected = [model(batch) for batch in raw]
    places = {"text": "text", "image": "image"}
    config = CacheConfig(mapping={"image": CacheType.NONE})
    kept = cached(model, raw, store, config, encoders=places)
    model.image.encoded = 0
    for batch, out in zip(kept, expected, strict=True):
        assert type(batch["image"]) is torch.Tensor
        assert torch.allclose(model(batch), out, atol=1e-6)
    assert model.image.encoded == 20


def test_a_feature_that_feeds_a_cached_and_a_trainable_encoder_is_refused(store: Store) -> None:
    config = CacheConfig(mapping={"image": CacheType.NONE})
    with pytest.raises(
        InvalidValueError,
        match=r"batch\['text'\] is the input of the encoder 'text', which is cached, and of one that is not",
    ):
        cached(Two(), loader(Made(named_sample)), store, config, encoders={"text": "text", "image": "text"})


def test_two_encoders_share_a_feature(store: Store) -> None:
    class Both(Two):
        def forward(self, x: Any) -> torch.Tensor:
            out: torch.Tensor = self.head(torch.cat([self.text(x), self.image(x)], 1))
            return out

    model, raw = Both(), loader(shuffle=False)
    expected = [model(x) for x, _ in raw]
    for (x, _), out in zip(cached(model, raw, store), expected, strict=True):
        assert torch.allclose(model(x), out, atol=1e-6)


def test_one_encoder_is_called_for_the_query_and_for_the_document(store: Store) -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder()

        def forward(self, batch: Any) -> torch.Tensor:
            out: torch.Tensor = self.encoder(batch["query"]) - self.encoder(batch["document"])
            return out

    def pair(i: int) -> Any:
        return {"query": features()[i], "document": features(seed=4)[i]}

    model, raw = Pairs(), loader(Made(pair), shuffle=False)
    expected = [model(batch) for batch in raw]
    model.encoder.encoded = 0
    kept = cached(model, raw, store, encoders={"encoder": ["query", "document"]})
    assert model.encoder.encoded == 40
    for batch, out in zip(kept, expected, strict=True):
        assert torch.allclose(model(batch), out, atol=1e-6)


def test_an_encoder_of_several_inputs_is_fed_by_keyword(store: Store) -> None:
    class Masked(Encoder):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            assert mask is not None
            return super().forward(ids * mask)

    class Inputs(Model):
        def forward(self, batch: Any) -> torch.Tensor:
            out: torch.Tensor = self.head(self.encoder(batch["ids"], mask=batch["mask"]))
            return out

    raw = loader(
        Made(lambda i: {"ids": features()[i], "mask": features(seed=4)[i] > 0, "y": i}), shuffle=False
    )
    model = Inputs(Masked())
    expected = [model(batch) for batch in raw]
    kept = cached(model, raw, store, encoders={"encoder": {"ids": "ids", "mask": "mask"}})
    for batch, out in zip(kept, expected, strict=True):
        assert torch.equal(model(batch), out)


def test_an_encoder_deep_in_the_model_is_named_with_dots(store: Store) -> None:
    model = nn.Sequential(nn.Sequential(Encoder(), nn.Tanh()), nn.Linear(4, 3))
    raw = loader(shuffle=False)
    expected = [model(x) for x, _ in raw]
    kept = cached(model, raw, store, encoders="0.0")
    for (x, _), out in zip(kept, expected, strict=True):
        assert torch.equal(model(x), out)


def test_names_that_do_not_exist_are_answered_with_the_nearest(store: Store) -> None:
    with pytest.raises(InvalidValueError, match="did you mean 'encoder'"):
        cached(Model(), loader(), store, encoders="encodr")
    with pytest.raises(InvalidValueError, match=r"mapping names 'encodr'.*did you mean 'encoder'"):
        cached(Model(), loader(), store, CacheConfig(mapping={"encodr": CacheType.CPU}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((data(),), "the train loader is a TensorDataset; give a DataLoader"),
        ((loader(), CONFIG), "the val loader is a CacheConfig; give a DataLoader"),
        ((loader(), None, {"batch_size": 3}), "config is a dict; give a CacheConfig"),
        ((loader(), None, CONFIG, 0), "encoders holds a int; give names: 'encoder', 'encoder.layer', 'head'"),
        ((loader(), None, CONFIG, [Encoder()]), "encoders holds a Encoder; give names"),
    ],
)
def test_arguments_of_another_kind_are_answered_with_what_to_give(
    store: Store, arguments: Any, message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        cache_embeddings(*(Model(), *arguments, *[None] * (4 - len(arguments)), store))


def test_a_model_without_frozen_children_says_which_parameters_are_trained(store: Store) -> None:
    model = nn.Sequential(nn.Linear(8, 3), nn.ReLU())
    with pytest.raises(
        InvalidValueError,
        match=r"no child of the model is frozen: '0' \(its parameter 'weight' requires grad",
    ):
        cached(model, loader(), store)
    compiled: Any = torch.compile(Model())
    with pytest.raises(InvalidValueError, match=r"call cache_embeddings before torch\.compile"):
        cached(compiled, loader(), store)


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (nn.Linear(8, 4), "its parameter 'weight' requires grad"),
        (
            nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5)).requires_grad_(False),
            r"its module '1' \(Dropout\) is in train mode",
        ),
        (
            nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).requires_grad_(False),
            r"its module '1' \(BatchNorm1d\)",
        ),
        (
            nn.TransformerEncoderLayer(8, 2).requires_grad_(False),
            r"its module 'self_attn' \(MultiheadAttention\)",
        ),
        (
            nn.Sequential(nn.BatchNorm1d(8, track_running_stats=False)).requires_grad_(False).eval(),
            r"its module '0' \(BatchNorm1d\) has no running statistics",
        ),
    ],
)
def test_an_encoder_that_trains_or_is_random_is_refused_by_name(
    store: Store, encoder: nn.Module, message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        cached(Model(encoder), loader(), store, encoders="encoder")


def test_dropout_that_nobody_can_see_is_noticed(store: Store) -> None:
    class Hidden(Encoder):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(super().forward(x), 0.5, training=True)

    with pytest.raises(InvalidValueError, match="the encoder 'encoder' draws random numbers"):
        fill(data(), store, encoder=Hidden())


def test_a_compiled_model_trains_on_keys(store: Store) -> None:
    model = Model()
    kept = cached(model, loader(shuffle=False), store)
    compiled = torch.compile(model, backend="eager")
    for keys, _ in kept:
        assert torch.equal(compiled(keys), model(keys))


def test_running_out_of_memory_is_not_taken_for_a_wrong_input(store: Store) -> None:
    class Large(Encoder):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("no more")

    with pytest.raises(torch.OutOfMemoryError):
        fill(data(), store, encoder=Large())


def test_a_layer_that_is_no_encoder_cannot_compute_with_keys(store: Store) -> None:
    class Skips(Model):
        def forward(self, x: Any) -> torch.Tensor:
            return super().forward(x * 0.5)

    model = Skips()
    kept = cached(model, loader(), store)
    with pytest.raises(InvalidValueError, match="mul of Keys: this batch holds keys of cached embeddings"):
        losses(model, kept)
