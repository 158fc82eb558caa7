"""The commands that take a saved report: ``kvproof render`` and ``kvproof shrink``."""

from contextlib import nullcontext
from pathlib import Path

import click

from kvproof.cli.guard import guard
from kvproof.cli.options import FILE, Finished
from kvproof.cli.outputs import complain, print_text, write_outputs
from kvproof.cli.progress import show_progress

#: The forms of a report, each of which is a module of `kvproof.render`.
FORMS = {
    "html": "html",
    "junit": "junit",
    "sarif": "sarif",
    "markdown": "markdown",
    "json": "json",
    "text": "terminal",
}


@click.command()
@click.argument("report_file", metavar="REPORT", type=FILE)
@click.option(
    "--to", "form", type=click.Choice(FORMS), required=True, help="text is what an audit prints in a pipe."
)
@click.option("--out", type=FILE, help="Write this file. Default: standard output.")
def render(report_file: Path, form: str, out: Path | None) -> None:
    """Show a saved report in another form.

    REPORT is the report.json of `kvproof audit --report DIR`, or one that the pytest plugin kept. Exits with 0
    whatever the verdict is.
    """
    import importlib

    from kvproof._system.files import write_whole
    from kvproof.render.json import read

    report = read(report_file, on_note=complain)
    text: str = importlib.import_module(f"kvproof.render.{FORMS[form]}").render(report)
    output = (lambda: print_text(text)) if out is None else (lambda: write_whole(out, text.encode()))
    raise Finished(write_outputs([output], 0))


@click.command()
@click.argument("report_file", metavar="REPORT", type=FILE)
@click.option("--out", type=FILE, help="Write this file. Default: reproduction.py beside REPORT.")
@click.option("--scenario", metavar="NAME", help="Shrink what diverged in this scenario. Default: the first.")
@click.option(
    "--target", help="Load this instead of REPORT's target; needed for a function that returns a decoder."
)
@click.option("--quiet", is_flag=True, help="Print only errors; no progress bar.")
def shrink(report_file: Path, out: Path | None, scenario: str | None, target: str | None, quiet: bool) -> None:
    """Shrink a finding to one short file that shows it without an audit.

    REPORT is the report.json of `kvproof audit --report DIR`. Looks for the simplest program that still fails,
    and for random models the simplest model, writes both out, and runs that file. For a transformers model, the
    file needs torch and transformers alone; for a decoder of yours, it imports the function that returns it.
    Exits with 0 if it reproduces the finding, with 1 if it does not.
    """
    from kvproof.render.json import read

    report = read(report_file, on_note=complain)
    recorded = None if report.request is None else report.request.target
    guard((target or recorded,), trusts_code=False, timeout_s=None)
    with show_progress(quiet) as progress:
        from kvproof._shrinking.reproduce import reproduce
        from kvproof._system.machine import use_one_thread
        from kvproof.subjects._registry import runs_on_one_thread

        file = report_file.with_name("reproduction.py") if out is None else out
        tiny = recorded is not None and runs_on_one_thread(target or recorded)
        with use_one_thread() if tiny else nullcontext():
            done = reproduce(
                report, file, name=str(report_file), only=scenario, target=target, on_stage=progress.stage
            )
    outcome = "reproduces it" if done.reproduces else "does NOT reproduce it"
    if not done.reproduces:
        complain(f"{done.file} was run and {outcome}: {done.output}")
        raise Finished(1)
    text = f"{done.sentence}\n{done.file}: {done.num_lines} lines; it was run and {outcome}: {done.output}\n"
    raise Finished(write_outputs([] if quiet else [lambda: print_text(text)], 0))
