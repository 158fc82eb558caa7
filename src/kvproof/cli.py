"""The command line. Nothing heavy is imported before a command runs."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvproof._errors import KvproofError, OutputError, UsageError

if TYPE_CHECKING:
    from kvproof._ledger import Header
    from kvproof._report import Report
    from kvproof.reference import Checkpoint
    from kvproof.render.terminal import Look

#: Exit statuses that no verdict uses.
EXIT_USAGE, EXIT_REQUIRED, EXIT_INTERNAL, EXIT_OUTPUT, EXIT_INTERRUPTED = 2, 5, 70, 73, 130
#: What `--without` takes; the same as ``kvproof._milestone.SWITCHES``, which a test holds it to.
SWITCHES = ("wrong-position", "wrong-layer", "shape-assertions", "seed", "eos-stop", "context-stop")

DTYPES = ("float32", "bfloat16", "float16", "float64")

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="kvproof")
def cli() -> None:
    """Does a decoder's cached path compute the same logits as its uncached path?

    \b
    Exit status: 0 match or rounding; 1 diverged, or a gate that fails; 2 wrong usage; 3 inconclusive;
    4 vacuous; 5 a required scenario was not checked; 70 an error inside kvproof; 73 a result that could
    not be written; 130 interrupted.
    """


@cli.command()
@click.option("--checkpoint", type=_FILE, help="Load the weights from FILE instead of training them.")
@click.option("--save-checkpoint", type=_FILE, help="Write the weights to FILE (safetensors).")
@click.option(
    "--report",
    "report_dir",
    type=click.Path(path_type=Path),
    help="Write report.json, the generation ledgers and the checkpoint into this folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--quiet", is_flag=True, help="Print the verdict alone, and no progress.")
@click.option(
    "--without",
    multiple=True,
    type=click.Choice(SWITCHES),
    help="Switch one part off, to see the gate fail. May be repeated.",
)
def milestone(
    checkpoint: Path | None,
    save_checkpoint: Path | None,
    report_dir: Path | None,
    as_json: bool,
    quiet: bool,
    without: tuple[str, ...],
) -> None:
    """Run the reference system end to end.

    Recreates the trained checkpoint, compares the cached path with the uncached one at all 16 prefixes,
    plants both deliberate failures, generates with both policies, and holds the acceptance gate.
    """
    with _progress(quiet) as progress:
        weights = _load(checkpoint) if checkpoint else _train(progress)
        from kvproof._milestone import milestone as run

        source = str(checkpoint) if checkpoint else "trained"
        report = run(weights, source=source, without=without, on_stage=progress.stage)
    outputs: list[Callable[[], None]] = [lambda: _print_report(report, as_json=as_json, quiet=quiet)]
    if save_checkpoint is not None:
        outputs.append(lambda: _save(weights, save_checkpoint))
    if report_dir is not None:
        outputs.append(lambda: _write_report(report, weights, report_dir))
    sys.exit(_written(outputs, report.exit_status))


@cli.command()
@click.argument("target", required=False)
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True, help="Declared dtype.")
@click.option("--length", type=click.IntRange(min=8), default=28, show_default=True, help="Tokens a sequence.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of weights and tokens.")
@click.option("--attention", type=click.Choice(["eager", "sdpa"]), default="eager", show_default=True)
@click.option("--scenario", multiple=True, metavar="NAME", help="Run only this scenario. May be repeated.")
@click.option("--skip", multiple=True, metavar="NAME", help="Leave this scenario out. May be repeated.")
@click.option("--require", multiple=True, metavar="NAME", help="Fail with 5 unless this scenario was checked.")
@click.option("--list", "as_list", is_flag=True, help="List the scenarios and what each exposes.")
@click.option("--report", "report_file", type=_FILE, help="Write the report as JSON to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--quiet", is_flag=True, help="Print the verdict alone, and no progress.")
def audit(
    target: str | None,
    dtype: str,
    length: int,
    seed: int,
    attention: str,
    scenario: tuple[str, ...],
    skip: tuple[str, ...],
    require: tuple[str, ...],
    as_list: bool,
    report_file: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Compare the cached with the uncached path of TARGET in every scenario.

    TARGET is a folder with a transformers model (safetensors), or random:TYPE for a tiny random model of any
    causal type that transformers knows. Needs kvproof[transformers].
    """
    from kvproof.scenarios import catalogue, named

    if as_list:
        for entry in {s.name: s for s in catalogue(range(length), range(length))}.values():
            click.echo(f"{entry.name:20} {entry.exposes}")
        return
    if target is None:
        raise click.UsageError("Missing argument 'TARGET'.")
    from kvproof._audit import audit as run
    from kvproof._audit import random_sequences
    from kvproof._milestone import one_thread
    from kvproof.subjects._targets import load_target

    # More threads than one only wait for each other on tensors as small as a random model's.
    with _progress(quiet) as progress, one_thread() if target.startswith("random:") else nullcontext():
        progress.stage(f"loading {target}")
        subject = load_target(target, dtype=dtype, seed=seed, attention=attention)
        programs = catalogue(*random_sequences(subject, length, seed))
        chosen = named(programs, only=scenario, without=skip)
        report = run(subject, chosen, all_values=False, on_scenario=progress.stage)
    outputs: list[Callable[[], None]] = [lambda: _print_report(report, as_json=as_json, quiet=quiet)]
    if report_file is not None:
        outputs.append(lambda: _write_json(report, report_file))
    status = report.exit_status
    checked = {s.name for s in report.scenarios if s.verdict.value != "not-checked"}
    for name in require:
        if name not in checked:
            _complain(f"scenario {name!r} was required and not checked")
            status = status or EXIT_REQUIRED
    sys.exit(_written(outputs, status))


