"""Compares a report with an earlier one: what got worse, and what got better."""

from dataclasses import dataclass

from kvproof.contract.report import Report
from kvproof.contract.results import ScenarioResult, Verdict
from kvproof.errors import ReportError

_ORDER = list(Verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The scenarios whose verdict changed, in words, and the resulting exit status."""

    worse: tuple[str, ...]
    better: tuple[str, ...]
    exit_status: int

    def sentences(self) -> tuple[str, ...]:
        """Return one line for each change, and a summary."""
        verdict = "got worse than the baseline" if self.worse else "nothing got worse than the baseline"
        num = len(self.worse)
        head = f"{num} scenario{'' if num == 1 else 's'} {verdict}" if num else verdict
        return (
            *(f"worse: {text}" for text in self.worse),
            *(f"better: {text}" for text in self.better),
            f"{head}.",
        )


def changes(report: Report, baseline: Report) -> Changes:
    """Compare the verdict of every scenario with the baseline's, or with a pass if the baseline lacks it.

    A scenario that is no longer checked counts as worse: its status is that of a required but unchecked scenario.
    Advice does not count. Raises `ReportError` if subject or dtype differ.
    """
    for what, own, other in (
        ("subject", report.subject.name, baseline.subject.name),
        ("dtype", report.subject.dtype, baseline.subject.dtype),
    ):
        if own != other:
            raise ReportError(f"the baseline has another {what}: {other}, but this audit has {own}")
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
    status = next((s for s in (1, 6, 3, 4, 5) if s in statuses), 0)
    return Changes(worse=tuple(worse), better=tuple(better), exit_status=status)


def _verdicts(scenarios: tuple[ScenarioResult, ...]) -> dict[str, Verdict]:
    return {scenario.name: scenario.verdict for scenario in scenarios if not scenario.advice}


def _is_worse(then: Verdict, now: Verdict) -> bool:
    if now is Verdict.NOT_CHECKED:
        return then.passes
    return not now.passes and _ORDER.index(now) > _ORDER.index(then)
