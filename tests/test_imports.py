"""Imports point one way, down the data flow, and nothing heavy is loaded before it is used.

The table below is the architecture. Every import statement of the package is walked by its syntax tree, the lazy
ones inside functions and those for type checkers too.
"""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import packsvc

PACKAGE = Path(packsvc.__file__).parent

BASE = {"errors", "types"}
COMPILED = {"_native", "compiled"}
FIRST = BASE | {"config", "storage"}
MIDDLE = FIRST | {"sources", "encode", "plan", "assemble"}
SHARDS = MIDDLE | {"shards"}
READERS = SHARDS | {"cluster", "run", "stream", "attention", "validation", "statistics", "view"}
TOOLS = READERS | {"probe", "export", "trainers", "testing"}

MAY_IMPORT: dict[str, set[str]] = {
    "_native": set(),
    "compiled": {"_native"},
    "errors": set(),
    "types": set(),
    "config": BASE,
    "storage": BASE,
    "cluster": BASE,
    "sources": FIRST,
    "encode": FIRST,
    "plan": BASE | COMPILED,
    "assemble": BASE,
    "shards": MIDDLE | COMPILED,
    "run": SHARDS | {"cluster"},
    "attention": BASE,
    "stream": SHARDS | COMPILED | {"attention"},
    "validation": SHARDS | {"cluster"},
    "statistics": SHARDS,
    "view": SHARDS,
    "probe": READERS,
    "export": READERS,
    "trainers": READERS,
    "testing": READERS | {"probe"},  # an assertion is the probe, raised
    "commands": TOOLS,
    "service": TOOLS,
    "cli": TOOLS | {"commands", "service"},
    "__main__": {"cli"},
}
"""Rooms that each room may import from, itself aside. Rooms of one rank are siblings and not among each other's."""

HEAVY = {
    "ray", "torch", "transformers", "tokenizers", "fastokens", "pyarrow", "fsspec", "pydantic", "yaml", "duckdb",
    "datasets", "polars", "flash_attn", "jinja2", "typer", "rich", "fastapi", "plotly",
}  # fmt: skip
MAY_LOAD: dict[str, set[str]] = {
    "errors": set(),
    "types": set(),
    "config": {"pydantic", "yaml"},
    "storage": {"fsspec"},
    "cluster": set(),
    "sources": {"pyarrow", "fsspec"},
    "encode": {"transformers", "tokenizers", "fastokens", "jinja2", "fsspec"},
    "plan": set(),
    "assemble": set(),
    "shards": {"pyarrow", "fsspec"},
    "run": {"ray", "pyarrow"},
    "attention": {"torch", "flash_attn", "transformers"},
    "stream": {"torch", "pyarrow"},
    "validation": {"ray", "pyarrow"},
    "statistics": {"pyarrow", "duckdb"},
    "view": {"rich"},
    "probe": {"torch", "transformers"},
    "testing": {"torch"},
    "commands": {"typer", "rich"},
    "cli": {"typer"},
}
"""Heavy libraries that each room may import, at its top or inside a function."""


