"""The latest step of a run, kept so that the next run goes on behind it, and no step before it.

A checkpoint is a dataset in the store, `checkpoints/<project>`, whose metadata tells the input and the steps
that made it. Dataset and metadata are committed together, so a run that is killed at any moment leaves the
checkpoint before, or the new one, whole. It is pinned: gc must not take what a run of days stands on.

While steps are to come it is the uncompressed file that the next one reads, under a second name
(`hardlinks`): with the run's input and what the step writes, that makes 3 x S on disk. It is compressed once
all is done.

Serves a run only if its input and its first steps are the same; steps behind the checkpoint may change. Must
never hand out a dataset that other steps made: whoever runs a changed recipe under the name of the old one
starts over, and is told which operator differs.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import datasets

from castore.adapters.datasets import dataset_entries, hardlinks, mapped_files
from castore.adapters.datasets.dataset_entries import Options, Size
from castore.adapters.datasets.tables import part_of
from castore.errors import CorruptError, FullError, NotFoundError, TooLargeError
from castore.names import check_name
from castore.store import Store

FOLDER = "checkpoints"
_METADATA = "checkpoint"
_VERSION = 2


class Mark(NamedTuple):
    """The identity of a step, whatever its input.

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
        dataset: what the steps that are done have made; None to begin with the input.
        rows: rows before the first of them, and behind each.
        packed: whether the checkpoint is compressed.
        reason: why a checkpoint that is there does not serve; "" if there is none, or it does.
    """

    dataset: datasets.Dataset | None = None
    rows: Sequence[int] = ()
    packed: bool = False
    reason: str = ""

    @property
    def done(self) -> int:
        """How many steps are done."""
        return max(0, len(self.rows) - 1)


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

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """For the length of a run: a second one of the same name waits, and then finds the work done."""
        with mapped_files.store_locks(self._store).hold(self.name):
            yield

    def find(self, source: str, steps: Sequence[Mark]) -> Found:
        """Where a run over the input of fingerprint ``source`` begins."""
        told, reason = self._told(source, steps)
        if told is None:
            return Found(reason=f"{reason}; starting over" if reason else "")
        try:
            # Of a run that is over, nobody may ever look at a row.
            over = told["packed"] and len(told["steps"]) == len(steps)
            dataset = (dataset_entries if over else hardlinks).load(self._store, self.name)
        except (CorruptError, NotFoundError) as error:
            return Found(reason=f"the checkpoint of {self._project!r} cannot be read: {error}; starting over")
        return Found(dataset, told["rows"], told["packed"])

    def done(self, source: str, steps: Sequence[Mark]) -> tuple[int, str]:
        """How many steps a run would find done, and why no more. Reads no rows."""
        told, reason = self._told(source, steps)
        if told is None:
            return 0, reason or f"there is no checkpoint of {self._project!r}"
        return len(told["steps"]), f"the checkpoint of {self._project!r} does not reach so far"

    def _told(self, source: str, steps: Sequence[Mark]) -> tuple[dict[str, Any] | None, str]:
        """The record of a checkpoint that can be used, or None and why the one that is there cannot."""
        metadata = dataset_entries.metadata_of(self._store, self.name)
        if metadata is None:
            return None, ""
        reason = self._difference(metadata.get(_METADATA), source, steps)
        if reason:
            return None, f"the checkpoint of {self._project!r} does not serve: {reason}"
        return metadata[_METADATA], ""

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

    def save(
        self,
        dataset: datasets.Dataset,
        source: str,
        steps: Sequence[Mark],
        rows: Sequence[int],
        *,
        pack: bool = False,
    ) -> Size:
        """Put a dataset in the place of the one before.

        Args:
            dataset: what the steps made of the input.
            source: fingerprint of the input.
            steps: those that are done.
            rows: rows of the input, and behind each of them.
            pack: compress it, since no step will come; else that is done only to what cannot be linked, or
                would not fit.

        Raises:
            FullError, TooLargeError: it does not fit; the one before is still there.
        """
        told = {"version": _VERSION, "source": source, "steps": [mark._asdict() for mark in steps]}
        told["rows"] = list(rows)
        size = self._replace(self._put_linked, dataset, {**told, "packed": False})
        # Only now, and not at once: the checkpoint before is gone, and what it took is free.
        if pack or size is None:
            size = self._replace(self._put_packed, dataset, {**told, "packed": True})
        assert size is not None
        return size

    def _replace(
        self, put: Callable[..., Size | None], dataset: datasets.Dataset, told: dict[str, Any]
    ) -> Size | None:
        old = self._blobs()
        size = put(dataset, {_METADATA: told})
        if size is not None:
            self._store.delete_many(set(self._blobs()) - hardlinks.names(self._store, self.name))
            self._forget(set(old.values()) - set(self._blobs().values()))
        return size

    def _put_linked(self, dataset: datasets.Dataset, metadata: dict[str, Any]) -> Size | None:
        try:
            return hardlinks.put(self._store, self.name, dataset, metadata)
        except (FullError, TooLargeError):
            return None  # compressed it may fit

    def _put_packed(self, dataset: datasets.Dataset, metadata: dict[str, Any]) -> Size:
        dataset_entries.put_parts(
            self._store, self.name, {"": part_of(dataset)}, Options(self._codec), metadata
        )
        hardlinks.compress(self._store, self.name, self._codec)
        for name in self._blobs():
            self._store.pin(name)
        return dataset_entries.size_of(self._store, self.name)

    def drop(self) -> None:
        """Remove the checkpoint, and its bytes."""
        old = self._blobs()
        self._store.delete_many(old)
        self._forget(set(old.values()))

    def _blobs(self) -> dict[str, bytes]:
        """The checkpoint's files, and those of the one before that are still there: name to digest."""
        entries = self._store.entries(self.name)
        # A project "a/b" is not a part of the project "a".
        return {
            entry.name: bytes.fromhex(entry.digest)
            for entry in entries
            if entry.name.rpartition("/")[0] == self.name
        }

    def _forget(self, digests: set[bytes]) -> None:
        # At once and not with the next gc: "constant space" means now. What another entry names stays.
        blobs = [blob for digest in digests if (blob := self._store.blob(digest)) is not None]
        copies = self._store.find_many([f"{mapped_files.MAPS}/{blob.digest.hex()}" for blob in blobs])
        mapped_files.forget(self._store, blobs)
        self._store.remove_blobs(sorted(digests | {found.blob.digest for found in copies.values()}))


def _between(old: Mapping[str, Any], new: Mark) -> str:
    """The difference between a step of the checkpoint and one of this run; "" if there is none."""
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
