"""The page on processing is true: its Python runs as pasted, and so does its first recipe."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path

import pytest

from castore.recipes import juicer_keys, recipe, registry
from tests.cli.conftest import Cli, cli, folder  # noqa: F401 - fixtures
from tests.docs.test_pages import python_blocks

PAGE = Path(__file__).parents[2] / "docs" / "process.md"


def test_the_python_of_the_page_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_registered", {})
    examples = doctest.DocTestParser().get_doctest(
        python_blocks(PAGE), {"__name__": "page"}, PAGE.name, str(PAGE), 0
    )
    assert len(examples.examples) > 12
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, _ = doctest.DocTestRunner(optionflags=flags).run(examples)
    assert not failed, capsys.readouterr().out


def test_the_recipe_of_the_page_runs(
    cli: Cli,  # noqa: F811
    folder: Path,  # noqa: F811
    sources: dict[str, list[object]],
) -> None:
    text = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.S)[0]
    (folder.parent / "recipe.yaml").write_text(text)
    (folder.parent / "data").mkdir()
    rows = "".join(json.dumps({"text": str(text)[:2000]}) + "\n" for text in sources["text"])
    (folder.parent / "data" / "a.jsonl").write_text(rows)
    first = cli("process", "--config", "recipe.yaml", "--use-checkpoint")
    assert (first.code, first.err) == (0, "")
    (folder.parent / "recipe.yaml").write_text(text.replace('"<link>"', '""'))
    second = cli("process", "--config", "recipe.yaml", "--use-checkpoint")
    assert second.err.strip() in PAGE.read_text()
    third = cli("process", "--config", "recipe.yaml", "--use-checkpoint", "--json")
    assert {step["rows_run"] for step in json.loads(third.out)["steps"]} == {0}
    (folder.parent / "recipe.yaml").write_text(text.replace("length", "lenght"))
    fourth = cli("process", "--config", "recipe.yaml")
    assert fourth.err.strip() in PAGE.read_text()


def test_every_key_and_operator_stands_on_the_page() -> None:
    page = PAGE.read_text()
    assert [key for key in [*recipe.KEYS, *recipe.ALIASES] if f"`{key}`" not in page] == []
    assert [key for key in [*recipe.COLUMN_KEYS, *juicer_keys.JUICER_KEYS] if f"`{key}`" not in page] == []
    assert [name for name in registry.BUILT_IN if f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_every_parameter_stands_on_the_page(name: str) -> None:
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{name}`"))
    known = registry._known_parameters(registry.find_operator(name))
    assert known is not None
    for parameter in known.keys() - {"text_key"}:
        default = known[parameter].default
        assert f"`{parameter}" in row
        if isinstance(default, int | float) and default < 10**9 and not isinstance(default, bool):
            assert f"`{parameter}={default:g}`" in row
