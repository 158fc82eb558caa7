"""The command ``kvproof generate``, and what ``kvproof replay`` needs to have a record's model again."""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvproof.cli.audit import ATTENTIONS, DTYPES, EXIT_INTERRUPTED, read_prompt
from kvproof.cli.outputs import complain, made, print_text
from kvproof.cli.progress import shown_progress
from kvproof.errors import KvproofError, LedgerError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from kvproof._generation.replay import ReplayResult
    from kvproof._generation.requests import Origin, Request
    from kvproof.contract.ledger import Header, LedgerFile, Run
    from kvproof.policies import Policy, Stops
    from kvproof.subjects import Subject

_FILE = click.Path(path_type=Path, dir_okay=False)
#: The options that a sampling policy takes and greedy does not.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed")


@click.command()
@click.argument("target", required=False)
@click.option("--prompt", metavar="TEXT", help="A text, through the model's tokenizer and chat template.")
@click.option("--prompt-file", type=_FILE, help="The same, from a UTF-8 file.")
@click.option("--ids", metavar="IDS", help="Token ids in place of a text, such as 1,2,3.")
@click.option(
    "--prompts", type=_FILE, help="A prompt a line; in a .jsonl file each line is a JSON text or list of ids."
)
@click.option("--batch", type=int, default=8, show_default=True, help="Of --prompts, so many run at a time.")
@click.option("--raw", is_flag=True, help="Leave the chat template out.")
@click.option("--policy", "kind", type=click.Choice(["greedy", "sample"]), default="greedy", show_default=True)
@click.option("--temperature", type=float, help="Of a sampling policy; 1 where it is not given.")
@click.option("--top-k", type=int, help="Keep the so many largest logits.")
@click.option("--top-p", type=float, help="Keep the most likely tokens up to this probability together.")
@click.option("--min-p", type=float, help="Drop what is less likely than this part of the most likely token.")
@click.option("--typical-p", type=float, help="Keep the most typical tokens up to this probability together.")
@click.option("--repetition-penalty", type=float, help="Weaken tokens that were there before.")
@click.option("--seed", type=int, help="Of the first request's generator, 0 by default; each next adds 1.")
@click.option("--max-tokens", type=int, default=128, show_default=True)
@click.option("--stop", "stop_texts", multiple=True, metavar="TEXT", help="End at this text. May be repeated.")
@click.option("--stop-id", "stop_ids", type=int, multiple=True, help="End at this token. May be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's own end tokens.")
@click.option("--ledger", type=click.Path(path_type=Path), help="Write the record here; of --prompts, a folder.")
@click.option("--full-logits", is_flag=True, help="Write all rows beside the ledger, as safetensors.")
@click.option("--no-margins", "margins", flag_value=False, default=True, help="Compute one path alone: faster.")
@click.option("--path", type=click.Choice(["cached", "uncached"]), default="cached", show_default=True)
@click.option("--compare", is_flag=True, help="Run both paths side by side; say where the texts part, and why.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Declared dtype. Default: float32, or a factory's own.")
@click.option("--attention", type=click.Choice(ATTENTIONS), default="eager", show_default=True)
@click.option("--device", default="cpu", show_default=True, help="Where the model runs, such as cuda or cuda:1.")
@click.option("--config", type=_FILE, help="Instead of TARGET: a random model of exactly this config.json.")
@click.option("--weights-seed", type=click.IntRange(min=0), default=0, help="Of a random model's weights.")
@click.option("--download", "network", is_flag=True, help="Fetch org/name from the hub if it is not cached.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
@click.option("--quiet", is_flag=True, help="Print the text alone.")
def generate(target: str | None, config: Path | None, **options: Any) -> None:
    """Generate from TARGET, which is what `kvproof audit` takes, and keep a record that can be replayed.

    Tokens appear as they come. Each step computes its row both ways, so that the record says whether rounding
    could have changed its choice; --no-margins leaves that out. Ctrl-C ends with what is there, marked. Exits
    with 0; with --compare, with the verdict on where the texts part.
    """
    if target is None and config is None:
        raise click.UsageError("Missing argument 'TARGET' (or --config FILE).")
    policies = _policies(options)
    prompts = list(_prompts(options))
    if options["full_logits"] and options["ledger"] is None:
        raise UsageError("--full-logits stand beside a ledger: add --ledger")
    if options["batch"] < 1:
        raise UsageError(f"batch must be at least 1, not {options['batch']}")
    from kvproof.contract.ledger import Source
    from kvproof.subjects._targets import LoadOptions, load_target

    loading = {name: options[name] for name in ("dtype", "attention", "device", "network", "trust_remote_code")}
    with shown_progress(options["quiet"]) as progress, _threads_for(target):
        progress.stage(f"loading {target or config}")
        subject = load_target(target, LoadOptions(seed=options["weights_seed"], config=config, **loading))
    source = Source(
        target=target,
        config=None if config is None else str(config),
        attention=options["attention"],
        device=options["device"],
        trust_remote_code=options["trust_remote_code"],
    )
    with _threads_for(target):
        sys.exit(_run(subject, prompts, policies, source, options))


def _run(
    subject: "Subject",
    prompts: "list[str | list[int]]",
    policy_of: "Callable[[int], Policy]",
    source: Any,
    options: dict[str, Any],
) -> int:
    from kvproof._generation.requests import Origin, check_request

    chat = subject.chats and not options["raw"]
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
    if options["compare"]:
        return _compared(subject, entries, policy_of, stops, options)
    return _served(subject, entries, policy_of, stops, options)


def _served(
    subject: "Subject",
    entries: "list[tuple[tuple[int, ...], Origin]]",
    policy_of: "Callable[[int], Policy]",
    stops: "Stops",
    options: dict[str, Any],
) -> int:
    """Run all requests; one alone is shown as it comes, several each at its end."""
    from kvproof._generation.requests import Request, serve

    several = options["prompts"] is not None
    ledger = options["ledger"]
    if several and ledger is not None:
        made(ledger)
    numbers: dict[int, int] = {}

    def requests() -> "Iterator[Request]":
        for number, (ids, origin) in enumerate(entries):
            file = ledger / f"{number:04}.jsonl" if several and ledger is not None else ledger
            request = Request(
                subject,
                ids,
                policy_of(number),
                stops,
                options["path"],
                margins=options["margins"],
                origin=origin,
                file=file,
                full_logits=options["full_logits"],
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
        serve(requests(), batch=options["batch"], on_step=(lambda r: None) if several else stream, on_end=at_end)
    except KeyboardInterrupt:
        complain("interrupted; the record holds what was done so far, marked")
        status = EXIT_INTERRUPTED
    took_s = time.perf_counter() - start
    if not several and ended:
        stream.finish(ended[0])
    if not options["quiet"]:
        click.echo(_summary([request.run() for request in ended], took_s), err=True)
    return status


def _compared(
    subject: "Subject",
    entries: "list[tuple[tuple[int, ...], Origin]]",
    policy_of: "Callable[[int], Policy]",
    stops: "Stops",
    options: dict[str, Any],
) -> int:
    from kvproof._generation.comparing import compare

    if len(entries) > 1 or not options["margins"] or options["path"] != "cached":
        raise UsageError("--compare takes one prompt, and neither --no-margins nor --path: it runs both paths")
    (ids, origin), stream = entries[0], _Stream()
    result = compare(
        subject,
        ids,
        policy_of(0),
        stops,
        origin=origin,
        file=options["ledger"],
        full_logits=options["full_logits"],
        on_step=stream,
    )
    print_text("\n")
    if result.step is not None:
        other = result.uncached.end
        print_text(f"uncached: {_shown(other.text or other.tokens) if other else ''}\n")
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
        print_text(_shown(text[self._printed :]))
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
        return _shown(end.text)
    return " ".join(step.chosen_token for step in request.steps)


def _shown(text: str) -> str:
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


def _policies(options: dict[str, Any]) -> "Callable[[int], Policy]":
    """Return what makes each request's policy; raise `UsageError` for options that do not go together."""
    from kvproof.policies import Greedy, Sample

    penalty = options["repetition_penalty"]
    given = {name: options[name] for name in _SAMPLING if options[name] is not None}
    if options["kind"] == "greedy":
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


def _prompts(options: dict[str, Any]) -> "Iterator[str | list[int]]":
    """Yield each prompt, a text or ids; raise `UsageError` unless exactly one option gives them."""
    given = [name for name in ("prompt", "prompt_file", "ids", "prompts") if options[name] is not None]
    if len(given) != 1:
        raise UsageError("give one of --prompt, --prompt-file, --ids and --prompts")
    if options["ids"] is not None:
        words = options["ids"].replace(",", " ").split()
        try:
            yield [int(word) for word in words]
        except ValueError as error:
            raise UsageError(f"--ids takes integers such as 1,2,3, not {options['ids'][:60]!r}") from error
        return
    if options["prompts"] is None:
        yield read_prompt(options["prompt"], options["prompt_file"]) or ""
        return
    lines = (read_prompt(None, options["prompts"]) or "").splitlines()
    if not lines:
        raise UsageError(f"{options['prompts']} holds no prompt")
    for number, line in enumerate(lines, start=1):
        yield _prompt_line(line, f"{options['prompts']} line {number}", options["prompts"].suffix == ".jsonl")


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


def _stops(subject: "Subject", options: dict[str, Any]) -> "Stops":
    from kvproof.policies import Stops

    return Stops(
        eos_id=None if options["ignore_eos"] else subject.eos_ids or None,
        stop_ids=options["stop_ids"],
        stop_texts=options["stop_texts"],
        max_tokens=options["max_tokens"],
    )


def _threads_for(target: str | None) -> AbstractContextManager[None]:
    """Run with one thread where more only wait for each other: on tensors as small as a random model's."""
    from kvproof._system.machine import one_thread
    from kvproof.subjects._registry import runs_on_one_thread

    return one_thread() if runs_on_one_thread(target) else nullcontext()


def recorded_subject(
    header: "Header", target: str | None, *, network: bool, trust_remote_code: bool
) -> "Subject":
    """Load the model of a record from where it was loaded, or from ``target``.

    What a record says is data: it is never let run code, neither a factory's nor a model's own, nor ask the
    network. Raises `LedgerError` for one that would have to, and `UsageError` for a model that cannot be had.
    """
    from kvproof.subjects._registry import runs_named_code
    from kvproof.subjects._targets import LoadOptions, fit_options, load_target

    source = header.source
    if source is None and target is None:
        raise LedgerError("the record does not say where its model was loaded from: give --target")
    if target is None and source is not None and source.target is not None:
        if runs_named_code(source.target):
            raise LedgerError(f"its model is made by the function {source.target!r}: to run it, give --target")
        target = source.target
    config = None if target is not None or source is None or source.config is None else Path(source.config)
    options = LoadOptions(
        dtype=header.dtype,
        seed=header.subject_seed or 0,
        attention="eager" if source is None else source.attention,
        device="cpu" if source is None else source.device,
        trust_remote_code=trust_remote_code,
        network=network,
        config=config,
    )
    return load_target(target, fit_options(target, options))


def read_ledger(file: Path) -> "LedgerFile":
    """Return a ledger; raise `LedgerError` for a file that cannot be read or is none."""
    from kvproof.contract.ledger import parse_ledger

    try:
        return parse_ledger(file.read_text("utf-8"), str(file))
    except FileNotFoundError as error:
        raise LedgerError(f"no such ledger: {file}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise LedgerError(f"cannot read {file}: {error}") from error


def read_rows(ledger: Path, header: "Header") -> "Tensor | None":
    """Return the rows (step, vocab) that were kept beside a ledger, or None where none were.

    Raises `LedgerError` where the header says that they were, and they cannot be read.
    """
    if not header.full_logits:
        return None
    import safetensors.torch

    from kvproof._generation.requests import rows_file

    file = rows_file(ledger)
    try:
        rows: Tensor = safetensors.torch.load_file(file)["logits"]
        return rows
    except FileNotFoundError as error:
        raise LedgerError(f"{ledger} has its rows beside it, and there is no {file}") from error
    except Exception as error:  # the library has errors of its own for a damaged file
        raise LedgerError(f"cannot read the rows of {ledger} in {file}: {error}") from error


def made_elsewhere(result: "ReplayResult") -> str:
    """Return what is said of a record that was made by other versions or on another machine."""
    return f" (made elsewhere: {'; '.join(result.elsewhere)})" if result.elsewhere else ""


def replayed_text(ledger: Path, run: "Run", result: "ReplayResult") -> str:
    """Return what is said of a record that holds."""
    from kvproof.contract.text import printable

    end = run.end
    said = "" if end is None else printable(end.tokens) if end.text is None else _shown(end.text)
    bits = "to the last bit" if result.bit_identical else "within the tolerance"
    marked = ", which was interrupted" if run.end and run.end.stop_reason == "interrupted" else ""
    bits += made_elsewhere(result)
    return f"{ledger}{marked}: all {result.num_lines} lines replay through both paths, logits {bits}.\n{said}\n"
