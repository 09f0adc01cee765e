"""The table of cases in this folder's README names tests that exist, and every test here stands in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CASES = {
    *("B01", "B02", "B04", "B05", "B07", "B10", "B13", "B14", "B15"),
    *("B16", "B18", "B20", "B21", "B22", "B25"),
    *("B24", "B26", "B28", "B30", "B31", "B33", "B34", "B35", "B36"),
    *("B08", "B11", "B27", "B37", "B38", "B39", "B41", "B42", "B44"),
    *("B46", "B47", "B48", "B50", "B51", "B53", "B54", "B55"),
    *("B57", "B58", "B60", "B61", "B63", "B65", "B66", "B67"),
}
ROW = re.compile(r"^\| (B\d\d) \| (.+) \| (.+) \|$", re.MULTILINE)


def rows() -> dict[str, list[str]]:
    """The tests of each case, as `file::name`."""
    found = ROW.findall((HERE / "README.md").read_text())
    return {case: re.findall(r"`([^`]+)`", tests) for case, _, tests in found}


def names_in(path: Path) -> dict[str, str]:
    """Names of a file's tests, and their docstrings."""
    functions = [one for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, _FUNCTION)]
    return {one.name: ast.get_docstring(one) or "" for one in functions if one.name.startswith("test_")}


_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def test_every_case_has_a_row_and_every_row_a_test_of_its_own() -> None:
    assert rows().keys() == CASES
    assert [case for case, tests in rows().items() if not tests] == []


def test_every_test_that_is_named_exists() -> None:
    named = [test.partition("::") for tests in rows().values() for test in tests]
    missing = [f"{file}::{name}" for file, _, name in named if name not in names_in(ROOT / file)]
    assert missing == []


def test_every_test_of_a_case_names_it_and_stands_in_its_row() -> None:
    table, unlisted = rows(), []
    for path in sorted(HERE.glob("test_cases_*.py")):
        for name, words in names_in(path).items():
            case = re.match(r"B\d\d", words)
            if case is None or f"tests/cases/{path.name}::{name}" not in table[case[0]]:
                unlisted.append(name)
    assert unlisted == []
