"""The command ``kvproof generate``."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import click

from kvproof.cli.audit import read_prompt
from kvproof.cli.guard import guard
from kvproof.cli.options import EXIT_INTERRUPTED, FILE, SEED, Finished, Loading, loading_options
from kvproof.cli.outputs import complain, make_folder, print_text
from kvproof.cli.progress import show_progress
from kvproof.errors import KvproofError, UsageError

if TYPE_CHECKING:
    from kvproof._generation.requests import Origin, Request
    from kvproof.contract.ledger import Run
    from kvproof.policies import Policy, Stops
    from kvproof.subjects import Subject

#: The options that a sampling policy takes and greedy does not.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed")


#: How many prompts run at once by default.
_BATCH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """What is generated and how, as it was typed; how the model is loaded stands in `Loading`."""

    prompt: str | None
    prompt_file: Path | None
    ids: str | None
    prompts: Path | None
    batch: int | None
    raw: bool
    kind: str
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    seed: int | None
    max_tokens: int
    stop_texts: tuple[str, ...]
    stop_ids: tuple[int, ...]
    ignore_eos: bool
    ledger: Path | None
    full_logits: bool
    margins: bool
    path: "Literal['cached', 'uncached']"
    compare: bool
    quiet: bool


@click.command()
@click.argument("target", required=False)
@click.option("--prompt", metavar="TEXT", help="Prompt text, for the model's tokenizer and chat template.")
@click.option("--prompt-file", type=FILE, help="Read the prompt from a UTF-8 file.")
@click.option("--ids", metavar="IDS", help="Prompt as token ids, such as 1,2,3.")
@click.option(
    "--prompts", type=FILE, help="File with one prompt a line; in a .jsonl file, a JSON string or list of ids."
)
@click.option("--batch", type=int, help="With --prompts: number of prompts to run at once (default 8).")
@click.option("--raw", is_flag=True, help="Do not apply the chat template.")
@click.option("--policy", "kind", type=click.Choice(["greedy", "sample"]), default="greedy", show_default=True)
@click.option("--temperature", type=float, help="Temperature of sampling (default 1).")
@click.option("--top-k", type=int, help="Sample only from the K largest logits.")
@click.option("--top-p", type=float, help="Sample only from the most likely tokens up to this total probability.")
@click.option("--min-p", type=float, help="Drop tokens less likely than this fraction of the most likely one.")
@click.option(
    "--typical-p", type=float, help="Sample only from the most typical tokens up to this total probability."
)
@click.option("--repetition-penalty", type=float, help="Make tokens that already occurred less likely.")
@click.option("--seed", type=int, help="Random seed (default 0); prompt n uses seed + n.")
@click.option("--max-tokens", type=int, default=128, show_default=True)
@click.option("--stop", "stop_texts", multiple=True, metavar="TEXT", help="Stop at this text. May be repeated.")
@click.option("--stop-id", "stop_ids", type=int, multiple=True, help="Stop at this token id. May be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Continue past the model's own end tokens.")
@click.option(
    "--ledger",
    type=click.Path(path_type=Path),
    help="Record to write: a file, or with --prompts a folder.",
)
@click.option("--full-logits", is_flag=True, help="Also write all logits, as safetensors, beside the ledger.")
@click.option("--no-margins", "margins", flag_value=False, default=True, help="Compute one path only: faster.")
@click.option("--path", type=click.Choice(["cached", "uncached"]), default="cached", show_default=True)
@click.option("--compare", is_flag=True, help="Run both paths; say where and why their texts differ.")
@loading_options
@click.option("--weights-seed", type=SEED, default=0, help="Random seed of a random model's weights.")
@click.option("--quiet", is_flag=True, help="Print only the text.")
def generate(target: str | None, loading: Loading, weights_seed: int, **given: Any) -> None:
    """Generate from TARGET, which is what `kvproof audit` takes, and keep a record that can be replayed.

    Tokens appear as they come. Each step computes its row both ways, so that the record says whether rounding
    could have changed its choice; --no-margins leaves that out. Ctrl-C stops it; the record keeps what was done
    and says so. Exits with 0; with --compare, with the verdict on where the texts differ.
    """
    if target is None and loading.config is None:
        raise click.UsageError("Missing argument 'TARGET' (or --config FILE).")
    options = GenerateOptions(**given)
    policies = _policies(options)
    prompts = list(_prompts(options))
    if options.full_logits and options.ledger is None:
        raise UsageError("--full-logits writes rows beside a ledger: add --ledger")
    if options.batch is not None and options.batch < 1:
        raise UsageError(f"batch must be at least 1, not {options.batch}")
    if options.batch is not None and options.prompts is None:
        raise UsageError("--batch is the number of prompts to run at once: add --prompts, or leave it out")
    guard((target,), trusts_code=loading.trust_remote_code, timeout_s=loading.timeout_s)
    from kvproof.contract.ledger import Source
    from kvproof.subjects._targets import load_target

    with show_progress(options.quiet) as progress, _threads_for(target):
        progress.stage(f"loading {target or loading.config}")
        subject = load_target(target, loading.options(weights_seed))
    source = Source(
        target=target,
        config=None if loading.config is None else str(loading.config),
        attention=cast("Literal['eager', 'sdpa']", loading.attention),
        device=loading.device,
        trust_remote_code=loading.trust_remote_code,
    )
    with _threads_for(target):
        raise Finished(_run(subject, prompts, policies, source, options))


def _run(
    subject: "Subject",
    prompts: "list[str | list[int]]",
    policy_of: "Callable[[int], Policy]",
    source: Any,
    options: GenerateOptions,
) -> int:
    from kvproof._generation.requests import Origin, check_request

    chat = subject.chats and not options.raw
    stops = _stops(subject, options)
    entries: list[tuple[tuple[int, ...], Origin]] = []
    for prompt in prompts:
        text = prompt if isinstance(prompt, str) else None
        ids = subject.encode(prompt, chat=chat) if isinstance(prompt, str) else tuple(prompt)
        entries.append((ids, Origin(source=source, prompt_text=text, chat=chat and text is not None)))
    for number, (ids, _) in enumerate(entries):
        try:
            check_request(subject, ids, policy_of(number), stops)
        except KvproofError as error:
            where = f"prompt {number}: " if len(entries) > 1 else ""
            raise UsageError(f"{where}{error}") from error
    if options.compare:
        return _compare_paths(subject, entries, policy_of, stops, options)
    return _run_requests(subject, entries, policy_of, stops, options)


def _run_requests(
    subject: "Subject",
    entries: "list[tuple[tuple[int, ...], Origin]]",
    policy_of: "Callable[[int], Policy]",
    stops: "Stops",
    options: GenerateOptions,
) -> int:
    """Run all requests; one alone is shown as it comes, several each at its end."""
    from kvproof._generation.requests import Request, serve

    several = options.prompts is not None
    ledger = options.ledger
    if several and ledger is not None:
        make_folder(ledger)
    numbers: dict[int, int] = {}

    def requests() -> "Iterator[Request]":
        for number, (ids, origin) in enumerate(entries):
            file = ledger / f"{number:04}.jsonl" if several and ledger is not None else ledger
            request = Request(
                subject,
                ids,
                policy_of(number),
                stops,
                options.path,
                margins=options.margins,
                origin=origin,
                file=file,
                full_logits=options.full_logits,
            )
            numbers[id(request)] = number
            yield request

    stream, ended, start = _Stream(), list[Request](), time.perf_counter()

    def at_end(request: Request) -> None:
        ended.append(request)
        if several:
            print_text(f"[{numbers[id(request)]}] {shown_text(request)}\n")

    status = 0
    try:
        serve(
            requests(),
            batch=options.batch or _BATCH,
            on_step=(lambda r: None) if several else stream,
            on_end=at_end,
        )
    except KeyboardInterrupt:
        complain("interrupted; the record holds what was done so far, marked")
        status = EXIT_INTERRUPTED
    took_s = time.perf_counter() - start
    if not several and ended:
        stream.finish(ended[0])
    if not options.quiet:
        click.echo(_summary([request.run() for request in ended], took_s), err=True)
    return status


def _compare_paths(
    subject: "Subject",
    entries: "list[tuple[tuple[int, ...], Origin]]",
    policy_of: "Callable[[int], Policy]",
    stops: "Stops",
    options: GenerateOptions,
) -> int:
    from kvproof._generation.comparing import compare

    if len(entries) > 1 or not options.margins or options.path != "cached":
        raise UsageError("--compare takes one prompt, and neither --no-margins nor --path: it runs both paths")
    (ids, origin), stream = entries[0], _Stream()
    result = compare(
        subject,
        ids,
        policy_of(0),
        stops,
        origin=origin,
        file=options.ledger,
        full_logits=options.full_logits,
        on_step=stream,
    )
    print_text("\n")
    if result.step is not None:
        other = result.uncached.end
        print_text(f"uncached: {show_text(other.text or other.tokens) if other else ''}\n")
    print_text(f"{result.sentence}\n")
    return result.verdict.exit_status


class _Stream:
    """Prints a request's text as it comes: what later tokens can still change is held back."""

    def __init__(self) -> None:
        self._printed = 0

    def __call__(self, request: "Request") -> None:
        """Print what the newest step adds."""
        if request.end is not None and request.end.text is not None:
            self.finish(request, newline=False)
            return
        text = request.text()
        if text is not None:
            self._print(settled(text, request.stops.stop_texts))
        elif request.steps[self._printed :]:
            print_text(f"{request.steps[-1].chosen_token} ")
            self._printed += 1

    def finish(self, request: "Request", *, newline: bool = True) -> None:
        """Print the rest of an ended request."""
        if request.end is not None and request.end.text is not None:
            self._print(request.end.text)
        if newline:
            print_text("\n")

    def _print(self, text: str) -> None:
        print_text(show_text(text[self._printed :]))
        self._printed = max(self._printed, len(text))


