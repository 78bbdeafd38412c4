"""Agreement with independent implementations."""

import pytest
import torch
from torch import nn

import longspan


def converted(theirs: nn.MultiheadAttention, causal: bool) -> longspan.Attention:
    """Our softmax attention with the weights of torch's module."""
    ours = longspan.build("softmax", theirs.embed_dim, theirs.num_heads, causal=causal).double().eval()
    weights = {}
    for name, weight, bias in zip(
        ("query", "key", "value"), theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True
    ):
        weights |= {f"{name}.weight": weight, f"{name}.bias": bias}
    ours.load_state_dict(weights | {"out.weight": theirs.out_proj.weight, "out.bias": theirs.out_proj.bias})
    return ours


@pytest.fixture
def theirs():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(12, 3, batch_first=True).double().eval()
    nn.init.normal_(module.in_proj_bias)
    return module


X = torch.randn(2, 13, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
CONTEXT = torch.randn(2, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


MASK = torch.arange(13) < torch.tensor([[13], [8]])
SEEN = torch.arange(7) < torch.tensor([[7], [4]])


@pytest.mark.parametrize(
    ("causal", "keys", "ours", "torchs"),
    [
        (False, X, {}, {}),
        # In torch, True hides.
        (True, X, {}, {"attn_mask": torch.ones(13, 13, dtype=torch.bool).triu(1)}),
        (False, X, {"mask": MASK}, {"key_padding_mask": ~MASK}),
        (True, CONTEXT, {"context": CONTEXT, "context_mask": SEEN}, {"key_padding_mask": ~SEEN}),
    ],
    ids=["plain", "causal", "padded", "across"],
)
def test_softmax_is_torchs_multihead_attention(theirs, causal, keys, ours, torchs):
    expected, weights = theirs(X, keys, keys, average_attn_weights=False, **torchs)
    record = {}
    y, _ = converted(theirs, causal)(X, record=record, **ours)
    real = ours.get("mask", torch.ones(2, 13, dtype=torch.bool))
    for found, right in ((y, expected), (record["matrix"].transpose(1, 2), weights.transpose(1, 2))):
        torch.testing.assert_close(found[real], right[real], atol=1e-12, rtol=0)


@pytest.mark.parametrize("prenorm", [True, False])
def test_a_block_is_torchs_encoder_layer(prenorm):
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(12, 3, 20, 0.0, "gelu", batch_first=True, norm_first=prenorm).double().eval()
    config = longspan.StackConfig(dim=12, depth=1, heads=3, attention="softmax", feedforward=20, prenorm=prenorm)
    ours = longspan.Stack(config, causal=False).double().eval()
    block = ours.blocks[0]
    block.attention.load_state_dict(converted(theirs.self_attn, causal=False).state_dict())
    block.feedforward.expand.load_state_dict(theirs.linear1.state_dict())
    block.feedforward.contract.load_state_dict(theirs.linear2.state_dict())
    ours.norm = nn.Identity()
    torch.testing.assert_close(ours(X)[0], theirs(X), atol=1e-10, rtol=0)
