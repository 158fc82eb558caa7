"""Plants every fault in the subjects that are named, and writes what came of it as JSON.

Run on its own, because this is thousands of calls, and inside the tests each one's shapes are checked.
"""

import json
import sys
from collections.abc import Iterator

import torch

from kvproof._engine.audit import Auditor
from kvproof._engine.certificate import Certifier
from kvproof._engine.programs import run_program
from kvproof._engine.prompts import random_sequences
from kvproof._engine.uncached_values import OnePassRuns
from kvproof.contract.codec import to_plain
from kvproof.errors import KvproofError
from kvproof.faults import Place, Planting, catalogue
from kvproof.scenarios import Boundaries, Scenario, longest_sequences
from kvproof.scenarios import catalogue as scenarios
from kvproof.subjects import Subject
from kvproof.subjects._transformers import random_model

#: How many tokens the cache holds when its tensors are edited. Faults in calls act in every call on a warm cache.
POSITION = 3


def whole_scenarios(certifier: Certifier, boundaries: Boundaries) -> Iterator[tuple[str, str, bool]]:
    """Yield (fault, scenario, seen) for each fault in its last layer and each scenario that must see it.

    Scenarios that cannot run on the subject are left out. The fault ``none`` stands for none at all.
    """
    site = certifier.site
    subject = certifier.rung.subject
    seen_by = {fault.name: fault.seen_by for fault in catalogue()}
    forms: dict[str, list[Scenario]] = {}
    for program in scenarios(site.sequence, site.other, boundaries):
        if not program.skipped and program.needs <= set(subject.info.abilities):
            forms.setdefault(program.name, []).append(program)
    longest = {s for programs in forms.values() for p in programs for s in longest_sequences(p)}
    runs = OnePassRuns(subject, sorted(longest))
    for name in sorted(forms.keys() & {name for names in seen_by.values() for name in names}):
        yield "none", name, is_seen(subject, runs, Planting(), forms[name])
    for fault in catalogue():
        for layer in list(fault.layers(site))[-1:]:
            place = Place(layer=layer, position=POSITION if fault.edits_cache else 1, site=site)
            for name in fault.seen_by:
                if name in forms:
                    yield fault.name, name, is_seen(subject, runs, fault.make(place), forms[name])


def is_seen(subject: Subject, runs: OnePassRuns, planting: Planting, forms: list[Scenario]) -> bool:
    """Return whether some form of the scenario sees the fault."""
    for program in forms:
        try:
            for call in run_program(subject, program, planting):
                if any(runs.over(r.prefix).logits_differ(len(r.prefix), r.logits) for r in call.rows):
                    return True
        except KvproofError:
            return True
    return False


def main(names: list[str]) -> None:
    """Write certificates, and what whole scenarios see, by name of the subject."""
    torch.set_num_threads(1)
    found = {}
    for name in names:
        subject = random_model(name, seed=0, dtype=torch.float32, attention="eager")
        first, second = random_sequences(subject, 16, 0)
        auditor = Auditor(subject)
        auditor.uncached.measure([first, second])
        audited = [
            program
            for program in scenarios(first, second, subject.boundaries)
            if not program.skipped and program.needs <= set(subject.info.abilities)
        ]
        certifier = Certifier(auditor.uncached, auditor.tolerance, first, second, audited)
        certificate = certifier.certificate()
        found[name] = {
            "certificate": to_plain(certificate),
            "scenarios": list(whole_scenarios(certifier, subject.boundaries)),
        }
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