def settled(text: str, stop_texts: tuple[str, ...]) -> str:
    """Return the part of a growing text that stays: no half character, and no start of a stop text."""
    text = text.rstrip("\ufffd")
    held = (n for stop in stop_texts for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n]))
    return text[: len(text) - max(held, default=0)]


def shown_text(request: "Request") -> str:
    """Return an ended request's text, or its tokens where there is no tokenizer, safe to print."""
    end = request.end
    assert end is not None
    if end.text is not None:
        return show_text(end.text)
    return " ".join(step.chosen_token for step in request.steps)


def show_text(text: str) -> str:
    """Return text that a model made, safe to print; its lines stay lines."""
    from kvproof.contract.text import printable

    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))


def _summary(runs: "list[Run]", took_s: float) -> str:
    num_tokens = sum(len(run.steps) for run in runs)
    reasons = Counter(run.end.stop_reason or "the context" for run in runs if run.end)
    margins = Counter(step.margin_verdict for run in runs for step in run.steps if step.margin_verdict)
    text = f"{num_tokens} tokens in {took_s:.2f} s, {num_tokens / max(took_s, 1e-9):.1f} a second; "
    text += "stopped by " + ", ".join(
        f"{reason}" + (f" ({number})" if len(runs) > 1 else "") for reason, number in reasons.items()
    )
    if margins:
        text += "; choices: " + ", ".join(f"{number} {verdict}" for verdict, number in margins.items())
    return text


