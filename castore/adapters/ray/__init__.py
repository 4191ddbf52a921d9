"""Ray: a pipeline on all nodes of a cluster, and a Ray Data function whose results are kept.

Nodes divide a step's blocks as any nodes that share a remote do: Ray starts the work, and nothing depends on
Ray's memory of it. So a run that is started again goes on, and data does not travel through the driver.

May import: ray, the store and all below it, and the public names of `castore.adapters.datasets`.
Must never: keep a result anywhere but in a store.
"""

from __future__ import annotations

from castore.errors import MissingDependencyError

try:
    from castore.adapters.ray.batches import map_batches
    from castore.adapters.ray.nodes import run, run_on_nodes
except ModuleNotFoundError as error:
    if error.name not in ("ray", "pyarrow", "datasets"):
        raise
    raise MissingDependencyError.of(error.name, "ray") from error

__all__ = ["map_batches", "run", "run_on_nodes"]
