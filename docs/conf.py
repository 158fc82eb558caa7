"""How ``make docs`` builds the site. What the pages generate comes from the code itself, as `tables` says."""

import importlib.metadata
import re
import sys
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parent))

import tables

project = "kvproof"
release = importlib.metadata.version("kvproof")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click"]

smartquotes = False  # words stand as the code has them

html_theme = "furo"
html_title = f"kvproof {release}"
html_copy_source = html_show_sourcelink = False
html_show_copyright = False
pygments_style, pygments_dark_style = "default", "monokai"

myst_heading_anchors = 3  # links of the form page.md#heading, as on GitHub

default_role = "py:obj"  # single backticks in docstrings name objects, and link those that are on a page
add_module_names = False
autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 80


class Generated(SphinxDirective):
    """A table that a function of `tables` makes, as Markdown."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes("\n".join(getattr(tables, self.arguments[0])()))


def with_named_defaults(*event: Any) -> tuple[str | None, str | None]:
    """Return a signature in which a function that is a default stands by its name, and a lambda as ``...``."""
    signature, returns = event[-2:]
    if signature is not None:
        signature = re.sub(r"<function [\w.]*<lambda>[^>]*>", "...", signature)
        signature = re.sub(r"<function ([\w.]+)[^>]*>", r"\1", signature)
    return signature, returns


def setup(app: Sphinx) -> None:
    app.add_directive("generated", Generated)
    app.connect("autodoc-process-signature", with_named_defaults)
