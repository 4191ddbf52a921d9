"""Hit rates of a cache level with room for a part of the samples, by policy and by the order of reading.

Pure simulation: samples are numbers of one size, a level is a set of them. The shipped policy is not
imitated: `ours` calls the `Policy` itself. Must stay importable without the benchmarks' environment, because
the tests use it too.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

from castore.adapters.torch.policy import Policy

Trace = Sequence[int]
#: Takes a trace, the number of samples and the number of places; returns for each read whether it hit.
Simulate = Callable[[Trace, int, int], list[bool]]

SEED = 20_26
PARTS = (0.10, 0.25, 0.50, 0.75, 0.90)
#: Popularity of the sample of rank r is r ** -SKEW.
SKEW = 1.0
#: Where popularity drifts: the part of the samples that change ranks after each epoch's worth of reads.
DRIFT = 0.2


# --- orders of reading --------------------------------------------------------------------------------------


def shuffled(samples: int, epochs: int, rng: random.Random) -> list[int]:
    """Every sample once an epoch, each time in another order: `DataLoader(shuffle=True)`."""
    return [index for _ in range(epochs) for index in rng.sample(range(samples), samples)]


def sequential(samples: int, epochs: int, rng: random.Random) -> list[int]:
    """Every sample once an epoch, in order."""
    return [*range(samples)] * epochs


def zipf(samples: int, epochs: int, rng: random.Random) -> list[int]:
    """Independent draws, a few samples far more often than most; as many as the epochs have reads."""
    return _drawn(samples, epochs, rng, moving=0)


def drifting(samples: int, epochs: int, rng: random.Random) -> list[int]:
    """As `zipf`, but some samples exchange their ranks after each epoch's worth of reads."""
    return _drawn(samples, epochs, rng, moving=round(DRIFT * samples))


def _drawn(samples: int, epochs: int, rng: random.Random, moving: int) -> list[int]:
    by_rank = rng.sample(range(samples), samples)
    weights = list(itertools.accumulate((rank + 1) ** -SKEW for rank in range(samples)))
    trace: list[int] = []
    for _ in range(epochs):
        trace += rng.choices(by_rank, cum_weights=weights, k=samples)
        ranks = rng.sample(range(samples), moving)
        movers = [by_rank[rank] for rank in ranks]
        rng.shuffle(movers)
        for rank, index in zip(ranks, movers, strict=True):
            by_rank[rank] = index
    return trace


TRACES: dict[str, Callable[[int, int, random.Random], list[int]]] = {
    "shuffled epochs": shuffled,
    "sequential epochs": sequential,
    "Zipf": zipf,
    "Zipf, drifting": drifting,
}


# --- policies -----------------------------------------------------------------------------------------------


def optimum(trace: Trace, samples: int, places: int) -> list[bool]:
    """Knows the future: drops, or passes over, the sample that is read again last.

    Belady's MIN with bypass. No policy that has to read a sample before it keeps it can hit more often over
    the whole trace.
    """
    never = len(trace)
    following, last = [never] * len(trace), [never] * samples
    for time in range(len(trace) - 1, -1, -1):
        following[time], last[trace[time]] = last[trace[time]], time
    kept: dict[int, int] = {}  # the next read of each sample
    farthest: list[
        tuple[int, int]
    ] = []  # a heap of (-next read, sample); lines that differ from `kept` are out of date
    hits = []
    for index, after in zip(trace, following, strict=True):
        hits.append(index in kept)
        if index not in kept and len(kept) == places:
            while kept.get(farthest[0][1]) != -farthest[0][0]:
                heapq.heappop(farthest)
            if -farthest[0][0] <= after:
                continue
            del kept[heapq.heappop(farthest)[1]]
        kept[index] = after
        heapq.heappush(farthest, (-after, index))
    return hits


def ours(trace: Trace, samples: int, places: int) -> list[bool]:
    """The shipped policy, called as the levels call it.

    Each read is a use, and a full level asks for a victim.
    """
    policy = Policy(memoryview(bytearray(samples)), memoryview(bytearray(8)).cast("Q"))
    residents: list[int] = []
    place_of: dict[int, int] = {}
    hits = []
    for index in trace:
        policy.use(index)
        hits.append(index in place_of)
        if index in place_of:
            continue
        if len(residents) < places:
            place_of[index] = len(residents)
            residents.append(index)
            continue
        place = policy.victim(index, len(residents), residents.__getitem__)
        if place is not None:
            del place_of[residents[place]]
            residents[place], place_of[index] = index, place
    return hits


def fixed(trace: Trace, samples: int, places: int) -> list[bool]:
    """Keeps the samples that it reads first, until it is full, and then changes nothing."""
    kept: set[int] = set()
    hits = []
    for index in trace:
        hits.append(index in kept)
        if len(kept) < places:
            kept.add(index)
    return hits


def lru(trace: Trace, samples: int, places: int) -> list[bool]:
    """Keeps every sample that it reads, and drops the one that was read longest ago."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = []
    for index in trace:
        hits.append(index in kept)
        kept[index] = None
        kept.move_to_end(index)
        if len(kept) > places:
            kept.popitem(last=False)
    return hits


OURS = "castore"
POLICIES: dict[str, Simulate] = {
    "offline optimum": optimum,
    OURS: ours,
    "fixed subset": fixed,
    "LRU": lru,
}


# --- figures ------------------------------------------------------------------------------------------------


def rate(hits: Sequence[bool], warm: int) -> float:
    """The part of the reads that hit, without the first ``warm`` reads, which find an empty level."""
    counted = hits[warm:]
    return sum(counted) / len(counted)


def hit_rate(simulate: Simulate, trace: Trace, samples: int, part: float) -> float:
    """The hit rate of a level for a part of the samples, after as many reads as there are samples."""
    return rate(simulate(trace, samples, round(part * samples)), samples)


def make_trace(name: str, samples: int, epochs: int, seed: int = SEED) -> list[int]:
    """The trace of that name in `TRACES`; the same for the same arguments."""
    return TRACES[name](samples, epochs, random.Random(seed))
