"""Kill a process at an exact point: a forked child works on a store and kills itself around a chosen call.

Nothing of this ships: the child wraps a function of castore in its own memory, and all other code in it is
the real one. SIGKILL leaves it no chance to clean up. Forking a process that has everything imported makes a
kill cost milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

#: Installs itself in the calling process and strikes later; the function that makes a Stop only prepares it.
Stop = Callable[[], None]


def die() -> NoReturn:
    """SIGKILL for the calling process."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody outlives SIGKILL")


def before(owner: Any, name: str, nth: int = 1, then: Stop = die) -> Stop:
    """Strike when ``owner.name`` is called for the ``nth`` time."""
    return lambda: _wrap(owner, name, nth, then, lambda: None)


def after(owner: Any, name: str, nth: int | None = 1, then: Stop = die) -> Stop:
    """Strike when the ``nth`` call of ``owner.name`` returns, or each call if None.

    ``then`` may install another stop.
    """
    return lambda: _wrap(owner, name, nth, lambda: None, then)


def halfway(owner: Any, name: str, argument: int, nth: int = 1) -> Stop:
    """Strike when the ``nth`` call of ``owner.name`` has got half of the bytes in the given argument."""

    def arm() -> None:
        original, calls = getattr(owner, name), [0]

        def cut(*arguments: Any) -> Any:
            calls[0] += 1
            if calls[0] < nth:
                return original(*arguments)
            given = arguments[argument]
            original(*arguments[:argument], given[: len(given) // 2], *arguments[argument + 1 :])
            return die()

        setattr(owner, name, cut)

    return arm


def _wrap(owner: Any, name: str, nth: int | None, first: Stop, last: Stop) -> None:
    original, calls = getattr(owner, name), [0]

    def counted(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        now = nth is None or calls[0] == nth
        if now:
            first()
        result = original(*arguments, **options)
        if now:
            last()
        return result

    setattr(owner, name, counted)


def killed(task: Callable[[], object], stop: Stop) -> None:
    """Run ``task`` in a forked child that ``stop`` kills. Fails if the child ends by itself, or fails."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            stop()
            task()
            os.write(writing, b"it came to its end: the stop was never reached")
        except BaseException:
            os.write(writing, traceback.format_exc().encode()[-60_000:])
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the child was not killed: {said}"
    assert os.WTERMSIG(status) == signal.SIGKILL


def pause() -> None:
    """SIGSTOP for the calling process: it hangs until another process continues it."""
    os.kill(os.getpid(), signal.SIGSTOP)


@contextlib.contextmanager
def paused(task: Callable[[], object], stop: Stop = lambda: None) -> Iterator[None]:
    """Run ``task`` in a forked child that comes to a `pause`.

    After the block the child continues, and must end well.
    """
    child = os.fork()
    if not child:
        try:
            stop()
            task()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, os.WUNTRACED)
    assert os.WIFSTOPPED(status), "the child never came to its pause"
    try:
        yield
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    os.kill(child, signal.SIGCONT)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the child failed after its pause"
