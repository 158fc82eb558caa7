"""README and examples do what they show. Numbers are another machine's, so they are compared as numbers."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def blocks(kind: str) -> list[str]:
    return [text for language, text in BLOCKS if language == kind]


def masked(text: str) -> list[str]:
    """Return the text's lines with the digits of every measured number hidden; whole numbers stay."""
    lines = text.strip("\n").split("\n")
    return [NUMBER.sub(lambda m: m[0] if m[0].isdigit() else "#", line).rstrip() for line in lines]


def run(command: list[str], folder: Path) -> str:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert "Traceback" not in result.stderr, result.stderr
    return result.stdout


def assert_shown(shown: list[str], printed: list[str]) -> None:
    """Each run of shown lines stands in what was printed, in order; ``...`` skips any lines."""
    at = 0
    for part in "\n".join(shown).split("\n...\n"):
        wanted = part.removeprefix("...\n").split("\n")
        starts = [i for i in range(at, len(printed)) if printed[i : i + len(wanted)] == wanted]
        assert starts, "not printed:\n" + "\n".join(wanted) + "\n\nprinted:\n" + "\n".join(printed)
        at = starts[0] + len(wanted)


@pytest.mark.parametrize("number", [0, 1], ids=["the reference system", "your own decoder"])
def test_the_code_prints_what_it_shows(number: int, tmp_path: Path):
    code, shown = blocks("python")[number], blocks("text")[number]
    assert masked(run([sys.executable, "-c", code], tmp_path)) == masked(shown)


def test_the_test_suite_finds_the_bug_of_the_code_before_it(tmp_path: Path):
    _, decoder, suite = blocks("python")
    (tmp_path / "test_mine.py").write_text(decoder.replace("print(", "(") + suite)
    printed = run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "test_mine.py"], tmp_path)
    assert "1 failed, 1 passed, 1 skipped" in printed
    assert "The cached path diverges" in printed
    assert "the subject lacks the ability: crop" in printed


@pytest.mark.parametrize("session", blocks("console"), ids=lambda text: text.split("\n")[0])
def test_the_commands_print_what_they_show(session: str, tmp_path: Path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for part in session.split("$ ")[1:]:
        command, _, shown = part.partition("\n")
        printed = masked(run(shlex.split(command), tmp_path))
        assert_shown(masked(shown), printed)


def test_the_make_commands_exist():
    (shell,) = blocks("sh")
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE)
    for line in shell.strip().split("\n"):
        assert line.split()[1] in targets


def test_ci_runs_the_command_that_the_readme_tells():
    assert "make test" in (ROOT / ".ci" / "run").read_text("utf-8")


def test_every_file_that_the_readme_names_is_there():
    for name in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / name).exists(), name
    tree = next(text for language, text in BLOCKS if language == "" and "src/kvproof/" in text)
    for name in re.findall(r"[├│└]── ([\w.]+/?[\w.]*/?)", tree):
        place = ROOT if (ROOT / name).exists() else ROOT / "src" / "kvproof"
        assert (place / name).exists(), name


def test_the_example_tells_the_whole_story(tmp_path: Path):
    example = ROOT / "examples" / "generate-with-kv-cache.py"
    text = example.read_text("utf-8")
    assert text.count("\n") < 80
    assert f"in {text.count(chr(10))} lines" in README
    printed = run([sys.executable, str(example)], tmp_path)
    assert printed.count("match") == 16
    assert "greedy: <bos> A B D <eos> (stopped by eos)" in printed
    assert "sample: <bos> Y X Y <eos> (stopped by eos)" in printed
    assert "wrong layer's cache" in printed
    assert "256 for the full context" in printed
