"""The pages are true: their Python runs as pasted, and the links, tests and modules that they name are there.

Examples of a page share one session, in a folder of their own. Must not need anything but what the page says.
"""

from __future__ import annotations

import ast
import doctest
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from castore.errors import MissingDependencyError
from castore_fuse.lifecycle import check_fuse

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROSE = [*PAGES, ROOT / "CHANGELOG.md"]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def python_blocks(page: Path, without: str | None = None) -> str:
    """The ``>>>`` examples of a page, at the lines where they stand, less the blocks that import a module."""
    out: list[str] = []
    inside = False
    start = 0
    for line in page.read_text().splitlines():
        if line == "```python":
            inside, start = True, len(out)
        elif line == "```":
            inside = False
        elif inside and without is not None and line == f">>> import {without}":
            inside = False
            out[start:] = [""] * (len(out) - start)
        out.append(line if inside and line != "```python" else "")
    return "\n".join(out) + "\n"


def run_examples(
    page: Path, *, more_than: int, capsys: pytest.CaptureFixture[str], without: str | None = None
) -> None:
    """Assert that the examples of a page, run in one session in the working folder, print what it says."""
    examples = doctest.DocTestParser().get_doctest(
        python_blocks(page, without), {"__name__": "page"}, page.name, str(page), 0
    )
    assert len(examples.examples) > more_than
    failed, _ = doctest.DocTestRunner(optionflags=_FLAGS).run(examples)
    assert not failed, capsys.readouterr().out


def test_the_python_of_the_python_page_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        check_fuse()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    monkeypatch.chdir(tmp_path)
    run_examples(ROOT / "docs" / "python.md", more_than=50, capsys=capsys)


def test_the_python_of_the_file_system_page_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CASTORE_DIR", "set by the page")
    # zarr 3 needs Python 3.11.
    without = "zarr" if sys.version_info < (3, 11) else None
    run_examples(ROOT / "docs" / "filesystem.md", more_than=30, capsys=capsys, without=without)


