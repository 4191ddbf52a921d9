"""A class of the user's counts by its code, whatever module it names; keys change with what a library reads.

Python takes the module of a class that is made by a call from the code that makes it: `abc`, `types`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from castore.errors import UnhashableError
from castore.keys import libraries
from castore.keys.objects import function_fingerprint
from tests.keys.test_class_edits import fingerprint

_ABC = (
    "import abc, functools, json, types\nclass B(abc.ABC):\n    @abc.abstractmethod\n    def run(self): ...\n"
)
# Each makes a class `D` whose method `run` gives EDIT, and which names a module of Python or of a library.
MAKERS = {
    "type over an abstract class": _ABC + "D = type('D', (B,), {'run': lambda self: EDIT})",
    "type over an abstract class, values": _ABC
    + "D = type('D', (B,), {'k': EDIT, 'run': lambda self: self.k})",
    "ABCMeta": _ABC + "D = abc.ABCMeta('D', (), {'run': lambda self: EDIT})",
    "a metaclass over ABCMeta": (
        _ABC + "class M(abc.ABCMeta):\n    def __new__(m, n, b, ns): return super().__new__(m, n, b, ns)\n"
        "D = M('D', (B,), {'run': lambda self: EDIT})"
    ),
    "make_dataclass": (
        "D = dataclasses.make_dataclass('D', [('a', int, EDIT)], namespace={'run': lambda s: s.a})"
    ),
    "make_dataclass, a method": (
        "D = dataclasses.make_dataclass('D', [('a', int, 3)], namespace={'run': lambda s: s.a + EDIT})"
    ),
    "new_class": _ABC + "D = types.new_class('D', (), {}, lambda ns: ns.update(run=lambda self: EDIT))",
    "wraps": (
        _ABC + "@functools.wraps(json.JSONEncoder, updated=())\nclass D:\n    def run(self): return EDIT"
    ),
    "a library's module": "class D:\n    __module__ = 'numpy'\n    def run(self): return EDIT",
    "Python's module": "class D:\n    __module__ = 'json'\n    def run(self): return EDIT",
}


@pytest.mark.parametrize("use", ["D().run()", "I.run()"])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_class_that_names_a_module_which_lacks_it_is_the_users(maker: str, use: str) -> None:
    """Regression: such a class counted by its name, so an edit of it gave the results of before."""
    source = f"{MAKERS[maker]}\nI = D()\ndef step(x): return {use}"
    one, two, again = (fingerprint(source.replace("EDIT", edit)) for edit in ("1", "2", "1"))
    assert one == again
    assert one != two


def test_classes_of_libraries_count_by_name_wherever_their_module_keeps_them() -> None:
    import collections
    import threading

    import numpy as np
    import pandas as pd

    nested = [type(threading.Lock()), collections.OrderedDict, np.random.Generator, pd.DataFrame, type(None)]
    assert all(libraries.library_of_class(cls) is not None for cls in nested)


def test_a_module_that_looks_itself_up_counts_whole() -> None:
    read = "getattr(sys.modules[__name__], 'op_' + x)(x)"
    source = f"import sys\ndef op_a(x): return EDIT\ndef step(x): return {read}"
    assert fingerprint(source.replace("EDIT", "1")) != fingerprint(source.replace("EDIT", "2"))


def test_a_function_that_names_modules_and_its_own_module_is_followed_by_its_names_alone() -> None:
    source = "OTHER = EDIT\ndef step(x): return [type(m).__name__ for m in x.modules()], __name__"
    assert fingerprint(source.replace("EDIT", "1")) == fingerprint(source.replace("EDIT", "2"))


@pytest.mark.parametrize("reader", ["getsource(f)", "getsourcelines(f)", "getcomments(f)", "getsource(own)"])
def test_source_text_counts_where_code_reads_it(tmp_path: Path, reader: str) -> None:
    program = """
        import sys
        sys.path.insert(0, sys.argv[1])
        from castore.keys.objects import function_fingerprint
        import m
        print(function_fingerprint(m.step), function_fingerprint(m.f))
        """
    found = []
    for number, comment in enumerate(("one", "two")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "m.py").write_text(
            f"import inspect, sys\n# {comment}\ndef f(x):\n    # {comment}\n    return x\n"
            f"def step(x):\n    import m as own\n    return inspect.{reader}\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program), folder],
            capture_output=True, text=True, check=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        found.append(done.stdout.split())
    (read, plain), (read_later, plain_later) = found
    assert plain == plain_later
    assert read != read_later


@pytest.mark.parametrize("reader", ["get_json_schema(f)", "tokenizer.apply_chat_template(x, tools=[f])"])
def test_what_describes_a_function_to_a_model_reads_its_docstring_and_types(reader: str) -> None:
    source = f"get_json_schema = tokenizer = None\ndef f(q: EDIT):\n    'TEXT'\ndef step(x): return {reader}"
    edits = (("int", "a"), ("float", "a"), ("int", "b"))
    found = {fingerprint(source.replace("EDIT", kind).replace("TEXT", text)) for kind, text in edits}
    assert len(found) == len(edits)


def test_the_environment_and_the_streams_of_the_process_count_by_their_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: `from os import environ` put all variables into the key."""
    environ, stream, get = os.environ, sys.stderr, os.environ.get

    def step(x: str) -> object:
        return environ[x], get(x), print(x, file=stream)

    before = function_fingerprint(step)
    monkeypatch.setenv("CASTORE_TESTS_ANY", "1")
    assert function_fingerprint(step) == before
    with open(os.devnull) as other, pytest.raises(UnhashableError, match="depends on where it stands"):
        function_fingerprint(lambda: other)


