"""Functions and values that other libraries wrap or look up: an edit of the user's code changes the
fingerprint, and neither a call nor another process does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_DRIVER = """
import importlib, json, sys
from castore.keys.objects import function_fingerprint
found = {}
for name in sys.argv[1:]:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        found[name] = str(error)
        continue
    before = function_fingerprint(module.step)
    result = repr(module.step(3))
    found[name] = [before, function_fingerprint(module.step), result]
print(json.dumps(found))
"""
# The source of a step, where EDIT is 2 or 3.
_CASES = {
    "curry": """
        import toolz
        @toolz.curry
        def add(k, x): return x * EDIT + k
        def step(x): return add(5)(x)
    """,
    "curry_called": """
        import toolz
        @toolz.curry
        def add(k, x): return x * FACTOR + k
        FACTOR = EDIT
        step = add(5)
    """,
    "cachetools_function": """
        import cachetools
        @cachetools.cached({})
        def clean(x): return x * EDIT
        def step(x): return clean(x)
    """,
    "cachetools_ttl": """
        import cachetools.func
        @cachetools.func.ttl_cache(maxsize=3)
        def clean(x): return x * EDIT
        def step(x): return clean(x)
    """,
    "a_global_by_name": """
        class Operator:
            def __init__(self, factor): self.factor = factor
            def __call__(self, x): return x * self.factor
            def __reduce__(self): return "OPERATOR"
        OPERATOR = Operator(EDIT)
        def step(x): return OPERATOR(x)
    """,
    "a_global_by_name_with_slots": """
        class Operator:
            __slots__ = ("factor",)
            def __call__(self, x): return x * self.factor
            def __reduce__(self): return "OPERATOR"
        OPERATOR = Operator()
        OPERATOR.factor = EDIT
        def step(x): return OPERATOR(x)
    """,
    "beartype_function": """
        from beartype import beartype
        @beartype
        def clean(x: int) -> int: return x * EDIT
        def step(x): return clean(x)
    """,
    "beartype_class": """
        from beartype import beartype
        @beartype
        class Cleaner:
            def clean(self, x: int) -> int: return x * EDIT
        def step(x): return Cleaner().clean(x)
    """,
    "loguru_logger": """
        import sys
        from loguru import logger
        logger.remove()
        logger.add(sys.stderr, level="ERROR", format=lambda record: "{message}")
        def step(x):
            logger.debug("x")
            return x * EDIT
    """,
    "tenacity_retry": """
        import tenacity
        @tenacity.retry(stop=tenacity.stop_after_attempt(2))
        def clean(x): return x * EDIT
        def step(x): return clean(x)
    """,
    "wrapt_decorator": """
        import wrapt
        @wrapt.decorator
        def twice(wrapped, instance, args, kwargs): return wrapped(*args, **kwargs) * 2
        @twice
        def clean(x): return x * EDIT
        def step(x): return clean(x)
    """,
    "wrapt_wrapper": """
        import wrapt
        @wrapt.decorator
        def times(wrapped, instance, args, kwargs): return wrapped(*args, **kwargs) * EDIT
        class Cleaner:
            @times
            def clean(self, x): return x
        cleaner = Cleaner()
        def step(x): return cleaner.clean(x)
    """,
    "wrapt_proxy": """
        import wrapt
        class Scaled(wrapt.ObjectProxy):
            def __init__(self, wrapped):
                super().__init__(wrapped)
                self._self_factor = EDIT
            def get(self, name): return self.__wrapped__[name] * self._self_factor
        table = Scaled({3: 1})
        def step(x): return table.get(x)
    """,
    "protocol": """
        import typing
        class Cleaner(typing.Protocol):
            def clean(self, x): ...
        class Lower(Cleaner):
            def clean(self, x): return x * EDIT
        def step(x): return Lower().clean(x)
    """,
    "marshmallow_schema": """
        from marshmallow import Schema, fields, post_load
        class Sample(Schema):
            n = fields.Integer()
            @post_load
            def scale(self, data, **_): return data["n"] * EDIT
        SCHEMA = Sample()
        def step(x): return SCHEMA.load({"n": x})
    """,
    "sympy_function": """
        import sympy
        class Scaled(sympy.Function):
            @classmethod
            def eval(cls, a): return a * EDIT
        def step(x): return int(Scaled(x))
    """,
    "decimal_context": """
        import decimal
        CONTEXT = decimal.Context(prec=EDIT)
        def step(x): return str(CONTEXT.divide(decimal.Decimal(1), decimal.Decimal(x)))
    """,
    "scanner": """
        import re
        SCANNER = re.Scanner([("[0-9]", lambda scanner, text: int(text) * EDIT), (".", None)])
        def step(x): return SCANNER.scan(str(x))[0]
    """,
    "jinja_loader": """
        import jinja2
        ENVIRONMENT = jinja2.Environment(loader=jinja2.DictLoader({"a": "{{ x }} EDIT"}))
        def step(x): return ENVIRONMENT.get_template("a").render(x=x)
    """,
    "jinja_template": """
        import jinja2
        TEMPLATE = jinja2.Environment(loader=jinja2.DictLoader({"a": "{{ x }} EDIT"})).get_template("a")
        def step(x): return TEMPLATE.render(x=x)
    """,
    "pandas_query": """
        import pandas as pd
        THRESHOLD = EDIT
        def step(x): return len(pd.DataFrame({"s": [2, 3]}).query("s >= @THRESHOLD"))
    """,
    "pandas_query_of_a_constant": """
        import pandas as pd
        THRESHOLD, QUERY = EDIT, "s >= @THRESHOLD"
        def step(x): return len(pd.DataFrame({"s": [2, 3]}).query(QUERY))
    """,
    "duckdb_table_of_a_constant": """
        import duckdb, pandas as pd
        WEIGHTS, QUERY = pd.DataFrame({"a": [EDIT]}), "select a from WEIGHTS"
        def step(x): return duckdb.sql(QUERY).fetchall()
    """,
    "pandas_eval": """
        import pandas as pd
        def weight(x): return x * EDIT
        def step(x): return pd.DataFrame({"s": [x]}).eval("@weight(s)").tolist()
    """,
    "duckdb_table": """
        import duckdb, pandas as pd
        WEIGHTS = pd.DataFrame({"a": [EDIT]})
        def step(x): return duckdb.sql(f"select a * {x} from WEIGHTS").fetchall()
    """,
    "torch_operator": """
        import torch
        @torch.library.custom_op("castore_tests::scale", mutates_args=())
        def scale(x: torch.Tensor) -> torch.Tensor: return x * EDIT
        def step(x): return torch.ops.castore_tests.scale(torch.tensor(x)).item()
    """,
}


@pytest.fixture(scope="module")
def fingerprints(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Fingerprints before and after a call, and the result, by case: as it is, in a process with other random
    hashes, and edited.
    """
    found = []
    for edit, seed in (("2", "1"), ("2", "2"), ("3", "1")):
        folder = tmp_path_factory.mktemp("cases")
        for name, source in _CASES.items():
            lines = source.replace("EDIT", edit).splitlines()
            Path(folder, f"{name}.py").write_text("\n".join(line[8:] for line in lines))
        ran = subprocess.run(
            [sys.executable, "-c", _DRIVER, *_CASES],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
                "PYTHONHASHSEED": seed,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        found.append(json.loads(ran.stdout.splitlines()[-1]))
    return found


@pytest.mark.parametrize("name", _CASES)
def test_an_edit_counts_and_neither_a_call_nor_another_process_does(
    fingerprints: list[dict[str, Any]], name: str
) -> None:
    here, elsewhere, edited = (found[name] for found in fingerprints)
    if isinstance(here, str):
        pytest.skip(here)
    assert here[0] == here[1] == elsewhere[0]
    assert here[2] == elsewhere[2] != edited[2]
    assert edited[0] != here[0]