@cli.command()
@click.argument("ledger", type=_FILE)
@click.option(
    "--checkpoint",
    type=_FILE,
    help="The recorded model's weights. Default: train them from the recorded seed.",
)
@click.option("--quiet", is_flag=True, help="Print failures alone, and no progress.")
def replay(ledger: Path, checkpoint: Path | None, quiet: bool) -> None:
    """Re-derive each line of a generation LEDGER through both paths, and name the first that fails.

    Exits with 1 if a line does not follow from the lines before it and the model, or if the record is
    cut off.
    """
    from kvproof._errors import LedgerError
    from kvproof._ledger import parse_ledger
    from kvproof._text import printable

    try:
        record = parse_ledger(ledger.read_text("utf-8"), str(ledger))
    except FileNotFoundError as error:
        raise LedgerError(f"no such ledger: {ledger}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise LedgerError(f"cannot read {ledger}: {error}") from error
    with _progress(quiet) as progress:
        weights = _load(checkpoint) if checkpoint else _recreate(progress, record.run.header, ledger)
        from kvproof._milestone import TOLERANCE, one_thread
        from kvproof._replay import replay as run
        from kvproof.subjects import ReferenceSubject

        with one_thread():
            try:
                result = run(record.run, ReferenceSubject(weights), TOLERANCE)
            except UsageError as error:
                raise LedgerError(f"{ledger}: {error}") from error
    if result.problem is not None:
        _complain(f"{ledger}: {result.problem}")
    if record.damage is not None:
        _complain(f"{ledger}: {record.damage}; the lines before it were replayed")
    if result.problem is not None or record.damage is not None:
        sys.exit(1)
    if not quiet:
        bits = "to the last bit" if result.bit_identical else "within the tolerance"
        end = record.run.end
        _print(
            f"{ledger}: all {result.num_lines} lines replay through both paths, logits {bits}.\n"
            f"{printable(end.tokens) if end else ''}\n"
        )


class Progress:
    """Tells a person what is being done; the silent form says nothing."""

    def step(self, done: int, total: int, loss: float) -> None:
        """Report one finished training step and the loss before it, in nats."""

    def stage(self, name: str) -> None:
        """Report what is being run next."""


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress]:
    """Show progress on standard error, where that is a terminal and the caller did not ask for quiet."""
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield Progress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("loading torch", total=None)

        class Shown(Progress):
            def step(self, done: int, total: int, loss: float) -> None:
                text = f"training, loss {loss:.4f} nats"
                bars.update(task, completed=done, total=total, description=text)

            def stage(self, name: str) -> None:
                bars.update(task, description=name, total=None)

        yield Shown()


