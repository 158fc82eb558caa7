"""The library's own ``generate()``, with every choice forced and every row of logits read where it is computed.

The output of ``generate()`` is rounded to float32 and indexes rows only by step. Therefore kvproof observes each
forward, and pairs each row with the ids that the library itself reports for it: those that it passes to its
logits processors.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final

import torch
import torch._dynamo
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from kvproof._numerics.taps import Tap
from kvproof.scenarios import Claim, Generate, Method
from kvproof.subjects._base import Generated, GeneratedCall
from kvproof.subjects._transformers.quiet import quiet

#: The score of tokens that must not be chosen. Minus infinity would keep prompt lookup from proposing them.
_UNWANTED: Final = -1e4

#: The number of tokens that prompt lookup proposes, and the number in one chunk of a prompt.
_NUM_PROPOSED, _CHUNK = 3, 4

_OPTIONS: Final[dict[Method, dict[str, Any]]] = {
    Method.GREEDY: {},
    Method.BEAM: {},
    Method.PROMPT_LOOKUP: {
        "prompt_lookup_num_tokens": _NUM_PROPOSED,
        "max_matching_ngram_size": 2,
        "eos_token_id": -1,  # no end token; versions before 5.0 do not accept None here
    },
    Method.CHUNKED_PREFILL: {"prefill_chunk_size": _CHUNK},
    Method.STATIC_CACHE: {"cache_implementation": "static"},
}

#: Names of the cache argument with which the library can prefill a prompt in chunks.
CHUNKED_ARGUMENTS: Final = ("cache", "past_key_values")

#: Types whose ``generate()`` does not take its rows from the plain forward, and why.
_OTHER_FUNCTION: Final = {"xlnet": "its generate() appends a dummy token and takes the row of its query stream"}

#: Attributes that ``generate()`` reads from a model, or sets on it for its next run.
_NOTED: Final = ("generation_config", "_previous_max_cache_length")

#: Runs one forward of the model: ``run(call, tap, arguments)``.
RunForward = Callable[[Callable[..., Any], Tap, dict[str, Any]], Any]


def why_not(model: PreTrainedModel) -> str | None:
    """Return why the library's ``generate()`` cannot be compared with the plain forward, or None if it can."""
    if not model.can_generate():
        return "the library does not generate from it"
    if type(model).generate is not GenerationMixin.generate:
        return "its generate() is not the library's, and takes other arguments"
    return _OTHER_FUNCTION.get(str(model.config.model_type))


def generate(
    model: PreTrainedModel,
    operation: Generate,
    make_tap: Callable[[], Tap],
    run_forward: RunForward,
    *,
    takes_mask: bool,
) -> Generated:
    """Run the library's ``generate()`` once and return the result of each of its forwards.

    The model's own generation settings are not used, and the run leaves nothing on the model.
    """
    longest = max(map(len, operation.prompts))
    padding = [longest - len(prompt) for prompt in operation.prompts]
    device = model.device
    rows = zip(padding, operation.prompts, strict=True)
    ids = torch.tensor([[0] * num + list(prompt) for num, prompt in rows], device=device)
    mask = torch.tensor([[0] * num + [1] * (longest - num) for num in padding], device=device)
    num_beams = len(operation.steps[0]) if operation.method is Method.BEAM else 1
    watch = _Watch(operation, longest, padding * num_beams)
    settings = GenerationConfig(
        max_new_tokens=len(operation.steps),
        do_sample=False,
        num_beams=num_beams,
        pad_token_id=0,
        use_cache=True,
        disable_compile=True,
        **_OPTIONS[operation.method],
    )
    with _left_as_it_was(model), quiet(), _watched(model, watch, make_tap, run_forward):
        model.generation_config = GenerationConfig()
        model.generate(
            ids,
            generation_config=settings,
            logits_processor=LogitsProcessorList([watch]),
            **({"attention_mask": mask} if takes_mask else {}),
        )
    return watch.generated()


@dataclass(slots=True, kw_only=True)
class _Forward:
    """One forward, and which of its rows follow the forced tokens."""

    tap: Tap
    num_new: int
    logits: Tensor  #: (batch, new, vocab), or only those of the last new tokens
    end: int = 0  #: how many columns its last row follows; 0 if that is not known yet
    lengths: list[int] = field(default_factory=list)  #: how many columns each kept row follows


