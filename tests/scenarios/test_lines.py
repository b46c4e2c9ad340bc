"""Every `expect` line of every scenario file is asserted by a test, and awaits a mechanism at most once."""

import ast
from collections import Counter
from pathlib import Path

import yaml


def _expected(data: Path) -> set[tuple[str, int]]:
    files = [yaml.safe_load(path.read_text()) for path in data.glob("*.yaml")]
    return {(raw["id"], index) for raw in files for index in range(len(raw["expect"]))}


def _asserted() -> set[tuple[str, int]]:
    lines = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.expects":
                scenario, line = (ast.literal_eval(argument) for argument in node.args)
                lines.add((scenario, line))
    return lines


def test_every_line_has_a_test(data):
    assert _expected(data) == _asserted()


def test_awaiting_lines_exist(data, awaiting_lines):
    assert set(awaiting_lines) <= _expected(data)
    assert all(needs.strip() for needs in awaiting_lines.values())


def test_awaiting_lines_are_listed_once(data):
    listed = yaml.safe_load((data.parent / "awaiting.yaml").read_text())
    assert all(times == 1 for times in Counter((entry["scenario"], entry["line"]) for entry in listed).values())
