"""README and examples do what they show; `shown` says how blocks are read, and how numbers are compared."""

import re

import pytest

from .shown import ROOT, Reader, assert_shown, blocks

README = (ROOT / "README.md").read_text("utf-8")


def of(kind: str) -> list[str]:
    return [text for language, text in blocks(README) if language == kind]


def test_the_code_prints_what_it_shows(reader: Reader):
    (text,), (code,) = of("text"), of("python")
    assert_shown(text, reader.execute(code))


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


def test_the_readme_is_for_someone_who_has_two_minutes():
    assert README.count("\n") < 150


def test_the_example_tells_the_whole_story(reader: Reader):
    example = ROOT / "examples" / "generate-with-kv-cache.py"
    text = example.read_text("utf-8")
    assert text.count("\n") < 80
    printed = reader.execute(text)
    assert printed.count("match") == 16
    assert "greedy: <bos> A B D <eos> (stopped by eos)" in printed
    assert "sample: <bos> Y X Y <eos> (stopped by eos)" in printed
    assert "wrong layer's cache" in printed
    assert "256 for the full context" in printed
