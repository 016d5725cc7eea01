"""Imports go downward only, and the planner's side of the house knows no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

PACKAGE = "ds_finepage"
ROOT = Path(__file__).parents[2] / PACKAGE

FLOORS = {
    "_compat": 0,
    "errors": 0,
    "units": 0,
    "config": 0,
    "files": 0,
    "compiler": 0,
    "graph": 1,
    "checker": 2,
    "packing": 2,
    "planning": 3,
    "capture": 3,
    "execution": 3,
    "reporting": 3,
    "integrations.transformers": 4,
    "runtime": 5,
    "whatif": 6,
    "modeller": 7,
    "drafted": 7,
    "batches": 7,
    "api": 8,
    "integrations.deepspeed": 9,
    "serving": 9,
    "compare": 10,
    "run": 11,
    "cli": 11,
}
TORCH_FREE = (
    *("errors", "units", "config", "files", "compiler"),
    *("graph", "checker", "planning", "reporting"),
)
HEAVY = ("torch", "deepspeed", "transformers")

FILES = sorted(ROOT.rglob("*.py"))


def unit_named(parts: Sequence[str]) -> str:
    """Name the unit of a module: each integration is one of its own."""
    return ".".join(parts[:2]) if parts[0] == "integrations" else parts[0]


def unit_of(path: Path) -> str:
    """Name the package or module on whose floor a file stands; ``__init__`` stands above all."""
    return unit_named(path.relative_to(ROOT).with_suffix("").parts)


UNITS = sorted({unit_of(path) for path in FILES} - {"integrations.__init__"})


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST) -> Iterator[str]:
    """All modules that are imported anywhere in a file, in functions and for typing too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, "relative import"
            if node.module == PACKAGE:
                yield from (f"{PACKAGE}.{alias.name}" for alias in node.names)
            else:
                yield node.module


def why_not(importer: str, imported_module: str) -> str | None:
    """Say what is wrong with an import of one of our modules, if anything is."""
    target = unit_named([*imported_module.split(".")[1:], ""])
    if target == importer:
        return None
    if target not in FLOORS:  # the package itself, or a name in it
        return None if FLOORS[importer] == max(FLOORS.values()) else "the package is above all"
    if FLOORS[target] > FLOORS[importer]:
        return f"upward, from floor {FLOORS[importer]} to {FLOORS[target]}"
    both_packages = all((ROOT / unit.replace(".", "/")).is_dir() for unit in (target, importer))
    if FLOORS[target] == FLOORS[importer] and both_packages:
        return f"sideways on floor {FLOORS[importer]}"
    return None


def test_everything_has_a_floor() -> None:
    assert [unit for unit in UNITS if unit not in FLOORS and unit != "__init__"] == []


@pytest.mark.parametrize("unit", [unit for unit in UNITS if unit in FLOORS])
def test_imports_go_downward(unit: str) -> None:
    wrong = []
    for path in FILES:
        if unit_of(path) != unit:
            continue
        for name in imported(ast.parse(path.read_text())):
            reason = why_not(unit, name) if name.split(".")[0] == PACKAGE else None
            if reason is not None:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}: {reason}")
    assert wrong == []


@pytest.mark.parametrize(
    ("importer", "target", "reason"),
    [
        ("graph", "ds_finepage.planning.policies", "upward"),
        ("planning", "ds_finepage.capture.recorder", "sideways"),
        ("planning", "ds_finepage", "above all"),
        ("runtime", "ds_finepage.attach", "above all"),
        ("planning", "ds_finepage.planning.liveness", None),
        ("planning", "ds_finepage.graph", None),
        ("config", "ds_finepage.units", None),
        ("api", "ds_finepage.runtime.handle", None),
        ("runtime", "ds_finepage.integrations.deepspeed.seam", "upward"),
        ("runtime", "ds_finepage.integrations.transformers.host_cache", None),
        ("cli", "ds_finepage", None),
    ],
)
def test_the_rule_itself(importer: str, target: str, reason: str | None) -> None:
    found = why_not(importer, target)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize("unit", TORCH_FREE)
def test_the_planners_side_never_imports_torch(unit: str) -> None:
    for path in FILES:
        if unit_of(path) == unit:
            names = list(imported(ast.parse(path.read_text())))
            assert [n for n in names if n.split(".")[0] in HEAVY] == [], path
            assert [n for n in names if n.startswith(f"{PACKAGE}._compat")] == [], path


def test_planning_starts_without_torch() -> None:
    """Seen from a fresh interpreter: what is imported brings nothing heavy by a detour."""
    modules = [module_of(path) for path in FILES if unit_of(path) in TORCH_FREE]
    assert f"{PACKAGE}.planning" in modules and f"{PACKAGE}.graph" in modules
    code = (
        f"import sys\nimport {', '.join(modules)}\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT.parent, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_no_public_name_is_hidden_by_a_module() -> None:
    """A submodule becomes an attribute of the package as soon as somebody imports it."""
    import ds_finepage

    names = {name for unit in UNITS for name in unit.split(".")}
    assert not {*ds_finepage.__all__} & names
