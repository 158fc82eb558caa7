"""The command line. Nothing heavy is imported before a command runs."""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvproof.cli.audit import ATTENTIONS, DTYPES, EXIT_INTERRUPTED, audit
from kvproof.cli.generate import generate, recorded_subject
from kvproof.cli.outputs import (
    EXIT_OUTPUT,
    complain,
    print_report,
    print_text,
    save,
    write_milestone,
    written,
)
from kvproof.cli.progress import Progress, shown_progress
from kvproof.contract.milestone import SWITCHES
from kvproof.errors import KvproofError, OutputError, UsageError

if TYPE_CHECKING:
    from kvproof.contract.ledger import Header
    from kvproof.reference import Checkpoint

#: Exit statuses that no verdict uses.
EXIT_USAGE, EXIT_INTERNAL = 2, 70
#: The forms of a report, and the module that writes each.
FORMS = {
    "html": "html",
    "junit": "junit",
    "sarif": "sarif",
    "markdown": "markdown",
    "json": "json",
    "text": "terminal",
}

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


cli.add_command(audit)
cli.add_command(generate)


@cli.command()
@click.option("--checkpoint", type=_FILE, help="Load the weights from FILE instead of training them.")
@click.option("--save-checkpoint", type=_FILE, help="Write the weights to FILE (safetensors).")
@click.option(
    "--report",
    "report_dir",
    type=click.Path(path_type=Path),
    help="Write report.json and report.html, the generation ledgers and the checkpoint into this folder.",
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
    with shown_progress(quiet) as progress:
        weights = _load(checkpoint) if checkpoint else _train(progress)
        from kvproof._reference_system.milestone import milestone as run

        source = str(checkpoint) if checkpoint else "trained"
        report = run(weights, source=source, without=without, on_stage=progress.stage)
    outputs: list[Callable[[], None]] = [lambda: print_report(report, as_json=as_json, quiet=quiet)]
    if save_checkpoint is not None:
        outputs.append(lambda: save(weights, save_checkpoint))
    if report_dir is not None:
        outputs.append(lambda: write_milestone(report, weights, report_dir))
    sys.exit(written(outputs, report.exit_status))


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def faults(as_json: bool) -> None:
    """List the deliberate faults, what each breaks, and the stages at which it must first show."""
    import json

    from kvproof.contract.stages import Stage
    from kvproof.faults import catalogue

    entries = [
        {
            "name": fault.name,
            "breaks": fault.breaks,
            "stages": [stage for stage in Stage if stage in fault.stages],
            "scenarios": list(fault.seen_by),
            "classes": list(fault.classes),
        }
        for fault in catalogue()
    ]
    if as_json:
        print_text(f"{json.dumps(entries, indent=2)}\n")
        return
    for entry in entries:
        click.echo(f"{entry['name']:25} {entry['breaks']} [{', '.join(entry['stages'])}]")


@cli.command(context_settings={"show_default": True})
@click.argument("targets", nargs=-1)
@click.option("--all-types", is_flag=True, help="Every causal type that transformers knows, as random:TYPE.")
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), default=["float32"])
@click.option("--attention", "attentions", multiple=True, type=click.Choice(ATTENTIONS), default=["eager"])
@click.option("--length", type=click.IntRange(min=8), default=28, help="Tokens a sequence.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Of weights and tokens.")
@click.option("--scenario", "only", multiple=True, metavar="NAME", help="Run only this scenario.")
@click.option("--skip", "without", multiple=True, metavar="NAME", help="Leave this scenario out.")
@click.option("--jobs", "num_jobs", type=click.IntRange(1, 1024), help="Processes at a time; else one a core.")
@click.option("--limit", "limit_s", type=click.IntRange(1, 604_800), default=120, help="Seconds for each audit.")
@click.option("--out", "folder", type=click.Path(path_type=Path), required=True, help="Write the table here.")
@click.option("--fresh", is_flag=True, help="Start again, and forget what the folder holds.")
@click.option("--quiet", is_flag=True, help="Print one sentence, and no progress.")
def sweep(targets: tuple[str, ...], folder: Path, quiet: bool, **options: Any) -> None:
    """Audit many TARGETS, each in a process of its own, into one table: sweep.json and sweep.md in --out.

    A sweep that was interrupted or killed goes on where it was when it is called again. A target that cannot
    be built is listed as refused; it fails the sweep only if it was named, and then with 2. One that crashes or
    is cut off counts as inconclusive. --dtype, --attention, --scenario and --skip may be repeated.
    """
    if not targets and not options["all_types"]:
        raise click.UsageError("Missing argument 'TARGETS' (or --all-types).")
    with shown_progress(quiet, still=True) as progress:
        from kvproof._sweeping.sweep import sweep_targets

        table = sweep_targets(targets, folder, on_group=progress.groups, on_note=complain, **options)
    text = table.summary if quiet else f"{table.summary}\nThe table: {folder / 'sweep.md'}"
    status = table.verdict.exit_status or (EXIT_USAGE if table.refused(targets) else 0)
    sys.exit(written([lambda: print_text(f"{text}\n")], status))


