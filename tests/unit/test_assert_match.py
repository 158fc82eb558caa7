"""``assert_match`` takes what ``audit`` takes."""

import inspect
import typing

from kvproof._assert import AuditKeywords
from kvproof._engine.audit import audit


def test_the_keywords_are_those_of_audit():
    parameters = inspect.signature(audit).parameters.values()
    keywords = {p.name: p.annotation for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert typing.get_type_hints(AuditKeywords) == keywords
