"""Stages: the named intermediate values on the way to the logits, in causal order.

The order is that of a pre-norm decoder: earlier stages are computed first. So the first stage that differs
introduced the error, and everything after it may only propagate it.
"""

from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """One kind of intermediate value. Members are in causal order."""

    TOKEN = "token"  #: the consumed token id
    POSITION = "position"  #: the absolute position of that token
    EMBEDDING = "embedding"  #: token embedding + position embedding
    ATTN_NORM = "attn_norm"  #: the layer's normalised input
    NEW_Q = "new_q"  #: the query of the new token, after rotation if there is one
    NEW_K = "new_k"  #: the key of the new token
    NEW_V = "new_v"  #: the value of the new token
    CACHE_LEN = "cache_len"  #: number of entries in the layer's cache after the append
    CACHE_K = "cache_k"  #: the keys that attention reads: every slot of the appended cache
    CACHE_V = "cache_v"  #: the values that attention reads
    MASK = "mask"  #: the attention mask; exposed so that faults can change it, and never compared
    ATTN_WEIGHTS = "attn_weights"  #: attention probabilities over the valid entries
    ATTN_MIX = "attn_mix"  #: each head's weighted sum of values, before the output projection
    ATTN_OUT = "attn_out"  #: attention output, after the output projection
    ATTN_RESIDUAL = "attn_residual"  #: layer input + attention output
    MLP_OUT = "mlp_out"  #: output of the MLP, including its norm
    MLP_RESIDUAL = "mlp_residual"  #: the layer's output
    FINAL_NORM = "final_norm"  #: the last layer's output, normalised
    MODULE = "module"  #: the output of a named module, for decoders without taps of their own
    LOGITS = "logits"  #: the readout
    POLICY = "policy"  #: the token chosen from equal logits


#: Stages that exist once, before the first layer and after the last one.
BEFORE_LAYERS = (Stage.TOKEN, Stage.POSITION, Stage.EMBEDDING)
AFTER_LAYERS = (Stage.FINAL_NORM, Stage.LOGITS, Stage.POLICY)
#: Stages that adapters expose for models without taps of their own.
SHOWN_BY_ADAPTERS = (Stage.MASK, Stage.ATTN_MIX, Stage.MODULE)
#: Stages of every layer of a decoder with taps of its own, in causal order.
IN_LAYER = tuple(s for s in Stage if s not in (*BEFORE_LAYERS, *AFTER_LAYERS, *SHOWN_BY_ADAPTERS))
#: Stages with a value for every cache slot, not only for the new tokens.
OVER_SLOTS = frozenset({Stage.CACHE_K, Stage.CACHE_V})


@dataclass(frozen=True, slots=True)
class Site:
    """A stage of one layer (None outside the layers) and, if it is a module's output, of one module.

    Layers and positions count from 0, and so do the parts of an output that has several values.
    """

    stage: Stage
    layer: int | None = None
    module: str | None = None
    part: int = 0

    def __str__(self) -> str:
        if self.stage is Stage.MODULE:
            return f"the output of {self.module}" + (f" (part {self.part})" if self.part else "")
        place = self.stage.value if self.layer is None else f"{self.stage.value} of layer {self.layer}"
        return place if self.module is None else f"{place} in {self.module}"


def causal_order(num_layers: int) -> tuple[Site, ...]:
    """Return every site of a decoder with taps of its own and ``num_layers`` layers, earliest first."""
    layers = tuple(Site(stage, layer) for layer in range(num_layers) for stage in IN_LAYER)
    return tuple(map(Site, BEFORE_LAYERS)) + layers + tuple(map(Site, AFTER_LAYERS))


#: The likely cause if a stage is the first that differs. Wrong cache slots have causes of their own below:
#: what a slot really holds says more than that it is wrong.
LIKELY_CONTRACT: dict[Stage, str] = {
    Stage.TOKEN: "token ownership: the cached path consumed another token than the request holds",
    Stage.POSITION: "position index: the new token must take the position that equals the cache length",
    Stage.EMBEDDING: "embedding: the lookup or the position addition",
    Stage.ATTN_NORM: "normalisation before attention, or the residual stream handed to this layer",
    Stage.NEW_Q: "projection, normalisation, or axis order of the new query",
    Stage.NEW_K: "new key: projection, normalisation, position or axis order",
    Stage.NEW_V: "new value: projection, normalisation or axis order",
    Stage.CACHE_LEN: "missing or duplicate append: each layer appends each consumed token exactly once",
    Stage.CACHE_K: "cache content: a stored key changed after it was written, or the wrong one is read",
    Stage.CACHE_V: "cache content: a stored value changed after it was written, or the wrong one is read",
    Stage.MASK: "mask: which slots the new tokens may read",
    Stage.ATTN_WEIGHTS: "mask or scale: attention read the wrong rows of a cache that is right",
    Stage.ATTN_MIX: "attention mix: keys, values and weights, where they are shown, are right",
    Stage.ATTN_OUT: "attention mix or output projection",
    Stage.ATTN_RESIDUAL: "residual addition after attention",
    Stage.MLP_OUT: "MLP or its normalisation",
    Stage.MLP_RESIDUAL: "residual addition after the MLP",
    Stage.FINAL_NORM: "final normalisation",
    Stage.MODULE: "this module gives a different result when a sequence is fed in several calls",
    Stage.LOGITS: "readout",
    Stage.POLICY: "policy, tie rule, or generator state: the logits match and the chosen token differs",
}
WRONG_LAYER = "wrong layer's cache: each layer must read and append to its own"
WRONG_SLOT = "stale or misplaced slot: a layer's entries must stand in the order of consumption"
WRONG_KIND = "keys and values swapped"
WRONG_DTYPE = "precision: a value is held, or computed, in a lower dtype than on the uncached path"
AFTER_READOUT = (
    "the logits themselves differ although every value shown before them agrees: what is done at or after the "
    "readout (softcap, scaling, slicing)"
)
NOTHING_SHOWN = "not known, because nothing inside this decoder can be seen except its token ids"
WRONG_REQUEST = "cross-request cache contamination: each request owns its cache"
