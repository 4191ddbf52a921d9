"""strace and py-spy on a program: system calls per operation, FUSE requests of a mount, functions by time.

Gives counts, not times: both tools slow down the program. Linux only, for processes that this user may trace.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

#: The requests in include/uapi/linux/fuse.h that reading files causes.
_OPCODES = {
    1: "LOOKUP", 2: "FORGET", 3: "GETATTR", 5: "READLINK", 14: "OPEN", 15: "READ", 17: "STATFS",
    18: "RELEASE",
    22: "GETXATTR", 23: "LISTXATTR", 25: "FLUSH", 26: "INIT", 27: "OPENDIR", 28: "READDIR", 29: "RELEASEDIR",
    34: "ACCESS", 36: "INTERRUPT", 38: "DESTROY", 39: "IOCTL", 41: "NOTIFY_REPLY", 42: "BATCH_FORGET",
    44: "READDIRPLUS", 46: "LSEEK", 50: "SYNCFS", 52: "STATX",
}  # fmt: skip
#: Samples a second that py-spy takes.
_RATE = 500
# Threads that wait for work, which py-spy does not always distinguish from running ones.
_WAITING = (
    "_worker (concurrent/futures/thread.py",
    "Condition.wait (threading.py",
    "wait (concurrent/futures/",
)
#: The part of the time that is in none of an operation's stages.
BESIDE = "all else"
#: Seconds in which requests that no process waits for (RELEASE) arrive.
_SETTLE = 0.2


def no_strace() -> str:
    """Why system calls cannot be traced here; empty if they can."""
    if not _find("strace"):
        return "there is no strace: install the package of that name"
    tried = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, text=True, check=False)
    return f"strace may not trace here: {tried.stderr.strip()}" if tried.returncode else ""


def no_profiler() -> str:
    """Why functions cannot be sampled here; empty if they can."""
    if (profiler := _find("py-spy")) is None:
        return "there is no py-spy: make it with tools/setup.sh bench"
    look = [profiler, "dump", "--pid", str(os.getpid())]
    tried = subprocess.run(look, capture_output=True, text=True, check=False)
    return f"py-spy may not look at processes here: {tried.stderr.strip()}" if tried.returncode else ""


def _find(program: str) -> str | None:
    """The path of a program: beside this Python, else on the user's path."""
    own = Path(sys.executable).with_name(program)
    return str(own) if own.exists() else shutil.which(program)


def calls_each(operation: str, work: Path, calls: int) -> dict[str, float]:
    """System calls of one call of an operation, by name, in all threads together.

    Args:
        operation: one of `tools.bench.operations`.
        work: a folder for its data and the counts.
        calls: how many more calls the second run makes than the first.
    """
    least = calls // 2
    few, many = (_count(operation, work / f"{number}", number) for number in (least, least + calls))
    return {name: (many[name] - few[name]) / calls for name in many}


def _count(operation: str, work: Path, calls: int) -> Counter[str]:
    work.mkdir(parents=True)
    counts = work / "strace.txt"
    _run(
        *("strace", "-f", "-c", "-U", "calls,name", "-o", str(counts)),
        *(sys.executable, "-m", "tools.bench.operations", operation, str(work / "data"), str(calls)),
    )
    found = re.findall(r"^\s*(\d+)\s+(\w+)\s*$", counts.read_text(), re.M)
    return Counter({name: int(number) for number, name in found if name != "total"})


def parts(operation: str, work: Path, calls: int, stages: Sequence[str] = ()) -> list[tuple[str, float]]:
    """The functions, or stages, of an operation with their parts of its time; greatest first."""
    command = [sys.executable, "-m", "tools.bench.operations", operation, str(work / "data"), str(calls)]
    work.mkdir(parents=True)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        _listen(process, "ready")
        with functions(process.pid, work, stages) as found:
            process.stdin.write("\n")
            process.stdin.flush()
            _listen(process, "done")
    return shares(found)


def shares(found: Counter[str]) -> list[tuple[str, float]]:
    """The counts of `functions` as parts of all, greatest first."""
    return [(name, samples / found.total()) for name, samples in found.most_common()]


