"""Makes untrusted text safe to print: a token can contain anything."""


def printable(text: str) -> str:
    """Return ``text`` with an escape for every character that a terminal might interpret."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def one_line(text: str, max_length: int = 500) -> str:
    """Return ``text`` on one printable line, shortened to ``max_length`` characters and an ellipsis."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= max_length else f"{line[:max_length]}..."