def room_of(path: Path) -> str:
    """The room a file of the package is in: `packsvc/plan/ffd.py` and `packsvc/errors.py` are in plan and errors."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> list[tuple[int, str]]:
    """Line and dotted name of everything a file imports, wherever the statement stands."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; name the room"
            if node.module == "packsvc":
                found += [(node.lineno, f"packsvc.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, str(node.module)))
    return found


def files() -> list[Path]:
    """Every module of the package but its own face, which opens rooms by name when they are asked for."""
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def public_functions() -> set[str]:
    return {name for name in packsvc.__all__ if name.islower()} | {"repack", "ffd", "clean", "show", "dry_run"}


def test_imports_point_down_the_data_flow() -> None:
    wrong, seen = [], 0
    for path in files():
        room = room_of(path)
        assert room in MAY_IMPORT, f"{path}: a new room {room!r}; give it a place in the table of this test"
        for line, name in imports_of(path):
            parts = name.split(".")
            if parts[0] != "packsvc":
                continue
            seen += 1
            if len(parts) == 1 or parts[1] not in MAY_IMPORT:
                wrong.append(f"{path}:{line}: imports the package's face ({name}); name the room")
            elif parts[1] != room and parts[1] not in MAY_IMPORT[room]:
                wrong.append(f"{path}:{line}: {room} may not import {parts[1]}")
    assert wrong == []
    assert seen > 50


def test_the_table_has_no_cycle() -> None:
    """A room's whole reach, followed to the end, never comes back to it."""
    for room, direct in MAY_IMPORT.items():
        reach, todo = set(), list(direct)
        while todo:
            step = todo.pop()
            if step not in reach:
                reach.add(step)
                todo += MAY_IMPORT.get(step, set())
        assert room not in reach, room


def test_rooms_reach_into_each_other_by_their_faces() -> None:
    """What a room offers stands in its `__init__`; records and errors are modules of their own."""
    wrong = []
    for path in files():
        room = room_of(path)
        for line, name in imports_of(path):
            parts = name.split(".")
            if parts[0] == "packsvc" and len(parts) > 2 and parts[1] not in (room, "commands"):
                wrong.append(f"{path}:{line}: imports {name}; import it from packsvc.{parts[1]}")
    assert wrong == []


def test_heavy_libraries_stay_in_their_rooms() -> None:
    wrong, seen = [], 0
    for path in files():
        room = room_of(path)
        for line, name in imports_of(path):
            library = name.split(".")[0]
            if library in HEAVY:
                seen += 1
                if room in MAY_LOAD and library not in MAY_LOAD[room]:
                    wrong.append(f"{path}:{line}: {room} may not import {library}")
    assert wrong == []
    assert seen > 20


def loaded_by(code: str) -> set[str]:
    """Which heavy libraries a fresh interpreter has loaded after `code`."""
    ask = f"{code}\nimport sys\nprint(*[name for name in {sorted(HEAVY)!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import packsvc", set()),
        ("import packsvc; packsvc.load_job; packsvc.PackJob", {"pydantic", "yaml"}),
        ("import packsvc.plan, packsvc.assemble; packsvc.plan.ffd", set()),
        ("import packsvc.errors, packsvc.types", set()),
        ("import packsvc.config", {"pydantic", "yaml"}),
        ("import packsvc.storage", {"fsspec"}),
        ("import packsvc.sources", {"fsspec", "pyarrow", "pydantic", "yaml"}),
        ("import packsvc.shards", {"fsspec", "pyarrow", "pydantic", "yaml"}),
        ("import packsvc.statistics", {"fsspec", "pyarrow", "pydantic", "yaml"}),
        ("import packsvc.cli", {"typer", "rich", "pydantic"}),
    ],
)
def test_nothing_heavy_is_loaded_before_it_is_used(code: str, allowed: set[str]) -> None:
    assert loaded_by(code) <= allowed


def test_no_module_bears_the_name_of_a_public_function() -> None:
    """`from packsvc import pack` must give the function, also after a module of that name was imported."""
    names = {name.split(".")[-1] for _, name, _ in pkgutil.walk_packages([str(PACKAGE)], "packsvc.")}
    assert names & public_functions() == set()
    assert {"plan", "shards", "errors"} <= names


@pytest.mark.parametrize("face", sorted(p.parent.name for p in PACKAGE.glob("*/__init__.py")))
def test_a_room_shows_a_sorted_face(face: str) -> None:
    """A docstring, imports and a sorted `__all__`; nothing else."""
    tree = ast.parse((PACKAGE / face / "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{face} does not say what it does"
    names: list[str] = []
    for node in tree.body[1:]:
        assert isinstance(node, (ast.Import, ast.ImportFrom, ast.Assign)), f"{face}: line {node.lineno}"
        if isinstance(node, ast.Assign):
            assert ast.unparse(node.targets[0]) == "__all__"
            names = ast.literal_eval(node.value)
    assert names == sorted(names, key=lambda n: (not n.isupper(), n.lower() == n, n)), f"{face}: __all__ is not sorted"


def test_the_package_offers_what_its_face_names() -> None:
    for name in packsvc.__all__:
        assert getattr(packsvc, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = packsvc.nothing
