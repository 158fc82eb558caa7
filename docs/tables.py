"""The tables of the pages that would go stale if people wrote them: each from what the code itself holds."""

import re
from collections.abc import Iterator

from kvproof._numerics.tolerances import CONSTANTS, DECLARED
from kvproof.cli import cli
from kvproof.scenarios import Boundaries, Scenario, catalogue


def tolerances() -> Iterator[str]:
    """Yield the declared tolerances, by dtype."""
    yield from ("| declared dtype | allowed gap, relative to the row's largest logit | source |", "|---|---|---|")
    for tolerance in DECLARED.values():
        yield f"| {tolerance.dtype} | {tolerance.relative:g} | {_cell(tolerance.source)} |"


def constants() -> Iterator[str]:
    """Yield the constants of the verdict rules."""
    yield from ("| constant | value | source |", "|---|---|---|")
    for constant in CONSTANTS:
        yield f"| {constant.name} | {constant.value:g} | {_cell(constant.source)} |"


def exit_statuses() -> Iterator[str]:
    """Yield the exit statuses, as the command line's own help names them."""
    yield from ("| status | meaning |", "|---|---|")
    for status, meaning in re.findall(r"(\d+) ([^;.]+)[;.]", cli.help or ""):
        yield f"| {status} | {' '.join(meaning.split())} |"


def scenarios() -> Iterator[str]:
    """Yield every scenario of the catalogue, made for a decoder that has a window and a short context."""
    yield from ("| scenario | exposes | needs the abilities |", "|---|---|---|")
    programs = catalogue(range(28), range(28, 56), Boundaries(context_len=64, windows=(6,)))
    for name in dict.fromkeys(program.name for program in programs):
        same = [program for program in programs if program.name == name]
        needs = sorted({ability.value for program in same for ability in program.needs})
        yield f"| {name} | {_cell(_exposed(same))} | {', '.join(needs) or 'none'} |"


def _exposed(programs: list[Scenario]) -> str:
    advice = " (advice: no part of the verdict)" if programs[0].advice else ""
    return programs[0].exposes + advice


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
