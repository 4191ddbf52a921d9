"""The deduplicator of nearly equal texts by MinHash signatures and locality-sensitive hashing.

After Broder (1997), with the bands of Leskovec, Rajaraman and Ullman's "Mining of Massive Datasets". A pair
that shares a band is compared by its whole signatures, so one equal band alone makes no duplicate. The seed
decides everything: the same texts give the same signatures on every machine.

docs/decisions/own-minhash.md says why this is not datasketch.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from castore.errors import InvalidValueError
from castore.recipes.operators.base import HASHES, NeedsMoreError, Sample, check_at_least
from castore.recipes.operators.clusters import DisjointSets, NearDeduplicator, group_equal_rows

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Words = npt.NDArray[np.uint32]

# Shingles that are hashed together: memory for all shingles times all permutations would be too much.
_SHINGLES = 2048
_EMPTY = 0xFFFF_FFFF


class DocumentMinhashDeduplicator(NearDeduplicator):
    """Keeps the first of the samples whose texts share most of their shingles (runs of tokens).

    Args:
        tokenization: tokens are the text between spaces (``"space"``), words without punctuation
            (``"punctuation"``), or characters (``"character"``, for scripts without spaces).
        window_size: the number of tokens of a shingle.
        lowercase: ignore case.
        ignore_pattern: a regular expression; its matches are ignored.
        num_permutations: the length of a signature; the error of the similarity is about ``1 /
            sqrt(num_permutations)``.
        jaccard_threshold: the least ratio of shared shingles to all shingles of two duplicates.
        num_bands, num_rows_per_band: the division of signatures in the search for pairs; default: the best
            for the threshold.
        tokenizer_model: the model of Data-Juicer's tokenization ``"sentencepiece"``, which castore lacks.
        seed: the seed of the permutations.
        text_key: the column of the text.

    Raises:
        InvalidValueError: a parameter makes no sense.
    """

    column = f"{HASHES}_minhash"
    tokenizers: ClassVar = {
        "space": (str.split, " "),
        "punctuation": (re.compile(r"\w+").findall, " "),
        "character": (list, " "),
    }

    def __init__(
        self,
        tokenization: str = "space",
        window_size: int = 5,
        lowercase: bool = True,
        ignore_pattern: str | None = None,
        num_permutations: int = 256,
        jaccard_threshold: float = 0.7,
        num_bands: int | None = None,
        num_rows_per_band: int | None = None,
        tokenizer_model: str | None = None,
        *,
        seed: int = 42,
        text_key: str = "text",
    ) -> None:
        if tokenization == "sentencepiece":
            raise NeedsMoreError(
                "tokenization='sentencepiece' needs a model, and castore's operators have none; use "
                f"{', '.join(self.tokenizers)}"
            )
        if tokenizer_model is not None:
            raise InvalidValueError("tokenizer_model is for tokenization='sentencepiece' only")
        super().__init__(tokenization, window_size, lowercase, ignore_pattern, text_key=text_key)
        if not 0 < jaccard_threshold <= 1:
            raise InvalidValueError(f"jaccard_threshold={jaccard_threshold!r} must be above 0 and at most 1")
        self.num_permutations = check_at_least(8, num_permutations, "num_permutations")
        self.jaccard_threshold = jaccard_threshold
        self.seed = seed
        if num_bands is None or num_rows_per_band is None:
            best = best_bands(num_permutations, jaccard_threshold)
            rows = num_rows_per_band or (num_permutations // num_bands if num_bands else best[1])
            num_bands, num_rows_per_band = num_bands or num_permutations // max(1, rows), rows
        if num_bands < 1 or num_rows_per_band < 1 or num_bands * num_rows_per_band > num_permutations:
            raise InvalidValueError(
                f"{num_bands} bands of {num_rows_per_band} rows do not fit into {num_permutations} "
                "permutations"
            )
        self.num_bands, self.num_rows_per_band = num_bands, num_rows_per_band

    def compute_hash(self, sample: Sample) -> Sample:
        """The sample with its signature, ``num_permutations`` numbers of 32 bits, as bytes."""
        sample[self.column] = self.signature(self.text_of(sample)).tobytes()
        return sample

    def signature(self, text: str) -> Words:
        """The signature of a text; all bits are set for a text without tokens."""
        import numpy as np
        from xxhash import xxh3_64_intdigest

        shingles = {xxh3_64_intdigest(shingle) for shingle in self.shingles(text)}
        hashes = np.fromiter(shingles, np.uint64, len(shingles))
        factors, offsets = _permutations(self.seed, self.num_permutations)
        least = np.full(self.num_permutations, _EMPTY, np.uint64)
        for at in range(0, len(hashes), _SHINGLES):
            # Multiply-shift: the high half of a * x + b modulo 2**64, with odd a.
            permuted = (hashes[at : at + _SHINGLES, None] * factors + offsets) >> np.uint64(32)
            np.minimum(least, permuted.min(axis=0), out=least)
        return least.astype("<u4")

    def process(self, dataset: Any) -> Any:
        """The dataset without near duplicates, in order; takes 4 bytes for each sample and permutation."""
        import numpy as np

        signatures = np.empty((len(dataset), self.num_permutations), "<u4")
        row = 0
        for table in self.hashes(dataset):
            block = b"".join(table.column(0).to_pylist())
            rows = np.frombuffer(block, "<u4").reshape(-1, self.num_permutations)
            signatures[row : row + len(rows)] = rows
            row += len(rows)
        leaders = self.clusters(signatures)
        first = np.flatnonzero(leaders == np.arange(len(leaders)))
        return dataset if len(first) == len(dataset) else dataset.select(first)

    def clusters(self, signatures: Words) -> npt.NDArray[np.int64]:
        """For each signature, the first one of its cluster; a chain of similar pairs is one cluster."""
        import numpy as np

        forest = DisjointSets(len(signatures))
        # Equal signatures are alike in every band: one of each is compared with the others.
        is_first = np.ones(len(signatures), bool)
        for members in group_equal_rows(self._band(signatures, 0)):
            for places in group_equal_rows(signatures[members]):
                equal = members[places]
                is_first[equal[1:]] = False
                for other in equal[1:]:
                    forest.join(int(equal[0]), int(other))
        firsts = np.flatnonzero(is_first)
        for number in range(self.num_bands):
            for members in group_equal_rows(self._band(signatures, number)[firsts]):
                self._join_alike(signatures, firsts[members], forest)
        return forest.leaders()

    def _band(self, signatures: Words, number: int) -> Words:
        import numpy as np

        start = number * self.num_rows_per_band
        return np.ascontiguousarray(signatures[:, start : start + self.num_rows_per_band])

    def _join_alike(self, signatures: Words, members: npt.NDArray[np.int64], forest: DisjointSets) -> None:
        """Join the members of a bucket whose similarity reaches the threshold."""
        import numpy as np

        while len(members) > 1:
            first, rest = members[0], members[1:]
            alike = np.empty(len(rest), bool)
            for at in range(0, len(rest), _SHINGLES):
                block = signatures[rest[at : at + _SHINGLES]] == signatures[first]
                alike[at : at + _SHINGLES] = block.mean(axis=1) >= self.jaccard_threshold
            for other in rest[alike]:
                forest.join(int(first), int(other))
            members = rest[~alike]


@lru_cache(maxsize=8)
def _permutations(seed: int, count: int) -> tuple[Any, Any]:
    """Odd factors and offsets, of 64 bits each."""
    import numpy as np

    # NumPy promises not to change this generator's raw output, unlike its distributions.
    raw = np.random.PCG64(seed).random_raw(2 * count).astype(np.uint64)
    return raw[:count] | np.uint64(1), raw[count:]


@lru_cache(maxsize=64)
def best_bands(permutations: int, threshold: float) -> tuple[int, int]:
    """The number of bands, and of rows in each, that miss few pairs above a threshold and find few below it.

    The chance that two texts of similarity s share one of b bands of r rows is ``1 - (1 - s**r)**b``. A found
    pair is compared again, so a missed pair costs more than a needless one: it counts nine times.

    >>> best_bands(256, 0.7)
    (32, 8)
    """
    import numpy as np

    steps = np.linspace(0, 1, 201)
    below, above = steps[steps < threshold], steps[steps >= threshold]

    def cost(rows: int) -> float:
        bands = permutations // rows
        found_below = 1 - (1 - below**rows) ** bands
        missed_above = (1 - above**rows) ** bands
        return float(found_below.sum() + 9 * missed_above.sum())

    rows = min(range(1, permutations + 1), key=cost)
    return permutations // rows, rows