def _policies(options: GenerateOptions) -> "Callable[[int], Policy]":
    """Return what makes each request's policy; raise `UsageError` for options that do not go together."""
    from kvproof.policies import Greedy, Sample

    penalty = options.repetition_penalty
    values = {name: getattr(options, name) for name in _SAMPLING}
    given = {name: value for name, value in values.items() if value is not None}
    if options.kind == "greedy":
        if given:
            option = f"--{next(iter(given)).replace('_', '-')}"
            raise UsageError(f"{option} does not go with greedy, which draws nothing: add --policy sample")
        greedy = Greedy(repetition_penalty=penalty)
        return lambda number: greedy
    seed = given.pop("seed", 0)

    def policy_of(number: int) -> Sample:
        return Sample(**given, repetition_penalty=penalty, seed=seed + number)

    policy_of(0)
    return policy_of


def _prompts(options: GenerateOptions) -> "Iterator[str | list[int]]":
    """Yield each prompt, a text or ids; raise `UsageError` unless exactly one option gives them."""
    given = (options.prompt, options.prompt_file, options.ids, options.prompts)
    if sum(value is not None for value in given) != 1:
        raise UsageError("give one of --prompt, --prompt-file, --ids and --prompts")
    if options.ids is not None:
        words = options.ids.replace(",", " ").split()
        try:
            yield [int(word) for word in words]
        except ValueError as error:
            raise UsageError(f"--ids takes integers such as 1,2,3, not {options.ids[:60]!r}") from error
        return
    if options.prompts is None:
        yield read_prompt(options.prompt, options.prompt_file) or ""
        return
    lines = (read_prompt(None, options.prompts) or "").splitlines()
    if not lines:
        raise UsageError(f"{options.prompts} holds no prompt")
    for number, line in enumerate(lines, start=1):
        yield _prompt_line(line, f"{options.prompts} line {number}", options.prompts.suffix == ".jsonl")


def _prompt_line(line: str, where: str, as_json: bool) -> str | list[int]:
    if not as_json:
        if not line.strip():
            raise UsageError(f"{where} is empty: a prompt holds at least one token")
        return line
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    if isinstance(value, str) or (isinstance(value, list) and all(type(entry) is int for entry in value)):
        return value
    raise UsageError(f"{where} is neither a text nor a list of ids: {line[:60]}")


def _stops(subject: "Subject", options: GenerateOptions) -> "Stops":
    from kvproof.policies import Stops

    return Stops(
        eos_id=None if options.ignore_eos else subject.eos_ids or None,
        stop_ids=options.stop_ids,
        stop_texts=options.stop_texts,
        max_tokens=options.max_tokens,
    )


def _threads_for(target: str | None) -> AbstractContextManager[None]:
    """Run with one thread where more only wait for each other: on tensors as small as a random model's."""
    from kvproof._system.machine import use_one_thread
    from kvproof.subjects._registry import runs_on_one_thread

    return use_one_thread() if runs_on_one_thread(target) else nullcontext()
