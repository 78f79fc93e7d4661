"""The README does what it says: its commands print what it prints, its code runs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like a fresh clone, as far as the README uses it."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(
        ROOT / "pipelines" / "quickstart", folder / "pipelines" / "quickstart", ignore=shutil.ignore_patterns("out*")
    )
    return folder


def run(*args: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *args], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_lines_say_what_it_is_and_how_to_see_it() -> None:
    top = README.splitlines()[:30]
    assert top[0].startswith("packsvc ")
    for wanted in ("make demo", "make test", "$ packsvc pack", "efficiency"):
        assert any(wanted in line for line in top), wanted


def test_its_make_targets_are_there() -> None:
    targets = re.findall(r"^make (\w+)", "".join(blocks("bash")), re.MULTILINE)
    assert targets[:2] == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.slow
def test_its_commands_print_what_it_shows(place: Path) -> None:
    """A line of three dots stands for lines left out."""
    seen = 0
    for block in blocks("console"):
        for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            _, *args = shlex.split(command)
            printed = run("-c", "from packsvc.cli import main; main()", *args, cwd=place)
            pattern = re.escape(shown).replace(re.escape("...\n"), "(?:.*\n)*")
            assert re.fullmatch(pattern, printed), f"{command} printed:\n{printed}"
            seen += 1
    assert seen >= 2


@pytest.mark.slow
def test_its_code_runs(place: Path) -> None:
    """After its commands, in their place."""
    if not (place / "pipelines" / "quickstart" / "out" / "manifest.json").exists():
        run("-c", "from packsvc.cli import main; main()", "pack", "pipelines/quickstart/job.yaml", cwd=place)
    codes = blocks("python")
    assert len(codes) >= 2
    for number, code in enumerate(codes):
        script = place / f"block{number}.py"
        script.write_text(code, encoding="utf-8")
        run(script.name, cwd=place)


def test_its_links_lead_somewhere() -> None:
    for path in re.findall(r"`((?:pipelines|packsvc|tests|benchmarks)/[\w./-]+)`", README):
        assert (ROOT / path).exists(), path
