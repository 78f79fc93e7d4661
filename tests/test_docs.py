"""What is written agrees with what is there: help, README, changelog, docstrings."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

import packsvc
from packsvc.cli import COMMANDS, app

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
GROUP: Any = typer.main.get_command(app)


def flat(group: Any, before: str = "") -> dict[str, Any]:
    """Every command by its full name, those of groups too: "pack", "jobs list"."""
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        found |= flat(command, f"{before}{name} ") if hasattr(command, "commands") else {before + name: command}
    return found


ALL = flat(GROUP)


def help_of(name: str) -> str:
    with GROUP.make_context("packsvc", [name, "x"], resilient_parsing=True) as ctx:
        return str(ALL[name].get_help(type(ctx)(ALL[name], info_name=f"packsvc {name}", parent=None)))


def parse(line: str) -> None:
    """Parse a command line without running it; raises what a wrong one raises."""
    args = shlex.split(line)[1:]
    name = args.pop(0)
    while name not in ALL:
        name += f" {args.pop(0)}"
    ALL[name].make_context(name, args)


def examples_of(text: str) -> list[str]:
    """Command lines of packsvc in a text, with or without a prompt, less pipes and comments."""
    lines = re.findall(r"^\s*(?:\$ )?(packsvc [a-z]+ .*)$", text, re.MULTILINE)
    return [re.split(r"\s[|#]\s", line)[0].strip() for line in lines]


def test_the_package_has_the_commands_that_are_registered() -> None:
    assert set(GROUP.commands) == set(COMMANDS)
    assert {"init", "pack", "validate", "stats", "show"} <= set(COMMANDS)


@pytest.mark.parametrize("name", sorted(ALL))
def test_every_command_has_help_with_an_example(name: str) -> None:
    text = help_of(name)
    assert f"packsvc {name} " in text.split("Arguments:")[0].split("Example", 1)[1]
    for parameter in ALL[name].params:
        assert getattr(parameter, "help", None), f"{name}: {parameter.name} has no help"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_is_in_the_readme(name: str) -> None:
    assert f"packsvc {name}" in README


@pytest.mark.parametrize("name", [*sorted(ALL), "README"])
def test_every_example_is_a_command_line_that_parses(name: str) -> None:
    shell = "".join(re.findall(r"^```(?:bash|console)\n(.*?)^```", README, re.MULTILINE | re.DOTALL))
    lines = examples_of(shell if name == "README" else help_of(name))
    assert lines
    for line in lines:
        parse(line)


def test_a_wrong_example_would_be_seen() -> None:
    with pytest.raises(Exception, match="No such option"):
        parse("packsvc pack job.yaml --nothing")


def test_a_table_is_never_without_json() -> None:
    for name in set(ALL) - {"init"}:
        assert "--json" in help_of(name), name


def test_the_front_page_of_the_help_lists_commands_and_exit_codes() -> None:
    with GROUP.make_context("packsvc", [], resilient_parsing=True) as ctx:
        text = GROUP.get_help(ctx)
    for name in COMMANDS:
        assert re.search(rf"^  {name}\s", text, re.MULTILINE)
    for code in range(4):
        assert re.search(rf"^    {code}  ", text, re.MULTILINE)


def modules() -> list[str]:
    return [name for _, name, _ in pkgutil.walk_packages(packsvc.__path__, "packsvc.")]


def test_every_module_says_what_it_does() -> None:
    assert len(modules()) > 30
    assert [name for name in modules() if not (importlib.import_module(name).__doc__ or "").strip()] == []


def test_examples_in_docstrings_give_what_they_say() -> None:
    tried = 0
    for name in modules():
        found = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
        assert found.failed == 0, name
        tried += found.attempted
    assert tried > 5


def test_the_changelog_tells_of_the_version_that_is_built() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert text.startswith("# Changelog\n")
    assert f"## [{packsvc.__version__}]" in text or "## [Unreleased]" in text
    for name in COMMANDS:
        assert f"packsvc {name}" in text


def test_the_quickstart_stays_small() -> None:
    """5 MB in all: it is in every clone."""
    folder = ROOT / "pipelines" / "quickstart"
    files = [p for p in folder.rglob("*") if p.is_file() and not p.relative_to(folder).parts[0].startswith("out")]
    assert 3_000_000 < sum(p.stat().st_size for p in files) < 5_000_000
