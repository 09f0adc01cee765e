"""Tables, and the places in documents where commands write them."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
from ops.bench import page

RELIABILITY, SAMPLING = (page.ROOT / "docs" / f"{name}.md" for name in ("RELIABILITY", "SAMPLING"))
RESULTS = page.ROOT / "ops" / "bench" / "RESULTS.md"
PLACES = [
    (document, *place)
    for document in (RELIABILITY, SAMPLING, RESULTS)
    for place in re.findall(r"<!-- ([\w.-]+): written by python -m (\S+) (.*) -->", document.read_text())
]


def document_with(text: str = "") -> str:
    return f"before\n\n<!-- here: written by python -m x -->\n{text}<!-- end of here -->\n\nafter\n"


def test_what_is_put_stands_at_its_place_alone() -> None:
    once = page.put(document_with(), "here", "  a table\n")
    assert once == "before\n\n<!-- here: written by python -m x -->\n\na table\n\n<!-- end of here -->\n\nafter\n"


def test_a_second_writing_replaces_the_first_one() -> None:
    once = page.put(document_with(), "here", "old")
    assert page.put(once, "here", "new") == page.put(document_with(), "here", "new")


@pytest.mark.parametrize(
    "document",
    ["no place", document_with() * 2, "<!-- end of here -->\n<!-- here: written by x -->\n", document_with()[:-30]],
)
def test_a_place_that_is_not_there_once_is_refused(document: str) -> None:
    with pytest.raises(LookupError, match="no place called 'here'"):
        page.put(document, "here", "text")


def test_a_document_without_the_place_ends_the_program_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(document_with())
    page.check_place(tmp_path / "page.md", "here")
    page.check_place(None, "elsewhere")
    with pytest.raises(SystemExit, match="no place called 'elsewhere'"):
        page.check_place(tmp_path / "page.md", "elsewhere")
    with pytest.raises(SystemExit, match="No such file"):
        page.check_place(tmp_path / "none.md", "here")


def test_a_table_has_as_many_cells_in_every_row() -> None:
    assert page.table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
    with pytest.raises(ValueError, match="a row of 1 cells under a head of 2"):
        page.table(["a", "b"], [["1"]])


def test_a_multiple_of_nothing_is_a_dash() -> None:
    assert (page.times(3.0, 2.0), page.times(3.0, 2.0, digits=1), page.times(3.0, 0.0)) == ("×1.50", "×1.5", "–")


def test_all_documents_have_places() -> None:
    assert {document for document, *_ in PLACES} == {RELIABILITY, SAMPLING, RESULTS}


@pytest.mark.parametrize(("document", "name", "module", "words"), PLACES)
def test_the_command_of_every_place_is_one_that_writes_there(
    document: Path, name: str, module: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line that a reader copies parses where it is run, and names the document that it stands in."""
    monkeypatch.chdir(page.ROOT)
    asked = importlib.import_module(module).arguments(shlex.split(words))
    assert page.ROOT / asked.write == document
    page.check_place(page.ROOT / asked.write, name)


def test_every_test_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+\.py)`", RELIABILITY.read_text()))
    assert len(named) > 8
    assert [name for name in sorted(named) if not (page.ROOT / "tests" / "faults" / name).exists()] == []


def test_every_module_that_the_readme_names_is_there() -> None:
    readme = (page.ROOT / "ops" / "bench" / "README.md").read_text()
    named = set(re.findall(r"python -m (ops\.bench\.\w+)", readme))
    assert len(named) > 10
    for module in sorted(named - {"ops.bench.peers"}):
        assert callable(importlib.import_module(module).arguments), module
    assert [
        name for name in re.findall(r"\]\((\w+\.md)\)", readme) if not (page.ROOT / "ops" / "bench" / name).exists()
    ] == []
