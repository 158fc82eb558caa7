"""From a report to one file that shows its finding without kvproof."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch

from kvproof._engine.verdict_rules import CAUSALITY
from kvproof._numerics.tolerances import STRUCTURAL_FLOOR
from kvproof._shrinking.programs import CLEAR, Failure, FailureFinder, Tries, simplify
from kvproof._shrinking.simpler import num_tokens
from kvproof._shrinking.writable import Found, WritableModel, check_writable, writable_model
from kvproof._system.files import is_regular, write_whole
from kvproof.contract.report import AuditRequest, Report
from kvproof.contract.results import ScenarioResult, Verdict
from kvproof.errors import KvproofError, ReportError, UsageError
from kvproof.scenarios import Ability, Extend, Generate, Scenario, catalogue, random_programs, token_by_token
from kvproof.subjects import Subject, limits_of
from kvproof.subjects._adapter import LoadOptions
from kvproof.subjects._registry import runs_named_code
from kvproof.subjects._targets import load_target

#: Tries of programs and of models, of each at most so many.
MAX_TRIES = 400
#: How long a written file may run, in seconds.
LIMIT_S = 600
#: The part of the row's scale beyond which a file calls a row wrong: float64 weights alone leave 1e-6, …
USUAL_LIMIT = 1e-5
#: … and float32 leaves 5e-5.
SINGLE_LIMIT = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """A written file, and what became of it."""

    file: Path
    num_lines: int
    reproduces: bool  #: run on its own, it exits with 1
    output: str  #: the last line that it printed
    sentence: str  #: what was shrunk to what, in words


@dataclass(slots=True, kw_only=True)
class _Case:
    """What is shrunk: a program, its wrong row, and the model that gives it."""

    model: WritableModel
    program: Scenario
    failure: Failure
    cached: bool


def reproduce(
    report: Report,
    file: Path,
    *,
    name: str,
    only: str | None = None,
    target: str | None = None,
    on_stage: Callable[[str], None] = lambda text: None,
) -> Reproduction:
    """Shrink what a report found first, or in the scenario ``only``, write it to ``file``, and run that.

    ``name`` is the report's, for messages. ``target`` is loaded in place of the report's, and must be given where
    that names code to run: what a report says is data.

    Raises `UsageError` where nothing diverged that can be written out, where the subject is no longer available,
    and where nothing fails in float64 here; `OutputError` where the file cannot be written.
    """
    if report.request is None:
        raise ReportError(
            f"{name} does not say how its audit was made; kvproof audit --report DIR writes one that does"
        )
    found = _finding(report, name, only)
    request = _allowed(report.request, target)
    on_stage(f"loading {request.target or request.config}")
    case, first = _case(request, found.name, on_stage)
    num_weights = case.model.num_weights
    _shrink(case, on_stage)
    text = _text(case, report, found)
    write_whole(file, text.encode())
    on_stage(f"running {file.name}")
    status, output = _run(file) if is_regular(file) else _run_elsewhere(text)
    return Reproduction(
        file=file,
        num_lines=text.count("\n"),
        reproduces=status == 1 and "relative gap" in output,
        output=output,
        sentence=_sentence(found.name, first, num_weights, case),
    )


def _allowed(request: AuditRequest, target: str | None) -> AuditRequest:
    """Return the request with the target to load; raise `ReportError` if a report alone would have code run."""
    if target is not None:
        return replace(request, target=target, config=None)
    if request.target is not None and runs_named_code(request.target):
        raise ReportError(f"its decoder is made by a function: to run it, give --target {request.target}")
    return request


def _finding(report: Report, name: str, only: str | None) -> ScenarioResult:
    """Return the result to shrink."""
    diverged = [s for s in report.scenarios if s.verdict is Verdict.DIVERGED]
    if only is not None:
        wanted = [s for s in diverged if s.name == only]
        if not wanted:
            names = ", ".join(s.name for s in diverged) or "none"
            raise UsageError(f"no scenario {only!r} diverged in {name}; of those that did there are: {names}")
        return wanted[0]
    counted = [s for s in diverged if not s.advice]
    if not counted:
        raise UsageError(f"nothing diverged in {name}: there is nothing to shrink")
    # What goes through generate() is not written out, so anything else comes first.
    return next((s for s in counted if not s.name.startswith("generate ")), counted[0])


def programs_of(request: AuditRequest, subject: Subject) -> tuple[Scenario, ...]:
    """Return every program of an audit again."""
    first, second = request.sequences
    drawn = random_programs(limits_of(subject), num=request.num_programs, seed=request.seed, max_len=len(first))
    return (*catalogue(first, second, subject.boundaries), *drawn)


def _case(request: AuditRequest, name: str, on_stage: Callable[[str], None]) -> tuple[_Case, Scenario]:
    """Return the first program of a name that fails in float64, on the model to be written out."""
    options = LoadOptions(
        dtype=request.dtype,
        seed=request.seed,
        attention=request.attention,
        device=request.device,
        trust_remote_code=request.trust_remote_code,
        config=None if request.config is None else Path(request.config),
    )
    check_writable(request.target)
    loaded = load_target(request.target, options)
    cached = name != CAUSALITY
    programs = [p for p in programs_of(request, loaded) if p.name == name]
    if not cached:
        whole = Extend(ids=(request.sequences[0],))
        programs = [replace(token_by_token(request.sequences[0]), name=CAUSALITY, operations=(whole,))]
    if any(isinstance(operation, Generate) for program in programs for operation in program.operations):
        raise UsageError(f"{name!r} goes through generate(), and such programs are not written out")
    on_stage(f"looking for {name}")
    model = writable_model(request, loaded)
    # The clearest first: beside a fault there may be what tables of a lower dtype move.
    for least, program in product((CLEAR, USUAL_LIMIT, STRUCTURAL_FLOOR.value), programs):
        if least < model.least_gap:
            continue
        failure = _finder(model, program, cached).find(program, least)
        if failure is not None:
            return _Case(model=model, program=program, failure=failure, cached=cached), program
    raise UsageError(
        f"{name!r} does not fail in float64 on {request.target or request.config}, run as a file without kvproof "
        f"runs it, with torch {torch.__version__} and the library that is installed; a fault of the declared "
        "dtype alone, or of how a session opens its caches, is not written out"
    )


def _finder(model: WritableModel, program: Scenario, cached: bool) -> FailureFinder:
    """Return what looks for rows that are wrong in true float64, and as a file without kvproof computes them."""
    return FailureFinder(model.subject, model.written_subject(single=_is_padded(program)), cached=cached)


def _is_padded(program: Scenario) -> bool:
    """Return whether a program pads rows: float64 that is not true gives NaN there with some attention."""
    return Ability.PAD in program.needs


def _shrink(case: _Case, on_stage: Callable[[str], None]) -> None:
    """Shrink program and model in turns, until neither gets simpler, quietly: each model would log the same."""

    def told(what: str, num: int) -> None:
        on_stage(f"shrinking the {what}: {len(case.program.operations)} operations, {num} tries")

    models = Tries(max_tries=MAX_TRIES, on_try=lambda num: told("model", num))
    programs = Tries(max_tries=MAX_TRIES, on_try=lambda num: told("program", num))
    while True:
        before = (case.program, case.model.key)
        with case.model.silence():
            finder = _finder(case.model, case.program, case.cached)
            case.program, case.failure = finder.shrink(case.program, case.failure, programs)
            _shrink_model(case, models)
        programs.known.clear()  # on another model other programs may fail
        if (case.program, case.model.key) == before or programs.num >= programs.max_tries:
            return


def _shrink_model(case: _Case, tries: Tries) -> None:
    least = case.failure.min_gap

    def better(candidate: WritableModel, best: WritableModel) -> bool:
        try:
            if candidate.size >= best.size:
                return False
            finder = _finder(candidate, case.program, case.cached)
        except KvproofError:
            return False
        failure = finder.find(case.program, least)
        if failure is None:
            return False
        case.failure = failure
        return True

    case.model = simplify(case.model, lambda model: model.simplify(), better, tries, key=lambda model: model.key)


def _text(case: _Case, report: Report, found: ScenarioResult) -> str:
    gap, single = case.failure.gap, _is_padded(case.program)
    usual = SINGLE_LIMIT if single else USUAL_LIMIT
    what = f"{found.name} of {report.subject.name}: the row after {len(case.failure.prefix)} tokens is "
    what += "not the uncached one." if case.cached else "another one where more tokens follow."
    sentence = f"{found.divergence.sentence}." if found.divergence is not None else report.summary
    return case.model.write(
        Found(
            program=case.program,
            place=case.failure.place,
            prefix=case.failure.prefix,
            cached=case.cached,
            single=single,
            limit=usual if gap > 10 * usual else gap / 10,
            title=what,
            sentence=f"In the audit: {sentence}",
        )
    )


def _run(file: Path) -> tuple[int, str]:
    """Run a written file by itself, without the network; return its exit status and the last line it printed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, file.resolve().name],
            cwd=file.resolve().parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"it was stopped after {LIMIT_S} seconds"
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    return done.returncode, lines[-1] if lines else "it printed nothing"


def _run_elsewhere(text: str) -> tuple[int, str]:
    """Run a file that went to a pipe or a device, from where it cannot be read again."""
    with tempfile.TemporaryDirectory(prefix="kvproof-") as folder:
        file = Path(folder) / "reproduction.py"
        file.write_text(text, "utf-8")
        return _run(file)


def _sentence(name: str, first: Scenario, num_weights: int, case: _Case) -> str:
    def told(program: Scenario, weights: int) -> str:
        num = len(program.operations)
        operations = f"{num} operation{'s' if num > 1 else ''}"
        text = f"{operations}, {num_tokens(program)} tokens"
        return f"{text}, {weights} weights" if weights else text  # 0 where they cannot be seen

    return f"{name}: {told(first, num_weights)}, shrunk to {told(case.program, case.model.num_weights)}"
