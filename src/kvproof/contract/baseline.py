"""A report held against an earlier one: what got worse, and what got better."""

from dataclasses import dataclass

from kvproof.contract.report import Report
from kvproof.contract.results import ScenarioResult, Verdict
from kvproof.errors import ReportError

_ORDER = list(Verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Scenarios whose verdict changed, each in words, and the exit status of what got worse."""

    worse: tuple[str, ...]
    better: tuple[str, ...]
    exit_status: int

    def sentences(self) -> tuple[str, ...]:
        """Return each change in a line, and how it stands against the baseline as a whole."""
        verdict = "got worse than the baseline" if self.worse else "nothing got worse than the baseline"
        num = len(self.worse)
        head = f"{num} scenario{'' if num == 1 else 's'} {verdict}" if num else verdict
        return (
            *(f"worse: {text}" for text in self.worse),
            *(f"better: {text}" for text in self.better),
            f"{head}.",
        )


def changes(report: Report, baseline: Report) -> Changes:
    """Hold every scenario's verdict against the baseline's; one that it does not have stands against a pass.

    What was checked and is not any more got worse, with the status of a required scenario that was not checked.
    Advice is no part of it. Raises `ReportError` where the two are not of one subject and dtype.
    """
    for what, own, other in (
        ("subject", report.subject.name, baseline.subject.name),
        ("dtype", report.subject.dtype, baseline.subject.dtype),
    ):
        if own != other:
            raise ReportError(f"the baseline is of another {what}: {other}, and this audit of {own}")
    before, after = _verdicts(baseline.scenarios), _verdicts(report.scenarios)
    for verdicts, of in ((before, baseline), (after, report)):
        if of.certificate is not None:
            verdicts["certificate"] = Verdict.MATCH if of.certificate.problem is None else Verdict.VACUOUS
    worse, better, statuses = [], [], [0]
    for name, now in after.items():
        then = before.get(name, Verdict.MATCH if now is not Verdict.NOT_CHECKED else now)
        if (then.passes and now.passes) or then is now:
            continue
        text = f"{name}: {then.value}, and now {now.value}"
        if _is_worse(then, now):
            worse.append(text)
            statuses.append(5 if now is Verdict.NOT_CHECKED else now.exit_status)
        else:
            better.append(text)
    status = next((s for s in (1, 3, 4, 5) if s in statuses), 0)
    return Changes(worse=tuple(worse), better=tuple(better), exit_status=status)


def _verdicts(scenarios: tuple[ScenarioResult, ...]) -> dict[str, Verdict]:
    return {scenario.name: scenario.verdict for scenario in scenarios if not scenario.advice}


def _is_worse(then: Verdict, now: Verdict) -> bool:
    if now is Verdict.NOT_CHECKED:
        return then.passes
    return not now.passes and _ORDER.index(now) > _ORDER.index(then)
