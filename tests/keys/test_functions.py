"""A function's fingerprint changes when what it computes may have changed, and never by chance.

Real modules in real files, each fingerprint taken in a process of its own with a hash seed of its own.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from castore.errors import InvalidValueError, UnhashableError
from castore.keys.objects import function_fingerprint

HELPERS = """
import re
PATTERN = re.compile("a+")
LIMIT = 3
def clean(text):
    return PATTERN.sub("", text)[:LIMIT]
def even(n):
    return True if n == 0 else odd(n - 1)
def odd(n):
    return False if n == 0 else even(n - 1)
class Base:
    def scale(self):
        return 2
class Scaler(Base):
    def run(self, x):
        return self.scale() * x
"""

# Ways in which a step may reach helpers.clean; each must notice an edit of it (Hugging Face datasets, issue
# 3297).
WAYS = {
    "from-import": "from helpers import clean\ndef step(x): return clean(x)",
    "module": "import helpers\ndef step(x): return helpers.clean(x)",
    "alias": "import helpers as h\ndef step(x): return h.clean(x)",
    "inner-import": "def step(x):\n    import helpers as h\n    return h.clean(x)",
    "inner-from": "def step(x):\n    from helpers import clean as c\n    return c(x)",
    "package": "import pack.sub\ndef step(x): return pack.sub.clean(x)",
    "inner-package": "def step(x):\n    import pack.sub\n    return pack.sub.clean(x)",
    "inner-submodule": "def step(x):\n    from pack import sub\n    return sub.clean(x)",
    "lambda": "from helpers import clean\nstep = lambda x: clean(x)",
    "comprehension": "from helpers import clean\ndef step(xs): return [clean(x) for x in xs]",
    "nested": (
        "from helpers import clean\ndef step(xs):\n    def one(x): return clean(x)\n    return map(one, xs)"
    ),
    "closure": (
        "from helpers import clean\ndef make(f):\n    def inner(x): return "
        "f(x)\n    return inner\nstep = make(clean)"
    ),
    "default": "from helpers import clean\ndef step(x, f=clean): return f(x)",
    "table": "from helpers import clean\nTABLE = {'c': [clean]}\ndef step(x): return TABLE['c'][0](x)",
    "module-argument": (
        "import helpers\ndef call(m, x): return m.clean(x)\ndef step(x): return call(helpers, x)"
    ),
    "module-result": (
        "def lazy():\n    import helpers\n    return helpers\ndef step(x): return lazy().clean(x)"
    ),
    "module-attribute": textwrap.dedent("""
        import helpers
        class Op:
            def __init__(self): self.m = helpers
            def run(self, x): return self.m.clean(x)
        def step(x): return Op().run(x)
        """),
    "module-held": textwrap.dedent("""
        import helpers
        class Op:
            def __init__(self): self.m = helpers
            def run(self, x): return self.m.clean(x)
        step = Op().run
        """),
    "module-of-class": (
        "import helpers\nclass Op:\n    m = helpers\ndef call(m, x): return m.clean(x)\n"
        "def step(x): return call(Op.m, x)"
    ),
    "module-table": (
        "import helpers\nTABLE = {'c': helpers}\ndef call(m, x): return m.clean(x)\n"
        "def step(x): return call(TABLE['c'], x)"
    ),
    "module-default": "import helpers\ndef step(x, m=helpers): return m.clean(x)",
    "module-getattr": "import helpers\ndef step(x): return getattr(helpers, 'cle' + 'an')(x)",
    "module-vars": "import helpers\ndef step(x): return vars(helpers)['cle' + 'an'](x)",
    "module-alias": (
        "def call(m, x): return m.clean(x)\ndef step(x):\n    import pack.sub as s\n    m = s\n"
        "    return [call(m, y) for y in x]"
    ),
    "module-inner": (
        "def call(m, x): return m.clean(x)\ndef step(x):\n    from pack import sub\n"
        "    def inner(y): return call(sub, y)\n    return inner(x)"
    ),
    "package-argument": (
        "import pack.sub\ndef call(p, x): return p.sub.clean(x)\ndef step(x): return call(pack, x)"
    ),
    "submodule-argument": (
        "import pack.sub\ndef call(m, x): return m.clean(x)\ndef step(x): return call(pack.sub, x)"
    ),
    "partial": "import functools\nfrom helpers import clean\nstep = functools.partial(clean, 'x')",
    "cached": "import functools\nfrom helpers import clean\nstep = functools.lru_cache(clean)",
    "wrapped": textwrap.dedent("""
        import functools
        from helpers import clean
        def wrap(f):
            @functools.wraps(f)
            def inner(*args): return f(*args)
            return inner
        @wrap
        def step(x): return clean(x)
        """),
    "method": textwrap.dedent("""
        import dataclasses
        from helpers import clean
        @dataclasses.dataclass
        class Op:
            size: int = 3
            def run(self, x): return clean(x)[:self.size]
        step = Op().run
        """),
    "class": textwrap.dedent("""
        from helpers import clean
        class Op:
            @property
            def text(self): return clean("x")
        def step(x): return Op().text
        """),
}


# Only castore is imported before the fork: what `main` imports is new to each process.
_EACH = """
import os, sys
from castore.keys.objects import function_fingerprint
for folder in sys.argv[1:]:
    pid = os.fork()
    if not pid:
        os.chdir(folder)
        sys.path[:0] = ["", folder]
        import main
        print(function_fingerprint(main.step), flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""


def fingerprints_in(*folders: Path, seed: str = "0") -> list[str]:
    """The fingerprints of main.step, with each folder to import from, each in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", _EACH, *folders], capture_output=True, text=True, check=False,
        cwd=folders[0].parent,
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{Path(__file__).parents[2]}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = done.stdout.split()
    assert len(found) == len(folders)
    return found


def write(folder: Path, main: str, helpers: str = HELPERS) -> Path:
    (folder / "pack").mkdir(parents=True)
    (folder / "pack" / "__init__.py").write_text("")
    (folder / "pack" / "sub.py").write_text(helpers)
    (folder / "helpers.py").write_text(helpers)
    (folder / "main.py").write_text(main)
    return folder


@pytest.fixture(scope="module")
def by_way(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str, str]]:
    """The fingerprints of each way: at first, moved, and edited."""
    # In another place, with another seed, moved down, with a comment and a docstring: still the same.
    moved = "# comment\n\n" + HELPERS.replace("(text):", '(text):\n    "What it does."\n    # how')
    edited = HELPERS.replace('sub("", text)', 'sub("-", text)')
    told = []
    for seed, above, helpers in (("1", "", HELPERS), ("2", "\n\n", moved), ("0", "", edited)):
        place = tmp_path_factory.mktemp("ways")
        folders = [write(place / way, above + main, helpers) for way, main in WAYS.items()]
        told.append(fingerprints_in(*folders, seed=seed))
    return dict(zip(WAYS, zip(*told, strict=True), strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_an_edit_of_an_imported_function_is_noticed_however_it_is_reached(
    by_way: dict[str, tuple[str, str, str]], way: str
) -> None:
    before, moved, edited = by_way[way]
    assert moved == before
    assert edited != before


EDITS = [
    ("clean", 'compile("a+")', 'compile("b+")'),
    ("clean", "LIMIT = 3", "LIMIT = 4"),
    ("even", "return False if n == 0", "return None if n == 0"),
    ("Scaler", "return 2", "return 3"),
    ("Scaler", "self.scale() * x", "self.scale() + x"),
]


@pytest.mark.parametrize(("name", "old", "new"), EDITS)
def test_an_edit_behind_an_imported_function_is_noticed(
    tmp_path: Path, name: str, old: str, new: str
) -> None:
    main = f"from helpers import {name}\ndef step(x): return {name}(x)"
    edited = write(tmp_path / "b", main, HELPERS.replace(old, new))
    assert len(set(fingerprints_in(write(tmp_path / "a", main), edited))) == 2


def test_an_edit_of_what_is_not_used_changes_nothing(tmp_path: Path) -> None:
    main = "import helpers\ndef step(x): return helpers.clean(x)"
    edited = HELPERS.replace("return 2", "return 3") + "\nNEW = object()\n"
    other = write(tmp_path / "b", main + "\nUNUSED = object()", edited)
    assert len(set(fingerprints_in(write(tmp_path / "a", main), other))) == 1


def test_a_users_module_named_like_the_standard_librarys_is_the_users(tmp_path: Path) -> None:
    main = "import statistics\ndef step(x): return statistics.mean(x)"
    folders = [write(tmp_path / str(factor), main) for factor in (1, 2)]
    for folder in folders:
        (folder / "statistics.py").write_text(f"def mean(x): return {folder.name}")
    assert len(set(fingerprints_in(*folders))) == 2


def made(source: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(textwrap.dedent(source), "made.py", "exec"), scope)
    step: Callable[..., Any] = scope["step"]
    return step


SAME = [
    ("def step(x): return x + 1", "\n\ndef step(x):\n    'doc'\n    return x + 1  # one"),
    ("def step(x): return x in {'a', 'b', 'c'}", "def step(x): return x in {'c', 'b', 'a'}"),
    ("def step(x: int) -> int: return x", "def step(x): return x"),
    ("def step(x):\n    class A:\n        y = 1\n    return A",
    "def step(x):\n    class A:\n        'doc'\n        y = 1\n    return A"),
]  # fmt: skip
CHANGED = [
    ("D = {'a': 1, 'b': 2}\ndef step(x): return D", "D = {'b': 2, 'a': 1}\ndef step(x): return D"),
    ("def step(x): return x + 1", "def step(x): return x + 2"),
    ("def step(x): return x + 1", "def step(x): return x + 1.0"),
    ("def step(x): return x + 1", "def step(x): return x - 1"),
    ("def step(x): return x.a", "def step(x): return x.b"),
    ("def step(x): return x < 1", "def step(x): return x > 1"),
    ("def step(x, y): return x", "def step(y, x): return x"),
    ("def step(x, y=1): return x", "def step(x, y=2): return x"),
    ("def step(x, *, y=1): return x", "def step(x, *, y=2): return x"),
    ("def step(x, y=1): return x", "def step(x, *, y=1): return x"),
    ("def step(x): return len(x)", "def step(x): return max(x)"),
    ("def step(x): return [y + 1 for y in x]", "def step(x): return [y + 2 for y in x]"),
    ("K = 1\ndef step(x): return K", "K = 2\ndef step(x): return K"),
    ("def step(x): return f(x)", "def f(x): return x\ndef step(x): return f(x)"),
    ("a = lambda x: 1\nb = lambda x: 2\ndef step(x): return a(b(x))",
    "b = lambda x: 1\na = lambda x: 2\ndef step(x): return a(b(x))"),
    ("def step(x):\n    try: return x\n    except ValueError: pass",
    "def step(x):\n    try: return x\n    except KeyError: pass"),
    ("import math\ndef step(x): return math.sin(x)", "import math\ndef step(x): return math.cos(x)"),
    ("import json\ndef step(x): return json.dumps(x)", "import json\ndef step(x): return json.loads(x)"),
    ("def step(x): yield x", "def step(x): return x"),
    ("import enum\nclass C(enum.Enum): A = 1\ndef step(x): return C.A",
    "import enum\nclass C(enum.Enum): A = 2\ndef step(x): return C.A"),
    ("import enum\nclass C(enum.Enum): A = 1\nV = C.A\ndef step(x): return V.value",
    "import enum\nclass C(enum.Enum): A = 2\nV = C.A\ndef step(x): return V.value"),
    ("def f():\n    k = 1\n    return lambda x: k\nstep = f()",
    "def f():\n    k = 2\n    return lambda x: k\nstep = f()"),
    ("class A:\n    K = 1\n    def f(self): return self.K\ndef step(x): return A().f()",
    "class A:\n    K = 2\n    def f(self): return self.K\ndef step(x): return A().f()"),
    ("S = frozenset((min, max))\ndef step(x): return S", "S = frozenset((min, len))\ndef step(x): return S"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "two"), SAME)
def test_what_cannot_change_the_result_changes_nothing(one: str, two: str) -> None:
    assert function_fingerprint(made(one)) == function_fingerprint(made(two))


@pytest.mark.parametrize(("one", "two"), CHANGED)
def test_what_can_change_the_result_changes_the_fingerprint(one: str, two: str) -> None:
    assert function_fingerprint(made(one)) != function_fingerprint(made(two))


def test_functions_of_libraries_count_by_name() -> None:
    import numpy as np

    functions = [
        len,
        max,
        str.upper,
        "a".join,
        "b".join,
        re.sub,
        re.match,
        np.add,
        np.mean,
        os.path.join,
        dict,
        textwrap.dedent,
    ]
    functions += [functools.partial(re.sub, "a"), functools.partial(re.sub, "b")]
    codes = [function_fingerprint(function) for function in functions]  # type: ignore[arg-type]
    assert len(set(codes)) == len(functions)
    assert codes == [function_fingerprint(function) for function in functions]  # type: ignore[arg-type]


def test_locks_and_loggers_do_not_stand_in_the_way() -> None:
    import logging

    lock, log = threading.Lock(), logging.getLogger("x")

    def step(x: int) -> int:
        with lock:
            log.info("x")
            return x

    assert function_fingerprint(step) == function_fingerprint(step)


def test_what_has_no_stable_hash_is_named() -> None:
    thing = (number for number in range(3))

    def step(x: object) -> object:
        return thing, x

    with pytest.raises(UnhashableError, match=r"step -> closure 'thing': cannot hash a generator"):
        function_fingerprint(step)
    with pytest.raises(UnhashableError, match=r"step -> global 'G'\['k'\]\[1\]: cannot hash"):
        function_fingerprint(made("G = {'k': [1, (n for n in ())]}\ndef step(x): return G"))
    with pytest.raises(UnhashableError, match=r"step -> global 'f' -> global 'G': cannot hash"):
        function_fingerprint(made("G = (n for n in ())\ndef f(): return G\ndef step(x): return f()"))
    with pytest.raises(InvalidValueError):
        function_fingerprint(3)  # type: ignore[arg-type]


_PROGRAM = """
import multiprocessing, sys
import castore
store = castore.Store(sys.argv[1])

@store.cached
def double(number):
    with open(sys.argv[2], "a") as ran:
        ran.write(".")
    return 2 * number

if __name__ == "__main__":
    assert double(1) == 2
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(double, [1, 2]) == [2, 4]
    assert double(2) == 4
"""


def test_a_cached_function_of_a_program_is_the_same_in_its_spawned_workers(tmp_path: Path) -> None:
    """Regression: a worker calls the main module by another name, and computed all results once more."""
    (tmp_path / "program.py").write_text(_PROGRAM)
    subprocess.run(
        [sys.executable, tmp_path / "program.py", tmp_path / "store", tmp_path / "ran"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=True,
    )
    assert (tmp_path / "ran").read_text() == ".."
