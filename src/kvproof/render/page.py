"""Fills in a page: one file that needs no network, in which text from tokens can never run as code.

The templates escape everything from a report. Data for the scripts is in a block that is not a script. The page's
content security policy allows only these scripts, by their digests, and loads nothing.
"""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import BaseLoader, Environment, StrictUndefined, TemplateNotFound
from markupsafe import Markup

from kvproof.contract.text import one_line, printable

#: The chart library, unmodified; its versions and licences are in the same folder.
CHARTS = ("vendor/d3.min.js", "vendor/plot.umd.min.js")
#: The text of a token or prefix is cut to this many characters, from its end.
_TAIL = 40
_MINUS, _TIMES = "\u2212", "\u00d7"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def page(
    template: str,
    *,
    title: str,
    version: str,
    data: Any,
    scripts: Sequence[str],
    styles: Sequence[str],
    **values: Any,
) -> str:
    """Return a page: its scripts use ``data``, and its template uses ``values``.

    ``scripts`` and ``styles`` are names of assets, in the order in which the page includes them.
    """
    texts = [asset(name) for name in scripts]
    allowed = " ".join(f"'sha256-{_digest(text)}'" for text in texts)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    return (
        _environment()
        .get_template(template)
        .render(
            title=title,
            version=version,
            policy=policy,
            style=Markup("".join(map(asset, styles))),
            scripts=[Markup(text) for text in texts],
            data=island(data),
            **values,
        )
    )


def island(data: Any) -> Markup:
    """Return data as JSON that is safe inside a page: it cannot end its block or start another."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


@cache
def asset(name: str) -> str:
    """Return the text of a file that ships with the renderers."""
    return files("kvproof.render").joinpath("assets", name).read_text("utf-8")


def number(value: float | None) -> str:
    """Return a number in readable form: with a power of ten if it is very small or very large."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else f"{_MINUS}∞"
    if value == 0 or (0.01 <= abs(value) < 10_000):
        return f"{value:.4g}".replace("-", _MINUS)
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.replace('-', _MINUS)} {_TIMES} 10{str(int(exponent)).translate(_SUPERSCRIPTS)}"


def tail(text: str) -> str:
    """Return the end of an untrusted text, safe to show."""
    text = printable(text)
    return text if len(text) <= _TAIL else f"…{text[-_TAIL:]}"


class _Assets(BaseLoader):
    def get_source(self, environment: Environment, template: str) -> tuple[str, str, Any]:
        try:
            return asset(template), template, lambda: True
        except FileNotFoundError as error:
            raise TemplateNotFound(template) from error


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=_Assets(), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["shown"] = printable
    environment.filters["tail"] = tail
    environment.filters["tight"] = one_line
    environment.filters["num"] = number
    environment.filters["six"] = lambda value: f"{value:.6g}".replace("-", _MINUS)
    environment.filters["capitalised"] = lambda text: text[:1].upper() + text[1:]
    return environment


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
