"""Model types of flash-linear-attention that longspan does not support, with the reason."""

UNSERVED = {
    "mom": "which routes tokens to several memories",
    "momentum_deltanet": "whose state is a pair of matrices",
    "cyclic_flow_attention": "whose state has rotating slots",
    "wall_transformer": "whose logits decay by channels of keys",
    "parallax": "whose values have a correction of first order",
    "cat": "which compresses chunks by a second model",
    "rodimus": "which selects what its state and a window of softmax keep",
    "samba": "whose layers are those of Mamba and softmax in turns",
    "yoco": "whose later layers read one cache of keys and values",
}
