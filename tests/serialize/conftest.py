"""A server of processes that has torch, which each spawned one imports for a second."""

from __future__ import annotations

import multiprocessing

multiprocessing.set_forkserver_preload(["torch.utils.data"])
