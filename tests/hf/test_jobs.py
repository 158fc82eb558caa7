"""Audits by several processes: the same report, from start to findings, and what Ctrl-C leaves of it."""

import sys
from dataclasses import replace

import pytest
import torch

import kvproof
from kvproof._system.machine import use_one_thread, use_threads
from kvproof._system.pool import default_jobs
from kvproof.contract.report import Report
from kvproof.scenarios import RANDOM_PROGRAMS, catalogue, random_programs, select
from kvproof.subjects import limits_of
from kvproof.subjects._transformers import TransformersSubject, random_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks")
SCENARIOS = ("token-by-token", "chunked prefill", "fork", "batch")
SEQUENCES = tuple(range(3, 15)), tuple(range(20, 32))


def model(name: str) -> TransformersSubject:
    return random_model(name, dtype=torch.float32, attention="eager", seed=0)


def audited(subject: TransformersSubject, jobs: int) -> Report:
    drawn = random_programs(limits_of(subject), num=3, seed=0, max_len=8)
    programs = (*select(catalogue(*SEQUENCES, subject.boundaries), only=SCENARIOS), *drawn)
    return kvproof.audit(subject, programs, all_values=False, certificate=True, spread=True, jobs=jobs)


@pytest.mark.parametrize(("name", "passes"), [("llama", True), ("mamba", False)])
def test_several_processes_come_to_the_report_of_one(name: str, passes: bool):
    """Findings, four ways, certificate, spread and what the random programs did are brought together."""
    subject = model(name)
    with use_one_thread():  # as each of several processes does: more may add in another order
        one, two = (audited(subject, jobs) for jobs in (1, 2))
    assert one.verdict.passes == passes
    assert RANDOM_PROGRAMS in {scenario.name for scenario in one.scenarios}
    assert (one.certificate is not None) == passes
    assert one.spreads
    assert replace(two, environment=one.environment) == one


def test_as_many_as_torch_has_threads_where_it_may():
    subject = model("llama")
    assert subject.may_fork
    with use_threads(3):
        assert default_jobs(may_fork=True) == 3
        assert default_jobs(may_fork=False) == 1


def test_an_interrupt_keeps_what_was_done():
    def on_scenario(name: str) -> None:
        if name == "chunked prefill":
            raise KeyboardInterrupt

    report = kvproof.audit(model("llama"), length=8, jobs=2, keep_partial=True, on_scenario=on_scenario)
    assert [scenario.name for scenario in report.scenarios] == ["causality", "token-by-token", "prefill+steps"]
    assert report.partial


def test_the_first_finding_ends_it_where_asked():
    report = kvproof.audit(
        model("mamba"), ["chunked prefill", "multi-turn"], length=12, jobs=2, all_values=False, fail_fast=True
    )
    assert [scenario.name for scenario in report.scenarios] == ["causality", "chunked prefill"]
    assert report.partial