def identify(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
        there = (page.parent / target) if target else page
        assert there.exists(), f"{identify(page)} links to {target}"
        assert not anchor or anchor in anchors(there), f"{identify(page)} links to {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and `make docs` make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = [re.sub(r"[^\w\- ]", "", line.lower()) for line in re.findall(r"^#+ (.+)$", text, re.M)]
    return {heading.replace(" ", "-") for heading in headings}


def test_every_page_stands_in_an_index() -> None:
    for folder in (ROOT / "docs", ROOT / "docs" / "decisions"):
        index = (folder / "index.md").read_text()
        missing = [page.name for page in folder.glob("*.md") if f"]({page.name})" not in index]
        assert missing == ["index.md"]
    suites = {path.stem for path in (ROOT / "tools" / "bench" / "suites").glob("[a-z]*.py")}
    page = (ROOT / "docs/benchmarks.md").read_text()
    linked = set(re.findall(r"^\| \[(\w+)\]\(benchmarks/\1\.md\)", page, re.M))
    # A suite that has not been run on a quiet machine yet has no page to link to.
    unlinked = set(re.findall(r"^\| (\w+) \| (?!goal)", page, re.M)) & suites
    assert suites == linked | unlinked
    assert {path.stem for path in (ROOT / "docs" / "benchmarks").glob("*.md")}.isdisjoint(unlinked)


#: By the language of a block, the beginnings of the lines that are code. All others are output or a file.
_PROMPTS = {"```console": ("$ ", "# "), "```python": (">>> ", "... "), "```sql": ("",)}


@pytest.mark.parametrize("page", PROSE, ids=identify)
def test_no_line_of_a_page_is_wider_than_110_columns(page: Path) -> None:
    """Held are prose and code. Rows of tables, addresses, files of others and output of programs cannot be
    broken.
    """
    fence = ""
    code: tuple[str, ...] = ()
    wide = []
    lines = page.read_text().splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("```"):
            fence = "" if fence else line
            # Without a prompt in its first line, a block of Python is code from end to end.
            is_source = fence == "```python" and not following.startswith(">>> ")
            code = ("",) if is_source else _PROMPTS.get(fence, ())
        held = line.startswith(code) if fence else not line.startswith(("|", "!["))
        if held and len(re.sub(r"https?://\S+", "", line)) > 110:
            wide.append(line)
    assert wide == []


_OPENINGS = re.compile(
    r"(?:^|[.:?][*_)\"]* )[*_(]*((?:Who|Whoever|What|Whatever|So that) [^.?\n]*[?]?)", re.M
)


def questions_as_subjects(prose: str) -> list[str]:
    """The beginnings of sentences such as "What is kept is small.", in prose with a paragraph a line."""
    return [opening for opening in _OPENINGS.findall(prose) if "?" not in opening]


@pytest.mark.parametrize("page", PROSE, ids=identify)
def test_no_sentence_of_a_page_has_a_question_for_its_subject(page: Path) -> None:
    """House style: subject first. A heading or a cell of a table may ask."""
    text = re.sub(r"^```.*?^```|^#.*?$|^\|.*?$", "", page.read_text(), flags=re.M | re.S)
    paragraphs = [
        " ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)
    ]
    prose = "\n".join(re.sub(r"^(?:[-*]|\d+\.) ", "", paragraph) for paragraph in paragraphs)
    assert questions_as_subjects(prose) == []


def prose_of(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings and comments of a module, each with the line of its beginning."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text
    first, last, comment = 0, 0, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        words = token.string.lstrip("#: ")
        line = token.start[0]
        # A comment beside code is no part of the one above it.
        if line == last + 1 and not token.line[: token.start[1]].strip():
            comment += f"\n{words}"
        else:
            yield first, comment
            first, comment = line, words
        last = line
    yield first, comment


@pytest.mark.parametrize("folder", ["castore", "fuse", "tools", "tests"])
def test_no_docstring_and_no_comment_has_a_question_for_a_subject(folder: str) -> None:
    found = []
    # Most modules have none of the words, and tokenizing takes most of the time.
    sources = {path: path.read_text() for path in sorted((ROOT / folder).rglob("*.py"))}
    for path, source in sources.items():
        for line, text in prose_of(source) if re.search(r"\b(?:Who|What|So\b)", source) else ():
            prose = "\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
            found += [f"{identify(path)}:{line}: {opening}" for opening in questions_as_subjects(prose)]
    assert found == []


@pytest.mark.parametrize(
    "page", [page for page in DECISIONS if page.name not in ("index.md", "first-design.md")], ids=identify
)
def test_a_decision_has_its_context_its_consequence_and_fits_on_a_short_page(page: Path) -> None:
    headings = re.findall(r"^## (.+)$", page.read_text(), re.M)
    assert [name for name in headings if name != "Figures"] == ["Context", "Decision", "Consequence"]
    assert headings == sorted(headings, key=["Context", "Decision", "Figures", "Consequence"].index)
    assert len(page.read_text().splitlines()) <= 100


def test_the_glossary_has_each_term_once_and_no_other_page_has_a_glossary() -> None:
    table = re.compile(r"^\| (?:term|word) \| meaning \|$", re.M)
    pages = [identify(page) for page in PAGES if table.search(page.read_text())]
    assert pages == ["docs/glossary.md"]
    terms = re.findall(r"^\| ([^|]+?) \| ", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    terms = [term for term in terms if term != "term"]
    assert len(terms) > 40
    assert [term for term in terms if terms.count(term) > 1] == []


def test_every_test_that_a_page_names_is_there() -> None:
    """Pages say of their promises which test shows it: a renamed one would make it a rumour."""
    pages = "".join(page.read_text() for page in PAGES)
    sources = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    named = set(re.findall(r"`(test_\w+)(?:\[.*?\])?`", pages))
    assert len(named) > 20
    there = {name for source in sources.values() for name in re.findall(r"def (test_\w+)", source)}
    assert named - there == set()


ROOMS = sorted(path.parent for path in (ROOT / "castore").glob("*/__init__.py"))
PACKAGES = sorted(
    path.parent for folder in ("castore", "fuse") for path in (ROOT / folder).glob("*/**/__init__.py")
)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_package_says_what_it_may_import_and_what_it_never_does(package: Path) -> None:
    said = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    assert "May import:" in said
    assert "Must never:" in said


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_is_in_the_map_of_the_architecture(room: Path) -> None:
    assert f"`{room.name}/`" in (ROOT / "docs" / "architecture.md").read_text()


def test_at_the_top_of_castore_are_a_dozen_modules_at_most() -> None:
    assert len([*(ROOT / "castore").glob("*.py")]) <= 12


def test_no_modules_import_one_another_in_a_circle() -> None:
    graph = grimp.build_graph("castore", "castore_fuse", exclude_type_checking_imports=False)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()


def test_the_modules_that_pages_about_the_code_name_are_there() -> None:
    folders = ("castore", "fuse", "tests", "tools")
    there = [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")]
    about = [
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs" / f"{name}.md" for name in ("architecture", "design", "scaling", "walks")),
    ]
    named = {
        (identify(page), name)
        for page in [*about, *DECISIONS]
        for name in re.findall(r"(?<![\w/])[\w/]+\.py\b", page.read_text())
    }
    assert len(named) > 50
    assert {
        (page, name) for page, name in named if not any(path.endswith(f"/{name}") for path in there)
    } == set()


def test_the_policies_of_each_role_are_json_with_the_actions_of_its_row() -> None:
    page = (ROOT / "docs" / "remote.md").read_text()
    rows = re.findall(r"^\| (?:reader|writer|collector)\b.*$", page, flags=re.M)
    policies = [json.loads(block) for block in re.findall(r"```json\n(\{\"Version.*?)```", page, flags=re.S)]
    allowed: set[str] = set()
    for row, policy in zip(rows, policies, strict=True):
        allowed |= set(re.findall(r"s3:\w+", row))
        given = {
            action
            for statement in policy["Statement"]
            if "/probe/" not in str(statement["Resource"])  # a writer's own trials and claims
            for action in re.findall(r"s3:\w+", str(statement["Action"]))
        }
        assert given == allowed
