"""The pages of the site do what they show; `shown` says how a page is read."""

import re
import tomllib

import pytest

from kvproof.cli import cli

from .shown import ROOT, Reader, agree, assert_shown, blocks

DOCS = ROOT / "docs"
PAGES = {str(page.relative_to(DOCS)): page.read_text("utf-8") for page in sorted(DOCS.rglob("*.md"))}


def pages_with(*kinds: str) -> list[str]:
    return [name for name, text in PAGES.items() if any(kind in kinds for kind, _ in blocks(text))]


@pytest.mark.filterwarnings("default")  # what other libraries warn of is shown to a reader, and stops nobody
@pytest.mark.parametrize("name", pages_with("console", "python"))
def test_a_page_does_what_it_shows(name: str, reader: Reader):
    reader.follow(PAGES[name])


@pytest.mark.parametrize("name", pages_with("sh"))
def test_what_is_not_run_names_what_is_there(name: str):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = {f"'kvproof[{name}]'" for name in project["optional-dependencies"]}
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE)
    for line in "".join(block for kind, block in blocks(PAGES[name]) if kind == "sh").splitlines():
        match line.split():
            case ["pip", "install", what]:
                assert what in extras
            case ["make", target, *_]:
                assert target in targets
            case ["kvproof", command, *words]:
                known = {option for param in cli.commands[command].params for option in param.opts}
                assert {word for word in words if word.startswith("--")} <= known, line
            case _:
                assert line.split()[0] in ("source", "for", "done"), line


TABLE = "| scenario | rows | gap | allowed | noise | float64 gap | verdict |"
ROW = "| causality | 95 | 8.3e-07 | 1.8e-06 | 8.3e-07 | 8.9e-16 | match |"
WRONG = "| rollback | 56 | 9.8e-04 | 1.1e-05 | 3.2e-05 | 9.8e-04 | diverged |"


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("28 rows, gap 4.9e-04", "28 rows, gap 9.8e-04"),
        ("0.389574 and 2e+12", "0.389573 and 7e+12"),
        ("a\n...\nd", "a\nb\nc\nd"),
        ("...\nd", "c\nd"),
        ("1 passed in ...", "1 passed in 3.06s"),
        ('largest_gap" value="5.960464477539062e-07"', 'largest_gap" value="2.3e-06"'),
        ("in float32 alone: seen from 3e-05 on", "in float32 alone: seen from 2e-04 on"),
        (f"{TABLE}\n{ROW}", f"{TABLE}\n{ROW.replace('8.3e-07', '1.7e-06').replace('8.9e-16', '4.1e-14')}"),
        (f"{TABLE}\n...\n{ROW}", f"{TABLE}\n| an | other | 1 |\n{ROW}"),
        (f"{TABLE}\n{WRONG}", f"{TABLE}\n{WRONG.replace('3.2e-05', '8.1e-05')}"),
        (f"...\n{ROW}", f"{TABLE}\n{ROW.replace('8.3e-07', '1.7e-06')}"),
    ],
)
def test_what_another_machine_prints_is_the_same(shown: str, printed: str):
    assert_shown(shown, printed)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("28 rows", "29 rows"),
        ("gap 4.9e-04", "gap 4.9e-02"),
        ("0.389574", "0.409574"),
        ("largest 22.31", "largest 23.31"),
        ("a\nb", "a\nb\nc"),
        ("a\n...", "b\na"),
        ("a\n...\nd", "a\nd\ne"),
        ("", "a"),
        ("2 passed in ...", "1 passed in 3.06s"),
        ("is beyond 3.45e-09", "is beyond 3.55e-09"),
        ("seen from 3e-05 on", "seen from 4e-04 on"),
        (f"{TABLE}\n{ROW}", f"{TABLE}\n{ROW.replace('8.3e-07', '1.9e-06')}"),
        (f"{TABLE}\n{ROW.replace('8.3e-07', '1.9e-06')}", f"{TABLE}\n{ROW}"),
        (f"{TABLE}\n{ROW}", f"{TABLE}\n{ROW.replace('1.8e-06', '2.0e-06')}"),
        (f"{TABLE}\n{ROW}", f"{TABLE}\n{ROW.replace('8.9e-16', '8.9e-08')}"),
        (f"{TABLE}\n{ROW}", f"{TABLE}\n{ROW.replace('95', '96')}"),
        (f"{TABLE}\n{ROW}", f"{TABLE}\n{ROW.replace('match', 'rounding')}"),
        (f"{TABLE}\n{WRONG}", f"{TABLE}\n{WRONG.replace('9.8e-04', '9.4e-04')}"),
    ],
)
def test_what_is_stale_is_seen(shown: str, printed: str):
    with pytest.raises(AssertionError, match="not printed"):
        assert_shown(shown, printed)


def test_numbers_of_rounding_are_held_below_what_rounding_comes_to():
    """One processor's float64 noise was 15 times another's, and a page that held it to a factor of ten failed."""
    assert agree("8.9e-16", "2.2e-13", "float64 gap ")
    assert not agree("8.9e-16", "2.2e-8", "float64 gap ")
    assert agree("4.9e-04", "1.2e-03", "noise")
    assert not agree("4.9e-04", "4.9e-02", "gap")
    assert agree("0.0e+00", "2.2e-16", "float64 gap")
    assert not agree("0.0e+00", "0.1", "gap")


def test_what_is_no_figure_of_rounding_is_held_to_its_digits_however_small():
    """A limit of 3.45e-09 on a page stood for any other."""
    assert agree("3.45e-09", "3.46e-09", " is beyond ")
    assert not agree("3.45e-09", "3.55e-09", " is beyond ")
