"""The deduplicator of nearly equal texts by SimHash: similar texts have 64-bit hashes that differ in few
bits.

After Charikar (2002) and Manku, Jain and Das Sarma (2007). Two hashes that differ in at most k bits agree in
one of k + 1 blocks, so only hashes that share a block are compared. The hashes equal Data-Juicer's, bit for
bit.
"""

from __future__ import annotations

import functools
import hashlib
import re
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from castore.errors import InvalidValueError
from castore.recipes.operators.base import HASHES, Sample, compile_pattern
from castore.recipes.operators.clusters import DisjointSets, NearDeduplicator, group_equal_rows

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Words = npt.NDArray[np.uint64]

_BITS = 64
_SPACES = re.compile(" +")


def _split_at_spaces(text: str) -> list[str]:
    return [token for token in _SPACES.split(text) if token]


def _split_at_punctuation(text: str) -> list[str]:
    return compile_pattern(r"\p{P}", "tokenization").split(text)


class DocumentSimhashDeduplicator(NearDeduplicator):
    """Keeps the first of the samples whose hashes differ in few bits; a chain of such pairs is one cluster.

    Args:
        tokenization: tokens are the text between plain spaces (``"space"``), the text between punctuation
            (``"punctuation"``), or characters (``"character"``, for scripts without spaces).
        window_size: the number of tokens of a shingle.
        lowercase: ignore case.
        ignore_pattern: a regular expression; its matches are ignored.
        num_blocks: the number of blocks of a hash in the search for pairs; changes only the time.
        hamming_distance: bits in which two duplicates may differ; less than ``num_blocks``.
        text_key: the column of the text.

    Raises:
        InvalidValueError: a parameter makes no sense.

    >>> one, other = (f"It was a bright cold day in April {end}" for end in ("and", "as"))
    >>> op = DocumentSimhashDeduplicator(tokenization="character")
    >>> (op.hash_of(one) ^ op.hash_of(other)).bit_count() < (op.hash_of(one) ^ op.hash_of("no")).bit_count()
    True
    """

    column = f"{HASHES}_simhash"
    # As in Data-Juicer.
    tokenizers: ClassVar = {
        "space": (_split_at_spaces, " "),
        "punctuation": (_split_at_punctuation, " "),
        "character": (list, ""),
    }

    def __init__(
        self,
        tokenization: str = "space",
        window_size: int = 6,
        lowercase: bool = True,
        ignore_pattern: str | None = None,
        num_blocks: int = 6,
        hamming_distance: int = 4,
        *,
        text_key: str = "text",
    ) -> None:
        super().__init__(tokenization, window_size, lowercase, ignore_pattern, text_key=text_key)
        if not 0 < hamming_distance < num_blocks <= _BITS:
            raise InvalidValueError(
                f"hamming_distance={hamming_distance!r} must be at least 1 and less than "
                f"num_blocks={num_blocks!r}, which is at"
                f" most {_BITS}"
            )
        self.num_blocks = num_blocks
        self.hamming_distance = hamming_distance

    def compute_hash(self, sample: Sample) -> Sample:
        """The sample with its hash, as 8 bytes."""
        sample[self.column] = self.hash_of(self.text_of(sample)).to_bytes(8, "little")
        return sample

    def hash_of(self, text: str) -> int:
        """The hash of a text: the majority of its shingles' hashes, bit for bit; 0 without tokens."""
        import numpy as np

        digests = b"".join(
            hashlib.md5(shingle, usedforsecurity=False).digest()[:8] for shingle in self.shingles(text)
        )
        if not digests:
            return 0
        bits = np.unpackbits(np.frombuffer(digests, np.uint8).reshape(-1, 8), axis=1)
        most = 2 * bits.sum(axis=0, dtype=np.int64) > len(bits)
        return int.from_bytes(np.packbits(most).tobytes(), "big")

    def process(self, dataset: Any) -> Any:
        """The dataset without near duplicates, in order; takes about 50 bytes of RAM for each sample."""
        import numpy as np

        blocks = [b"".join(table.column(0).to_pylist()) for table in self.hashes(dataset)]
        hashes = np.frombuffer(b"".join(blocks), "<u8").astype(np.uint64)
        kinds, first, kind_of = np.unique(hashes, return_index=True, return_inverse=True)
        leaders = self.clusters(kinds)
        # The first sample of each cluster, whatever its hash is.
        earliest = np.full(len(kinds), len(hashes))
        np.minimum.at(earliest, leaders, first)
        kept = np.flatnonzero(earliest[leaders[kind_of.reshape(-1)]] == np.arange(len(hashes)))
        return dataset if len(kept) == len(dataset) else dataset.select(kept)

    def clusters(self, hashes: Words) -> npt.NDArray[np.int64]:
        """For each of several distinct hashes, the place of the first hash of its cluster."""
        import numpy as np

        forest = DisjointSets(len(hashes))
        edges = [_BITS * block // self.num_blocks for block in range(self.num_blocks + 1)]
        masks = [(1 << high) - (1 << low) for low, high in pairwise(edges)]
        # Two near hashes share at least this many blocks.
        for equal in combinations(masks, self.num_blocks - self.hamming_distance):
            shared = (hashes & np.uint64(sum(equal))).reshape(-1, 1)
            for members in group_equal_rows(shared):
                self._join_near(hashes[members], members, forest)
        return forest.leaders()

    def _join_near(self, hashes: Words, members: npt.NDArray[np.int64], forest: DisjointSets) -> None:
        for at in range(len(members) - 1):
            near = _count_bits(hashes[at + 1 :] ^ hashes[at]) <= self.hamming_distance
            for other in members[at + 1 :][near]:
                forest.join(int(members[at]), int(other))


def _count_bits(words: Words) -> npt.NDArray[np.int64]:
    """The number of set bits of each number."""
    import numpy as np

    quarters = np.ascontiguousarray(words).view(np.uint16).reshape(-1, 4)
    counts: npt.NDArray[np.int64] = _bit_counts_of_16()[quarters].sum(axis=1, dtype=np.int64)
    return counts


@functools.lru_cache(maxsize=1)
def _bit_counts_of_16() -> npt.NDArray[np.uint8]:
    import numpy as np

    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    counts: npt.NDArray[np.uint8] = np.unpackbits(numbers, axis=1).sum(axis=1, dtype=np.uint8)
    return counts
