"""Detects that a dataset was changed after it was wrapped: its key would then name samples it no longer
returns.

`noted_values` lists the values that lie nearest in the dataset, with marks that a write changes. A difference
is a change if the value before and the value now encode differently, or if the mark of one value differs.

The dataset may change itself while it is read: after each read the values are noted again. Attributes that
the dataset's reading methods assign or write to are skipped. A difference that appears while another thread
reads is ignored.

Globals that the code refers to are compared by digests when a pass over the dataset begins, in each new
worker, and before a read if a name is bound to another object, or its value was written to: that takes about
a millisecond, which is too long for each sample.

Cannot see a write to single elements of a large array, list or dict, a write to a frame, or anything beyond
the first values, in order of depth.
"""

from __future__ import annotations

import os
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from castore.adapters.noted_globals import Binding
from castore.adapters.noted_values import Seen, differ, ids_of_attributes, kind_of, walk
from castore.adapters.torch.dataset_identity import DATASETS
from castore.adapters.torch.named_files import NamedFiles
from castore.adapters.torch.outside import Outside, outside_of
from castore.errors import InvalidValueError, UnhashableError
from castore.keys.libraries import library_of
from castore.keys.pickled import pickled_attributes
from castore.keys.tracing import encode

_MOST = 64  # values
# Seconds of a thread from which digests of what lies outside are made anew only where globals look changed.
_SLOW = 0.05


