"""Model types of flash-linear-attention that longspan does not support, with the reason."""

_SOFTMAX = "whose layers are softmax attention without a state of constant size"

UNSERVED = {
    "mom": "which routes tokens to several memories",
    "momentum_deltanet": "whose state is a pair of matrices",
    "cyfa": "whose state has rotating slots",
    "bitnet": _SOFTMAX,
    "deltaformer": _SOFTMAX,
    "wall_transformer": _SOFTMAX,
    "parallax": _SOFTMAX,
}
