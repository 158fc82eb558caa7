"""The commands of the reference system: ``kvproof milestone`` and ``kvproof lesson``."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvproof.cli.options import FILE, Finished
from kvproof.cli.outputs import print_report, print_text, save_checkpoint, write_milestone, write_outputs
from kvproof.cli.progress import Progress, show_progress
from kvproof.contract.milestone import SWITCHES
from kvproof.errors import OutputError

if TYPE_CHECKING:
    from kvproof.reference import Checkpoint


@click.command()
@click.option("--checkpoint", type=FILE, help="Load the weights from FILE instead of training them.")
@click.option("--save-checkpoint", "weights_file", type=FILE, help="Write the weights to FILE (safetensors).")
@click.option(
    "--report",
    "report_dir",
    type=click.Path(path_type=Path),
    help="Write report.json and report.html, the generation ledgers and the checkpoint into this folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--quiet", is_flag=True, help="Print only the verdict; no progress bar.")
@click.option(
    "--without",
    multiple=True,
    type=click.Choice(SWITCHES),
    help="Switch one part off, to see the gate fail. May be repeated.",
)
def milestone(
    checkpoint: Path | None,
    weights_file: Path | None,
    report_dir: Path | None,
    as_json: bool,
    quiet: bool,
    without: tuple[str, ...],
) -> None:
    """Run the reference system end to end.

    Recreates the trained checkpoint, compares the cached path with the uncached one at all 16 prefixes,
    plants both deliberate failures, generates with both policies, and holds the acceptance gate.
    """
    with show_progress(quiet) as progress:
        weights = load_checkpoint(checkpoint) if checkpoint else train_checkpoint(progress)
        from kvproof._reference_system.milestone import milestone as run

        source = str(checkpoint) if checkpoint else "trained"
        report = run(weights, source=source, without=without, on_stage=progress.stage)
    outputs: list[Callable[[], None]] = [lambda: print_report(report, as_json=as_json, quiet=quiet)]
    if weights_file is not None:
        outputs.append(lambda: save_checkpoint(weights, weights_file))
    if report_dir is not None:
        outputs.append(lambda: write_milestone(report, weights, report_dir))
    raise Finished(write_outputs(outputs, report.exit_status))


@click.command()
@click.option("--out", type=FILE, help="Write the page to FILE and open nothing.")
@click.option("--checkpoint", type=FILE, help="Load the weights from FILE instead of training them.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
def lesson(out: Path | None, checkpoint: Path | None, quiet: bool) -> None:
    """Open the interactive lesson: the reference decoder, token by token.

    Step through every number of a real cache, switch faults on, and answer five questions. The page is one file
    that needs no network. Without --out it is written to a new temporary folder, which stays, and opened in your
    browser.
    """
    with show_progress(quiet) as progress:
        weights = load_checkpoint(checkpoint) if checkpoint else train_checkpoint(progress)
        from kvproof._reference_system.lesson_steps import walk
        from kvproof.render.lesson import render

        page = render(walk(weights, progress.stage)).encode()
    if out is not None:
        from kvproof._system.files import write_whole

        raise Finished(write_outputs([lambda: write_whole(out, page)], 0))
    raise Finished(write_outputs([lambda: _show(page)], 0))


def _show(page: bytes) -> None:
    """Write a page where it stays, and open it; say where it is, for nothing may open."""
    import tempfile
    import webbrowser

    from kvproof._system.files import write_whole

    try:
        file = Path(tempfile.mkdtemp(prefix="kvproof-")) / "lesson.html"
    except OSError as error:
        raise OutputError(f"cannot make a temporary folder for the lesson: {error.strerror}") from error
    write_whole(file, page)
    opened = webbrowser.open(file.as_uri())
    print_text(f"The lesson: {file}\n" if opened else f"The lesson: {file} (open it in a browser)\n")


def train_checkpoint(progress: Progress, seed: int | None = None) -> "Checkpoint":
    """Train the reference decoder, from a seed of its own or from another."""
    import dataclasses

    from kvproof._system.machine import use_one_thread
    from kvproof.reference import RECIPE, Checkpoint, train

    recipe = RECIPE if seed is None else dataclasses.replace(RECIPE, seed=seed)
    with use_one_thread():
        decoder, loss = train(recipe, on_step=lambda step, at: progress.step(step, recipe.num_steps, at))
    return Checkpoint(decoder=decoder, seed=recipe.seed, loss=loss)


def load_checkpoint(path: Path) -> "Checkpoint":
    """Load the reference decoder's weights."""
    from kvproof.reference import load_checkpoint as load

    return load(path)
