"""The cost of single operations in a store of a given size; `scale` draws it against the number of entries.

Each operation is repeated until a clock can measure it, several times over. The figure is the median, in
seconds an operation. The store grows by the entries put here, which are few beside its own. Caches are warm,
except that look-ups and listings are of names that the kernel does not know.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

from castore import Store
from tools.bench import corpus
from tools.bench.growing import FILES, name_of, probes
from tools.bench.peers import Mount

_CALLS = 500
_stamps = count()


def costs(path: Path, entries: int, mountpoint: Path, rounds: int) -> dict[str, float]:
    """Seconds of each operation in the store at ``path``, which holds ``entries`` entries.

    Args:
        mountpoint: where the store is mounted meanwhile.
        rounds: number of measurements behind each median.
    """
    names = probes(entries)
    random.Random(entries).shuffle(names)
    with Store(path, memory=0) as store:
        found = {
            "get": _measure_median(rounds, len(names), lambda: _get(store, names)),
            "put": _measure_median(rounds, _CALLS, _make_put(store, rounds)),
            "gc, 500 expired": _measure_median(rounds, 1, store.gc, lambda: _expire(store)),
            "stat": _measure_median(rounds, 1, store.stat),
        }
    return found | _through_mount(path, entries, mountpoint, rounds)


def _through_mount(path: Path, entries: int, mountpoint: Path, rounds: int) -> dict[str, float]:
    look_ups, listings = [], []
    with Mount.of_store(path, mountpoint) as mount:
        for _ in range(rounds):
            mount.again()
            folders = random.choices(range(entries // FILES), k=2)
            look_ups.append(_measure_seconds(partial(_look_up, mountpoint, folders[0])) / FILES)
            listings.append(_measure_seconds(partial(_list, mountpoint, folders[1])))
    return {
        "mount: look-up": statistics.median(look_ups),
        f"mount: list {FILES}": statistics.median(listings),
    }


def _do_nothing() -> None:
    return


def _measure_median(
    rounds: int, calls: int, work: Callable[[], object], prepare: Callable[[], object] = _do_nothing
) -> float:
    figures = []
    for turn in range(rounds + 1):
        prepare()
        took = _measure_seconds(work)
        if turn:  # the first turn warms the caches
            figures.append(took / calls)
    return statistics.median(figures)


def _measure_seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _get(store: Store, names: list[str]) -> None:
    if any(store.get(name) is None for name in names):
        raise RuntimeError(f"{store.path} lacks entries")


def _make_put(store: Store, rounds: int) -> Callable[[], None]:
    batches = iter([_new_items() for _ in range(rounds + 1)])

    def put() -> None:
        for name, value in next(batches):
            store.put(name, value)

    return put


def _new_items() -> list[tuple[str, bytes]]:
    stamp = f"put/{next(_stamps):06}"
    return [
        (f"{stamp}/{number:04}", value) for number, value in enumerate(corpus.records(_CALLS, 2048, stamp))
    ]


def _expire(store: Store) -> None:
    store.put_many(_new_items(), ttl=0.001)
    time.sleep(0.01)


def _look_up(root: Path, folder: int) -> None:
    for file in range(FILES):
        os.stat(f"{root}/{name_of(folder * FILES + file)}")


def _list(root: Path, folder: int) -> None:
    with os.scandir(os.path.dirname(f"{root}/{name_of(folder * FILES)}")) as listing:
        if sum(1 for _ in listing) != FILES:
            raise RuntimeError(f"folder {folder} is not listed whole")
