"""The command ``kvproof sweep``."""

from pathlib import Path
from typing import Any

import click

from kvproof.cli.options import ATTENTIONS, DTYPES, EXIT_REQUIRED, EXIT_USAGE, SEED, Finished
from kvproof.cli.outputs import complain, print_text, write_outputs
from kvproof.cli.progress import show_progress


@click.command(context_settings={"show_default": True})
@click.argument("targets", nargs=-1)
@click.option("--all-types", is_flag=True, help="Every causal type that transformers knows, as random:TYPE.")
@click.option("--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), default=["float32"])
@click.option("--attention", "attentions", multiple=True, type=click.Choice(ATTENTIONS), default=["eager"])
@click.option("--length", type=click.IntRange(min=8), default=28, help="Tokens per sequence.")
@click.option("--seed", type=SEED, default=0, help="Seed of weights and tokens.")
@click.option("--scenario", "only", multiple=True, metavar="NAME", help="Run only this scenario.")
@click.option("--skip", "without", multiple=True, metavar="NAME", help="Leave this scenario out.")
@click.option(
    "--jobs", "num_jobs", type=click.IntRange(1, 1024), help="Number of processes. Default: one per core."
)
@click.option("--limit", "limit_s", type=click.IntRange(1, 604_800), default=120, help="Seconds for each audit.")
@click.option("--out", "folder", type=click.Path(path_type=Path), required=True, help="Write the table here.")
@click.option("--fresh", is_flag=True, help="Start again and discard what the folder holds.")
@click.option("--quiet", is_flag=True, help="Print only one sentence; no progress bar.")
def sweep(targets: tuple[str, ...], folder: Path, quiet: bool, **options: Any) -> None:
    """Audit many TARGETS, each in a process of its own, into one table: sweep.json and sweep.md in --out.

    A sweep that was interrupted or killed resumes when you run the same command again. A target that cannot be
    built is listed as refused; that fails the sweep, with 2, only if you named the target. A target that crashes
    or is cut off counts as inconclusive. --dtype, --attention, --scenario and --skip may be repeated.
    """
    if not targets and not options["all_types"]:
        raise click.UsageError("Missing argument 'TARGETS' (or --all-types).")
    with show_progress(quiet, still=True) as progress:
        from kvproof._sweeping.sweep import SweepOptions, sweep_targets

        asked = SweepOptions(**options)
        table = sweep_targets(targets, folder, asked, on_group=progress.groups, on_note=complain)
    text = table.summary if quiet else f"{table.summary}\nThe table: {folder / 'sweep.md'}"
    status = table.verdict.exit_status
    if status in (0, EXIT_REQUIRED) and table.has_refused(targets):
        status = EXIT_USAGE
    raise Finished(write_outputs([lambda: print_text(f"{text}\n")], status))
