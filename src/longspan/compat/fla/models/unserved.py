"""Model types of flash-linear-attention that longspan does not support, with the reason."""

_SOFTMAX = "whose layers are softmax attention without a state of constant size"

UNSERVED = {
    "mesa_net": "whose layers solve a linear system by conjugate gradients for each token",
    "gsa": "whose first pass decays the channels of the values, for which longspan has no kernel",
    "abc": "whose first pass decays the channels of the values, for which longspan has no kernel",
    "raven": "whose first pass decays the channels of the values, for which longspan has no kernel",
    "mom": "which routes tokens to several memories",
    "momentum_deltanet": "whose state is a pair of matrices",
    "cyfa": "whose state has rotating slots",
    "transformer": _SOFTMAX,
    "bitnet": _SOFTMAX,
    "mla": _SOFTMAX,
    "nsa": _SOFTMAX,
    "moba": _SOFTMAX,
    "forgetting_transformer": _SOFTMAX,
    "path_attn": _SOFTMAX,
    "deltaformer": _SOFTMAX,
    "wall_transformer": _SOFTMAX,
    "parallax": _SOFTMAX,
    "stickbreaking_attn": _SOFTMAX,
}
