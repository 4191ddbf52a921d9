"""Small similar samples made of the machine's texts: JSON records and token ids, as training caches hold.

Samples to learn from and samples to measure on come from different documents. Never makes text up: the gain
of dictionaries depends on how people write.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from functools import cache

import numpy as np

from tools.bench import corpus, recipe, texts

_VOCABULARY = 50_000
# Most characters of one document: a few very long ones must not be most of the data.
_MOST = 100_000


@cache
def _documents(size: int) -> list[tuple[str, str]]:
    return [(row["name"], row["text"][:_MOST]) for row in texts.documents(size)]


def records(size: int, length: int) -> tuple[list[bytes], list[bytes]]:
    """JSON records with ``length`` characters of text each: to learn from, and to measure on.

    Args:
        size: bytes of documents to cut them from.
        length: characters of each record's text.
    """
    chance = random.Random(corpus.SEED)

    def each(name: str, text: str) -> Iterator[bytes]:
        for start in range(0, len(text) - length, length):
            record = {
                "id": f"{name}#{start}",
                "source": name.rsplit("/", 1)[0],
                "split": chance.choice(["train", "valid"]),
                "language": "en",
                "quality": round(chance.random(), 4),
                "text": text[start : start + length],
            }
            yield json.dumps(record).encode()

    return _halves([list(each(*document)) for document in _documents(size)])


def token_ids(size: int, length: int, dtype: str) -> tuple[list[bytes], list[bytes]]:
    """Sequences of ``length`` token ids, of a vocabulary of 50,000: to learn from, and to measure on."""
    return _halves(
        [
            [
                ids[start : start + length].astype(dtype).tobytes()
                for start in range(0, len(ids) - length + 1, length)
            ]
            for ids in _tokenised(size)
        ]
    )


@cache
def _tokenised(size: int) -> list[np.ndarray[tuple[int], np.dtype[np.int32]]]:
    documents = [text for _, text in _documents(size)]
    tokenize = recipe.Tokenize(recipe.vocabulary(documents, _VOCABULARY - 256), _MOST)
    return [tokenize({"text": text})["ids"] for text in documents]


def _halves(parts: list[list[bytes]]) -> tuple[list[bytes], list[bytes]]:
    """The samples of every other document, and those of the others, each once and in random order."""
    chance = random.Random(corpus.SEED)
    halves = []
    for place in (0, 1):
        half = list(dict.fromkeys(itertools.chain.from_iterable(parts[place::2])))
        chance.shuffle(half)
        halves.append(half)
    return halves[0], halves[1]
