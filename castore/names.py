"""Checks the names of entries: relative POSIX paths in UTF-8 that every tool can read through a mount.

Assumes nothing of the store. Must never accept a name that leads out of the folder it is joined to. Must be
fast on good names, since every put and get checks one: one regular expression accepts those, and the slow
path only explains what is wrong. Names are compared byte for byte; Unicode is not normalised, as on ext4.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TypeVar

from castore.errors import InvalidNameError, InvalidValueError

T = TypeVar("T")

# Linux's NAME_MAX.
PART_BYTES = 255
# PATH_MAX is 4096 with its NUL; the rest is left for the mountpoint in front.
NAME_BYTES = 3072
# First part of names in the mount's own folder.
RESERVED = ".castore"
#: The folder of names that hold bytes for links (watch/link_registry.py).
LINKS = f"{RESERVED}/links"

_CONTROL = r"\x00-\x1f\x7f"
_PART = rf"(?!\.\.?(?:/|\Z))[^/{_CONTROL}\ud800-\udfff]+"
_GOOD = re.compile(rf"(?!{re.escape(RESERVED)}(?:/|\Z)){_PART}(?:/{_PART})*").fullmatch
_DIGEST = "[0-9a-f]{64}"
_OWN = re.compile(
    rf"{re.escape(RESERVED)}/(?:blobs/{_DIGEST}|parts/{_DIGEST}/[0-9a-f]{{1,16}}-[0-9a-f]{{1,16}}"
    rf"|links/{_DIGEST}/-?[0-9]{{1,20}}\.[0-9a-f]{{16}}/{_PART})"
).fullmatch
_HAS_CONTROL = re.compile(rf"[{_CONTROL}]").search
# A character takes four bytes at most, so a name this short cannot hold an over-long part.
_SURELY_SHORT = PART_BYTES // 4


def check_name(name: str) -> str:
    """`name`, if it may name an entry.

    Args:
        name: parts joined by `/`: at most 255 bytes of UTF-8 a part and 3072 in all.

    Raises:
        InvalidNameError: it may not; the message names the part that is wrong.

    >>> check_name("imagenet/train-00001.tar")
    'imagenet/train-00001.tar'
    >>> check_name("a/../b")
    Traceback (most recent call last):
    castore.errors.InvalidNameError: name 'a/../b': part 2 is '..'; names cannot lead out of their folder
    """
    if type(name) is str:
        length = len(name)
        short = length <= _SURELY_SHORT or (length <= PART_BYTES and name.isascii())
        if short and _GOOD(name):
            return name
    return _check_slowly(name, "name")


def is_name(name: str) -> bool:
    """Whether an entry may have a name.

    >>> is_name("a/b"), is_name("a/../b")
    (True, False)
    """
    try:
        check_name(name)
    except InvalidNameError:
        return False
    return True


def check_names(names: Iterable[str], of: str) -> Iterator[str]:
    """Several names, checked as they are taken.

    Args:
        names: the names. One text is refused: its letters would be taken for names.
        of: the function that takes them, for the message.

    Raises:
        InvalidValueError: it is one name, or nothing that has several.
        InvalidNameError: (while iterating) see `check_name`.
    """
    return map(check_name, require_several(names, of))


def require_several(items: Iterable[T], of: str, what: str = "names") -> Iterator[T]:
    """Several names, or other items, for a caller that checks each by itself.

    Raises:
        InvalidValueError: it is one text or bytes, or nothing that has several items.
    """
    if isinstance(items, str | bytes):
        raise InvalidValueError(f"{of} takes several {what}, not one: write [{items!r:.80}]")
    try:
        return iter(items)
    except TypeError:
        raise InvalidValueError(f"{of} takes several {what}, not {type(items).__name__}") from None


def check_known_name(name: str) -> str:
    """`name`, if it may be in the index.

    The index has names that users may give, and names of castore's own (`is_own_name`).

    Raises:
        InvalidNameError: see `check_name`.
    """
    return name if type(name) is str and is_own_name(name) else check_name(name)


def is_own_name(name: str) -> bool:
    """Whether a name is one of castore's own, which no listing shows: bytes kept of remotes
    (remote/kept_bytes.py), and bytes held for links (watch/link_registry.py).
    """
    return _OWN(name) is not None


def check_prefix(prefix: str, what: str = "prefix") -> str:
    """`prefix`, a folder of names, without its trailing slash; "" means all names.

    Args:
        prefix: the folder.
        what: the argument's name, for the message.

    Raises:
        InvalidNameError: it is neither empty nor a good name.

    >>> check_prefix("imagenet/"), check_prefix("")
    ('imagenet', '')
    """
    text = _plain(prefix, what)
    bare = text if text == "/" else text.removesuffix("/")
    return _check_slowly(bare, what) if bare else ""


def below(name: str) -> tuple[str, str]:
    """Bounds of all names strictly inside the folder ``name``: ``0`` follows ``/`` in the order of bytes.

    >>> below("a")
    ('a/', 'a0')
    """
    return name + "/", name + "0"


class FilesAbove:
    """Finds the files that names lie inside, which cannot be: a name is a file or a folder, not both.

    >>> above = FilesAbove()
    >>> [above.find(name) for name in ("a", "a-b", "a/b", "ab", "b/c")]
    [None, None, 'a', None, None]
    """

    def __init__(self) -> None:
        self._open: list[str] = []

    def find(self, name: str) -> str | None:
        """The file that a name lies inside, of the names before it; None for none.

        Args:
            name: above all names before it, in the order of bytes.
        """
        files = self._open
        while files and name >= files[-1] + "0":  # see `below`
            files.pop()
        found = next((file for file in files if name.startswith(file + "/")), None)
        files.append(name)
        return found


def _check_slowly(name: str, what: str) -> str:
    name = _plain(name, what)
    problem = _problem(name)
    if problem:
        raise InvalidNameError(f"{what} {_shown(name)}: {problem}")
    return name


def _plain(name: object, what: str) -> str:
    if not isinstance(name, str):
        raise InvalidNameError(f"a {what} is a str, not {type(name).__name__}: {_shown(name)}")
    # Subclasses of str (a NumPy string, an enum) may define equality otherwise: go on with a plain str.
    return str.__str__(name)


def _problem(name: str) -> str | None:
    if not name:
        return "is empty; give at least one part"
    if name.startswith("/"):
        return "is absolute; leave out the leading '/'"
    for place, part in enumerate(name.split("/"), start=1):
        problem = _part_problem(part)
        if problem:
            return f"part {place} {problem}"
    if name.split("/", 1)[0] == RESERVED:
        return f"part 1 is {RESERVED!r}, which the mount keeps for itself"
    if len(name.encode()) > NAME_BYTES:
        return f"has {len(name.encode())} bytes; at most {NAME_BYTES} are allowed"
    return None


def _part_problem(part: str) -> str | None:
    if not part:
        return "is empty; use single slashes and none at the end"
    if part in (".", ".."):
        return (
            f"is {part!r}; names cannot lead out of their folder" if part == ".." else "is '.'; leave it out"
        )
    control = _HAS_CONTROL(part)
    if control:
        return f"has the control character {control[0]!r}"
    try:
        size = len(part.encode())
    except UnicodeEncodeError as error:
        return f"has {part[error.start]!r}, which is not valid Unicode and cannot be written as UTF-8"
    return f"has {size} bytes; at most {PART_BYTES} are allowed" if size > PART_BYTES else None


def _shown(name: object) -> str:
    text = repr(name)
    return text if len(text) <= 100 else f"{text[:60]}...{text[-30:]}"
