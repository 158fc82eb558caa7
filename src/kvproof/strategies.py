"""Hypothesis strategies for programs. Requires ``kvproof[hypothesis]``.

Use them in property tests of your own decoder to draw programs; Hypothesis shrinks the ones that fail.
"""

from hypothesis import strategies as st

from kvproof.scenarios import Scenario, random_program
from kvproof.subjects import Subject, limits_of


@st.composite
def programs(draw: st.DrawFn, subject: Subject, max_len: int | None = None) -> Scenario:
    """Draw a program of operations on one or more sessions, each of which is legal at its place on the subject.

    Sessions hold at most ``max_len`` tokens, by default the whole context. At least one row is compared.
    """
    most = subject.info.context_len if max_len is None else max_len
    return random_program(lambda low, high: draw(st.integers(low, high)), limits_of(subject), most)
