"""Keys of the cache: computed from a config, and turned into names of entries.

Any text is a key. A name has more rules (no "..", no NUL, 255 bytes a part, never both file and folder), so
each key becomes one part below one folder. A key that is a valid part stays as it is. In any other key,
forbidden characters are escaped as in a URL, and a part that is too long is cut and gets its digest. Must
never map two keys to one name.
"""

from __future__ import annotations

import re

from blake3 import blake3

from castore.errors import InvalidValueError
from castore.keys import encoder
from castore.names import PART_BYTES

#: Folder of the store that holds the entries of these caches, which never touch any other entry.
FOLDER = "tree"
# '%' itself is escaped, so that no other text resembles an escape. A slash would make a folder of another
# key.
_UNSAFE = re.compile("[%/\x00-\x1f\x7f\ud800-\udfff]")
_PLAIN = re.compile(r"(?!\.)[A-Za-z0-9_.\- ]{1,200}").fullmatch
# No key's escape is '%' alone or begins with '%~': these mark the empty key and a digest.
_EMPTY, _CUT = "%", "%~"
_DIGITS = encoder.KEY_DIGITS


def name_of(key: str) -> str:
    """The name of the entry that holds ``key``.

    Raises:
        InvalidValueError: ``key`` is no str.

    >>> name_of("tokenized_42"), name_of("a/../b"), name_of("..")
    ('tree/tokenized_42', 'tree/a%2F..%2Fb', 'tree/%2E.')
    """
    if type(key) is str and _PLAIN(key):
        return f"{FOLDER}/{key}"
    return f"{FOLDER}/{_escape_key(check_key(key))}"


def check_key(key: str) -> str:
    """``key`` as a plain str, if it is of a subclass.

    Raises:
        InvalidValueError: it is no str.
    """
    if not isinstance(key, str):
        raise InvalidValueError(
            f"a key must be a str, not {type(key).__name__}; make one of a config with "
            "TreeCacheManager.compute_key"
        )
    return str.__str__(key)


def _escape_key(key: str) -> str:
    text = _UNSAFE.sub(_escape_match, key) or _EMPTY
    if text in (".", ".."):
        text = "%2E" + text[1:]
    if len(text.encode()) <= PART_BYTES:
        return text
    digits = str(blake3(key.encode("utf-8", "surrogatepass")).hexdigest())[:_DIGITS]
    room = PART_BYTES - len(_CUT) - _DIGITS
    return text.encode()[:room].decode("utf-8", "ignore") + _CUT + digits


def _escape_match(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode("utf-8", "surrogatepass"))


def compute_key(
    config: object, prefix: str | None, include_content_hash: bool, content: encoder.Content | None
) -> str:
    """See `TreeCacheManager.compute_key`."""
    parts = [encoder.key(config)]
    if prefix:
        parts.insert(0, check_key(prefix))
    if include_content_hash:
        if content is None:
            raise InvalidValueError("include_content_hash=True needs the content: pass content=")
        parts.append(encoder.key("content", content=content))
    return "_".join(parts)