KNOWN: dict[str, Callable[[Any], Any]] = {
    "json.JSONDecoder": lambda n: __import__("json").JSONDecoder(strict=n == 1),
    "struct.Struct": lambda n: __import__("struct").Struct("<I" if n == 1 else "<H"),
    "a method of struct.Struct": lambda n: __import__("struct").Struct("<I" if n == 1 else "<H").unpack,
    "keys of a dict": lambda n: {n: 1}.keys(),
    "items of a dict": lambda n: {1: n}.items(),
    "values of a dict": lambda n: {1: n}.values(),
    "a hash": lambda n: __import__("hashlib").sha256(b"%d" % n),
    "msgspec.Meta": lambda n: __import__("msgspec").Meta(ge=n),
    "a decoder of JSON": lambda n: __import__("msgspec").json.Decoder(int if n == 1 else str),
    "an encoder of JSON": lambda n: __import__("msgspec").json.Encoder(order="sorted" if n == 1 else None),
    "a decoder of msgpack": lambda n: __import__("msgspec").msgpack.Decoder(int if n == 1 else str),
    "an encoder of msgpack": lambda n: __import__("msgspec").msgpack.Encoder(enc_hook=len if n == 1 else max),
}


@pytest.mark.parametrize("kind", KNOWN)
def test_objects_of_c_count_by_what_they_were_made_of(kind: str) -> None:
    """Regression: each of them was an error."""
    made = KNOWN[kind]
    codes = [function_fingerprint(functools.partial(print, made(number))) for number in (1, 2, 1)]
    assert codes[0] == codes[2]
    assert codes[0] != codes[1]


PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:]
import corp.core
from corp.proj import f
from castore.keys.objects import function_fingerprint
print(function_fingerprint(f), function_fingerprint(corp.core.g))
"""


@pytest.mark.parametrize("shared", ["a namespace", "a package that adds folders to its path", "links"])
def test_own_code_in_a_package_whose_name_is_shared_with_an_installed_one_counts(
    tmp_path: Path, shared: str
) -> None:
    """Regression: all of the package counted by the version of the installed part."""
    installed, own = tmp_path / "site-packages", tmp_path / "own"
    record = "corp/core.py,,\n"
    for folder in (installed, own):
        (folder / "corp").mkdir(parents=True)
        if shared == "a package that adds folders to its path":
            (folder / "corp" / "__init__.py").write_text(
                "__path__ = __import__('pkgutil').extend_path(__path__, __name__)"
            )
    if shared == "links":
        (installed / "corp").rmdir()
        (installed / "corp").symlink_to(own / "corp")
    about = installed / "corp_core-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: corp-core\nVersion: 1.0\n")
    (about / "RECORD").write_text(record)
    if shared == "links":
        (about / "direct_url.json").write_text('{"url": "file:///own", "dir_info": {"editable": true}}')
    found = []
    for number in (1, 2):
        (installed / "corp" / "core.py").write_text(f"def g(x): return x + {number}")
        (own / "corp" / "proj.py").write_text(f"def f(x): return x + {number}")
        done = subprocess.run(
            [sys.executable, "-B", "-c", PROGRAM, *([installed] if shared == "links" else [installed, own])],
            capture_output=True, text=True, check=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        found.append(done.stdout.split())
    (proj, core), (proj_later, core_later) = found
    assert proj != proj_later
    assert (core == core_later) is (shared != "links")


def test_the_distribution_of_a_package_is_that_which_importlib_finds() -> None:
    owners = importlib.metadata.packages_distributions()
    tops = sorted(top for top in owners if top.isidentifier() and not top.startswith("_"))
    assert len(tops) > 10
    distributions = [*importlib.metadata.distributions()]
    for top in tops[:: len(tops) // 10]:
        holding = {found.metadata["Name"] for found in distributions if libraries._holds(found, top)}
        assert holding <= {*owners[top]}, top
        # Since Python 3.12 files that are no code count for importlib too.
        assert holding == {*owners[top]} or sys.version_info >= (3, 12), top
