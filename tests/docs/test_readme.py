"""README and examples do what they show; `shown` says how blocks are read, and how numbers are compared."""

import re

import pytest

from .shown import ROOT, Reader, assert_shown, blocks

README = (ROOT / "README.md").read_text("utf-8")


def of(kind: str) -> list[str]:
    return [text for language, text in blocks(README) if language == kind]


@pytest.mark.parametrize("number", [0, 1], ids=["the reference system", "your own decoder"])
def test_the_code_prints_what_it_shows(number: int, reader: Reader):
    assert_shown(of("text")[number], reader.execute(of("python")[number]))


def test_the_test_suite_finds_the_bug_of_the_code_before_it(reader: Reader):
    _, decoder, suite = of("python")
    (reader.folder / "test_mine.py").write_text(decoder.replace("print(", "(") + suite)
    printed = reader.run("pytest -rs test_mine.py")
    assert "1 failed, 1 passed, 1 skipped" in printed
    assert "The cached path diverges" in printed
    assert "the subject lacks the ability: crop" in printed


@pytest.mark.filterwarnings("default")  # what other libraries warn of is shown to a reader, and stops nobody
@pytest.mark.parametrize("session", of("console"), ids=lambda text: text.split("\n")[0])
def test_the_commands_print_what_they_show(session: str, reader: Reader):
    reader.follow(f"```console\n{session}```\n")


def test_the_make_commands_exist():
    (shell,) = of("sh")
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE)
    for line in shell.strip().split("\n"):
        assert line.split()[1] in targets


def test_ci_runs_the_command_that_the_readme_tells():
    assert "make test" in (ROOT / ".ci" / "run").read_text("utf-8")


def test_every_file_that_the_readme_names_is_there():
    for name in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / name).exists(), name
    tree = next(text for text in of("") if "src/kvproof/" in text)
    for name in re.findall(r"[├│└]── ([\w.]+/?[\w.]*/?)", tree):
        place = ROOT if (ROOT / name).exists() else ROOT / "src" / "kvproof"
        assert (place / name).exists(), name


def test_the_example_tells_the_whole_story(reader: Reader):
    example = ROOT / "examples" / "generate-with-kv-cache.py"
    text = example.read_text("utf-8")
    assert text.count("\n") < 80
    assert f"in {text.count(chr(10))} lines" in README
    printed = reader.execute(text)
    assert printed.count("match") == 16
    assert "greedy: <bos> A B D <eos> (stopped by eos)" in printed
    assert "sample: <bos> Y X Y <eos> (stopped by eos)" in printed
    assert "wrong layer's cache" in printed
    assert "256 for the full context" in printed
