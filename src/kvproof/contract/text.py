"""Makes text that came from elsewhere safe to print: a token may hold anything."""


def printable(text: str) -> str:
    """Return ``text`` with every character that a terminal might act on written as its escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
