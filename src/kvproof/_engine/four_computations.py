"""Which side is wrong: one row by every way there is to compute it.

Neither path is the truth by definition. A row that comes out the same by all ways but one was computed wrong
by that one, be it the uncached one.
"""

from collections.abc import Iterator

from torch import Tensor

from kvproof._engine.rung import Prefix
from kvproof._engine.uncached_rows import Uncached
from kvproof._engine.verdict_rules import are_equal_in_float64
from kvproof._numerics.gaps import gap_of_rows
from kvproof.contract.results import FourWays
from kvproof.errors import KvproofError
from kvproof.subjects import Subject

_LITERAL, _ONE_PASS, _FRESH, _STEPPING = "literal", "one-pass", "fresh cache in one call", "fresh cache in steps"
_UNCACHED = (_LITERAL, _ONE_PASS)


def four_ways(uncached: Uncached, prefix: Prefix, actual: Tensor) -> FourWays | None:
    """Compute a row of the top rung by four ways and say which agree; None where no top rung can tell.

    ``actual`` is the scenario's own row; it is a fifth way where it agrees with none of the four.
    """
    if uncached.top is None or uncached.exact is not None:  # what rounded tables move would part the ways
        return None
    groups: list[tuple[list[str], Tensor]] = []
    for name, row in (*_ways(uncached, prefix), ("this scenario", actual)):
        for names, first in groups:
            gap = gap_of_rows(first, row)
            if are_equal_in_float64(gap):
                names.append(name)
                break
        else:
            groups.append(([name], row))
    named = sorted((tuple(names) for names, _ in groups), key=len, reverse=True)
    suspect = _suspect(named)
    return FourWays(ids=prefix, groups=tuple(named), suspect=suspect, sentence=_sentence(named, suspect))


def _ways(uncached: Uncached, prefix: Prefix) -> Iterator[tuple[str, Tensor]]:
    """Yield each way that the subject can go, with its row."""
    assert uncached.top is not None
    yield _LITERAL, uncached.top.literal(prefix)
    longer = uncached.continuation(prefix)
    if longer is not None:
        yield _ONE_PASS, uncached.top.one_pass(longer, len(prefix))
    steps: list[Prefix] = [(token,) for token in prefix]
    for name, parts in ((_FRESH, [prefix]), (_STEPPING, steps)):
        try:
            yield name, _cached(uncached.top.subject, parts)
        except KvproofError:
            continue  # a way that cannot be gone says nothing


def _cached(subject: Subject, parts: list[Prefix]) -> Tensor:
    session = subject.session()
    for part in parts:
        logits = session.extend([part])
    return logits[0, -1]


def _suspect(groups: list[tuple[str, ...]]) -> str | None:
    """Return the computation that disagrees with the others; if it is the scenario, all plain ones must agree."""
    alone = [names for names in groups[1:] if _plain(names)]
    if len(groups) == 1:
        return None
    if not alone:
        return "this scenario"
    majority = _plain(groups[0])
    return alone[0][0] if len(alone) == 1 and len(_plain(alone[0])) == 1 and len(majority) >= 3 else None


def _plain(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name != "this scenario")


def _sentence(groups: list[tuple[str, ...]], suspect: str | None) -> str:
    if len(groups) == 1:
        return f"in float64 all ways of computing this row agree: {', '.join(groups[0])}"
    if suspect is None:
        listed = "; ".join(" = ".join(names) for names in groups)
        return f"the ways of computing this row do not tell which side is wrong: {listed}"
    side = "the uncached path" if suspect in _UNCACHED else "the cached path"
    agreeing, *others = groups
    like = [name for names in others for name in names if name != suspect]
    return (
        f"{side} is the suspect: {len(agreeing)} other ways of computing this row agree "
        f"({', '.join(agreeing)}); only {' and '.join([suspect, *like])} differ{'' if like else 's'}"
    )
