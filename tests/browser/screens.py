"""Screenshots against those on record; ``KVPROOF_WRITE_SCREENS=1`` writes them anew: look at the diff."""

import io
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image, ImageChops, ImageStat
from playwright.sync_api import Page

FOLDER = Path(__file__).parent / "screens"
FONT = "DejaVu Sans"
#: Pictures are kept at a third of their size: small in the repository, and blind to single pixels.
SCALE = 3
#: Mean difference of a channel, of 255: another release of the browser stays below, a missing chart does not.
MOST_DIFFERENT = 3.0


def assert_looks_as_before(page: Page, name: str, *, keep: bool = True) -> None:
    """Hold what the screen shows against the picture of that name; one that differs is kept beside it."""
    fonts = subprocess.run(["fc-list", FONT], capture_output=True).stdout if shutil.which("fc-list") else b""
    if not fonts:
        pytest.skip(f"the pictures on record were taken with the font {FONT} (Debian: fonts-dejavu-core)")
    page.add_style_tag(content=f"* {{ font-family: '{FONT}' !important; caret-color: transparent !important; }}")
    page.evaluate("document.fonts.ready")
    whole = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    seen = whole.resize((whole.width // SCALE, whole.height // SCALE), Image.Resampling.BOX)
    file = FOLDER / f"{name}.png"
    if keep and os.environ.get("KVPROOF_WRITE_SCREENS"):
        seen.quantize(64).save(file, optimize=True)
    kept = Image.open(file).convert("RGB")
    assert kept.size == seen.size
    difference = max(ImageStat.Stat(ImageChops.difference(kept, seen)).mean)
    if difference > MOST_DIFFERENT:
        other = FOLDER / f"{name}.seen.png"
        if keep:
            seen.save(other)
        raise AssertionError(f"{name} differs by {difference:.1f} of 255 a pixel: look at {other}")