def _train(progress: Progress, seed: int | None = None) -> "Checkpoint":
    import dataclasses

    from kvproof._milestone import one_thread
    from kvproof.reference import RECIPE, Checkpoint, train

    recipe = RECIPE if seed is None else dataclasses.replace(RECIPE, seed=seed)
    with one_thread():
        decoder, loss = train(recipe, on_step=lambda step, at: progress.step(step, recipe.num_steps, at))
    return Checkpoint(decoder=decoder, seed=recipe.seed, loss=loss)


def _recreate(progress: Progress, header: "Header", ledger: Path) -> "Checkpoint":
    """Train the model of a record again from its recorded seed."""
    from kvproof._errors import LedgerError, TrainingError

    try:
        return _train(progress, header.subject_seed)
    except (UsageError, TrainingError) as error:
        raise LedgerError(f"{ledger}: its model cannot be recreated; give --checkpoint: {error}") from error


def _load(path: Path) -> "Checkpoint":
    from kvproof.reference import load_checkpoint

    return load_checkpoint(path)


def _written(outputs: list[Callable[[], None]], status: int) -> int:
    """Run every output; one that fails does not lose the others, and shows in the exit status."""
    for write in outputs:
        try:
            write()
        except OutputError as error:
            _complain(str(error))
            status = status or EXIT_OUTPUT
    return status


def _write_json(report: "Report", path: Path) -> None:
    from kvproof._files import write_whole
    from kvproof.render.json import render

    write_whole(path, render(report).encode())


def _save(weights: "Checkpoint", path: Path) -> None:
    from kvproof.reference import save_checkpoint

    save_checkpoint(weights, path)


def _print_report(report: "Report", *, as_json: bool, quiet: bool) -> None:
    if as_json:
        from kvproof.render.json import render as as_text

        text = as_text(report)
    elif quiet:
        text = f"{report.summary}\n"
    else:
        from kvproof.render.terminal import render

        width, look = _terminal()
        text = render(report, width=width, look=look)
    _print(text)


def _print(text: str) -> None:
    """Print text as it is; a closed pipe or a full disk raises `OutputError`."""
    try:
        click.echo(text, nl=False, color=True)
        if sys.stdout is None:
            raise OutputError("cannot write to standard output: it is closed")
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes it when it exits
        raise OutputError(f"cannot write to standard output: {error.strerror}") from error


def _terminal() -> "tuple[int, Look]":
    import shutil

    from kvproof.render.terminal import Look

    forced = bool(os.environ.get("FORCE_COLOR"))
    if (sys.stdout is None or not sys.stdout.isatty()) and not forced:
        return 100, Look.PLAIN
    width = max(80, shutil.get_terminal_size((100, 24)).columns)
    return width, Look.MONO if os.environ.get("NO_COLOR") else Look.COLOUR


def _write_report(report: "Report", weights: "Checkpoint", folder: Path) -> None:
    from kvproof._files import write_whole
    from kvproof._ledger import ledger_lines

    assert report.milestone is not None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the report folder {folder}: {error.strerror}") from error
    for pair in report.milestone.runs[:2]:
        lines = "".join(f"{line}\n" for line in ledger_lines(pair.cached))
        write_whole(folder / f"{pair.name}.jsonl", lines.encode())
    _save(weights, folder / "checkpoint.safetensors")
    _write_json(report, folder / "report.json")


def _complain(message: str) -> None:
    """Say what is wrong on standard error; where that is closed or full, the exit status says it alone."""
    with suppress(OSError):
        click.echo(f"kvproof: {message}", err=True)


def main() -> None:
    """Run the command line; every way out has its exit status and says why in one line."""
    sys.exit(_status_of(lambda: cli(standalone_mode=False)))


def _status_of(run: Callable[[], object]) -> int:
    try:
        run()
    except click.ClickException as error:
        with suppress(OSError):
            error.show()
        return EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        _complain("interrupted; no file was left half-written")
        return EXIT_INTERRUPTED
    except UsageError as error:
        _complain(str(error))
        return EXIT_USAGE
    except OutputError as error:
        _complain(str(error))
        return EXIT_OUTPUT
    except KvproofError as error:
        _complain(f"{type(error).__name__}: {error}")
        return EXIT_INTERNAL
    except OSError as error:  # from printing help
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes it when it exits
        _complain(f"cannot write to standard output: {error.strerror}")
        return EXIT_OUTPUT
    except Exception:
        traceback.print_exc()
        _complain("this is an error inside kvproof, not in what it was given")
        return EXIT_INTERNAL
    return 0