class _Watch(LogitsProcessor):  # type: ignore[misc]
    """Records each forward's logits and the ids that they follow, and returns scores that force each choice."""

    def __init__(self, operation: Generate, prompt_len: int, padding: list[int]) -> None:
        self.operation = operation
        self.prompt_len = prompt_len
        self.padding = padding
        self.counts: Counter[Claim] = Counter()
        self._wanted = operation.prefixes()
        self._forwards: list[_Forward] = []
        self._due: _Forward | None = None  #: the newest forward, until all of its rows are scored

    def saw(self, tap: Tap, num_new: int, logits: Tensor) -> None:
        """Store a forward's logits: (batch, new, vocab), or only those of its last tokens."""
        # A copy: the library writes into these when it scores them.
        self._due = _Forward(tap=tap, num_new=num_new, logits=logits.detach().clone())
        self._forwards.append(self._due)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record the row that follows ``input_ids``, and return scores that force the wanted choice."""
        length = input_ids.shape[1]
        step = length - self.prompt_len
        rows = zip(input_ids.tolist(), self.padding, strict=True)
        prefixes = tuple(tuple(row[padding:]) for row, padding in rows)
        past_end = step >= len(self._wanted)
        self._note(length, None if past_end else prefixes == self._wanted[step])
        if past_end:
            return scores
        forced = torch.full_like(scores, _UNWANTED)
        # The sum of a beam's scores is minus its rank, so the beams keep their order.
        for rank, (row, token) in enumerate(self.operation.steps[step]):
            forced[row, token] = row - rank
        return forced

    def _note(self, length: int, is_wanted: bool | None) -> None:
        """Record that the row after ``length`` columns is scored. If no forward is due, do nothing."""
        if self._due is None:
            return
        if not self._due.end:
            self._due.end = self._end_of(self._due, length)
        if is_wanted:
            self._due.lengths.append(length)
        elif is_wanted is not None:
            self.counts[Claim.REJECTED] += 1
        if length == self._due.end:
            if len(self._due.lengths) > 1:
                self.counts[Claim.ACCEPTED] += len(self._due.lengths) - 1
            self._due = None

    def _end_of(self, forward: _Forward, first_len: int) -> int:
        """Return how many columns a forward's last row follows, given the number for its first scored row."""
        if self.operation.method is not Method.PROMPT_LOOKUP:
            return first_len  # only the last row is scored
        # Every proposal is verified in one call, and scored in order.
        return forward.num_new if forward is self._forwards[0] else first_len + forward.num_new - 1

    def generated(self) -> Generated:
        """Return the record: a call for each forward that produced a row after the forced tokens."""
        calls = tuple(self._call(forward) for forward in self._forwards if forward.lengths)
        return Generated(calls=calls, counts=self.counts)

    def _call(self, forward: _Forward) -> GeneratedCall:
        places = [length - forward.end - 1 for length in forward.lengths]  # from the end
        return GeneratedCall(
            tap=forward.tap,
            num_new=forward.num_new,
            offset=forward.num_new + places[0],
            prefixes=tuple(self._wanted[length - self.prompt_len] for length in forward.lengths),
            logits=torch.stack([forward.logits[:, place] for place in places], dim=1),
        )


@contextmanager
def _watched(
    model: PreTrainedModel, watch: _Watch, make_tap: Callable[[], Tap], run_forward: RunForward
) -> Iterator[None]:
    """Run each forward of the model through ``run_forward``, and pass its logits to ``watch``."""
    forward = model.forward

    @wraps(forward)
    def watched(**arguments: Any) -> Any:
        tap = make_tap()
        output = run_forward(forward, tap, arguments)
        watch.saw(tap, arguments["input_ids"].shape[1], output.logits)
        return output

    model.forward = watched
    try:
        yield
    finally:
        del model.forward


@contextmanager
def _left_as_it_was(model: PreTrainedModel) -> Iterator[None]:
    """Restore what ``generate()`` sets on the model, and the compiler setting that chunked prompts change."""
    noted = {name: vars(model)[name] for name in _NOTED if name in vars(model)}
    compiler = torch._dynamo.config
    limit = compiler.cache_size_limit
    try:
        yield
    finally:
        compiler.cache_size_limit = limit
        for name in _NOTED:
            vars(model).pop(name, None)
        vars(model).update(noted)
