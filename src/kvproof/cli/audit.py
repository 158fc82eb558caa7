"""The command ``kvproof audit``."""

import shlex
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvproof.cli.guard import guard
from kvproof.cli.options import (
    EXIT_INTERRUPTED,
    EXIT_REQUIRED,
    FILE,
    SEED,
    Finished,
    Loading,
    ids_options,
    loading_options,
    read_ids,
)
from kvproof.cli.outputs import (
    complain,
    make_folder,
    print_report,
    print_text,
    write_outputs,
    write_report,
)
from kvproof.cli.progress import show_progress
from kvproof.errors import UsageError
from kvproof.subjects._registry import describe_extras, describe_targets, runs_named_code, runs_on_one_thread

if TYPE_CHECKING:
    from kvproof._engine.uncached_rows import Reference
    from kvproof.contract.report import AuditRequest, Report
    from kvproof.subjects import Subject

    Ids = tuple[int, ...]

#: The options that say where a result goes or who computes it, and nothing of what is run.
_OUTPUTS = frozenset({"report_dir", "as_json", "quiet", "as_list", "jobs", "timeout_s"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """What is audited, how, and where the result goes, as it was typed; `Loading` says how TARGET is loaded."""

    length: int
    seed: int
    ids: str | None
    avoid_ids: str | None
    prompt: str | None
    prompt_file: Path | None
    scenario: tuple[str, ...]
    skip: tuple[str, ...]
    require: tuple[str, ...]
    num_programs: int
    as_list: bool
    reference: "Reference"
    certificate: bool
    truth: str | None
    repeats: int
    jobs: int | None
    fail_fast: bool
    baseline: Path | None
    report_dir: Path | None
    as_json: bool
    quiet: bool


@click.command()
@click.argument("target", required=False)
@click.option("--length", type=click.IntRange(min=8), default=28, show_default=True, help="Tokens per sequence.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Seed of weights and tokens.")
@loading_options
@ids_options
@click.option("--prompt", metavar="TEXT", help="Audit this text's tokens instead of random ones.")
@click.option("--prompt-file", type=FILE, help="Read that text from a UTF-8 file.")
@click.option(
    "--scenario",
    multiple=True,
    metavar="NAME",
    help="Run only this scenario, and fail with 5 unless it was checked. May be repeated.",
)
@click.option("--skip", multiple=True, metavar="NAME", help="Leave this scenario out. May be repeated.")
@click.option("--require", multiple=True, metavar="NAME", help="Fail with 5 unless this scenario was checked.")
@click.option(
    "--programs",
    "num_programs",
    type=click.IntRange(0, 10_000),
    default=0,
    show_default=True,
    help="Number of random programs, drawn by the seed, to run besides the catalogue.",
)
@click.option("--list", "as_list", is_flag=True, help="List the scenarios and what each exposes.")
@click.option(
    "--reference",
    type=click.Choice(["one-pass", "literal"]),
    default="one-pass",
    show_default=True,
    help="How to compute uncached rows: in one pass, after proving causality, or each prefix on its own.",
)
@click.option(
    "--certificate/--no-certificate",
    default=True,
    show_default=True,
    help="After a pass, plant deliberate faults to prove that this audit can fail.",
)
@click.option(
    "--truth",
    metavar="TARGET",
    help="The same weights in another implementation, which has float64, for a TARGET that has none.",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="How often the same call is made first, to see that it gives the same rows; 1 leaves that out.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Number of processes, of one thread each. Default: torch's number of threads for a transformers model "
    "on the CPU under Linux, else 1; 1 for random:TYPE too.",
)
@click.option("--fail-fast", is_flag=True, help="Stop after the first scenario that diverges or raises.")
@click.option("--baseline", type=FILE, help="Fail only on what got worse than in this report.json.")
@click.option(
    "--report", "report_dir", type=click.Path(path_type=Path), help="Write report.json and report.html here."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--quiet", is_flag=True, help="Print only the verdict; no progress bar.")
def audit(target: str | None, loading: Loading, **given: Any) -> None:
    """Compare the cached with the uncached path of TARGET in every scenario.

    TARGET is {targets}. A prompt shorter than --length is filled up with random tokens. {extras}
    """
    options = AuditOptions(**given)
    if options.as_list:
        _print_scenarios(options.length)
        return
    if target is None and loading.config is None:
        raise click.UsageError("Missing argument 'TARGET' (or --config FILE).")
    _check_scenarios(options)
    text = read_prompt(options.prompt, options.prompt_file)
    guard((target, options.truth), trusts_code=loading.trust_remote_code, timeout_s=loading.timeout_s)
    from kvproof.render.json import read

    before = None if options.baseline is None else read(options.baseline, on_note=complain)
    report, sequences = _run(target, loading, options, text)
    context = click.get_current_context()
    report = replace(report, request=_request(context, report.subject.dtype, sequences))
    raise Finished(_write(report, options, before, _repeat_command(context, report)))


def _run(
    target: str | None, loading: Loading, options: AuditOptions, text: str | None
) -> "tuple[Report, tuple[Ids, Ids]]":
    """Load the target and audit it; return the report, and the tokens that the catalogue was made over."""
    from kvproof._engine.audit import audit as run
    from kvproof._engine.prompts import sequences_for
    from kvproof._system.machine import use_one_thread
    from kvproof.scenarios import catalogue, random_programs, select
    from kvproof.subjects import limits_of
    from kvproof.subjects._targets import fit_options, load_target

    seed = options.seed
    # More threads than one only wait for each other on tensors as small as a random model's.
    tiny = runs_on_one_thread(target)
    with show_progress(options.quiet, timed=True) as progress, use_one_thread() if tiny else nullcontext():
        progress.stage(f"loading {target or loading.config}")
        used, avoided = read_ids(options.ids), read_ids(options.avoid_ids) or ()
        subject = load_target(target, replace(loading.options(seed), ids=used, avoid_ids=avoided))
        problems = _adapter_problems(subject) if target is not None and runs_named_code(target) else []
        truth = None
        if options.truth is not None:
            progress.stage(f"loading {options.truth}")
            exact = fit_options(options.truth, replace(loading.options(seed), dtype="float64"))
            truth = load_target(options.truth, exact)
        first, other = sequences_for(subject, text, options.length, seed)
        drawn = random_programs(limits_of(subject), num=options.num_programs, seed=seed, max_len=len(first))
        programs = (*catalogue(first, other, subject.boundaries), *drawn)
        chosen = select(programs, only=options.scenario, without=options.skip)
        progress.parts(1 + len({program.name for program in chosen}))
        report = run(
            subject,
            chosen,
            all_values=False,
            spread=options.report_dir is not None,
            keep_partial=True,
            on_scenario=progress.part,
            reference=options.reference,
            certificate=options.certificate,
            truth=truth,
            repeats=options.repeats,
            jobs=options.jobs,
            fail_fast=options.fail_fast,
        )
    return replace(report, notes=(*problems, *report.notes)), (first, other)


def _adapter_problems(subject: "Subject") -> list[str]:
    """Return what the quick part of ``kvproof check`` finds, as notes: an audit reports it as the decoder's."""
    from kvproof import conformance

    broken = [check for check in conformance.check(subject, quick=True).checks if check.problem is not None]
    advice = ["if you wrote the adapter, look there first: kvproof check TARGET checks all its promises"]
    return [str(check) for check in broken] + (advice if broken else [])


def _check_scenarios(options: AuditOptions) -> None:
    """Raise `UsageError` for a scenario that does not exist, before anything is loaded."""
    from kvproof.contract.results import Comparison
    from kvproof.scenarios import RANDOM_PROGRAMS, catalogue, check_names

    names = [scenario.name for scenario in catalogue(range(options.length), range(options.length))]
    names += [RANDOM_PROGRAMS] if options.num_programs else []
    check_names((*options.scenario, *options.skip), names)
    check_names(options.require, (*names, Comparison.CAUSALITY.value))


def _print_scenarios(length: int) -> None:
    from kvproof.scenarios import catalogue

    entries = {s.name: s for s in catalogue(range(length), range(length))}.values()
    print_text("".join(f"{entry.name:37} {entry.exposes}\n" for entry in entries))


audit.help = str(audit.help).format(targets=describe_targets(), extras=describe_extras())


def _request(
    context: click.Context, dtype: str, sequences: "tuple[tuple[int, ...], tuple[int, ...]]"
) -> "AuditRequest":
    """Return what an audit was asked, to be kept in its report."""
    from kvproof.contract.report import AuditRequest

    options = context.params
    return AuditRequest(
        target=options["target"],
        config=None if options["config"] is None else str(options["config"]),
        dtype=dtype,
        attention=options["attention"],
        device=options["device"],
        trust_remote_code=options["trust_remote_code"],
        seed=options["seed"],
        sequences=sequences,
        num_programs=options["num_programs"],
        command=shlex.join(_command_words(context, _OUTPUTS)),
    )


def _write(report: "Report", options: AuditOptions, before: "Report | None", repeat: str) -> int:
    """Print and write an audit's report as its options say; return the exit status."""
    from kvproof.contract.baseline import changes

    found = None if before is None else changes(report, before)
    as_json, quiet, folder = options.as_json, options.quiet, options.report_dir
    outputs: list[Callable[[], None]] = [lambda: print_report(report, as_json=as_json, quiet=quiet)]
    if not as_json and not quiet:
        outputs.append(lambda: print_text(repeat))
    if folder is not None:
        outputs.append(lambda: write_report(report, make_folder(folder)))
    status = report.exit_status if found is None else found.exit_status
    if found is not None and not as_json:
        outputs.append(lambda: print_text("".join(f"{line}\n" for line in found.sentences())))
    if report.partial and not (options.fail_fast and status):
        complain("interrupted; the report holds what was done so far")
        status = EXIT_INTERRUPTED
    return write_outputs(outputs, _require(report, options, status))


def _require(report: "Report", options: AuditOptions, status: int) -> int:
    """Say which scenarios were required or named and not checked; return the exit status with that.

    Naming a scenario asks for it; if something else is wrong, only ``--require`` says that it is missing.
    """
    from kvproof.contract.results import Verdict

    results = {result.name: result for result in report.scenarios}
    nothing_wrong, missing = status in (0, EXIT_REQUIRED), False
    named = options.scenario if nothing_wrong and not report.partial else ()
    for name in dict.fromkeys((*options.require, *named)):
        result = results.get(name)
        if result is not None and result.verdict is not Verdict.NOT_CHECKED:
            continue
        missing = True
        asked = "required" if name in options.require else "named"
        why = f": {result.reason}" if result is not None and result.reason else ""
        complain(f"scenario {name!r} was {asked} and not checked{why}")
    if report.verdict is Verdict.NOT_CHECKED and nothing_wrong and not missing:
        missing = True
        complain("nothing was checked that counts for the verdict")
    return EXIT_REQUIRED if nothing_wrong and missing else status


def _repeat_command(context: click.Context, report: "Report") -> str:
    """Return the line to type to repeat the first finding alone, or nothing where there is none."""
    found = [s.name for s in report.scenarios if s.verdict is report.verdict and not s.advice]
    if report.verdict.value not in ("diverged", "raised") or not found:
        return ""
    name = found[0]
    words = _command_words(context, _OUTPUTS | {"scenario", "skip", "require", "certificate", "fail_fast"})
    if name != "causality":  # it comes before every scenario
        words += ["--scenario", name]
    text = f"To repeat the first finding alone: {shlex.join(words)}\n"
    folder = context.params["report_dir"]
    if folder is not None and report.verdict.value == "diverged":
        target = context.params["target"]
        own = target is not None and runs_named_code(target)
        shrink = shlex.join(["kvproof", "shrink", str(folder / "report.json"), *(("--target", target) * own)])
        text += f"To shrink it to one file{'' if own else ' that needs no kvproof'}: {shrink}\n"
    return text


def _command_words(context: click.Context, left_out: frozenset[str]) -> list[str]:
    """Return the words of the command line that was typed, without some options and what is default."""
    words = ["kvproof", "audit"]
    for parameter in context.command.params:
        value = context.params[str(parameter.name)]
        if parameter.name in left_out or value in (None, (), parameter.get_default(context)):
            continue
        if isinstance(parameter, click.Argument):
            words.append(str(value))
        elif isinstance(value, bool):
            words.append(parameter.opts[0] if value else parameter.secondary_opts[0])
        else:
            each = value if isinstance(value, tuple) else (value,)
            words += [word for one in each for word in (parameter.opts[0], str(one))]
    return words


def read_prompt(text: str | None, file: Path | None) -> str | None:
    """Return the prompt, exactly as it was typed or as it stands in the file."""
    if file is None:
        return text
    if text is not None:
        raise UsageError("give --prompt or --prompt-file, not both")
    try:
        return file.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise UsageError(f"no such prompt file: {file}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt file {file} is not UTF-8: {error}") from error
    except OSError as error:
        raise UsageError(f"cannot read the prompt file {file}: {error.strerror}") from error