@cli.command()
@click.argument("ledger", type=_FILE)
@click.option("--from", "from_step", type=int, default=0, metavar="STEP", help="Go on from this recorded step.")
@click.option("--target", help="The recorded model, where it is elsewhere now or a function makes it.")
@click.option(
    "--checkpoint",
    type=_FILE,
    help="The reference system's recorded weights. Default: train them from the recorded seed.",
)
@click.option("--download", "network", is_flag=True, help="Fetch org/name from the hub if it is not cached.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
@click.option("--quiet", is_flag=True, help="Print failures alone, and no progress.")
def replay(
    ledger: Path,
    from_step: int,
    target: str | None,
    checkpoint: Path | None,
    network: bool,
    trust_remote_code: bool,
    quiet: bool,
) -> None:
    """Re-derive each line of a generation LEDGER through both paths, and name the first that fails.

    The model is loaded from where the record says. Exits with 1 if a line does not follow from the lines before
    it and the model, or if the record is cut off.
    """
    from kvproof.cli.generate import made_elsewhere, read_ledger, read_rows, replayed_text

    record = read_ledger(ledger)
    header = record.run.header
    with shown_progress(quiet) as progress:
        from kvproof._generation.replay import replay as run
        from kvproof._reference_system.milestone import TOLERANCE
        from kvproof._system.machine import one_thread, threads
        from kvproof.contract.text import printable
        from kvproof.errors import LedgerError
        from kvproof.subjects import ReferenceSubject, Subject

        subject: Subject
        # What kvproof did not load is the reference system, or what someone gave to the Python interface.
        reference = header.source is None and target is None
        if reference and checkpoint is None and header.subject != ReferenceSubject.NAME:
            name = printable(header.subject)
            raise LedgerError(f"{ledger} does not say where its model {name!r} was loaded from: give --target")
        if reference:
            subject = ReferenceSubject(_load(checkpoint) if checkpoint else _recreate(progress, header, ledger))
        else:
            progress.stage("loading the model")
            subject = recorded_subject(header, target, network=network, trust_remote_code=trust_remote_code)
        num_threads = min(header.environment.num_threads, os.cpu_count() or 1)
        with one_thread() if reference else threads(max(1, num_threads)):
            try:
                result = run(
                    record.run,
                    subject,
                    TOLERANCE if reference else None,
                    from_step=from_step,
                    rows=read_rows(ledger, header),
                )
            except UsageError as error:
                raise LedgerError(f"{ledger}: {error}") from error
    if result.problem is not None:
        complain(f"{ledger}: {result.problem}{made_elsewhere(result)}")
    if record.damage is not None:
        complain(f"{ledger}: {record.damage}; the lines before it were replayed")
    if result.problem is not None or record.damage is not None:
        sys.exit(1)
    if not quiet:
        print_text(replayed_text(ledger, record.run, result))


@cli.command()
@click.argument("report_file", metavar="REPORT", type=_FILE)
@click.option(
    "--to", "form", type=click.Choice(FORMS), required=True, help="text is what an audit prints in a pipe."
)
@click.option("--out", type=_FILE, help="Write this file. Default: standard output.")
def render(report_file: Path, form: str, out: Path | None) -> None:
    """Show a saved report in another form.

    REPORT is the report.json of `kvproof audit --report DIR`, or one that the pytest plugin kept. Exits with 0
    whatever the verdict is.
    """
    import importlib

    from kvproof._system.files import write_whole
    from kvproof.render.json import read

    text: str = importlib.import_module(f"kvproof.render.{FORMS[form]}").render(read(report_file))
    output = (lambda: print_text(text)) if out is None else (lambda: write_whole(out, text.encode()))
    sys.exit(written([output], 0))


@cli.command()
@click.option("--out", type=_FILE, help="Write the page to this file instead of serving it.")
@click.option("--checkpoint", type=_FILE, help="Load the weights from FILE instead of training them.")
@click.option("--port", type=click.IntRange(0, 65_535), default=0, help="Serve here. Default: a free port.")
@click.option("--no-browser", is_flag=True, help="Serve, and open no browser.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
def lesson(out: Path | None, checkpoint: Path | None, port: int, no_browser: bool, quiet: bool) -> None:
    """Open the interactive lesson: the reference decoder, token by token.

    Every number of a real cache to step through, faults to switch on, and five questions. The page is served on
    this machine alone until Ctrl-C; --out writes it as one file that needs no network.
    """
    with shown_progress(quiet) as progress:
        weights = _load(checkpoint) if checkpoint else _train(progress)
        from kvproof._reference_system.lesson_steps import walk
        from kvproof.render.lesson import render

        page = render(walk(weights, progress.stage))
    if out is not None:
        from kvproof._system.files import write_whole

        sys.exit(written([lambda: write_whole(out, page.encode())], 0))
    from kvproof.cli.serving import serve

    def ready(address: str) -> None:
        print_text(f"The lesson: {address} (Ctrl-C ends it)\n")
        sys.stdout.flush()
        if not no_browser:
            import webbrowser

            webbrowser.open(address)

    with suppress(KeyboardInterrupt):
        serve(page, port, ready)


@cli.command()
@click.argument("report_file", metavar="REPORT", type=_FILE)
@click.option("--out", type=_FILE, help="Write this file. Default: reproduction.py beside REPORT.")
@click.option("--scenario", metavar="NAME", help="Shrink what diverged in this scenario. Default: the first.")
@click.option("--quiet", is_flag=True, help="Print nothing that is not wrong, and no progress.")
def shrink(report_file: Path, out: Path | None, scenario: str | None, quiet: bool) -> None:
    """Shrink a finding to one short file that shows it without kvproof.

    REPORT is the report.json of `kvproof audit --report DIR`. Looks for the simplest program that still fails,
    and for random models the simplest model, writes both out with torch and transformers alone, and runs that
    file. Exits with 0 if it reproduces the finding, with 1 if it does not.
    """
    with shown_progress(quiet) as progress:
        from kvproof._shrinking.reproduce import reproduce
        from kvproof._system.machine import one_thread
        from kvproof.render.json import read
        from kvproof.subjects._registry import runs_on_one_thread

        report = read(report_file)
        file = report_file.with_name("reproduction.py") if out is None else out
        tiny = report.request is not None and runs_on_one_thread(report.request.target)
        with one_thread() if tiny else nullcontext():
            done = reproduce(report, file, name=str(report_file), only=scenario, on_stage=progress.stage)
    outcome = "reproduces it" if done.reproduces else "does NOT reproduce it"
    if not done.reproduces:
        complain(f"{done.file} was run and {outcome}: {done.output}")
        sys.exit(1)
    text = f"{done.sentence}\n{done.file}: {done.num_lines} lines; it was run and {outcome}: {done.output}\n"
    sys.exit(written([] if quiet else [lambda: print_text(text)], 0))


def _train(progress: Progress, seed: int | None = None) -> "Checkpoint":
    import dataclasses

    from kvproof._system.machine import one_thread
    from kvproof.reference import RECIPE, Checkpoint, train

    recipe = RECIPE if seed is None else dataclasses.replace(RECIPE, seed=seed)
    with one_thread():
        decoder, loss = train(recipe, on_step=lambda step, at: progress.step(step, recipe.num_steps, at))
    return Checkpoint(decoder=decoder, seed=recipe.seed, loss=loss)


def _recreate(progress: Progress, header: "Header", ledger: Path) -> "Checkpoint":
    """Train the model of a record again from its recorded seed."""
    from kvproof.errors import LedgerError, TrainingError

    try:
        return _train(progress, header.subject_seed)
    except (UsageError, TrainingError) as error:
        raise LedgerError(f"{ledger}: its model cannot be recreated; give --checkpoint: {error}") from error


def _load(path: Path) -> "Checkpoint":
    from kvproof.reference import load_checkpoint

    return load_checkpoint(path)


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
        complain("interrupted; no file was left half-written")
        return EXIT_INTERRUPTED
    except UsageError as error:
        complain(str(error))
        return EXIT_USAGE
    except OutputError as error:
        complain(str(error))
        return EXIT_OUTPUT
    except KvproofError as error:
        complain(f"{type(error).__name__}: {error}")
        return EXIT_INTERNAL
    except OSError as error:  # from printing help
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes it when it exits
        complain(f"cannot write to standard output: {error.strerror}")
        return EXIT_OUTPUT
    except Exception:
        traceback.print_exc()
        complain("this is an error inside kvproof, not in what it was given")
        return EXIT_INTERNAL
    return 0
