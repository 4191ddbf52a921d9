"""The comprehensive example of Quaterion's page on its cache, with a real text encoder and an image
encoder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from castore.adapters.embeddings import CacheConfig, CachedEncoder, CacheType, cache_embeddings
from tests.adapters.embeddings.minilm import Agreement, Digits
from tests.adapters.embeddings.models import losses

COUNT, BATCH = 24, 8
PLACES = {"text_encoder": (0, "text"), "image_encoder": (0, "image")}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def custom_key_extractor(feature: Any) -> Any:
    return feature[:60] if isinstance(feature, str) else feature.numpy().tobytes()


def config(
    folder: Path, text: CacheType = CacheType.GPU, image: CacheType = CacheType.CPU, **options: Any
) -> CacheConfig:
    return CacheConfig(
        mapping={"text_encoder": text, "image_encoder": image},
        batch_size=BATCH,
        save_dir=folder / "cache_dir",
        num_workers=2,
        **options,
    )


def run(config: CacheConfig | None, length: int = 16) -> tuple[list[float], int, int]:
    """Train two epochs; return the losses and the numbers of encoded texts and images."""
    model = Agreement(length)
    train = DataLoader(Digits(COUNT), batch_size=BATCH, shuffle=True)
    val: DataLoader[Any] | None = DataLoader(Digits(BATCH, start=COUNT), batch_size=BATCH)
    if config is not None:
        train, val = cache_embeddings(model, train, val, config, PLACES)
    out = losses(model, train)
    assert val is not None
    with torch.no_grad():
        out += [model.eval()(x).sum().item() for x, _ in val]
    return out, model.text_encoder.encoded, model.image_encoder.encoded


def test_the_second_run_encodes_nothing_and_losses_are_those_without_a_cache_to_the_last_bit(
    tmp_path: Path,
) -> None:
    plain, texts, images = run(None)
    assert (texts, images) == (2 * COUNT + BATCH, 2 * COUNT + BATCH)
    first, texts, images = run(config(tmp_path))
    assert (texts, images) == (COUNT + BATCH, COUNT + BATCH)
    second, *again = run(config(tmp_path, CacheType.DISK, CacheType.AUTO))
    assert again == [0, 0]
    assert plain == first == second
    extracted, texts, images = run(config(tmp_path, key_extractors=custom_key_extractor))
    # Some sentences occur more than once, and are encoded once.
    distinct = [len({*Digits(COUNT).texts}), len({*Digits(BATCH, start=COUNT).texts})]
    assert (texts, images) == (sum(distinct), COUNT + BATCH)
    assert extracted == pytest.approx(plain, rel=1e-4)
    assert run(config(tmp_path, key_extractors=custom_key_extractor))[1:] == (0, 0)


def test_another_tokenizer_misses_and_a_used_one_does_not(tmp_path: Path) -> None:
    assert run(config(tmp_path))[1] == COUNT + BATCH
    # Half the length gives the texts other embeddings; the images are unchanged.
    assert run(config(tmp_path), length=8)[1:] == (COUNT + BATCH, 0)
    model = Agreement()
    model.text_encoder.tokenizer.add_tokens(["envelope!"])
    assert fills(model, tmp_path) == (COUNT, 0)
    used = Agreement()
    used.text_encoder(["a text that is cut and padded", "another"])
    used.text_encoder.encoded = 0
    assert fills(used, tmp_path) == (0, 0)


def fills(model: Agreement, folder: Path) -> tuple[int, int]:
    cache_embeddings(model, DataLoader(Digits(COUNT), batch_size=BATCH), None, config(folder), PLACES)
    assert isinstance(model.text_encoder, CachedEncoder)
    return model.text_encoder.encoded, model.image_encoder.encoded


class Tokenised(Digits):
    """A dataset that tokenises its texts."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(COUNT)
        self.tokenizer = tokenizer

    def __getitem__(self, index: int) -> Any:
        tokens = self.tokenizer(self.texts[index], padding="max_length", max_length=16, truncation=True)
        return torch.tensor(tokens["input_ids"]), self.labels[index]


@pytest.mark.parametrize("where", ["dataset", "collate"])
def test_a_tokenizer_in_the_dataset_or_in_the_collate_function_counts(tmp_path: Path, where: str) -> None:
    # Of the same kind with few words: the vocabulary counts, and 30,000 words take a while.
    tokenizer = Agreement().text_encoder.tokenizer.train_new_from_iterator(Digits(COUNT).texts, 100)

    def collate(samples: list[Any]) -> Any:
        texts = [x["text"] for x, _ in samples]
        tokens = tokenizer(texts, padding="max_length", max_length=16, truncation=True)
        return torch.tensor(tokens["input_ids"]), torch.tensor([y for _, y in samples])

    def encoded() -> int:
        embedding = torch.nn.Embedding(40_000, 4).requires_grad_(False)
        torch.nn.init.ones_(embedding.weight)
        encoder = Counting(embedding)
        model = torch.nn.Sequential(encoder, torch.nn.Linear(4, 2))
        batches: DataLoader[Any] = (
            DataLoader(Tokenised(tokenizer), batch_size=BATCH)
            if where == "dataset"
            else DataLoader(Digits(COUNT), batch_size=BATCH, collate_fn=collate)
        )
        cache_embeddings(model, batches, config=CacheConfig(save_dir=tmp_path / "store"))
        return encoder.encoded

    assert [encoded(), encoded()] == [COUNT, 0]
    tokenizer.add_tokens(["envelope"])
    assert encoded() == COUNT


class Counting(torch.nn.Module):
    """Means of embeddings; counts the encoded items."""

    def __init__(self, embedding: torch.nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.encoded = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.encoded += len(ids)
        out: torch.Tensor = self.embedding(ids).mean(1)
        return out
