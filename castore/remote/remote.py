"""The door of a remote: what `Store.remote` gives. Calls run in a process of their own (transfer.py).

Knows no bucket and opens no connection to one, so a process that uses it may fork.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, suppress
from itertools import islice
from typing import Any

from castore.errors import (
    CorruptError,
    InvalidValueError,
    RemoteDeniedError,
    RemoteError,
    RemoteUnreachableError,
)
from castore.names import check_name, check_prefix
from castore.parts import Parts
from castore.remote.error_values import rebuild
from castore.remote.fetcher_client import FetcherClient
from castore.remote.keys import COMMITS, REFS, TREES, check_commit, check_ref
from castore.remote.outcomes import (
    BackgroundPull,
    Checked,
    Progress,
    Pulled,
    Pushed,
    RemoteChange,
    RemoteCollected,
    RemoteCommit,
    RemoteProblem,
    RemoteResult,
    RemoteUsage,
    Warmed,
)
from castore.remote.remotes import Remotes, RemoteSettings
from castore.system.forks import block_forks
from castore.system.job_rank import check_shard
from castore.units import as_whole, parse_duration

log = logging.getLogger("castore")

# With `-m` Python would import modules from the current folder, which may hold anything. At its end Python
# would wait for threads that wait for a network.
_PROGRAM = (
    "import os, sys; sys.path[:] = [entry for entry in sys.path if entry not in ('', '.')];"
    " from castore.remote.transfer import main; os._exit(main())"
)
# Behind the call: it is to stop.
_STOP = b"stop\n"
# Seconds for the process to clean up after an interrupt; it ends by itself earlier than that.
_PATIENCE = 15
# Seconds to wait for results that are offered in the background.
_OFFER_SECONDS = 60
# Refs whose repair failed that an error names.
_FAILURES = 5
# Upper bound in bytes of a note.
_LONGEST_NOTE = 1 << 16


class Remote:
    """A remote of a store: a place on object storage or a shared file system that several stores use.

    `Store.remote` makes it. Every call starts a process that talks to the storage, with this process's
    environment, and ends it.

    Raises:
        RemoteUnreachableError: any call, if the storage gives no answer in time.
        RemoteDeniedError: the credentials are missing, expired or do not suffice.
        RemoteError: the storage refuses otherwise, or holds what castore did not write.
    """

    def __init__(self, parts: Parts, settings: RemoteSettings, options: dict[str, Any]) -> None:
        self._parts = parts
        self._options = options
        #: Name, URL and options, as the store keeps them.
        self.settings = settings

    @property
    def name(self) -> str:
        """Its name in this store."""
        return self.settings.name

    @property
    def url(self) -> str:
        """Its URL."""
        return self.settings.url

    def __repr__(self) -> str:
        return f"Remote({self.name!r}, {self.url!r})"

    def push(
        self,
        prefix: str = "",
        *,
        ref: str = "main",
        note: str = "",
        delete: bool = False,
        restore: bool = False,
        progress: Progress | None = None,
    ) -> Pushed:
        """Bring names into a ref, and the bytes that the remote lacks. Only these travel.

        If others have pushed to the ref since this store last pushed or pulled, both changes are merged by
        name.

        Args:
            prefix: push the names at and below it; default all.
            ref: default ``"main"``; made if there is none.
            note: text for the history.
            delete: also remove names at and below ``prefix`` from the ref that the store does not have. By
                default they stay: what a cache has evicted is no less wanted.
            restore: also bring names that others have removed from the ref. By default they stay removed, as
                long as the store has not changed them.
            progress: called with the stored bytes that are in the remote, and those of all that travels.

        Raises:
            ConflictError: names changed both here and in the ref; its ``names`` lists them.
            NameConflictError: a name would lie inside a file of the ref.
            NotFoundError: there is no name at or below ``prefix``, or none in the store, with ``delete`` and
                no prefix.
            CorruptError: a blob here is damaged.
            InvalidValueError: an entry is a pickle, or ``note`` is no text, or one of more than 65,536 bytes.
            InvalidNameError: ``ref`` cannot be the name of a ref, or ``prefix`` is neither empty nor a name.
            RemoteDeniedError: the remote was added with ``read_only``, or the credentials may not write.
        """
        options = {"delete": delete, "restore": restore}
        return self._push(prefix, ref, note, options, [], progress)

    def _push(
        self,
        prefix: str,
        ref: str,
        note: str,
        options: dict[str, bool],
        bad: list[str],
        progress: Progress | None,
    ) -> Pushed:
        if self.settings.read_only:
            raise RemoteDeniedError(
                f"remote {self.name!r} was added with --read-only, so nothing is pushed to it;"
                " remove it and add it without"
            )
        check_prefix(prefix)
        _check_note(note)
        self._parts.index.require_writable()  # the base is kept in the store
        arguments = {
            "ref": check_ref(ref),
            "prefix": prefix.rstrip("/"),
            "note": note,
            "bad": bad,
            "remote": self.name,
            **options,
        }
        return Pushed(**self._call("push", arguments, progress))

    def pull(
        self,
        ref: str = "main",
        *,
        commit: str | None = None,
        prefix: str = "",
        below: str = "",
        replace: bool = False,
        lazy: bool = False,
        progress: Progress | None = None,
    ) -> Pulled:
        """Bring the names of a ref into the store, and the bytes that the store lacks, each checked.

        Args:
            ref: default ``"main"``.
            commit: the first six or more hex digits of a commit in the ref's history; default the newest.
            prefix: pull the names at and below it; default all.
            below: a folder of the store that the names come into; default none.
            replace: take the ref's bytes for all names that differ, those too that changed here alone, and
                remove names of the store, pinned ones too, where the ref has a file or a folder in their way.
            lazy: bring the names alone. Bytes are fetched when somebody reads them; the budget drops them
                again, and keeps the names.
            progress: called with stored bytes that have come, and the stored bytes of all that is fetched;
                with ``lazy`` with numbers of names.

        Raises:
            ConflictError: names changed both here and in the ref; its ``names`` lists them.
            NameConflictError: a name would be a file of the store and a folder of the ref, or the other way
                round, without ``replace``.
            RemoteMissingError: there is no such ref, commit or prefix, or a page of the tree is gone; or
                bytes are gone, and all other names have come.
            CorruptError: the commit is damaged, or a page of its tree is; or bytes are, and all other names
                have come.
            InvalidNameError: ``ref`` cannot be the name of a ref, or ``prefix`` or ``below`` is neither empty
                nor a name.
            InvalidValueError: ``commit`` is not 6 or more hex digits.
            FullError: they do not fit into the budget or onto the disk.
        """
        arguments = self._pull_arguments(ref, commit, prefix, below, replace, lazy)
        return Pulled(**self._call("pull", arguments, progress))

    def begin_pull(
        self,
        ref: str = "main",
        *,
        commit: str | None = None,
        prefix: str = "",
        below: str = "",
        replace: bool = False,
        lazy: bool = False,
    ) -> BackgroundPull:
        """Begin a `pull`, and go on with it in the background. Names come in their order, with their bytes.

        `castore.adapters.torch.WindowSampler` reads an epoch behind it. The pull ends early if this process
        ends, and the next one goes on with it.

        Args:
            ref, commit, prefix, below, replace, lazy: as for `pull`.

        Returns:
            A `concurrent.futures.Future` of the outcome, for this process. It raises what `pull` would raise,
            and cannot be cancelled.

        Raises:
            InvalidNameError, InvalidValueError: as for `pull`, at once.
        """
        arguments = self._pull_arguments(ref, commit, prefix, below, replace, lazy)
        start = f"{arguments['below']}/" if arguments["below"] else ""
        place = start + arguments["prefix"] if arguments["prefix"] else arguments["below"]
        names = self._parts.index.entries(place, time.time())
        future = BackgroundPull(is_first=next(names, None) is None)
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(Pulled(**self._call("pull", arguments)))
            except BaseException as error:  # noqa: BLE001 (the future raises it)
                future.set_exception(error)

        # A daemon, so that a program can end before its pull does.
        threading.Thread(target=run, name="castore-pull", daemon=True).start()
        return future

    def _pull_arguments(
        self, ref: str, commit: str | None, prefix: str, below: str, replace: bool, lazy: bool
    ) -> dict[str, Any]:
        known = Remotes(self._parts.path, self._parts.settings)
        arguments: dict[str, Any] = {
            "ref": check_ref(ref), "start": _check_commit(commit), "prefix": check_prefix(prefix),
            "below": check_prefix(below, "folder"), "replace": replace, "lazy": lazy, "remote": self.name,
            "is_first": commit is None and ref not in known.refs(self.name), "began": time.time(),
        }  # fmt: skip
        self._parts.index.require_writable()
        return arguments

    def prepare(self, *, create: bool = True) -> list[str]:
        """Make the place a remote, if it is none yet, and find out by trying what it can do.

        Args:
            create: False if the place must be one already.

        Returns:
            Sentences on what may surprise.

        Raises:
            RemoteError: it has another format, or cannot do what a remote needs.
        """
        settings = self.settings
        arguments = {
            "read_only": settings.read_only, "single_writer": settings.single_writer, "create": create,
        }  # fmt: skip
        found: list[str] = self._call("prepare", arguments)
        return found

    def forget(self, *keys: str) -> int:
        """Remove the shared results of computations, so that they are computed again.

        Results that this store offers in the background come into the remote first. Entries that stores have
        made of a result stay until they are deleted there.

        Args:
            keys: of the computations, as `Store.get_or_compute` takes them. ``cache_name`` of a function that
                `Store.cached` decorates gives the key of a call.

        Returns:
            How many results were there.

        Raises:
            RemoteDeniedError: the remote was added with ``read_only``, or the credentials may not delete.
            InvalidNameError: nothing can have such a key.
            RemoteError: this store's offers do not come to an end; also as for every call.
        """
        if self.settings.read_only:
            raise RemoteDeniedError(f"remote {self.name!r} was added with --read-only, so nothing is removed")
        names = [check_name(key) for key in keys]
        self._finish_offers()
        return sum(self._call("forget", {"keys": names}))

    def _finish_offers(self) -> None:
        """Wait for the store's offers: one that came after its result is removed would bring it back."""
        finished = FetcherClient(self._parts.path).call_running(
            "finish_offers", timeout=_OFFER_SECONDS + 1.0, seconds=_OFFER_SECONDS
        )
        _, left, failure = finished or ("", 0, None)
        if failure is not None:
            log.warning("a result could not be offered: %s", failure)
        if left:
            raise RemoteError(
                f"{left} results are still on their way into remote {self.name!r} after {_OFFER_SECONDS} s;"
                " forget them when they are there"
            )

    def results(self, prefix: str = "", *, progress: Progress | None = None) -> list[RemoteResult]:
        """The shared results of computations, sorted by key. Reads each record: one request a result.

        Args:
            prefix: of the keys: those at and below it; default all.
            progress: called with the number of results that were read.

        Raises:
            InvalidNameError: ``prefix`` is neither empty nor a name.
        """
        found = self._call("results", {"prefix": check_prefix(prefix).rstrip("/")}, progress)
        return [RemoteResult(*fields) for fields in found]

    def usage(self) -> RemoteUsage:
        """The number of refs, objects and results, and their bytes. Reads listings alone."""
        return RemoteUsage(*self._call("usage", {}))

    def refs(self) -> list[str]:
        """The names of all refs, sorted."""
        found: list[str] = self._call("refs", {})
        return found

    def log(self, ref: str = "main", *, commit: str | None = None, limit: int = 20) -> list[RemoteCommit]:
        """The newest commits of a ref, newest first.

        Args:
            ref: default ``"main"``.
            commit: begin at this one.
            limit: at most so many.

        Raises:
            RemoteMissingError: there is no such ref or commit.
            CorruptError: that commit is damaged.
            InvalidNameError: ``ref`` cannot be the name of a ref.
            InvalidValueError: ``limit`` is less than 1, or ``commit`` is not 6 or more hex digits.
        """
        most = as_whole(limit)
        if most is None or most < 1:
            raise InvalidValueError(f"limit must be a whole number, 1 or more, not {limit!r:.80}")
        arguments = {"ref": check_ref(ref), "start": _check_commit(commit), "limit": most}
        return [RemoteCommit(**fields) for fields in self._call("log", arguments)]

    def diff(
        self, old: tuple[str, str | None], new: tuple[str, str | None], *, prefix: str = ""
    ) -> list[RemoteChange]:
        """The names that differ between two commits, in order.

        Args:
            old, new: a ref, and the first digits of a commit in its history, or None for the newest.
            prefix: compare the names at and below it; default all.

        Raises:
            RemoteMissingError: there is no such ref or commit.
            CorruptError: that commit is damaged.
            InvalidNameError: a ref cannot have that name, or ``prefix`` is neither empty nor a name.
            InvalidValueError: ``old`` or ``new`` is no pair.
        """
        arguments = {"old": _check_version(old), "new": _check_version(new), "prefix": check_prefix(prefix)}
        return [RemoteChange(*fields) for fields in self._call("diff", arguments)]

    def warm(
        self,
        prefix: str = "",
        *,
        ref: str = "main",
        commit: str | None = None,
        shard: tuple[int, int] = (0, 1),
        progress: Progress | None = None,
    ) -> Warmed:
        """Fetch bytes before a mount of the ref reads them. Bytes that are here already do not travel. If
        some are damaged or gone, all others come.

        Args:
            prefix: of the names, default all.
            ref: default ``"main"``.
            commit: the first six or more hex digits of a commit in the ref's history; default the newest.
            shard: ``(i, n)`` fetches the i-th of n parts, counted from 0, so that n nodes share the work. The
                parts are of about equal size, and each has names that are neighbours.
            progress: called with stored bytes that are here, and the stored bytes of all.

        Raises:
            InvalidValueError: there is no such shard, or ``commit`` is not 6 or more hex digits.
            FullError: it does not fit into the store's budget.
            RemoteMissingError: there is no such ref, commit or prefix, or bytes are gone.
            CorruptError: the commit is damaged, or a page of its tree is, or bytes are.
            InvalidNameError: ``ref`` cannot be the name of a ref, or ``prefix`` is neither empty nor a name.
        """
        check_shard(shard)
        from castore.remote.remote_tree import RemoteTree

        with closing(RemoteTree(self._parts, self.name, ref, _check_commit(commit))) as tree:
            return tree.warm(check_prefix(prefix), shard, progress or (lambda done, total: None))

    def check(self, *, deep: bool = False, progress: Progress | None = None) -> Checked:
        """Check that the bucket has all that its refs mean, and try out again what the storage can do.

        The trial writes small objects below ``probe/`` and removes them, as `Store.add_remote` does. It only
        reads if the remote was added with ``read_only``.

        Args:
            deep: read every object and compare its bytes with its digest. By default only listings and trees
                are read.
            progress: with ``deep`` called with bytes that were read, and those of all objects.
        """
        found = self._call(
            "check", {"remote": self.name, "deep": deep, "read_only": self.settings.read_only}, progress
        )
        problems, history = (
            [RemoteProblem(ref, key, why, tuple(names)) for ref, key, why, names in found[kind]]
            for kind in ("problems", "history")
        )
        lists = {"problems": problems, "history": history, "warnings": tuple(found["warnings"])}
        return Checked(**found | lists)

    def gc(
        self,
        *,
        keep_commits: int | None = None,
        grace: float | str = "1d",
        unused: float | str | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> RemoteCollected:
        """Collect the remote's garbage: objects that no kept commit of any ref needs, and no shared result.

        A run condemns what is garbage now. It deletes what an earlier run condemned at least a grace period
        ago, and what is still garbage. So run it now and then, once a day for example; one collector at a
        time. Pushes and readers go on meanwhile.

        Args:
            keep_commits: number of each ref's newest commits that are kept; default all. Commits that were a
                ref's newest within the grace period are kept in any case.
            grace: seconds, or ``"2d"``; at least 40 minutes. The longest time that a reader may need a commit
                which is not kept, or that a push may take.
            unused: seconds, or ``"30d"``, without a use after which a shared result is garbage; at least two
                days, since uses are noted once a day. Default never.
            dry_run: write nothing; ``condemned`` is what would be condemned. Ages go by this machine's clock.
            progress: called with bytes that were deleted, and those of all that are.

        Raises:
            RemoteDeniedError: the remote was added with ``--read-only``, or the credentials may not delete.
            InvalidValueError: no commit would be kept, or the grace period or ``unused`` is too short.
            CorruptError: a page is damaged, so garbage cannot be determined; nothing was deleted.
            RemoteError: another collector is at work.
        """
        from castore.remote.collect import SHORTEST_GRACE, SHORTEST_UNUSED

        seconds = parse_duration(grace)
        if seconds < SHORTEST_GRACE:
            raise InvalidValueError(
                f"a grace period of {grace} is too short: a push that runs may need that long; take at least"
                f" {SHORTEST_GRACE / 60:.0f} minutes"
            )
        idle = None if unused is None else parse_duration(unused)
        if idle is not None and idle < SHORTEST_UNUSED:
            raise InvalidValueError(
                f"results that were not used for {unused} cannot be told: uses are noted once a day; take at"
                " least 2 days"
            )
        kept = None if keep_commits is None else as_whole(keep_commits)
        if keep_commits is not None and (kept is None or kept < 1):
            raise InvalidValueError(
                f"{keep_commits!r:.80} commits cannot be kept: keep the newest one at least"
            )
        if self.settings.read_only and not dry_run:
            raise RemoteDeniedError(
                f"remote {self.name!r} was added with --read-only, so nothing in it is deleted"
            )
        arguments = {"keep_commits": kept, "grace": seconds, "unused": idle, "dry_run": dry_run}
        return RemoteCollected(**self._call("gc", arguments, progress))

    def repair(self, checked: Checked, *, progress: Progress | None = None) -> list[Pushed]:
        """Upload again what a check found missing or damaged, as far as this store has the bytes.

        Args:
            checked: from `check`.
            progress: as for `push`.

        Bytes count by their digest, so the store may have them under any name. No name of the store comes
        into a ref. A ref gets a new commit if its names lead to new objects, and none if the lost objects
        themselves come back.

        Returns:
            The outcome for each ref, if there are problems, but for refs that are damaged themselves, or
            whose newest commit, or a page of its tree, no longer exists here or there. Another `check` lists
            what is still missing.

        Raises:
            CorruptError: a blob here is damaged. Other refs are repaired all the same.
            RemoteError: several refs are not repaired as a whole; the message has the reason for each. Or an
                object cannot be written.
            RemoteDeniedError: the remote was added with ``read_only``, or the credentials may not write.
        """
        keys = [(problem.ref, problem.key) for problem in checked.problems]
        bad = [key.rpartition("/")[2] for _, key in keys if not key.startswith(REFS)]
        damaged = {ref for ref, key in keys if key.startswith(REFS)}
        without_tree = {ref for ref, key in keys if key.startswith((COMMITS, TREES))}
        repaired: list[Pushed] = []
        failures: dict[str, CorruptError | RemoteError] = {}
        for ref in checked.refs if bad else ():
            if ref in damaged:  # nothing says what its names are
                continue
            try:
                repaired.append(
                    self._push("", ref, "repair", {"delete": False, "restore": False}, bad, progress)
                )
            except (RemoteDeniedError, RemoteUnreachableError):
                raise
            except (CorruptError, RemoteError) as error:
                of_remote = isinstance(error, RemoteError) or (error.where or "").startswith((COMMITS, TREES))
                if not of_remote or ref not in without_tree:
                    failures[ref] = error
        if len(failures) == 1:
            raise next(iter(failures.values()))
        if failures:
            told = "; ".join(f"ref {ref!r}: {error}" for ref, error in islice(failures.items(), _FAILURES))
            more = "" if len(failures) <= _FAILURES else f"; and {len(failures) - _FAILURES} more"
            raise RemoteError(f"{len(failures)} refs are not repaired as a whole: {told}{more}")
        return repaired

    def _call(self, call: str, arguments: dict[str, Any], progress: Progress | None = None) -> Any:
        request = {
            "store": str(self._parts.path), "options": self._options,
            "file_mode": self._parts.settings.file_mode, "url": self.url,
            "requests": self.settings.requests, "rate": self.settings.rate, "call": call,
            "arguments": arguments,
        }  # fmt: skip
        outcome: dict[str, Any] | None = None
        with ExitStack() as opened:
            # A terminal's Ctrl-C reaches the new process too, which inherits the mask: this process ends it.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            opened.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
            # A child of another thread's fork would hold the pipes open, and this thread would wait for it.
            with block_forks():
                reading, writing = os.pipe()
                answers = opened.enter_context(open(reading, "rb"))
                command = [sys.executable, "-c", _PROGRAM, str(writing), str(os.getpid())]
                try:
                    process = opened.enter_context(
                        subprocess.Popen(
                            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=(writing,)
                        )
                    )
                finally:
                    os.close(writing)
            assert process.stdin is not None
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                with suppress(BrokenPipeError):  # the process has ended: its answer has the reason
                    process.stdin.write(json.dumps(request).encode() + b"\n")
                    process.stdin.flush()
                for line in answers:  # to their end: a closed input would interrupt the process
                    message = json.loads(line)
                    if "waits" in message:
                        log.warning(
                            "waiting for another push or pull of ref %r in %s",
                            arguments["ref"],
                            self._parts.path,
                        )
                    elif "progress" not in message:
                        outcome = message
                    elif progress is not None:
                        progress(*message["progress"])
            except BaseException:
                # A worker that was forked meanwhile has the pipe as well: a closed end alone tells nothing.
                if process.poll() is None:
                    with suppress(BrokenPipeError):
                        process.stdin.write(_STOP)
                        process.stdin.flush()
                raise
            finally:
                with suppress(BrokenPipeError):
                    process.stdin.close()
                try:
                    process.wait(_PATIENCE)
                except subprocess.TimeoutExpired:
                    process.kill()
        if outcome is not None and "error" in outcome:
            raise rebuild(outcome["error"])
        if outcome is not None:
            return outcome["result"]
        raise RemoteError(
            f"the process that talks to remote {self.name!r} ended with status {process.returncode};"
            " nothing is lost: do the same again"
        )


def _check_version(version: Any) -> tuple[str, str | None]:
    if not isinstance(version, tuple | list) or len(version) != 2:
        raise InvalidValueError(
            f'a version is a ref and a commit or None, as in ("main", None), not {version!r:.80}'
        )
    ref, commit = version
    return check_ref(ref), _check_commit(commit)


def _check_commit(commit: Any) -> str | None:
    return None if commit is None else check_commit(commit)


def _check_note(note: Any) -> None:
    try:
        if isinstance(note, str) and len(note.encode()) <= _LONGEST_NOTE:
            return
        found = f"{len(note):,} characters" if isinstance(note, str) else f"{note!r:.80}"
    except UnicodeEncodeError:
        found = f"{note!r:.80}, which has no UTF-8"
    raise InvalidValueError(f"a note is text of at most {_LONGEST_NOTE} bytes in UTF-8, not {found}")
