"""Shapes are checked while the tests run; the trained checkpoint is made once."""

import os

from jaxtyping import install_import_hook
from transformers import GenerationMixin  # noqa: F401  # what hooked modules import is compiled in every process

# Before anything imports kvproof: every annotated shape in these modules is checked at each call. What has none
# is left alone, for each function costs at each call, and one inside another is made again each time.
install_import_hook(["kvproof.reference", "kvproof.subjects._base"], "beartype.beartype")

from typing import Any  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from kvproof import Report  # noqa: E402
from kvproof._engine import audit as audit_module  # noqa: E402
from kvproof._engine.verdict_rules import judge  # noqa: E402
from kvproof.reference import Checkpoint, train  # noqa: E402
from kvproof.subjects import ReferenceSubject  # noqa: E402

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # more round otherwise: tools/processors.py
# A tiny model's speed depends on what else the machine does; examples are chosen the same way each time.
settings.register_profile("kvproof", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("kvproof")


_Report = audit_module.Report


def _judged_again(**members: Any) -> Report:
    """Make the report of an audit, and hold that each row's evidence gives its verdict and reason again."""
    report = _Report(**members)
    for scenario in report.scenarios:
        for row in scenario.rows:
            assert judge(row.evidence) == (row.verdict, row.reason), f"{scenario.name} after {row.tokens}"
    return report


audit_module.Report = _judged_again  # every report that the suite makes, in this process


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    """The trained reference checkpoint. Nothing may change it."""
    decoder, loss = train()
    return Checkpoint(decoder=decoder, seed=1, loss=loss)


@pytest.fixture
def subject(checkpoint: Checkpoint) -> ReferenceSubject:
    return ReferenceSubject(checkpoint)


@pytest.fixture
def uncounted(checkpoint: Checkpoint) -> ReferenceSubject:
    """The reference decoder without its cache's own guard: a wrong number of entries reaches the logits."""
    return ReferenceSubject(checkpoint, counts_entries=False)
