"""The architecture page draws the code of today."""

from __future__ import annotations

import re
from pathlib import Path

from tidegate.core.presets import PRESETS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
CORE = ROOT / "src" / "tidegate" / "core"


def test_the_table_of_core_names_every_file_and_no_other() -> None:
    table = PAGE.split("### `core/`")[1].split("##")[0]
    named = set(re.findall(r"^\| `([a-z_]+(?:\.py|/))`", table, re.MULTILINE))
    there = {p.name for p in CORE.glob("*.py") if p.name != "__init__.py"}
    there |= {f"{p.name}/" for p in CORE.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert named == there


def test_the_house_has_the_rooms_it_draws() -> None:
    house = PAGE.split("```\nsrc/tidegate/\n")[1].split("```")[0]
    drawn = set(re.findall(r"^  ([a-z]+(?:/|\.py))", house, re.MULTILINE))
    package = CORE.parent
    there = {f"{p.name}/" for p in package.iterdir() if (p / "__init__.py").exists()}
    there |= {p.name for p in package.glob("*.py") if not p.name.startswith("__")}
    assert drawn == there


def test_the_loop_on_the_page_is_the_loop_in_the_code() -> None:
    drawn = re.findall(r"self\.(_\w+)\(\)", PAGE.split("```python")[1].split("```")[0])
    run = (package_file("engine/loop.py")).split("def _run(self)")[1].split("except")[0]
    assert drawn == re.findall(r"self\.(_\w+)\(\)", run)


def test_the_planner_names_every_reason_that_the_page_lists() -> None:
    paragraph = PAGE.split("may carry in `held_back_by`:")[1]
    listed = {" ".join(name.split()) for name in re.findall(r"`([a-z ]+(?:\n[a-z ]+)?)`", paragraph)} - {"not_before"}
    code = package_file("core/planner.py") + package_file("core/scheduler.py")
    assert listed
    assert all(f'"{name}"' in code for name in listed)


def test_the_readme_names_every_policy() -> None:
    readme = (ROOT / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in PRESETS)


def package_file(name: str) -> str:
    return (CORE.parent / name).read_text()
