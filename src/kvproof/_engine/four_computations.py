"""Which side is wrong: one row, computed in every way that the subject has.

Neither path is right by definition. But ways that make the same kind of call run the same code: if that code is
wrong, they agree on a wrong row. So agreement counts only between ways that differ in kind: with and without a
cache, and in the form of their calls. A group that agrees and holds ways of different kinds in both respects is
taken to be right, because no single mistake could mislead all of it. Without such a group the side is undecided.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from kvproof._engine.rung import Prefix, fed_to_fresh_cache
from kvproof._engine.uncached_rows import Uncached
from kvproof._engine.verdict_rules import are_equal_in_float64
from kvproof._numerics.gaps import gap_of_rows
from kvproof.contract.results import FourWays
from kvproof.errors import KvproofError

#: The scenario's own row: it is what is asked about, and supports no group.
_SCENARIO = "this scenario"
#: Shorter rows cannot be computed in parts without a single step among the calls that matter.
SHORTEST_IN_PARTS = 4


class _Form(StrEnum):
    """The form of the calls: how many tokens each consumes. One form can be wrong while the others are right."""

    WHOLE = "whole"
    PARTS = "parts"
    STEPS = "steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """One way to compute a row."""

    name: str
    words: str  #: for sentences
    cached: bool
    form: _Form


_LITERAL = _Way(name="literal", words="the literal forward", cached=False, form=_Form.WHOLE)
_ONE_PASS = _Way(name="one-pass", words="the pass over a longer sequence", cached=False, form=_Form.WHOLE)
_FRESH = _Way(name="fresh cache in one call", words="one call on a fresh cache", cached=True, form=_Form.WHOLE)
_HALVES = _Way(name="fresh cache in two parts", words="two parts on a fresh cache", cached=True, form=_Form.PARTS)
_PAIRS = _Way(
    name="fresh cache in parts of 2 or 3", words="parts of 2 or 3 tokens", cached=True, form=_Form.PARTS
)
_STEPPING = _Way(name="fresh cache in steps", words="single steps", cached=True, form=_Form.STEPS)
_WAYS = {way.name: way for way in (_LITERAL, _ONE_PASS, _FRESH, _HALVES, _PAIRS, _STEPPING)}


def four_ways(uncached: Uncached, prefix: Prefix, actual: Tensor, *, row: str = "this row") -> FourWays | None:
    """Compute a row of the top rung in every way and say which agree; None if there is no top rung to compare in.

    ``actual`` is the scenario's own row, and ``row`` what the sentence calls it.
    """
    if uncached.top is None or uncached.exact is not None:  # rounded tables alone would set the ways apart
        return None
    groups: list[tuple[list[str], Tensor]] = []
    own = (_SCENARIO, actual)
    for name, logits in (*((way.name, logits) for way, logits in _rows(uncached, prefix)), own):
        for names, first in groups:
            if are_equal_in_float64(gap_of_rows(first, logits)):
                names.append(name)
                break
        else:
            groups.append(([name], logits))
    named = sorted((tuple(names) for names, _ in groups), key=len, reverse=True)
    right = _supported(named, len(prefix))
    suspect = None if right is None else _suspect([names for names in named if names is not right])
    sentence = _sentence(named, right, suspect, row)
    return FourWays(ids=prefix, groups=tuple(named), suspect=suspect, sentence=sentence)


def _rows(uncached: Uncached, prefix: Prefix) -> Iterator[tuple[_Way, Tensor]]:
    """Yield each way that the subject supports, with its row."""
    assert uncached.top is not None
    yield _LITERAL, uncached.top.literal(prefix)
    longer = uncached.continuation(prefix)
    if longer is not None:
        yield _ONE_PASS, uncached.top.one_pass(longer, len(prefix))
    for way, sizes in _chunkings(len(prefix)):
        try:
            *_, logits = fed_to_fresh_cache(uncached.top.subject, prefix, sizes)
            yield way, logits[-1]
        except KvproofError:
            continue  # a way that the subject refuses says nothing


def _chunkings(length: int) -> Iterator[tuple[_Way, Sequence[int]]]:
    """Yield ways to feed a fresh cache, with the size of each call; no two of them make the same calls."""
    yield _FRESH, [length]
    if length >= SHORTEST_IN_PARTS:  # every part holds at least two tokens
        yield _HALVES, [length // 2, length - length // 2]
    if length >= SHORTEST_IN_PARTS + 2:  # with fewer tokens these are the two halves
        yield _PAIRS, [2] * (length // 2 - 1) + [2 + length % 2]
    if length > 1:
        yield _STEPPING, [1] * length


def _supported(groups: Sequence[tuple[str, ...]], length: int) -> tuple[str, ...] | None:
    """Return the one group whose ways have no trait in common, if there is exactly one such group.

    A single token can only be fed in one form of call, so there the form does not count.
    """
    supported = []
    for names in groups:
        ways = _ways(names)
        paths, forms = {way.cached for way in ways}, {way.form for way in ways}
        if len(paths) > 1 and (len(forms) > 1 or length == 1):
            supported.append(names)
    return supported[0] if len(supported) == 1 else None


def _suspect(wrong: Sequence[tuple[str, ...]]) -> str | None:
    """Return a way that is wrong, if possible one that agrees with the scenario; None if both paths are wrong."""
    ways = [way for names in sorted(wrong, key=lambda names: _SCENARIO not in names) for way in _ways(names)]
    if not ways:
        return _SCENARIO if wrong else None
    sides = {way.cached for way in ways} | {True for names in wrong if _SCENARIO in names}
    return ways[0].name if len(sides) == 1 else None


def _ways(names: Sequence[str]) -> list[_Way]:
    return [_WAYS[name] for name in names if name in _WAYS]


def _sentence(
    groups: Sequence[tuple[str, ...]], right: tuple[str, ...] | None, suspect: str | None, row: str
) -> str:
    if len(groups) == 1:
        return f"in float64 all ways of computing {row} agree: {', '.join(groups[0])}"
    if right is None or suspect is None:
        first, *others = (_in_words(names, groups) for names in groups)
        rest = "; ".join(f"another from {words}" for words in others)
        return (
            f"the ways of computing {row} do not tell which side is wrong: one result comes from {first}; {rest}"
        )
    side = "the uncached path" if suspect in (_LITERAL.name, _ONE_PASS.name) else "the cached path"
    agreeing = [name for name in right if name != _SCENARIO]
    wrong = [suspect, *(name for names in groups if names is not right for name in names if name != suspect)]
    return (
        f"{side} is the suspect: {len(agreeing)} other ways of computing {row} agree "
        f"({', '.join(agreeing)}); only {_listed(wrong)} differ{'' if len(wrong) > 1 else 's'}"
    )


def _in_words(names: Sequence[str], groups: Sequence[tuple[str, ...]]) -> str:
    """Describe a group, and say what its ways have in common where it holds all ways with that trait."""
    ways, said = _ways(names), list[str]()
    for alike, words in _traits([way for group in groups for way in _ways(group)]):
        if all(way in ways for way in alike):
            said.append(words)
            ways = [way for way in ways if way not in alike]
    return _listed([*said, *(way.words for way in ways), *(name for name in names if name == _SCENARIO)])


def _traits(ways: Sequence[_Way]) -> Iterator[tuple[list[_Way], str]]:
    """Yield the ways that have a trait in common, and words for them."""
    whole = [way for way in ways if way.form is _Form.WHOLE]
    if len({way.cached for way in whole}) > 1:
        yield whole, "one forward over all tokens, with or without a cache"
    yield [way for way in ways if not way.cached], "one forward without a cache"
    cached = [way for way in ways if way.cached]
    if len(cached) > 1:
        yield cached, "every way of feeding a fresh cache"


def _listed(items: Sequence[str]) -> str:
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)
