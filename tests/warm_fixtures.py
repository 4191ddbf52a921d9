"""Fixtures of `tests.warm`: processes that start others, shared by all workers of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.warm import DATASETS, TORCH, WarmPython

#: Modules that most commands of the command line use, and the processes that castore starts.
_COMMANDS = (
    "castore.cli.commands",
    "castore.cli.std_streams",
    "castore.store",
    "castore.remote.remote",
    "castore.remote.calls",
    "castore.remote.transfer",
    "castore.remote.result_sharing",
    "castore.remote.page_trim",
    "castore_fuse.api",
    "castore_fuse.daemon",
    "castore_fuse.operations",
    "castore_fuse.view",
)

#: The modules of the processes that start others, by the name of the fixture that has one.
_WARM = {"warm_datasets": DATASETS, "warm_torch": TORCH, "warm_castore": _COMMANDS}
_STARTED = pytest.StashKey[dict[str, WarmPython]]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Have all workers of pytest-xdist use the same ones."""
    started = node.config.stash.setdefault(_STARTED, {})
    for name, modules in _WARM.items():
        if name not in started:
            started[name] = WarmPython(modules)
    node.workerinput["castore_warm"] = {name: warm.address for name, warm in started.items()}


def pytest_unconfigure(config: pytest.Config) -> None:
    """End those that were started for workers."""
    for warm in config.stash.get(_STARTED, {}).values():
        warm.close()


def _warm(config: pytest.Config, name: str) -> Iterator[WarmPython]:
    addresses: dict[str, str] = getattr(config, "workerinput", {}).get("castore_warm", {})
    warm = WarmPython(_WARM[name], addresses.get(name, ""))
    yield warm
    warm.close()


@pytest.fixture(scope="session")
def warm_datasets(pytestconfig: pytest.Config) -> Iterator[WarmPython]:
    """Starts processes that have imported `datasets`."""
    yield from _warm(pytestconfig, "warm_datasets")


@pytest.fixture(scope="session")
def warm_torch(pytestconfig: pytest.Config) -> Iterator[WarmPython]:
    """Starts processes that have imported torch."""
    yield from _warm(pytestconfig, "warm_torch")


@pytest.fixture(scope="session")
def warm_castore(pytestconfig: pytest.Config) -> Iterator[WarmPython]:
    """Starts processes that have imported castore and its command line."""
    yield from _warm(pytestconfig, "warm_castore")


@pytest.fixture
def forked_processes(warm_castore: WarmPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the processes that castore starts (transfers, fetchers, mounts) forked from one that has imported
    it, and those that they start too.
    """
    monkeypatch.setattr(sys, "executable", os.fspath(warm_castore.executable))
