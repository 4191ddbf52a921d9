"""Errors can be caught as what they are elsewhere, print a plain sentence, and leave worker processes
whole.
"""

from __future__ import annotations

import errno
import functools
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from castore import Store, errors

BUILT_IN = {
    errors.InvalidNameError: ValueError,
    errors.InvalidValueError: ValueError,
    errors.SerializationError: TypeError,
    errors.UnhashableError: TypeError,
    errors.NotFoundError: KeyError,
    errors.MissingDependencyError: ImportError,
    errors.FullError: OSError,
}
ALL = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.CastoreError)
]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_prints_its_sentence_and_survives_pickling(kind: type[errors.CastoreError]) -> None:
    error = kind("there is no entry 'a'; list with castore ls")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error) == "there is no entry 'a'; list with castore ls"
    assert issubclass(kind, BUILT_IN.get(kind, errors.CastoreError))


def test_attributes_survive_pickling() -> None:
    corrupt = errors.CorruptError("a frame is bad", digest="ab" * 32, where="objects/ab/x.zst")
    copy = pickle.loads(pickle.dumps(corrupt))
    assert (copy.digest, copy.where) == ("ab" * 32, "objects/ab/x.zst")
    assert pickle.loads(pickle.dumps(errors.FullError("no space"))).errno == errno.ENOSPC
    missing = pickle.loads(pickle.dumps(errors.MissingDependencyError.of("pyarrow", "datasets")))
    assert missing.name == "pyarrow"
    assert 'pip install "castore[datasets]"' in str(missing)


def test_the_page_has_every_error_with_its_bases_and_every_warning() -> None:
    section = (Path(__file__).parents[1] / "docs" / "python.md").read_text().partition("\n## Errors\n")[2]
    rows = re.findall(r"^\| `(\w+(?:Error|Warning))` \|(.*?)\|", section, re.M)
    bases = {name: set(re.findall(r"`(\w+Error)`", also)) for name, also in rows if name.endswith("Error")}
    assert bases == {
        kind.__name__: {base.__name__ for base in kind.__bases__} - {"CastoreError"}
        for kind in ALL
        if kind is not errors.CastoreError
    }
    assert {name for name, _ in rows} - bases.keys() == {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, UserWarning)
    }


def test_a_warning_points_at_the_users_line_also_through_a_library(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with pytest.warns(errors.NestedStoreWarning) as warned:
        functools.singledispatch(Store)(tmp_path / "a").close()  # functools' wrapper is a function of Python
    assert [warning.filename for warning in warned] == [__file__]


def test_a_warning_in_a_thread_without_a_line_of_the_users_points_at_castore(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with pytest.warns(errors.NestedStoreWarning) as warned, ThreadPoolExecutor() as threads:
        threads.submit(Store, tmp_path / "a").result().close()
    assert [Path(warning.filename).name for warning in warned] == ["settings.py"]
