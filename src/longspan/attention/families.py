"""Families of mechanisms, and the symbols that their equations share."""

# The families of mechanisms, and the titles of their pages in this order.
FAMILIES = {
    "softmax": "Softmax attention",
    "sparse": "Local and sparse attention",
    "linear": "Linear attention",
    "gated": "Gated linear attention and the delta rule",
    "content": "Content-based sparse attention",
    "compressed": "Low-rank and compressed attention",
    "others": "Other mechanisms",
}

# Symbols that the equations of all mechanisms share: the LaTeX text to search for in an equation -> the meaning.
LEGEND = {
    "_": r"$i$ or $t$ counts the queries, $j$ the keys, $h$ the $H$ heads",
    "q_": r"$q_i = W_q x_i$, $k_j = W_k x_j$, $v_j = W_v x_j$: each head's channels, $D$ of them in queries and keys",
    "o_": r"$o_i$: the output of a head; $y_i = W_o [o_i^1; \ldots; o_i^H]$ unless stated otherwise",
    r"\mathcal{A}_i": r"$\mathcal{A}_i$: the keys that query $i$ may see, all or, if causal, those with $j \le i$",
    "S_": r"$S$: a state, zero before the first token; one for each head",
    r"\phi": r"$\phi$: a map from channels to features",
    r"\sigma": r"$\sigma(x) = \frac{1}{1 + e^{-x}}$",
    r"\odot": r"$\odot$: channel by channel",
}