@contextmanager
def functions(
    pid: int, work: Path, stages: Sequence[str] = (), *, pauses: bool = True
) -> Iterator[Counter[str]]:
    """Sample, within the block, the functions in which the threads of a process run, without their callees.

    Args:
        pid: of a Python process.
        work: a folder for py-spy's output.
        stages: functions, by py-spy's names, that count with all their callees; all else then counts as
            `BESIDE`.
        pauses: stop the process for each sample, so that stacks are complete. Threads that wait in a system
            call then seem to run: those of `_WAITING` are left out, others are not.
    """
    stacks, found = work / f"stacks-{pid}.txt", Counter[str]()
    command = [_find("py-spy") or "py-spy", "record", "--rate", str(_RATE), "--format", "raw", "--function"]
    if not pauses:
        command.append("--nonblocking")
    with subprocess.Popen(
        [*command, "--output", stacks, "--pid", str(pid)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as sampler:
        _listen(sampler, "Sampling")
        try:
            yield found
        finally:
            sampler.send_signal(signal.SIGINT)
            sampler.communicate()
    for line in stacks.read_text().splitlines():
        stack, _, samples = line.rpartition(" ")
        calls = [re.sub(r":\d+\)$", ")", call) for call in stack.split(";")]
        if not calls[-1].startswith(_WAITING):
            found[_spent_in(calls, stages)] += int(samples)


def _spent_in(calls: Sequence[str], stages: Sequence[str]) -> str:
    """The function or stage for which a stack of calls, outermost first, counts."""
    return next((call for call in calls if call in stages), BESIDE) if stages else calls[-1]


def _listen(process: subprocess.Popen[str], word: str) -> None:
    """Read lines until one has a word in it."""
    assert process.stdout is not None
    output = []
    for line in process.stdout:
        if word in line:
            return
        output.append(line)
    raise RuntimeError(f"`{process.args!r}` ended before it printed {word!r}: {''.join(output)[-2000:]}")


def _run(*command: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()[-2000:]}")


# --- a mount's requests -------------------------------------------------------------------------------------


@contextmanager
def requests(root: Path, work: Path) -> Iterator[Counter[str]]:
    """Count, within the block, the kernel's requests to the daemon behind a FUSE mount, by kind.

    Args:
        root: the mountpoint, as in the daemon's command line.
        work: a folder for the trace.
    """
    work.mkdir(parents=True, exist_ok=True)
    trace, found = work / "trace.txt", Counter[str]()
    command = ["strace", "-f", "-xx", "-s", "40", "-e", "trace=read,readv", "-P", "/dev/fuse"]
    with subprocess.Popen(
        [*command, "-o", trace, "-p", str(daemon(root))], stderr=subprocess.PIPE, text=True
    ) as tracer:
        _await_attached(tracer, root)
        try:
            yield found
            time.sleep(_SETTLE)
        finally:
            tracer.send_signal(signal.SIGINT)
            tracer.wait()
    found.update(_parse(trace.read_text()))


def _parse(trace: str) -> Iterator[str]:
    # A request begins with its length and its opcode, four bytes each.
    for line in trace.splitlines():
        if head := re.search(r'"((?:\\x[0-9a-f]{2}){8,})"', line):
            opcode = int.from_bytes(bytes.fromhex(head[1].replace("\\x", ""))[4:8], sys.byteorder)
            yield _OPCODES.get(opcode, f"opcode {opcode}")


def daemon(root: Path) -> int:
    """The process that has /dev/fuse open, and has the mountpoint in its command line."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.fsencode(root) not in (process / "cmdline").read_bytes():
                continue
            if any(os.readlink(entry) == "/dev/fuse" for entry in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:  # the process has just ended, or is another user's
            continue
    raise RuntimeError(f"no process serves {root}")


def _await_attached(tracer: subprocess.Popen[str], root: Path) -> None:
    assert tracer.stderr is not None
    output = tracer.stderr.readline()
    if "attached" not in output:
        raise RuntimeError(f"strace could not attach to the daemon of {root}: {output.strip()}")
