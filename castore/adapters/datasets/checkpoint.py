"""The checkpoint of a run: only its latest step is kept, and the next run continues after it.

A checkpoint is a dataset in the store, `checkpoints/<project>`, whose metadata names the input and the steps
that made it. Dataset and metadata are committed together, so a run killed at any moment leaves the old
checkpoint or the new one, whole. The checkpoint is pinned: gc must not remove the result of days of work.
While steps remain, the checkpoint is the uncompressed file that the next step reads, under a second name
(`hardlinks`): with the run's input and the output of the step, that makes 3 x S on disk. The checkpoint is
compressed after the last step.

A checkpoint serves a run only if the input and the first steps are the same; steps after the checkpoint may
change. Must never hand out a dataset that other steps made: a run of a changed recipe under the old name
starts over, and its message names the operator that differs.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import datasets

from castore.adapters.datasets import dataset_entries, hardlinks, mapped_files
from castore.adapters.datasets.dataset_entries import DatasetSize, StorageOptions
from castore.adapters.datasets.tables import make_part
from castore.errors import CorruptError, FullError, NotFoundError, TooLargeError
from castore.names import check_name
from castore.store import Store

CHECKPOINTS_FOLDER = "checkpoints"
_METADATA_KEY = "checkpoint"
_VERSION = 2


class StepIdentity(NamedTuple):
    """The identity of a step, independent of its input.

    Attributes:
        name: the operator's name.
        kind: as in `StepReport`.
        code: a fingerprint of the operator's code and parameters.
        parameters: the parts of the operator, for the message that names a difference: texts, or digests of
            parts that have no text.
    """

    name: str
    kind: str
    code: str
    parameters: Mapping[str, str]


class ResumePoint(NamedTuple):
    """The place where a run begins.

    Attributes:
        dataset: the result of the finished steps; None to begin with the input.
        rows: rows before the first finished step, and after each.
        packed: whether the checkpoint is compressed.
        reason: why an existing checkpoint cannot serve; "" if there is none, or it can.
    """

    dataset: datasets.Dataset | None = None
    rows: Sequence[int] = ()
    packed: bool = False
    reason: str = ""

    @property
    def steps_done(self) -> int:
        """The number of finished steps."""
        return max(0, len(self.rows) - 1)


class Checkpoint:
    """The checkpoint of a project.

    Args:
        store: the store that keeps the checkpoint.
        project: the checkpoint's name; runs of one name share a checkpoint, one run at a time.
        codec: the codec of the compressed checkpoint.

    Raises:
        InvalidNameError: the name cannot be used.
    """

    def __init__(self, store: Store, project: str, codec: str = "zstd") -> None:
        self.name = check_name(f"{CHECKPOINTS_FOLDER}/{project}")
        self._store = store
        self._project = project
        self._codec = codec

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the checkpoint during a run: a second run of the name waits, then finds the work done."""
        with mapped_files.store_locks(self._store).hold(self.name):
            yield

    def find(self, source: str, steps: Sequence[StepIdentity]) -> ResumePoint:
        """Find the place where a run over the input of fingerprint ``source`` begins."""
        record, reason = self._usable_record(source, steps)
        if record is None:
            return ResumePoint(reason=f"{reason}; starting over" if reason else "")
        try:
            # A finished run needs no rows until somebody reads the result.
            over = record["packed"] and len(record["steps"]) == len(steps)
            dataset = (dataset_entries if over else hardlinks).load(self._store, self.name)
        except (CorruptError, NotFoundError) as error:
            return ResumePoint(
                reason=f"the checkpoint of {self._project!r} cannot be read: {error}; starting over"
            )
        return ResumePoint(dataset, record["rows"], record["packed"])

    def count_done(self, source: str, steps: Sequence[StepIdentity]) -> tuple[int, str]:
        """The number of steps that a run would find finished, and why no more. Reads no rows."""
        record, reason = self._usable_record(source, steps)
        if record is None:
            return 0, reason or f"there is no checkpoint of {self._project!r}"
        return len(record["steps"]), f"the checkpoint of {self._project!r} ends before this step"

    def _usable_record(self, source: str, steps: Sequence[StepIdentity]) -> tuple[dict[str, Any] | None, str]:
        """The record of a usable checkpoint, or None and the reason why the existing one is not usable."""
        metadata = dataset_entries.metadata_of(self._store, self.name)
        if metadata is None:
            return None, ""
        reason = self._find_difference(metadata.get(_METADATA_KEY), source, steps)
        if reason:
            return None, f"the checkpoint of {self._project!r} cannot be used: {reason}"
        return metadata[_METADATA_KEY], ""

    def _find_difference(self, record: Any, source: str, steps: Sequence[StepIdentity]) -> str:
        if not isinstance(record, dict) or record.get("version") != _VERSION:
            return "another version of castore made it"
        if record["source"] != source:
            return "the input has changed"
        if len(record["steps"]) > len(steps):
            gone = record["steps"][len(steps)]["name"]
            return f"step {len(steps) + 1} {gone!r}, which it includes, is not among the steps any more"
        for number, (old, new) in enumerate(zip(record["steps"], steps, strict=False), start=1):
            difference = _step_difference(old, new)
            if difference:
                return f"step {number} {difference}"
        return ""

    def save(
        self,
        dataset: datasets.Dataset,
        source: str,
        steps: Sequence[StepIdentity],
        rows: Sequence[int],
        *,
        pack: bool = False,
    ) -> DatasetSize:
        """Replace the checkpoint by a dataset.

        Args:
            dataset: the result of the finished steps.
            source: the fingerprint of the input.
            steps: the finished steps.
            rows: rows of the input, and rows after each finished step.
            pack: compress the checkpoint, since no step follows. Otherwise only a dataset that cannot be
                linked, or would not fit, is compressed.

        Raises:
            FullError, TooLargeError: the dataset does not fit; the previous checkpoint is still there.
        """
        record = {"version": _VERSION, "source": source, "steps": [mark._asdict() for mark in steps]}
        record["rows"] = list(rows)
        size = self._replace(self._put_linked, dataset, {**record, "packed": False})
        # Compress only now: the previous checkpoint is gone, and its space is free.
        if pack or size is None:
            size = self._replace(self._put_packed, dataset, {**record, "packed": True})
        assert size is not None
        return size

    def _replace(
        self, put: Callable[..., DatasetSize | None], dataset: datasets.Dataset, record: dict[str, Any]
    ) -> DatasetSize | None:
        old = self._digests_by_name()
        size = put(dataset, {_METADATA_KEY: record})
        if size is not None:
            self._store.delete_many(
                set(self._digests_by_name()) - hardlinks.entry_names(self._store, self.name)
            )
            self._remove_bytes(set(old.values()) - set(self._digests_by_name().values()))
        return size

    def _put_linked(self, dataset: datasets.Dataset, metadata: dict[str, Any]) -> DatasetSize | None:
        try:
            return hardlinks.put(self._store, self.name, dataset, metadata)
        except (FullError, TooLargeError):
            return None  # a compressed checkpoint may fit

    def _put_packed(self, dataset: datasets.Dataset, metadata: dict[str, Any]) -> DatasetSize:
        dataset_entries.put_parts(
            self._store,
            self.name,
            {"": make_part(dataset, embed=False)},
            StorageOptions(self._codec),
            metadata,
        )
        hardlinks.compress(self._store, self.name, self._codec)
        for name in self._digests_by_name():
            self._store.pin(name)
        return dataset_entries.size_of(self._store, self.name)

    def _digests_by_name(self) -> dict[str, bytes]:
        """The files of the checkpoint, and leftover files of the previous one: name to digest."""
        entries = self._store.entries(self.name)
        # A project "a/b" is not a part of the project "a".
        return {
            entry.name: bytes.fromhex(entry.digest)
            for entry in entries
            if entry.name.rpartition("/")[0] == self.name
        }

    def _remove_bytes(self, digests: set[bytes]) -> None:
        # Remove the bytes now, not with the next gc: "constant space" means now. Blobs of other entries stay.
        blobs = [blob for digest in digests if (blob := self._store.blob(digest)) is not None]
        copies = self._store.find_many(
            [f"{mapped_files.COPIES_FOLDER}/{blob.digest.hex()}" for blob in blobs]
        )
        mapped_files.forget_copies(self._store, blobs)
        self._store.remove_blobs(sorted(digests | {found.blob.digest for found in copies.values()}))


def _step_difference(old: Mapping[str, Any], new: StepIdentity) -> str:
    """The difference between a step of the checkpoint and one of this run; "" if there is none."""
    if old["name"] != new.name or old["kind"] != new.kind:
        return f"was {old['name']!r} and is now {new.name!r}"
    if old["code"] == new.code:
        return ""
    before, now = old["parameters"], new.parameters
    for what in [*now, *before]:
        if what not in before or what not in now:
            return f"{new.name!r} differs: {what} {'is new' if what in now else 'is gone'}"
        if before[what] != now[what]:
            # A part without text has only a digest, which is meaningless to a reader.
            difference = (
                " has changed" if _is_digest(now[what]) else f" was {before[what]} and is now {now[what]}"
            )
            return f"{new.name!r} differs: {what}{difference}"
    return f"{new.name!r} differs: its code, or a value that the code refers to, has changed"


_is_digest = re.compile(r"[0-9a-f]{16,64}").fullmatch
