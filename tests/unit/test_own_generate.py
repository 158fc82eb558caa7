"""The ``generate()`` of a library that someone brings: a sound one passes, and each way to break it is found."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.test_given import VOCAB, sums

from kvproof import Verdict, audit
from kvproof.contract.report import Report
from kvproof.errors import RefusedError
from kvproof.scenarios import Ability, Generate, Method
from kvproof.subjects import CallableSubject, Generated, GeneratedCall

#: A library's loop: a prompt, the number of tokens, and a sampler that is asked for each of them.
Loop = Callable[[Any, tuple[int, ...], int, Callable[[Any], int]], None]


def sound(step: Any, prompt: tuple[int, ...], num_tokens: int, sample: Callable[[Any], int]) -> None:
    cache, fed = None, list(prompt)
    for _ in range(num_tokens):
        logits, cache = step(np.array(fed), cache)
        fed = [sample(logits[-1])]


def feeds_twice(step: Any, prompt: tuple[int, ...], num_tokens: int, sample: Callable[[Any], int]) -> None:
    """Feed the last token of the prompt again with the first that is generated."""
    cache, fed = None, list(prompt)
    for number in range(num_tokens):
        logits, cache = step(np.array(fed), cache)
        fed = [sample(logits[-1])]
        fed = [prompt[-1], *fed] if not number else fed


def drops_cache(step: Any, prompt: tuple[int, ...], num_tokens: int, sample: Callable[[Any], int]) -> None:
    fed = list(prompt)
    for _ in range(num_tokens):
        logits, _ = step(np.array(fed), None)
        fed = [sample(logits[-1])]


def stops_early(step: Any, prompt: tuple[int, ...], num_tokens: int, sample: Callable[[Any], int]) -> None:
    sound(step, prompt, num_tokens - 1, sample)


class Library(CallableSubject):
    """Two functions, and a loop around them."""

    def __init__(self, loop: Loop, dtype: str = "float32", refused: tuple[Method, ...] = ()) -> None:
        super().__init__(*sums(dtype), cast=sums)
        self.loop, self.refused = loop, refused

    @property
    def info(self) -> Any:
        info = super().info
        more = (Ability.GENERATE, Ability.GENERATE_CHUNKED)
        return dataclasses.replace(info, abilities=(*info.abilities, *more))

    def _cast(self, dtype: torch.dtype) -> "Library":
        return Library(self.loop, "float64", self.refused)

    def _generate(self, operation: Generate, make_tap: Any) -> Generated:
        if operation.method in self.refused:
            raise RefusedError(f"no {operation.method.value} here")
        (prompt,) = operation.prompts
        state: dict[str, Any] = {"prefix": prompt, "num_new": len(prompt)}
        forced, calls = iter([token for ((_, token),) in operation.steps]), list[GeneratedCall]()

        def sample(logits: Any) -> int:
            num_new = state["num_new"]
            row = torch.from_numpy(np.array(logits))[None, None]
            calls.append(
                GeneratedCall(
                    tap=make_tap(),
                    num_new=num_new,
                    offset=num_new - 1,
                    prefixes=((state["prefix"],),),
                    logits=row,
                )
            )
            token = next(forced)
            state.update(prefix=(*state["prefix"], token), num_new=1)
            return token

        self.loop(self._step, prompt, len(operation.steps), sample)
        return Generated(calls=tuple(calls))


def verdict(report: Report, name: str) -> Verdict:
    (found,) = (s for s in report.scenarios if s.name == name)
    return found.verdict


def test_a_library_that_generates_as_it_should_passes():
    report = audit(Library(sound), ["generate greedy", "generate chunked prefill"])
    assert verdict(report, "generate greedy").passes, report
    assert verdict(report, "generate chunked prefill").passes
    assert report.subject.vocab_size == VOCAB


@pytest.mark.parametrize("loop", [feeds_twice, drops_cache])
def test_a_loop_that_is_wrong_is_found(loop: Loop):
    assert verdict(audit(Library(loop), ["generate greedy"]), "generate greedy") is Verdict.DIVERGED


def test_a_loop_that_gives_too_few_rows_is_no_match():
    report = audit(Library(stops_early), ["generate greedy"])
    assert not report.verdict.passes
    assert "generate() gave no row after" in str(report)


def test_a_method_that_a_library_lacks_is_not_checked_and_the_greedy_one_must_be():
    report = audit(Library(sound, refused=(Method.CHUNKED_PREFILL,)), ["generate chunked prefill"])
    (found,) = (s for s in report.scenarios if s.name == "generate chunked prefill")
    assert found.verdict is Verdict.NOT_CHECKED
    assert found.reason == "generate was refused: no chunked prefill here"
    report = audit(Library(sound, refused=(Method.GREEDY,)), ["generate greedy"])
    assert verdict(report, "generate greedy") is Verdict.INCONCLUSIVE
