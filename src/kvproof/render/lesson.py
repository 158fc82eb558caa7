"""Renders the lesson as one HTML file: its numbers, and questions to answer before seeing the solutions."""

from dataclasses import dataclass
from typing import Any

from kvproof.contract.codec import to_plain
from kvproof.contract.lesson import Lesson
from kvproof.render.page import CHARTS, page


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question: its answer is a number or a choice."""

    title: str
    text: str
    ask: str
    choices: tuple[str, ...]  #: empty if the answer is a number
    right: int  #: the number, or the index of the choice
    hint: str
    solution: str


QUESTIONS = (
    Question(
        title="Set the next position",
        text="The frozen model's cache contains three consumed input positions. Which absolute position index "
        "should the next input token receive?",
        ask="Compute it first, then check your number.",
        choices=(),
        right=3,
        hint="The cache length equals the next zero-based index.",
        solution="The next input uses position index 3, the model's last valid input position.",
    ),
    Question(
        title="Interpret an equivalence table",
        text="Prefixes of lengths 1 and 2 differ by at most 10⁻⁷, but length 3 differs by 0.8 immediately "
        "after position addition. What should you inspect first?",
        ask="Select one choice, then check.",
        choices=(
            "Inspect the position index used for the third token.",
            "Change the sampling temperature and top-k value.",
            "Replace layer 2's cache before checking earlier state.",
        ),
        right=0,
        hint="Follow the first differing intermediate, not the final logits.",
        solution="Inspect whether the third input used position row 2 in both paths.",
    ),
    Question(
        title="Count the entries",
        text="After three consumed tokens, layer 0's K and V hold 3 entries a head, and layer 1's hold 2. What "
        "happened?",
        ask="Select one choice, then check.",
        choices=(
            "Nothing: layer 1 needs fewer entries, because layer 0 has read the past for it.",
            "Layer 1 missed an append: each layer appends each consumed token exactly once.",
            "The third token received the wrong position index.",
        ),
        right=1,
        hint="Look at the cache of both layers above while you step: how do their lengths go together?",
        solution="Layer 1 missed an append. Every layer owns a cache, and each consumed token adds one entry "
        "to each of them; so after t tokens every K and V has the shape (1, 2, t, 2). The length shows it "
        "before any logit does.",
    ),
    Question(
        title="The same token, so the same row?",
        text="At every prefix of a test, the cached row and the uncached row have the same most likely token. "
        "Is the cache right?",
        ask="Select one choice, then check.",
        choices=(
            "Yes: greedy decoding would return the same text.",
            "Yes, as long as the vocabulary is small.",
            "That is not shown: the rows may differ everywhere else.",
        ),
        right=2,
        hint="Above, take the run “seeded” with the fault “missing-append”, and look at the gaps beneath the "
        "tokens.",
        solution="It is not shown. With the missing append the seeded run keeps every most likely token, while "
        "a logit is off by more than 8. A policy that draws, or another prompt, meets what the chosen tokens "
        "hid. So whole rows are compared.",
    ),
    Question(
        title="A check that passes",
        text="A check passes on the healthy decoder. It also passes when every position is reset to 0. What "
        "does its pass say about the healthy decoder?",
        ask="Select one choice, then check.",
        choices=(
            "Nothing yet: the check has not been seen to fail.",
            "The healthy decoder is right, because the check passed on it.",
            "Positions do not matter for this decoder.",
        ),
        right=0,
        hint="What would the check say of a decoder that is wrong?",
        solution="Nothing yet. A reset of all positions moves the logits of this decoder by more than 20, so a "
        "check that lets it pass looks elsewhere. Only one that rejects what is broken on purpose makes a pass "
        "worth something.",
    ),
)

#: The page's name for each stage, and what the stage computes.
STAGES = {
    "token": ("token", "the id that is consumed"),
    "position": ("position", "the cache length before this token"),
    "embedding": ("embedding", "token embedding + position embedding"),
    "attn_norm": ("normalised input", "what query, key and value are made from"),
    "new_q": ("new query", "of this token, one a head"),
    "new_k": ("new key", "of this token, appended to K"),
    "new_v": ("new value", "of this token, appended to V"),
    "cache_len": ("cache length", "entries after the append"),
    "cache_k": ("K", "the keys that attention reads, one a slot"),
    "cache_v": ("V", "the values that attention reads, one a slot"),
    "attn_weights": ("attention weights", "softmax of query · key ÷ √2 over the valid entries"),
    "attn_out": ("attention output", "weights × values, both heads, projected"),
    "attn_residual": ("residual", "layer input + attention output"),
    "mlp_out": ("MLP output", "of the normalised residual"),
    "mlp_residual": ("layer output", "residual + MLP output"),
    "final_norm": ("final norm", "the last layer's output, normalised"),
    "logits": ("logits", "final norm · each token's embedding"),
    "policy": ("choice", "the policy's, from the logits"),
}


def render(lesson: Lesson) -> str:
    """Return the page; the same lesson gives the same bytes."""
    data: dict[str, Any] = to_plain(lesson)
    data["stages"] = STAGES
    data["questions"] = [{"choices": len(each.choices), "right": each.right} for each in QUESTIONS]
    return page(
        "lesson.html.jinja",
        title="A KV cache, one token at a time",
        version=lesson.environment.kvproof,
        data=data,
        scripts=(*CHARTS, "charts.js", "lesson.js"),
        styles=("page.css", "lesson.css"),
        lesson=lesson,
        questions=QUESTIONS,
        runs=list(dict.fromkeys(walk.run for walk in lesson.walks)),
        faults=list(dict.fromkeys((walk.fault, walk.breaks) for walk in lesson.walks if walk.fault)),
    )
