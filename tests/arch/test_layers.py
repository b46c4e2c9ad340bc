"""The house stays a house: who may import whom, and what may stand where."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"

# Each imports only what stands left of it (and itself). Whoever stands in one set does not see its neighbours.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"__init__"}),
    frozenset({"errors"}),
    frozenset({"core"}),
    frozenset({"custom"}),
    frozenset({"config"}),
    frozenset({"engine"}),
    frozenset({"observe"}),
    frozenset({"executors", "routing", "predictors"}),
    frozenset({"api"}),
    frozenset({"server", "gateway"}),
    frozenset({"simulate"}),
    frozenset({"cli"}),
    frozenset({"integrations"}),
    frozenset({"__main__"}),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# A policy or a planner that could read these would decide differently on another day or another machine.
FORBIDDEN_IN_CORE = frozenset(
    {"asyncio", "concurrent", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "random", "secrets"}
    | {"socket", "subprocess", "sys", "threading", "time", "urllib", "uuid"}
)
CORE_MAY_IMPORT = frozenset({"tidegate", "numpy", *sys.stdlib_module_names}) - FORBIDDEN_IN_CORE

MODULES = {
    ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SRC.rglob("*.py"))
}


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(tree: ast.AST, *, at_import_time: bool) -> Iterator[str]:
    """Names of imported modules, for `from a import b` both `a` and `a.b`.

    `at_import_time` leaves out what stands in functions and under TYPE_CHECKING.
    """
    for node in ast.iter_child_nodes(tree):
        if at_import_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if at_import_time and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from imports(node, at_import_time=at_import_time)


def own_imports(module: str, *, at_import_time: bool) -> set[str]:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    return {name for name in imports(tree, at_import_time=at_import_time) if name in MODULES} - {module}


def test_the_map_of_the_house_is_complete() -> None:
    assert {room(module) for module in MODULES} <= set(FLOOR_OF)
    assert {"core", "engine", "cli"} <= {room(module) for module in MODULES}


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    mine = room(module)
    for imported in own_imports(module, at_import_time=False):
        theirs = room(imported)
        assert mine == theirs or FLOOR_OF[theirs] < FLOOR_OF[mine], f"{module} imports {imported}"


def test_no_imports_in_a_circle() -> None:
    graph = {}
    for module in MODULES:
        needed = own_imports(module, at_import_time=True)
        # `from package import module` needs the module; a package's own __init__ is loaded before its parts anyway.
        graph[module] = {name for name in needed if not module.startswith(f"{name}.")}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as e:
        pytest.fail(f"circle: {' -> '.join(e.args[1])}")


@pytest.mark.parametrize("module", [m for m in MODULES if room(m) == "core"])
def test_core_imports_nothing_that_has_a_clock_a_coin_or_a_wire(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    tops = {name.split(".")[0] for name in imports(tree, at_import_time=False)}
    assert tops <= CORE_MAY_IMPORT, f"{module} imports {sorted(tops - CORE_MAY_IMPORT)}"
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not calls & {"open", "input", "print", "exec", "eval", "__import__"}


def test_core_imports_where_only_numpy_is_installed() -> None:
    script = """
import importlib, pkgutil, sys
ours = {"tidegate", "numpy"}
class OnlyCore:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top not in ours and top not in sys.stdlib_module_names and not top.startswith("_"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, OnlyCore())
import tidegate.core
names = [m.name for m in pkgutil.walk_packages(tidegate.core.__path__, "tidegate.core.")]
for name in names:
    importlib.import_module(name)
print(len(names), sorted({"torch", "numba", "vllm", "fastapi", "pydantic"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env={"PYTHONPATH": str(SRC)}
    )
    assert done.returncode == 0, done.stderr
    count, loaded = done.stdout.split(" ", 1)
    assert int(count) == sum(m.startswith("tidegate.core.") for m in MODULES)
    assert loaded.strip() == "[]"


@pytest.mark.parametrize("module", [m for m in MODULES if room(m) not in ("cli", "integrations")])
def test_the_environment_is_read_at_the_edge(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    reads = [n.lineno for n in attributes if ast.unparse(n) in ("os.environ", "os.getenv", "os.environb")]
    names = {name for name in imports(tree, at_import_time=False) if name in ("os.environ", "os.getenv")}
    assert not reads, f"{module} reads the environment in lines {reads}"
    assert not names


def tracked() -> list[Path]:
    """Files of the project: what git tracks, or in an unpacked source archive whatever there is."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        return [p for p in ROOT.rglob("*") if p.is_file() and not p.relative_to(ROOT).parts[0].startswith(".")]
    return [path for name in listed.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_is_named_for_having_no_subject() -> None:
    nameless = {"util", "utils", "helper", "helpers", "common", "misc", "manager"}
    assert not [str(path) for path in tracked() if path.stem in nameless]


def test_addresses_are_of_this_machine_or_of_a_licence() -> None:
    """Whatever else is fetched goes through a package client, which knows its own registry."""
    named = {
        match.decode()
        for path in tracked()
        if path.suffix != ".parquet"
        for match in re.findall(rb"https?://([a-z0-9.-]+\.[a-z]{2,})", path.read_bytes())
    }
    of_image = {"download.pytorch.org"}  # where the container image finds torch's build for the CPU
    assert named <= {"www.apache.org", "creativecommons.org", "a.org"} | of_image
