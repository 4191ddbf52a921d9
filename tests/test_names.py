"""Names that could lead out of a folder, break a tool or not fit a path are refused, and the error says
why.
"""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castore.errors import InvalidNameError
from castore.names import check_name, check_prefix

GOOD = [
    "a", "imagenet/train-00001.tar", "a b/c", "...", "a/..b", ".hidden", "a/.castore", ".castored",
    "données/été.tar", "日本/語",
    "a\\b", "x" * 255, "é" * 127, "/".join(["d" * 254] * 12), "\u0085", "~", "a:b", "-rf",
]  # fmt: skip

BAD = [
    ("", "is empty"), ("/", "absolute"), ("/a", "absolute"), ("a/", "part 2 is empty"),
    ("a//b", "part 2 is empty"),
    (".", "part 1 is '.'"), ("..", "part 1 is '..'"), ("a/../b", "part 2 is '..'"),
    ("a/..", "part 2 is '..'"), ("a/./b", "part 2 is '.'"),
    ("a\0b", "control character"), ("a/b\nc", "part 2 has the control character"),
    ("a\n", "control character"), ("..\n", "control"),
    ("\x7f", "control character"), ("x" * 256, "part 1 has 256 bytes"), ("é" * 128, "part 1 has 256 bytes"),
    ("😀" * 64, "part 1 has 256 bytes"), ("/".join(["d" * 254] * 13), "at most 3072"),
    ("a/\ud800", "part 2 has .* not valid Unicode"),
    (".castore", "part 1 is '.castore'"), (".castore/objects", "part 1 is '.castore'"), (None, "is a str"),
    (b"a", "is a str"),
    (Path("a"), "is a str"), (1, "is a str"),
]  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_good_names_pass_unchanged(name: str) -> None:
    assert check_name(name) == name
    assert check_prefix(f"{name}/") == name


@pytest.mark.parametrize(("name", "reason"), BAD)
def test_bad_names_are_refused_with_the_part(name: Any, reason: str) -> None:
    with pytest.raises(InvalidNameError, match=reason):
        check_name(name)


def test_prefixes_may_be_empty_or_end_in_a_slash() -> None:
    assert check_prefix("") == ""
    assert check_prefix("a/b/") == check_prefix("a/b") == "a/b"
    for bad in ("/", "a//", "../", ".castore/", None):
        with pytest.raises(InvalidNameError):
            check_prefix(bad)  # type: ignore[arg-type]


def test_subclasses_of_str_leave_as_plain_names() -> None:
    class Split(str, Enum):
        TRAIN = "train"

    for name in (Split.TRAIN, np.str_("train")):
        assert type(check_name(name)) is str
        assert check_name(name) == "train"


def test_a_long_bad_name_gives_a_short_message() -> None:
    with pytest.raises(InvalidNameError) as error:
        check_name("x" * 1_000_000)
    assert len(str(error.value)) < 250


@given(st.text(st.sampled_from("ab./\\\0\n\x7fé\ud800"), max_size=12))
def test_every_name_that_passes_stays_below_the_folder_it_is_joined_to(name: str) -> None:
    try:
        check_name(name)
    except InvalidNameError:
        return
    path = os.path.normpath(f"/root/{name}")
    assert path == f"/root/{name}"
    name.encode()
    assert name.isprintable()


@given(st.text(max_size=300))
def test_a_file_system_takes_every_name_that_passes(name: str) -> None:
    try:
        check_name(name)
    except InvalidNameError:
        return
    assert all(0 < len(os.fsencode(part)) <= 255 for part in name.split("/"))
