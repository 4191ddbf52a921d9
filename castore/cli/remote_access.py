"""Helpers of the commands that use a remote: the choice of the remote, ``REF@COMMIT``, and conflicts."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from castore.cli.completion import remotes
from castore.cli.exit_codes import FAILED
from castore.cli.output import LISTED, print_error, print_json
from castore.errors import ConflictError, InvalidValueError, NotFoundError

if TYPE_CHECKING:
    from castore import Remote, Store

#: The option of every command that reads from a remote.
FromRemote = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="NAME",
        autocompletion=remotes,
        help="The remote.  [default: the only one there is]",
    ),
]


_SHARD = re.compile(r"([0-9]{1,6})/([1-9][0-9]{0,5})")


def find_remote(store: Store, name: str | None, option: str) -> Remote:
    """The remote of a name, or the only one that the store knows.

    Args:
        store: knows the remotes.
        name: the user's, or None.
        option: the option that gives the name.

    Raises:
        NotFoundError: there is none.
        InvalidValueError: there are several, and no name was given.
    """
    if name is None:
        known = store.remotes()
        if not known:
            raise NotFoundError(
                f"there is no remote in {store.path}; add one with `castore remote add NAME URL`"
            )
        if len(known) > 1:
            raise InvalidValueError(
                f"the store knows several remotes; give one with {option}: {', '.join(known)}"
            )
        [name] = known
    return store.remote(name)


def split_ref(text: str) -> tuple[str, str | None]:
    """The ref and the commit's first digits of ``REF[@COMMIT]``.

    >>> split_ref("main"), split_ref("main@1a2b3c")
    (('main', None), ('main', '1a2b3c'))
    """
    ref, at, commit = text.partition("@")
    return ref, commit if at else None


def short(ref: str, commit: str) -> str:
    """A commit as people write it.

    >>> short("main", "1a2b3c4d5e6f")
    'main@1a2b3c4d'
    """
    return f"{ref}@{commit[:8]}"


def format_local(moment: float) -> str:
    """A time of another machine in this one's zone; "?" if it cannot be one."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    except (ValueError, OverflowError, OSError):
        return "?"


@contextmanager
def conflicts_reported(ref: str, advice: str, *, as_json: bool) -> Iterator[None]:
    """Turn a conflict into a sentence with the first names, and end the command with exit code 1.

    Args:
        ref: whose names are in conflict.
        advice: what the user may do.
        as_json: also print all names as JSON.
    """
    try:
        yield
    except ConflictError as error:
        names = error.names
        listed = ", ".join(map(repr, names[:LISTED]))
        more = f" and {len(names) - LISTED:,} more" if len(names) > LISTED else ""
        print_error(f"{listed}{more} changed both here and in ref {ref!r}; {advice}")
        if as_json:
            print_json({"conflicts": list(names)})
        raise typer.Exit(FAILED) from error


def count_changes(**counts: int) -> str:
    """Counts of names and their words, without those that are 0.

    >>> count_changes(new=3, changed=0, removed=1)
    '3 new, 1 removed'
    """
    return ", ".join(f"{count:,} {word}" for word, count in counts.items() if count)


def parse_shard(text: str) -> tuple[int, int]:
    """The part that ``I/N`` means, and the number of parts.

    Raises:
        InvalidValueError: the text is no such thing.
    """
    found = _SHARD.fullmatch(text)
    if found is None:
        raise InvalidValueError(f'--shard is I/N, such as 0/8, or "job", not {text!r}')
    return int(found[1]), int(found[2])
