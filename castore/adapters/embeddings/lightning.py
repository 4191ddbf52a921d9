"""A callback for Lightning: a LightningModule with `configure_caches` trains on cached embeddings.

As in Quaterion, the method returns a CacheConfig, or None for no cache. Before a fit begins, CachedEncoders
replace the module's frozen encoders, and loaders that give Keys replace its loaders. Needs the package
`lightning` or `pytorch_lightning`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from castore import Store
from castore.adapters.embeddings.model_cache import cache_loaders
from castore.errors import InvalidValueError, MissingDependencyError

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError:
    try:
        from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "this needs Lightning; install it with: pip install lightning"
        ) from error


class EmbeddingCacheCallback(Callback):
    """Caches the encoders that `configure_caches` of the LightningModule names, before each fit.

    Args:
        encoders, store, progress: as for `cache_embeddings`.

    Raises:
        InvalidValueError: the module has no `configure_caches`, a loader is no DataLoader, or the trainer's
            precision ("bf16-true", say) converts batches.
    """

    def __init__(
        self,
        encoders: Any = None,
        store: Store | str | os.PathLike[str] | None = None,
        *,
        progress: bool | None = None,
    ) -> None:
        self._encoders = encoders
        self._store = store
        self._progress = progress

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fill the caches, and have module and trainer use them.

        The data is set up, and no loader is in use yet.
        """
        configure = getattr(pl_module, "configure_caches", None)
        if configure is None:
            raise InvalidValueError(
                f"{type(pl_module).__name__} has no configure_caches; let it "
                "return a CacheConfig, or None for no cache"
            )
        config = configure()
        if config is None:
            return
        precision = str(trainer.precision)
        if precision.endswith("-true") and precision != "32-true":
            raise InvalidValueError(
                f'precision="{precision}" converts the batches that reach the module, and the encoders see'
                " them before; convert module and data yourself, or use a mixed precision"
            )
        # A trainer keeps its loaders here, from `fit` or from a method; there is no public name for it.
        sources = {
            "train": trainer.fit_loop._data_source,
            "val": trainer.fit_loop.epoch_loop.val_loop._data_source,
        }
        given = {role: source.dataloader() for role, source in sources.items() if source.is_defined()}
        flat: dict[str, DataLoader[Any]] = {}
        for role, loaders in given.items():
            _flatten(role, loaders, flat)
        cached = cache_loaders(pl_module, flat, config, self._encoders, self._store, progress=self._progress)
        for role, loaders in given.items():
            sources[role].instance = _replace_loaders(role, loaders, cached)


def _flatten(role: str, loaders: Any, flat: dict[str, DataLoader[Any]]) -> None:
    if isinstance(loaders, DataLoader):
        flat[role] = loaders
        return
    for name, inner in _inner_loaders(role, loaders):
        _flatten(f"{role}.{name}", inner, flat)


def _replace_loaders(role: str, loaders: Any, cached: Mapping[str, DataLoader[Any]]) -> Any:
    if isinstance(loaders, DataLoader):
        return cached[role]
    replaced = {
        name: _replace_loaders(f"{role}.{name}", inner, cached)
        for name, inner in _inner_loaders(role, loaders)
    }
    return replaced if isinstance(loaders, dict) else list(replaced.values())


def _inner_loaders(role: str, loaders: Any) -> list[tuple[Any, Any]]:
    if isinstance(loaders, dict):
        return list(loaders.items())
    if isinstance(loaders, list | tuple):
        return list(enumerate(loaders))
    raise InvalidValueError(
        f"the {role} loader is a {type(loaders).__name__}; only DataLoaders, "
        "and lists and dicts of these, can be cached"
    )
