"""`make docs`: the site has every page and every public name, and what is dead or undocumented ends the
build.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import GenericAlias

import pytest

ROOT = Path(__file__).parents[2]
API = ROOT / "docs" / "api"
MODULES = sorted(
    name for page in API.glob("*.md") for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)
)
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"

built = pytest.mark.skipif(
    not MKDOCS.exists(), reason="the site's environment is missing: tools/setup.sh docs"
)


def test_every_page_stands_in_the_navigation_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"^ +- (\S+\.md)$", navigation, re.M)
    assert sorted(listed) == sorted(
        str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")
    )


def test_every_public_module_has_a_page() -> None:
    adapters = {
        f"castore.adapters.{path.parent.name}" for path in (ROOT / "castore/adapters").glob("*/__init__.py")
    }
    assert set(MODULES) == {"castore", "castore_fuse", "castore.recipes", *adapters}


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_has_a_docstring(name: str) -> None:
    if name in ("castore.adapters.torch", "castore.adapters.embeddings"):
        pytest.importorskip("torch")
    module = importlib.import_module(name)
    assert inspect.getdoc(module)
    assert [path for public in module.__all__ for path in undocumented(public, getattr(module, public))] == []


def undocumented(name: str, value: object) -> Iterator[str]:
    """The name itself and, of a class, the methods and properties that castore's own classes define.

    The docstring of an alias stands in the source alone: the build of the site looks there.
    """
    if isinstance(value, GenericAlias):  # an alias, and a class for `inspect` before Python 3.11
        return
    if (inspect.isclass(value) or inspect.isroutine(value)) and not inspect.getdoc(value):
        yield name
    for kind in inspect.getmro(value) if inspect.isclass(value) else ():
        for member, found in vars(kind).items() if kind.__module__.startswith("castore") else ():
            is_callable = callable(found) or isinstance(found, property | classmethod | staticmethod)
            if is_callable and not member.startswith("_") and not inspect.getdoc(getattr(value, member)):
                yield f"{name}.{member}"


def build(project: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [MKDOCS, "build", "--strict", "--site-dir", site],
        cwd=project,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of some of what the site is built from, for a test to break.

    To build all of it again would take most of the time of these tests.
    """
    shutil.copytree(
        ROOT / "fuse", tmp_path / "project" / "fuse", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("castore/remote", "docs/api", "tools"):
        (tmp_path / "project" / name).mkdir(parents=True)
    for name in ("castore", "castore/remote"):
        (tmp_path / "project" / name / "__init__.py").write_text('"""Nothing but a package."""\n')
    shutil.copy(ROOT / "docs/api/castore_fuse.md", tmp_path / "project/docs/api")
    for name in ("mkdocs.yml", "tools/docs_hooks.py", "castore/remote/outcomes.py"):
        shutil.copy(ROOT / name, tmp_path / "project" / name)
    return tmp_path / "project"


@built
def test_the_site_builds_strictly_and_asks_no_other_host_for_anything(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert "put_file" in (tmp_path / "site" / "api" / "castore" / "index.html").read_text()
    pages = [page.read_text() for page in (tmp_path / "site").rglob("*.html")]
    assert len(pages) > 80
    loaded = [
        link for page in pages for link in re.findall(r"<(?:script|link|img)[^>]*https?://[^>]*>", page)
    ]
    assert loaded == []


@built
def test_a_dead_link_a_dead_anchor_and_a_page_missing_from_the_navigation_end_the_build(
    project: Path,
) -> None:
    # Of the pages only a first one stays, so nothing but what is wrong with the other ends the build.
    shutil.rmtree(project / "docs")
    (project / "docs").mkdir()
    (project / "docs" / "index.md").write_text("# Start\n")
    settings, nav, _ = (project / "mkdocs.yml").read_text().partition("\nnav:\n")
    (project / "mkdocs.yml").write_text(f"{settings}{nav}  - index.md\n")
    (project / "docs" / "unlisted.md").write_text(
        "# Unlisted\n\n[dead](nowhere.md) [dead](index.md#nowhere)\n"
    )
    done = build(project, project / "site")
    assert done.returncode != 0
    assert done.stderr.count("WARNING") == 3
    assert 'not included in the "nav" configuration' in done.stderr
    assert "'nowhere.md', but the target is not found" in done.stderr
    assert "'index.md#nowhere', but the doc 'index.md' does not contain an anchor" in done.stderr


@built
def test_a_public_name_without_a_docstring_ends_the_build(project: Path) -> None:
    errors = project / "fuse" / "castore_fuse" / "errors.py"
    source = errors.read_text()
    errors.write_text(
        re.sub(r'(class BusyError\(.*?\):\n) +""".*?"""\n', r"\1    pass\n", source, flags=re.S)
    )
    assert errors.read_text() != source
    done = build(project, project / "site")
    assert done.returncode != 0
    assert "castore_fuse.BusyError" in done.stderr
