"""The command ``kvproof replay``, and what it takes to load a record's model again."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvproof.cli.generate import show_text
from kvproof.cli.guard import guard
from kvproof.cli.lesson import load_checkpoint, train_checkpoint
from kvproof.cli.options import FILE, Finished, permission_options
from kvproof.cli.outputs import complain, print_text
from kvproof.cli.progress import Progress, show_progress
from kvproof.errors import LedgerError, TrainingError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from kvproof.contract.ledger import Header, LedgerFile, ReplayResult, Run
    from kvproof.reference import Checkpoint
    from kvproof.subjects import Subject


@click.command()
@click.argument("ledger", type=FILE)
@click.option("--from", "from_step", type=int, default=0, metavar="STEP", help="Go on from this recorded step.")
@click.option("--target", help="The recorded model, where it is elsewhere now or a function makes it.")
@click.option(
    "--checkpoint",
    type=FILE,
    help="The reference system's recorded weights. Default: train them from the recorded seed.",
)
@permission_options
@click.option("--quiet", is_flag=True, help="Print only failures; no progress bar.")
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
    guard((target,), trusts_code=trust_remote_code, timeout_s=None)
    record = read_ledger(ledger)
    header = record.run.header
    with show_progress(quiet) as progress:
        from kvproof._generation.replay import replay as run
        from kvproof._reference_system.milestone import TOLERANCE
        from kvproof._system.machine import use_one_thread, use_threads
        from kvproof.contract.text import printable
        from kvproof.subjects import ReferenceSubject, Subject

        subject: Subject
        # What kvproof did not load is the reference system, or what someone gave to the Python interface.
        reference = header.source is None and target is None
        if reference and checkpoint is None and header.subject != ReferenceSubject.NAME:
            name = printable(header.subject)
            raise LedgerError(f"{ledger} does not say where its model {name!r} was loaded from: give --target")
        if checkpoint is not None and not reference:
            raise LedgerError(
                f"{ledger} records {printable(header.subject)}, and --checkpoint gives weights of the reference "
                "system: leave it out, or give the model with --target"
            )
        if reference:
            subject = ReferenceSubject(
                load_checkpoint(checkpoint) if checkpoint else recreate(progress, header, ledger)
            )
        else:
            progress.stage("loading the model")
            subject = load_recorded(header, target, network=network, trust_remote_code=trust_remote_code)
        num_threads = min(header.environment.num_threads, os.cpu_count() or 1)
        with use_one_thread() if reference else use_threads(max(1, num_threads)):
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
        complain(f"{ledger}: {result.problem}{describe_origin(result)}")
    if record.damage is not None:
        complain(f"{ledger}: {record.damage}; the lines before it were replayed")
    if result.problem is not None or record.damage is not None:
        raise Finished(1)
    if not quiet:
        print_text(describe_replay(ledger, record.run, result))


def recreate(progress: Progress, header: "Header", ledger: Path) -> "Checkpoint":
    """Train the model of a record again from its recorded seed."""
    try:
        return train_checkpoint(progress, header.subject_seed)
    except (UsageError, TrainingError) as error:
        raise LedgerError(f"{ledger}: its model cannot be recreated; give --checkpoint: {error}") from error


def load_recorded(header: "Header", target: str | None, *, network: bool, trust_remote_code: bool) -> "Subject":
    """Load the model of a record from where it was loaded, or from ``target``.

    What a record says is data: it is never let run code, neither a factory's nor a model's own, nor ask the
    network. Raises `LedgerError` for one that would have to, and `UsageError` for a model that is unavailable.
    """
    from kvproof.subjects._adapter import LoadOptions
    from kvproof.subjects._registry import runs_named_code
    from kvproof.subjects._targets import fit_options, load_target

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
        return parse_ledger(file.read_text("utf-8"), str(file), on_note=complain)
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


def describe_origin(result: "ReplayResult") -> str:
    """Return what is said of a record that was made by other versions or on another machine."""
    return f" (made elsewhere: {'; '.join(result.elsewhere)})" if result.elsewhere else ""


def describe_replay(ledger: Path, run: "Run", result: "ReplayResult") -> str:
    """Return what is said of a record that holds."""
    from kvproof.contract.text import printable

    end = run.end
    said = "" if end is None else printable(end.tokens) if end.text is None else show_text(end.text)
    bits = "to the last bit" if result.bit_identical else "within the tolerance"
    marked = ", which was interrupted" if run.end and run.end.stop_reason == "interrupted" else ""
    bits += describe_origin(result)
    return f"{ledger}{marked}: all {result.num_lines} lines replay through both paths, logits {bits}.\n{said}\n"
