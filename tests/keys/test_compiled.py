"""Compiled code of the user's counts by its file. A file that was built anew is an error in a process that
has the old one.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import cffi  # type: ignore[import-untyped]
import pytest

from castore.errors import UnhashableError
from castore.keys.objects import function_fingerprint

# An extension module as Cython and pybind11 make them, against Python's stable ABI, without its headers.
_MODULE = r"""
typedef struct { long count; void *type; void *init; long index; void *copy; } Base;
typedef struct { const char *name; void *call; int flags; const char *doc; } Method;
typedef struct {
    Base base; const char *name; const char *doc; long size; Method *methods; void *slots; void *more[3];
} Definition;
#define GLUE(a, b) a##b
#define INIT(name) GLUE(PyInit_, name)
#define TEXT(name) #name
#define QUOTED(name) TEXT(name)
extern void *PyLong_FromLong(long);
extern void *PyModule_Create2(Definition *, int);
static void *answer(void *self, void *args) { return PyLong_FromLong(ANSWER); }
static Method methods[] = {{"answer", answer, 4, 0}, {0, 0, 0, 0}};
static Definition definition = {{1, 0, 0, 0, 0}, QUOTED(NAME), 0, -1, methods, 0, {0}};
void *INIT(NAME)(void) { return PyModule_Create2(&definition, 1013); }
"""
_USES = """
import fastops
from fastops import answer

def by_module(x):
    return x + fastops.answer()

def by_name(x):
    return x + answer()

def inside(x):
    import fastops as ops
    return x + ops.answer()

class Held:
    def __init__(self):
        self.run = fastops.answer

    def __call__(self, x):
        return x + self.run()
"""


def build(folder: Path, answer: int, name: str = "fastops") -> Path:
    built = folder / f"{name}.so"
    built.unlink(missing_ok=True)
    options = ["-shared", "-fPIC", "-w", f"-DANSWER={answer}", f"-DNAME={name}"]
    command = ["cc", *options, "-x", "c", "-", "-o", str(built)]
    subprocess.run(command, input=_MODULE, text=True, check=True)
    return built


def run(folder: Path, program: str) -> str:
    """The output of a process of its own: no process can import such a module twice."""
    told = subprocess.run(
        [sys.executable, "-B", "-c", program], cwd=folder, capture_output=True, text=True, check=True
    )
    return told.stdout.strip()


_PROGRAM = """
import sys; sys.path.insert(0, ".")
import uses
from castore.keys.objects import function_fingerprint
print({0}(1), function_fingerprint({0}))
"""


@pytest.mark.parametrize("use", ["uses.by_module", "uses.by_name", "uses.inside", "uses.Held()"])
def test_a_compiled_module_counts_by_its_code(tmp_path: Path, use: str) -> None:
    (tmp_path / "uses.py").write_text(_USES)
    told = []
    for answer in (1, 1, 2):
        build(tmp_path, answer)
        told.append(run(tmp_path, _PROGRAM.format(use)).split())
    assert [result for result, _ in told] == ["2", "2", "3"]
    assert told[0] == told[1]
    assert told[1][1] != told[2][1]


def test_a_module_that_was_built_anew_since_it_was_imported_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "uses.py").write_text(_USES)
    build(tmp_path, 1)
    other = tmp_path / "other"
    other.mkdir()
    build(other, 2)
    told = run(
        tmp_path,
        """
import os, sys; sys.path.insert(0, ".")
import uses
from castore.errors import UnhashableError
from castore.keys.objects import function_fingerprint
function_fingerprint(uses.by_module)
os.replace("other/fastops.so", "fastops.so")
try:
    function_fingerprint(uses.by_module)
except UnhashableError as error:
    print(error)
""",
    )
    assert "is of the compiled module 'fastops', which was built anew" in told


def test_what_of_the_users_lies_in_a_compiled_module_counts(tmp_path: Path) -> None:
    """Compiled code uses it without a trace in the Python code."""
    build(tmp_path, 1)

    def told(helper: str = "def f(x): return x", scale: int = 1) -> str:
        (tmp_path / "helper.py").write_text(helper)
        (tmp_path / "uses.py").write_text(
            f"import fastops, helper\nfastops.helper, fastops.SCALE = helper, {scale}\n"
            "def use(x):\n    return x + fastops.answer()\n"
        )
        return run(tmp_path, _PROGRAM.format("uses.use"))

    first = told()
    assert told() == first
    assert len({first, told(helper="def f(x): return -x"), told(scale=2)}) == 3


def test_the_other_compiled_modules_of_a_package_count(tmp_path: Path) -> None:
    package = tmp_path / "corp"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (tmp_path / "uses.py").write_text(
        "from corp import beside, fastops\ndef use(x):\n    return x + fastops.answer()\n"
    )
    told = []
    for answer in (1, 1, 2):
        build(package, 1)
        build(package, answer, "beside")
        told.append(run(tmp_path, _PROGRAM.format("uses.use")))
    assert told[0] == told[1] != told[2]


@pytest.mark.parametrize("name", ["/{folder}/own.so", "./own.so"])
def test_a_library_of_c_that_was_built_anew_since_it_was_loaded_is_an_error(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(number: int, path: Path) -> None:
        source = f"int answer(void) {{ return {number}; }}"
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
        subprocess.run(command, input=source, text=True, check=True)

    make(1, tmp_path / "own.so")
    monkeypatch.chdir(tmp_path)
    library = ctypes.CDLL(name.format(folder=str(tmp_path).lstrip("/")))

    def use(x: int) -> int:
        return x + int(library.answer())

    before = function_fingerprint(use)
    monkeypatch.chdir("/")  # a relative name leads elsewhere from now on
    assert function_fingerprint(use) == before
    make(2, tmp_path / "new.so")
    (tmp_path / "new.so").replace(tmp_path / "own.so")
    with pytest.raises(UnhashableError, match=r"library .*own\.so.* was built anew, moved or removed"):
        function_fingerprint(use)


def test_a_library_that_cffi_has_opened_counts_by_its_code(tmp_path: Path) -> None:
    told = []
    for number in (1, 1, 2):
        built = tmp_path / "own.so"
        built.unlink(missing_ok=True)
        source = f"int answer(void) {{ return {number}; }}"
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(built)]
        subprocess.run(command, input=source, text=True, check=True)
        functions = cffi.FFI()
        functions.cdef("int answer(void);")
        library = functions.dlopen(str(built))
        told.append(function_fingerprint(lambda x, library=library: x + library.answer()))
        functions.dlclose(library)
    assert told[0] == told[1] != told[2]


def structure(kind: type[ctypes.Structure | ctypes.Union], of: type) -> type:
    class Record(kind):  # type: ignore[misc,valid-type]
        _fields_ = [("number", of), ("flags", ctypes.c_uint8, 3)]  # noqa: RUF012

    return Record


def test_a_structure_of_ctypes_counts_by_its_fields() -> None:
    def told(record: Any) -> str:
        return function_fingerprint(lambda data: record.from_buffer_copy(data).number)

    one, same, other, union = (
        structure(ctypes.Structure, ctypes.c_int32),
        structure(ctypes.Structure, ctypes.c_int32),
        structure(ctypes.Structure, ctypes.c_float),
        structure(ctypes.Union, ctypes.c_int32),
    )
    assert told(one) == told(same)
    assert len({*map(told, (one, other, union))}) == 3
