"""A dozen types, one for each way to keep a past, in every scenario of the catalogue.

The full sweep over all types has a command and a table of its own; these stand for it on every run.
"""

import pytest
import torch

from kvproof._engine.audit import audit
from kvproof._engine.prompts import random_sequences
from kvproof.contract.results import Verdict
from kvproof.scenarios import catalogue
from kvproof.subjects._transformers import random_model

LENGTH = 16  # twice the tiny models' window
EVERYTHING = frozenset(scenario.name for scenario in catalogue(range(LENGTH), range(LENGTH)))
NOTHING: frozenset[str] = frozenset()
BLOCKS = frozenset({"chunked prefill", "multi-turn", "window crossing", "static cache"})

#: The scenarios that each type fails in transformers 5.17, by what the type stands for.
KINDS: dict[str, tuple[str, str, frozenset[str]]] = {
    "dense": ("llama", "sdpa", NOTHING),
    "grouped heads": ("qwen3", "eager", NOTHING),
    "window": ("gemma3_text", "eager", NOTHING),
    "experts": ("mixtral", "eager", NOTHING),
    "latent attention": ("deepseek_v3", "eager", NOTHING),
    "learnt positions": ("gpt2", "sdpa", NOTHING),
    "parallel branches": ("falcon", "eager", NOTHING),
    "hybrid": ("bamba", "eager", NOTHING),
    "recurrent": ("mamba", "eager", BLOCKS),
    "local attention by a bias": ("gpt_neo", "eager", frozenset({"static cache", "generate static cache"})),
    "not causal": ("big_bird", "eager", frozenset({"causality"})),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_type_fails_where_it_is_known_to_and_nowhere_else(kind: str):
    model_type, attention, known = KINDS[kind]
    subject = random_model(model_type, seed=0, dtype=torch.float32, attention=attention)
    programs = catalogue(*random_sequences(subject, LENGTH, 0), subject.boundaries)
    report = audit(subject, programs, all_values=False)
    counted = [scenario for scenario in report.scenarios if not scenario.advice]
    wrong = {scenario.name for scenario in counted if scenario.verdict is Verdict.DIVERGED}
    if "causality" in known:  # its literal rows are no function that a cache can give: what else differs follows
        wrong &= known
    assert wrong == known, report.summary
    assert {scenario.name for scenario in report.scenarios} == EVERYTHING | {"causality"}
    settled = (Verdict.MATCH, Verdict.ROUNDING, Verdict.DIVERGED, Verdict.NOT_CHECKED)
    assert all(scenario.verdict in settled for scenario in counted), report.summary
    assert report.verdict.passes is not bool(known)