class Changes:
    """Watches a dataset.

    Args:
        data: the dataset.
        watched: False where the caller named the data with a key: nothing is checked then.
    """

    def __init__(self, data: Any, watched: bool) -> None:
        self._data = data
        self._watched = watched
        self._ids: list[int] = []
        self._seen: list[Seen] | None = None
        # The process of each read in progress: after a fork the list still has reads of threads that the
        # child lacks.
        self._reads: list[int] = []
        self._process = os.getpid()
        self._digests: dict[str, set[bytes]] = {}  # of what lies outside
        self._bindings: list[Binding] = []
        self._is_slow = False  # to digest what lies outside
        self._has_read = False  # since the values outside were noted
        self.note()
        near = []
        if self._watched:
            began = time.thread_time()
            self._digests, self._bindings = _outside(data)
            self._is_slow = time.thread_time() - began > _SLOW
            near = [seen.value for seen in walk(data, _MOST)]
            near += [value for binding in self._bindings for value in binding.state.values]
        self._files = NamedFiles(near)

    @property
    def keeps(self) -> bool:
        """Whether what was read so far belongs to the dataset's key: its files are those of the wrapping."""
        return self._files.are_same

    def note(self) -> None:
        """Accept the present state as the unchanged one."""
        if self._watched:
            self._ids = ids_of_attributes(self._data)
            self._seen = walk(self._data, _MOST)

    def glance(self) -> None:
        """Check whether attributes of the dataset itself have been set since the last note. Takes a
        microsecond, but in a new process as long as `check`.

        Raises:
            InvalidValueError: an attribute was set to a different value.
        """
        if not self._watched:
            return
        if self._process != os.getpid():
            self.check()
        elif self._ids != ids_of_attributes(self._data):
            self._check(0)

    def check(self) -> None:
        """Check for all changes, those of globals too.

        Raises:
            InvalidValueError: something has changed; the message names it.
        """
        if not self._watched:
            return
        self._check(0)
        # A forked worker has the bindings of its parent.
        if not (self._is_slow and self._bindings) or any(binding.is_old() for binding in self._bindings):
            self._check_outside()
        # Only now: a loader's worker goes on after an error, and its next sample must be refused as well.
        self._process = os.getpid()

    def _check_outside(self) -> None:
        outside = _outside(self._data)
        for label, digests in outside.digests.items():
            before = self._digests.get(label, digests)
            if not before <= digests and not digests <= before:  # one has more where more code was reached
                _raise_changed(f"{label}, which the dataset refers to,")
        self._bindings = outside.bindings

    def passing(self, samples: Iterator[Any]) -> Iterator[Any]:
        """The samples of a pass over the dataset: check for all changes before it, accept those that reads
        have made at its end.

        Raises:
            InvalidValueError: something has changed; the message names it.
        """
        self.check()
        return self._settled(samples)

    def _settled(self, samples: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from samples
        finally:
            if self._has_read and not sys.is_finalizing():
                self._digests, self._bindings = _outside(self._data)
                self._has_read = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Surround a read of the dataset: check for changes before it, accept the dataset's own changes
        during it. Whether to keep what was read, `keeps` says.

        Raises:
            InvalidValueError: something has changed; the message names it.
        """
        if not self._watched:
            yield
            return
        process = os.getpid()
        self._reads.append(process)
        try:
            self._check(1)
            if len(self._reads) == 1 and any(binding.is_old() for binding in self._bindings):
                self._check_outside()
            before = self._files.states()
            try:
                yield
            finally:
                self.note()
                before_read, self._bindings = self._bindings, [binding.now() for binding in self._bindings]
                self._has_read |= not self._is_slow or any(
                    new.value is not old.value or not new.state.is_same(old.state)
                    for old, new in zip(before_read, self._bindings, strict=True)
                )
                self._files.compare(before)
        finally:
            self._reads.remove(process)

    def _check(self, own: int) -> None:
        """Check whether any noted value has changed; ``own`` of the reads in progress are the caller's."""
        seen = self._seen
        if seen is None:  # it came from another process
            self.note()
            return
        if self._reads.count(os.getpid()) > own:
            return
        ids, now = ids_of_attributes(self._data), walk(self._data, _MOST)
        path = None
        if differ(seen, now):
            path = _changed(seen, now)
        # Another thread's read may have begun meanwhile, or even ended: that read has noted everything.
        if self._reads.count(os.getpid()) > own or self._seen is not seen:
            return
        if path is not None:
            _raise_changed(f"dataset{path}")
        self._ids, self._seen = ids, now

    def __getstate__(self) -> dict[str, Any]:
        # Identities mean nothing in another process: check for changes before the pickle leaves this one.
        self.check()
        return {**vars(self), "_ids": [], "_seen": None, "_bindings": [], "_reads": [], "_process": None}


def _outside(data: Any) -> Outside:
    """The values that the code of a dataset and of its parts refers to outside of them."""
    code: dict[int, Any] = {}
    for seen in walk(data, _MOST):
        kind = kind_of(seen.value)
        held = type(seen.value) if kind in ("object", "module") else seen.value
        if isinstance(held, types.FunctionType | type) and library_of(held.__module__) is None:
            code[id(held)] = held
    return outside_of(code.values())


def _raise_changed(what: str) -> None:
    raise InvalidValueError(
        f"{what} has been changed since the dataset was wrapped, so samples would be kept under a key "
        "that is not theirs; change the dataset first and wrap it anew, or say what identifies the data with "
        "key=..."
    )


def _changed(seen: list[Seen], now: list[Seen]) -> str | None:
    """The path of a change that counts; None if there is none."""
    before = {old.path: old for old in seen}
    # A walk that reached the limit proves nothing about its last values: a new value pushes another one out.
    is_whole = len(seen) < _MOST and len(now) < _MOST
    for new in now:
        old = before.pop(new.path, None)
        if old is None:
            changed = is_whole
        elif old.value is new.value:
            changed = old.mark != new.mark
        else:
            changed = not _alike(old.value, new.value)
        if changed and _is_pickled(new):
            return new.path
    return next((old.path for old in before.values() if is_whole and _is_pickled(old)), None)


def _alike(old: Any, new: Any) -> bool:
    """Whether two values encode alike."""
    try:
        return encode(DATASETS, old, "").code == encode(DATASETS, new, "").code
    except UnhashableError:
        return False


def _is_pickled(seen: Seen) -> bool:
    """Whether pickle would keep all the attributes on the way to a value."""
    for value, name in seen.held:
        kept = pickled_attributes(value)
        if kept is not None and name not in kept:
            return False
    return True
