"""The latest step of a run, kept so that the next run goes on behind it, and no step before it.

A checkpoint is a dataset in the store, `checkpoints/<project>`, whose metadata tells the input and the steps
that made it. Dataset and metadata are committed together, so a run that is killed at any moment leaves the
checkpoint before, or the new one, whole. It is pinned: gc must not take what a run of days stands on.

Serves a run only if its input and its first steps are the same; steps behind the checkpoint may change. Must
never hand out a dataset that other steps made: whoever runs a changed recipe under the name of the old one
starts over, and is told which operator differs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import datasets

from castore.adapters.datasets import kept
from castore.adapters.datasets.kept import Options, Size
from castore.adapters.datasets.mapping import store_locks
from castore.adapters.datasets.tables import part_of
from castore.collect import remove_blobs
from castore.errors import CorruptError, NotFoundError
from castore.names import check_name
from castore.store import Store

FOLDER = "checkpoints"
_METADATA = "checkpoint"
_VERSION = 1


class Mark(NamedTuple):
    """What tells a step from any other, whatever its input.

    Attributes:
        name: of the operator.
        kind: as in `StepReport`.
        code: a fingerprint of its code and parameters.
        parameters: what it is made of, for the message that says what differs: texts, or digests of what has
            none.
    """

    name: str
    kind: str
    code: str
    parameters: Mapping[str, str]


class Found(NamedTuple):
    """Where a run begins.

    Attributes:
        done: how many steps are behind the dataset.
        dataset: what they made; None to begin with the input.
        reason: why a checkpoint that is there does not serve; "" if there is none, or it does.
    """

    done: int
    dataset: datasets.Dataset | None
    reason: str = ""


class Checkpoint:
    """The checkpoint of a project.

    Args:
        store: where it is kept.
        project: its name; runs of one name share a checkpoint, one at a time.
        codec: of the store.

    Raises:
        InvalidNameError: the name cannot be used.
    """

    def __init__(self, store: Store, project: str, codec: str = "zstd") -> None:
        self.name = check_name(f"{FOLDER}/{project}")
        self._store = store
        self._project = project
        self._codec = codec

    @contextmanager
    def alone(self) -> Iterator[None]:
        """For the length of a run: a second one of the same name waits, and then finds the work done."""
        with store_locks(self._store).hold(self.name):
            yield

    def find(self, source: str, steps: Sequence[Mark]) -> Found:
        """Where a run over the input of fingerprint ``source`` begins."""
        metadata = kept.metadata_of(self._store, self.name)
        if metadata is None:
            return Found(0, None)
        reason = self._difference(metadata.get(_METADATA), source, steps)
        if reason:
            return Found(
                0, None, f"the checkpoint of {self._project!r} does not serve: {reason}; starting over"
            )
        try:
            dataset = kept.load(self._store, self.name)
        except (CorruptError, NotFoundError) as error:
            return Found(
                0, None, f"the checkpoint of {self._project!r} cannot be read: {error}; starting over"
            )
        return Found(len(metadata[_METADATA]["steps"]), dataset)

    def _difference(self, told: Any, source: str, steps: Sequence[Mark]) -> str:
        if not isinstance(told, dict) or told.get("version") != _VERSION:
            return "another version of castore made it"
        if told["source"] != source:
            return "the input is another one"
        if len(told["steps"]) > len(steps):
            gone = told["steps"][len(steps)]["name"]
            return f"step {len(steps) + 1} {gone!r}, which it has behind it, is not there any more"
        for number, (old, new) in enumerate(zip(told["steps"], steps, strict=False), start=1):
            difference = _between(old, new)
            if difference:
                return f"step {number} {difference}"
        return ""

    def save(self, dataset: datasets.Dataset, source: str, steps: Sequence[Mark]) -> Size:
        """Put a dataset in the place of the one before.

        Args:
            dataset: what the steps made of the input.
            source: fingerprint of the input.
            steps: those that are done.

        Raises:
            FullError, TooLargeError: it does not fit; the one before is still there.
        """
        old = self._blobs()
        told = {"version": _VERSION, "source": source, "steps": [mark._asdict() for mark in steps]}
        parts = {"": part_of(dataset)}
        size = kept.put_parts(self._store, self.name, parts, Options(self._codec), {_METADATA: told})
        for entry in list(self._store.entries(self.name)):
            self._store.pin(entry.name)
        self._forget(old - self._blobs())
        return size

    def drop(self) -> None:
        """Remove the checkpoint, and its bytes."""
        old = self._blobs()
        for entry in list(self._store.entries(self.name)):
            self._store.unpin(entry.name)
        kept.drop(self._store, self.name)
        self._forget(old)

    def _blobs(self) -> set[str]:
        return {entry.digest for entry in self._store.entries(self.name)}

    def _forget(self, digests: set[str]) -> None:
        # At once and not with the next gc: "constant space" means now. What another entry names stays.
        remove_blobs(self._store, [bytes.fromhex(digest) for digest in sorted(digests)])


def _between(old: Mapping[str, Any], new: Mark) -> str:
    """What differs between a step of the checkpoint and one of this run; "" if nothing does."""
    if old["name"] != new.name or old["kind"] != new.kind:
        return f"was {old['name']!r} and is {new.name!r}"
    if old["code"] == new.code:
        return ""
    before, now = old["parameters"], new.parameters
    for what in [*now, *before]:
        if what not in before or what not in now:
            return f"{new.name!r} differs: {what} {'is new' if what in now else 'is gone'}"
        if before[what] != now[what]:
            # Where there is no text to show there is a digest, which tells nobody anything.
            told = " has changed" if _is_digest(now[what]) else f" was {before[what]} and is {now[what]}"
            return f"{new.name!r} differs: {what}{told}"
    return f"{new.name!r} differs: its code, or what it refers to"


_is_digest = re.compile(r"[0-9a-f]{16,64}").fullmatch
