"""The zoo of operators: each kind is a module that makes ``operator``, and contains one part, ``$X``, that
tests change.

Fresh processes import the modules from a folder, so nothing but the text of the modules can make a
difference: no names, no places, no earlier run. Run as a program, the module prints the fingerprint of each
kind in each of the folders.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path

KINDS: dict[str, str] = {
    "function": "def operator(sample): return {'n': sample['n'] + $X}",
    "lambda": "operator = lambda sample: sample['n'] + $X",
    "closure": (
        "def outer(k):\n    def inner(sample): return sample['n'] + k\n    return inner\noperator = outer($X)"
    ),
    "default": "def operator(sample, k=$X): return k",
    "keyword_default": "def operator(sample, *, k=$X): return k",
    "global_value": "LIMIT = $X\ndef operator(sample): return sample['n'] > LIMIT",
    "global_set": "WORDS = {'a', 'b', 'c', 'word$X'}\ndef operator(sample): return sample['t'] in WORDS",
    "global_dict": (
        "TABLE = {'z': 1, 'y': {'x', 'w', '$X'}}\ndef operator(sample): return TABLE[sample['t']]"
    ),
    "imported_function": "from helper import add\ndef operator(sample): return add(sample['n'])",
    "imported_module": "import helper\ndef operator(sample): return helper.add(sample['n'])",
    "import_inside": "def operator(sample):\n    from helper import add\n    return add(sample['n'])",
    "nested_functions": (
        "def operator(sample):\n    def deep(n): return n * $X\n    return deep(sample['n'])"
    ),
    "comprehension": "def operator(sample): return [n + $X for n in sample['ns']]",
    "generator_function": "def operator(batch):\n    for n in batch['n']: yield n + $X",
    "coroutine": "async def operator(sample): return sample['n'] + $X",
    "recursion": "def operator(n): return 1 if n < $X else n * operator(n - 1)",
    "mutual_recursion": (
        "def even(n): return n == $X or odd(n - 1)\ndef odd(n): return even(n - 1)\noperator = even"
    ),
    "partial": "from functools import partial\ndef f(s, k): return s['n'] + k\noperator = partial(f, k=$X)",
    "partial_of_library": "from functools import partial\noperator = partial(max, $X)",
    "bound_method": (
        "class A:\n    def __init__(self, k): self.k = k\n    def go(self, s): return self.k\n"
        "operator = A($X).go"
    ),
    "method_of_base": "class B:\n    def go(self, s): return $X\nclass A(B): pass\noperator = A().go",
    "callable_object": "class A:\n    def __call__(self, s): return $X\noperator = A()",
    "slots": (
        "class A:\n    __slots__ = ('k',)\n    def __call__(self, s): return self.k\n"
        "operator = A()\noperator.k = $X"
    ),
    "classmethod": (
        "class A:\n    k = $X\n    @classmethod\n    def go(cls, s): return cls.k\noperator = A.go"
    ),
    "staticmethod": "class A:\n    @staticmethod\n    def go(s): return $X\noperator = A.go",
    "property": (
        "class A:\n    @property\n    def k(self): return $X\n"
        "    def __call__(self, s): return self.k\noperator = A()"
    ),
    "cached_property": (
        "import functools\nclass A:\n    @functools.cached_property\n    def k(self): return $X\n"
        "    def __call__(self, s): return self.k\noperator = A()"
    ),
    "descriptor": (
        "class D:\n    def __get__(self, o, t=None): return $X\nclass A:\n    d = D()\n"
        "    def __call__(self, s): return self.d\noperator = A()"
    ),
    "own_getstate": (
        "import time\nclass A:\n    def __init__(self): self.k, self.made = $X, time.time()\n"
        "    def __getstate__(self): return {'k': self.k}\n    def __call__(self, s): return self.k\n"
        "operator = A()"
    ),
    "own_key": (
        "import time\nclass A:\n    def __init__(self): self.made = time.time()\n"
        "    def __castore_key__(self): return $X\n"
        "    def __call__(self, s): return 1\noperator = A()"
    ),
    "dataclass": (
        "import dataclasses\n@dataclasses.dataclass\nclass A:\n    k: int\n    names: frozenset\n"
        "    def __call__(self, s): return self.k\noperator = A($X, frozenset('abc'))"
    ),
    "enum": (
        "import enum\nclass Mode(enum.Enum):\n    FAST = 1\n    GOOD = 2\nMODE = Mode($X)\n"
        "def operator(s): return MODE is Mode.FAST"
    ),
    "named_tuple": (
        "from typing import NamedTuple\nclass C(NamedTuple):\n    k: int\nCONFIG = C($X)\n"
        "def operator(s): return CONFIG.k"
    ),
    "lru_cache": (
        "import functools\n@functools.lru_cache\ndef slow(n): return n + $X\nslow(1)\n"
        "def operator(s): return slow(s['n'])"
    ),
    "wraps": (
        "import functools\ndef twice(f):\n    @functools.wraps(f)\n    def inner(s): return f(f(s))\n"
        "    return inner\n"
        "@twice\ndef operator(s): return {'n': s['n'] + $X}"
    ),
    "singledispatch": (
        "import functools\n@functools.singledispatch\ndef size(v): return 0\n@size.register\n"
        "def _(v: str): return len(v) * $X\n"
        "size('a')\ndef operator(s): return size(s['t'])"
    ),
    "regex": "import re\nPATTERN = re.compile(r'a{$X}b')\ndef operator(s): return PATTERN.sub('', s['t'])",
    "lock": (
        "import threading\nclass A:\n    def __init__(self): self.lock, self.k = threading.Lock(), $X\n"
        "    def __call__(self, s):\n        with self.lock: return self.k\noperator = A()\noperator({})"
    ),
    "condition_and_event": (
        "import threading\nclass A:\n    def __init__(self):\n"
        "        self.c, self.e = threading.Condition(), threading.Event()\n"
        "        self.s, self.l, self.k = threading.Semaphore(3), threading.local(), $X\n"
        "    def __call__(self, s): return self.k\noperator = A()\noperator.s.acquire()"
    ),
    "process_lock": (
        "import multiprocessing\nclass A:\n"
        "    def __init__(self): self.lock, self.k = multiprocessing.Lock(), $X\n"
        "    def __call__(self, s): return self.k\noperator = A()"
    ),
    "thread_pool": (
        "from concurrent.futures import ThreadPoolExecutor\nclass A:\n"
        "    def __init__(self): self.pool, self.k = ThreadPoolExecutor(2), $X\n"
        "    def __call__(self, s): return self.k\noperator = A()"
    ),
    "logger": (
        "import logging\nlog = logging.getLogger(__name__)\ndef operator(s):\n    log.info('x')\n"
        "    return $X"
    ),
    "uuid_in_object": "import uuid\nID = uuid.UUID(int=$X)\ndef operator(s): return str(ID)",
    "path": "import pathlib\nROOT = pathlib.Path('/data/$X')\ndef operator(s): return ROOT / s['t']",
    "dates": (
        "import datetime as dt\nSINCE = dt.datetime(2020, 1, $X, tzinfo=dt.timezone.utc)\n"
        "def operator(s): return s['at'] > SINCE"
    ),
    "decimal": "import decimal\nRATE = decimal.Decimal('0.$X')\ndef operator(s): return RATE * s['n']",
    "seeded_random": "import random\nRNG = random.Random($X)\ndef operator(s): return RNG.random()",
    "numpy_random": (
        "import numpy as np\nRNG = np.random.default_rng($X)\ndef operator(s): return RNG.random()"
    ),
    "array": (
        "import numpy as np\nA = np.arange(500_000, dtype='f4')\nA[77] = -$X\n"
        "def operator(s): return A[s['n']]"
    ),
    "array_not_in_order": (
        "import numpy as np\nA = np.arange(2_000_000.0).reshape(1000, 2000).T\nA[3, 4] = -$X\n"
        "def operator(s): return A[s['n']]"
    ),
    "array_of_objects": (
        "import numpy as np\nA = np.array(['a', None, {'k': $X}], dtype=object)\ndef operator(s): return A[0]"
    ),
    "ufunc": "import numpy as np\nF = [None, np.sin, np.cos][$X]\ndef operator(s): return F(s['n'])",
    "tensor": (
        "import torch\nT = torch.arange(1000).bfloat16()\nT[5] = -$X\ndef operator(s): return T[s['n']]"
    ),
    "model": (
        "import torch\ntorch.manual_seed(0)\nclass Net(torch.nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n"
        ""
        "        self.a, self.b = torch.nn.Linear(8, 8), "
        "torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(8, 2))\n"
        "    def forward(self, x): return self.b(self.a(x)) * $X\nNET = Net().eval()\n"
        "def operator(s): return NET(s['x'])"
    ),
    "model_weights": (
        "import torch\ntorch.manual_seed(0)\nNET = torch.nn.TransformerEncoderLayer(8, 2)\n"
        "NET.linear1.weight.data[0, 0] = $X\ndef operator(s): return NET(s['x'])"
    ),
    "model_mode": (
        "import torch\ntorch.manual_seed(0)\nNET = torch.nn.Dropout(0.5).train($X == 1)\n"
        "def operator(s): return NET(s['x'])"
    ),
    "model_in_object": (
        "import torch, threading\ntorch.manual_seed(0)\nclass A:\n    def __init__(self):\n"
        "        self.model = torch.nn.Linear(4, $X)\n"
        "        self.lock, self.device = threading.RLock(), torch.device('cpu')\n"
        "    def process(self, s): return self.model(s['x'])\n"
        "operator = A().process"
    ),
    "torch_generator": (
        "import torch\nG = torch.Generator().manual_seed($X)\n"
        "def operator(s): return torch.rand(1, generator=G)"
    ),
    "opaque_handle": (
        "import ctypes\nclass Handle(ctypes.Structure): pass\nclass A:\n    def __init__(self):\n"
        "        self.h, self.v = ctypes.POINTER(Handle)(), ctypes.c_void_p(id(self))\n"
        "        self.k = $X\n"
        "    def __call__(self, s): return self.k\noperator = A()"
    ),
    "arrow_table": (
        "import pyarrow as pa\nT = pa.table({'a': [1, 2, $X]})\ndef operator(s): return T['a'][s['n']]"
    ),
    "dataset": (
        "import datasets\nD = datasets.Dataset.from_dict({'a': [1, 2, $X]})\n"
        "def operator(s): return D[s['n']]"
    ),
    "features": (
        "import datasets\nF = datasets.Features({'a': datasets.ClassLabel(names=['x', 'y$X'])})\n"
        "def operator(s): return F.encode_example(s)"
    ),
    "data_frame": (
        "import pandas as pd\nT = pd.DataFrame({'a': [1, $X], 'b': ['x', None]})\n"
        "def operator(s): return T.a.sum()"
    ),
    "registry": (
        "REGISTRY = {}\ndef register(f):\n    REGISTRY[f.__name__] = f\n    return f\n"
        "@register\ndef one(s): return $X\n@register\ndef both(s): return REGISTRY['one'](s)\n"
        "operator = both"
    ),
    "circle": (
        "class Node:\n    def __init__(self, k): self.k, self.others = k, []\n"
        "    def __call__(self, s): return self.k\n"
        "a, b = Node(0), Node($X)\na.others.append(b)\nb.others.append(a)\noperator = a"
    ),
    "estimator": (
        "import numpy as np\nclass Estimator:\n    def __init__(self, alpha): self.alpha = alpha\n"
        "    def fit(self, x): self.mean_, self.classes_ = x.mean(0), {'b', 'a', 'c'}; return self\n"
        "    def predict(self, s): return (s['x'] - self.mean_) * self.alpha\n"
        "operator = Estimator(0.5).fit(np.eye(4) * $X).predict"
    ),
    "data_juicer_filter": (
        "class LengthFilter:\n    def __init__(self, min_len): self.min_len = min_len\n"
        "    def compute_stats(self, s): s['__dj__stats__']['len'] = len(s['text']); return s\n"
        "    def process(self, s): return s['__dj__stats__']['len'] >= self.min_len\n"
        "operator = LengthFilter($X)"
    ),
}
if find_spec("torch") is None:
    KINDS = {name: source for name, source in KINDS.items() if "import torch" not in source}
_HELPER = "import base\ndef add(n): return base.step(n)\n"
_BASE = "def step(n): return n + $X\n"


def write(folder: Path, change: str) -> None:
    """Write every kind as a module, with that text in place of ``$X``; the helper's helper is changed too."""
    folder.mkdir()
    for name, source in {**KINDS, "../helper": _HELPER, "../base": _BASE}.items():
        path = folder / (f"kind_{name}.py" if not name.startswith("../") else f"{name[3:]}.py")
        path.write_text(source.replace("$X", change))


def main(folders: list[str]) -> None:
    """Print a line of JSON for each folder: the fingerprints of all kinds in it, and how long each took.

    A process of its own imports the modules of a folder. It is a fork, for libraries take seconds to import.
    """
    from castore.adapters.datasets.operator_keys import operator_fingerprint

    for library in ("numpy", "datasets", *(["torch"] if find_spec("torch") else [])):
        importlib.import_module(library)
    for folder in folders:
        if pid := os.fork():
            _, status = os.waitpid(pid, 0)
            assert status == 0
            continue
        sys.path.insert(0, folder)
        found = {}
        for name in KINDS:
            operator = importlib.import_module(f"kind_{name}").operator
            began = time.perf_counter()
            found[name] = operator_fingerprint(operator), time.perf_counter() - began
        print(json.dumps(found), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
