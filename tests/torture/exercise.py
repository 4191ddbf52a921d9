"""Every operation of a store, on a store that is not to be trusted, in a process with little memory.

Run as ``python exercise.py``. Reads paths of stores, a line each, and forks a process for each store, since
imports take most of the time. Prints a line of JSON: the outcome of each operation, and the growth of the
process's peak memory in MB; or under ``failed`` the traceback of an error that is not castore's own, or how
the process ended.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from collections.abc import Callable

from castore import CastoreError, Store
from castore.objects.codec_threads import codec_threads
from castore.repair import doctor

LIMIT = 2 << 30


def peak() -> int:
    with open("/proc/self/status") as file:
        return int(file.read().split("VmHWM:")[1].split()[0]) // 1024


def read_all(store: Store) -> int:
    hits = 0
    for name in [entry.name for entry in store.entries()]:
        try:
            hits += store.get(name) is not None
            with store.open(name) as file:
                file.seek(1000)
                file.read(10)
        except CastoreError:
            continue
    return hits


def acts(path: str) -> dict[str, Callable[[], object]]:
    def opened(act: Callable[[Store], object]) -> Callable[[], object]:
        def run() -> object:
            with Store(path, memory=0) as store:
                return act(store)

        return run

    return {
        "open": opened(lambda store: len(list(store.entries()))),
        "read": opened(read_all),
        "put": opened(lambda store: store.put("new/small", b"x" * 1000).size),
        "put large": opened(lambda store: store.put("new/large", os.urandom(400_000)).size),
        "compute": opened(lambda store: len(store.get_or_compute("new/computed", lambda: b"y"))),
        "delete": opened(lambda store: store.delete("new/small")),
        "stat": opened(lambda store: store.stat().entries),
        "verify": opened(lambda store: len(store.verify(repair=True).bad)),
        "gc": opened(lambda store: store.gc(max_size=10_000_000, grace=0).blobs),
        "doctor": lambda: [finding.mended for finding in doctor.examine(path)],
        "rebuild": lambda: doctor.rebuild_index(path)[1].entries,
        "read again": opened(read_all),
        "gc again": opened(lambda store: store.gc(grace=0).blobs),
        "verify again": opened(lambda store: len(store.verify().bad)),
    }


def exercise(path: str) -> dict[str, object]:
    codec_threads.pool().submit(int).result()
    before = peak()
    ended: dict[str, object] = {}
    for name, act in acts(path).items():
        try:
            ended[name] = act()
        except CastoreError as error:
            ended[name] = f"{type(error).__name__}: {error}"
    return {"ended": ended, "grew": peak() - before}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    for line in sys.stdin:
        child = os.fork()
        if not child:
            said: dict[str, object]
            try:
                said = exercise(line.removesuffix("\n"))
            except BaseException:
                said = {"failed": traceback.format_exc()}
            print(json.dumps(said), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"failed": f"it ended with {os.waitstatus_to_exitcode(status)}"}), flush=True)


if __name__ == "__main__":
    main()
