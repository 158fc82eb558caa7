"""Greedy generation against transformers' own ``generate()``, token for token: ``make bench-field``.

For tiny random models of many types in float32, and on demand for any other target. Where the tokens part, an
audit of the library's ``generate()`` with our choices forced on it says whether rounding explains it, and if not,
what it found. Prints a table in Markdown; the exit status is 1 if a difference has no explanation.
"""

import argparse
import sys
from dataclasses import dataclass

import torch
from transformers import GenerationConfig

import kvproof
from kvproof.errors import KvproofError
from kvproof.scenarios import Method, generation
from kvproof.subjects._adapter import LoadOptions
from kvproof.subjects._targets import load_target
from kvproof.subjects._transformers import TransformersSubject, known_types, quiet

PROMPT_LEN = 8


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one target."""

    target: str
    num_equal: int
    explained: bool
    said: str


def library_tokens(subject: TransformersSubject, prompt: list[int], num_tokens: int) -> list[int]:
    """Return what the library's ``generate()`` appends greedily, end tokens left out of account."""
    model = subject.model
    ids = torch.tensor([prompt], device=model.device)
    mask = {"attention_mask": torch.ones_like(ids)} if subject.takes_mask else {}
    settings = GenerationConfig(
        max_new_tokens=num_tokens, do_sample=False, pad_token_id=0, use_cache=True, disable_compile=True
    )
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with quiet(), torch.no_grad():
            return model.generate(ids, generation_config=settings, **mask)[0, len(prompt) :].tolist()
    finally:
        model.generation_config = own


def compared(target: str, num_tokens: int) -> Outcome:
    """Generate both ways and explain what differs."""
    subject = load_target(target, LoadOptions())
    if kvproof.scenarios.Ability.GENERATE not in subject.info.abilities:
        raise KvproofError(
            f"no generate() to hold it to: {subject.lacks.get(kvproof.scenarios.Ability.GENERATE)}"
        )
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(1, subject.info.vocab_size, (PROMPT_LEN,), generator=generator).tolist()
    run = kvproof.generate(subject, prompt, stops=kvproof.Stops(max_tokens=num_tokens), margins=False)
    theirs, ours = library_tokens(subject, prompt, num_tokens), list(run.returned)
    num_equal = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(theirs))
    if theirs == ours:
        return Outcome(target=target, num_equal=num_equal, explained=True, said="the same")
    forced = generation(Method.GREEDY, [prompt], [ours[: num_equal + 1]])
    report = kvproof.audit(subject, [forced], all_values=False, certificate=False)
    step = run.steps[num_equal]
    said = f"parts at step {num_equal}, margin {step.margin:.2g}: {report.verdict}; {report.summary}"
    explained = report.verdict.passes or report.verdict is kvproof.Verdict.DIVERGED
    return Outcome(target=target, num_equal=num_equal, explained=explained, said=said)


def main() -> int:
    """Print the table; return 1 if a difference has no explanation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", help="default: random:TYPE of every causal type")
    parser.add_argument("--tokens", type=int, default=24, help="tokens to return (default 24)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    outcomes, refused = [], []
    print(f"| target | equal of {options.tokens} tokens | what differs |\n|---|---|---|")
    for target in options.targets or [f"random:{kind}" for kind in known_types()]:
        try:
            outcome = compared(target, options.tokens)
        except KvproofError as error:
            refused.append(target)
            print(f"| {target} | | not compared: {str(error).splitlines()[0]} |", flush=True)
            continue
        except Exception as error:  # the library's own loop may raise anything
            refused.append(target)
            print(f"| {target} | | the library raised {type(error).__name__} |", flush=True)
            continue
        outcomes.append(outcome)
        print(f"| {outcome.target} | {outcome.num_equal} | {outcome.said} |", flush=True)
    same = sum(outcome.said == "the same" for outcome in outcomes)
    print(f"\n{same} of {len(outcomes)} generate the same tokens; {len(refused)} were not compared.")
    return int(not all(outcome.explained for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
