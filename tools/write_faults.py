"""Write docs/faults.md: the catalogue of deliberate faults, and the public cache bugs that each stands for.

The classes and counts are those of 105 public records of cache bugs, gathered from the trackers of libraries and
engines; one of each class is linked.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from kvproof.contract.stages import Stage
from kvproof.faults import Fault, catalogue

TARGET = Path(__file__).parents[1] / "docs" / "faults.md"

GITHUB = "https://github.com/"
#: Each class: how many public records, what goes wrong, and one of them.
CLASSES = {
    "append-integrity": (7, "a token is appended twice, or never", "huggingface/transformers/pull/42188"),
    "beam-reorder": (3, "state stays behind when beams move", "huggingface/transformers/issues/46612"),
    "bias-geometry": (3, "a distance bias counts from the wrong end", "huggingface/transformers/issues/19045"),
    "buffer-isolation": (6, "requests or branches share a buffer", "huggingface/transformers/pull/32929"),
    "left-padding": (8, "padding is attended to, or counted", "huggingface/transformers/issues/18104"),
    "mask-alignment": (9, "a mask is aligned to the wrong corner, or left out", "pytorch/pytorch/issues/108108"),
    "off-by-one-position": (2, "an offset is read after it has advanced", "ml-explore/mlx-lm/issues/1805"),
    "path-parity": (7, "one path computes a part that the other does not", "ml-explore/mlx-lm/issues/1674"),
    "prefix-reuse-identity": (7, "another prefix's entries are reused", "vllm-project/vllm/issues/30931"),
    "quantised-cache": (
        3,
        "entries are kept in another dtype, or too few bits",
        "huggingface/transformers/issues/35185",
    ),
    "recurrent-state": (5, "a state restarts, or is stored at the wrong point", "state-spaces/mamba/pull/1027"),
    "rollback-crop": (4, "what was taken back stays", "huggingface/transformers/pull/47720"),
    "rope-length-dependence": (2, "entries rotated with another table", "huggingface/transformers/pull/33129"),
    "stopping-bookkeeping": (3, "the last token is fed twice, or never", "microsoft/onnxruntime-genai/pull/1814"),
    "window-eviction": (8, "a window drops one too many, or too few", "huggingface/transformers/issues/33691"),
    "wrong-position": (9, "positions restart, or skip", "ml-explore/mlx-lm/pull/93"),
    "wrong-tensor-or-layer": (3, "the wrong tensor, head or layer", "ggml-org/llama.cpp/issues/12253"),
}
#: The classes that nothing is planted for, and why.
NO_FAULT = {
    "rounding": (14, "no bug: what a healthy audit must call rounding", "huggingface/transformers/issues/25420"),
    "cross-attention-cache": (
        2,
        "out of reach: decoders that stand alone have no encoder to read",
        "huggingface/transformers/issues/41875",
    ),
}


INTRODUCTION = (
    "After a pass, `kvproof audit` plants each of them wherever the subject lets it be planted, by layer and",
    "position, in a short form of the first scenario named here, in float64. A fault counts as caught if a row",
    "of logits differs, and as right if the first value that differs is at the stage named here; where a decoder",
    "does not show that stage, a module of the same layer stands for it.",
)


def text() -> str:
    """Return the page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    faults = catalogue()
    yield "# Deliberate faults"
    yield ""
    yield f"The {len(faults)} faults that `kvproof faults` lists; `tools/write_faults.py` writes this page."
    yield from INTRODUCTION
    yield ""
    yield "## From public bugs to faults"
    yield ""
    yield "| class of public bugs | records | what goes wrong | faults that stand for it | one of them |"
    yield "|---|---|---|---|---|"
    for name, (number, what, example) in sorted(CLASSES.items()):
        standing = ", ".join(fault.name for fault in faults if name in fault.classes)
        yield f"| {name} | {number} | {what} | {standing} | [{example}]({GITHUB}{example}) |"
    for name, (number, why, example) in sorted(NO_FAULT.items()):
        yield f"| {name} | {number} | {why} | none | [{example}]({GITHUB}{example}) |"
    yield ""
    yield "## The catalogue"
    yield ""
    yield "| fault | breaks | scenarios that see it | must first show at |"
    yield "|---|---|---|---|"
    yield from map(_row, faults)


def _row(fault: Fault) -> str:
    stages = ", ".join(stage.value for stage in Stage if stage in fault.stages)
    return f"| {fault.name} | {fault.breaks} | {', '.join(fault.seen_by)} | {stages} |"


if __name__ == "__main__":
    TARGET.write_text(text(), "utf-8")
    sys.exit(0)
