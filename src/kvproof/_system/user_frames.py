"""Says where in the user's own code something happened: file, line, function and the call that stands there."""

import linecache
import re
import site
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType

#: How many frames are shown, the innermost ones.
MAX_FRAMES = 3
_MAX_CODE = 120  #: characters of a shown line of code

_OWN = str(Path(__file__).parents[1])
_DUMPED = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')

#: A file, a line in it, and the function that the line belongs to.
Place = tuple[str, int, str]


def describe_traceback(frames: TracebackType | None) -> str:
    """Return where the user's code raised, innermost frame first; an empty string if none of it was running."""
    places = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_tb(frames)]
    return describe_places(reversed(places))


def describe_origin(error: BaseException) -> str:
    """Return where the user's code raised an exception, or the one that it comes from; empty if it did not."""
    place = describe_traceback(error.__traceback__)
    return describe_origin(error.__cause__) or place if error.__cause__ is not None else place


def describe_exit(error: SystemExit) -> str:
    """Return which ``sys.exit`` was called and where in the user's code, as in "sys.exit(0) in x.py, line 3"."""
    where = describe_traceback(error.__traceback__)
    return f"sys.exit({error.code!r}){f' in {where}' if where else ''}"


def describe_stack(frame: FrameType | None) -> str:
    """Return where the user's code is now, innermost frame first."""
    return describe_places(
        (f.f_code.co_filename, line, f.f_code.co_name) for f, line in traceback.walk_stack(frame)
    )


def describe_dump(text: str) -> str:
    """Return where the user's code was when `faulthandler` wrote ``text``, innermost frame first.

    Of several threads, it is the one that kvproof runs in.
    """
    threads = [
        list(_dumped_places(part)) for part in re.split(r"^(?:Current t|T)hread ", text, flags=re.MULTILINE)
    ]
    running = [places for places in threads if any(_is_own(file) for file, _, _ in places)]
    return describe_places(_until_own(max(running, key=len))) if running else ""


def describe_places(places: Iterable[Place]) -> str:
    """Return places, innermost first, in words: those in the user's own files, or in any file but kvproof's."""
    foreign = [place for place in places if not _is_own(place[0]) and not place[0].startswith("<")]
    shown: Sequence[Place] = [place for place in foreign if not _is_installed(place[0])] or foreign
    texts = [f"{file}, line {line}, in {name}{_code(file, line)}" for file, line, name in shown[:MAX_FRAMES]]
    return "; called from ".join(texts)


def _dumped_places(text: str) -> Iterator[Place]:
    for found in map(_DUMPED.fullmatch, text.splitlines()):
        if found is not None:
            yield found["file"], int(found["line"]), found["name"]


def _until_own(places: Sequence[Place]) -> Iterator[Place]:
    """Yield the frames inside kvproof's call of the decoder, not those outside that started kvproof."""
    for place in places:
        if _is_own(place[0]):
            return
        yield place


def _code(file: str, line: int) -> str:
    text = linecache.getline(file, line).strip()
    return f": {text[:_MAX_CODE]}" if text else ""


def _is_own(file: str) -> bool:
    return Path(file).is_relative_to(_OWN)


def _is_installed(file: str) -> bool:
    """Return whether a file belongs to Python or to an installed library."""
    homes = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *site.getsitepackages())
    return any(Path(file).is_relative_to(home) for home in homes if home)
