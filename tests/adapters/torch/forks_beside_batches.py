"""A program whose main thread forks while another one takes batches; each child reads a batch twice.

Handlers that another library has registered for forks take some time, before and after, in all of which the
other thread goes on. Exits with 1 if a batch of a child changed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from typing import Any

# Before castore is imported: these handlers run nearest to the fork.
os.register_at_fork(before=lambda: time.sleep(0.02), after_in_parent=lambda: time.sleep(0.02))

import torch  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from castore.adapters.torch import SharedBatches  # noqa: E402

_FORKS = 30


def main() -> int:
    data: Any = [torch.full((2048,), index) for index in range(400)]
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "collate_fn": SharedBatches()}
    loader: Any = DataLoader(data, batch_size=4, **options)
    latest: deque[torch.Tensor] = deque(maxlen=1)
    has_ended = threading.Event()

    def take() -> None:
        while not has_ended.is_set():
            for batch in loader:
                latest.append(batch)
                if has_ended.is_set():
                    return

    taker = threading.Thread(target=take)
    taker.start()
    while not latest:
        time.sleep(0.01)
    failed = 0
    for _ in range(_FORKS):
        child = os.fork()
        if child == 0:
            batch = latest[-1]
            first = batch.clone()
            is_whole = bool((batch[:, :1] == batch).all())
            time.sleep(0.05)  # in which the parent's thread goes on
            os._exit(not (is_whole and torch.equal(first, batch)))
        failed += os.waitpid(child, 0)[1] != 0
    has_ended.set()
    taker.join()
    print(f"{failed} of {_FORKS} children read other rows the second time")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
