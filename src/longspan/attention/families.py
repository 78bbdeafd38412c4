"""Families of mechanisms, and the symbols that their equations share."""

# What kinds of mechanisms there are: the pages about them, in this order.
FAMILIES = {
    "softmax": "Softmax over all pairs",
    "sparse": "Softmax over some pairs",
    "linear": "Sums without decay",
    "gated": "Sums with decay, and the delta rule",
    "content": "Softmax over pairs that the content chooses",
    "compressed": "Softmax over fewer keys or queries",
    "others": "Others",
}

# What the equations of all mechanisms have in common: the symbol by which it is found in them, and the words.
LEGEND = {
    "_": r"$i$ or $t$ counts the queries, $j$ the keys, $h$ the $H$ heads",
    "q_": r"$q_i = W_q x_i$, $k_j = W_k x_j$, $v_j = W_v x_j$: each head's channels, $D$ of them in queries and keys",
    "o_": r"$o_i$: what a head reads; $y_i = W_o [o_i^1; \ldots; o_i^H]$ unless it is said otherwise",
    r"\mathcal{A}_i": r"$\mathcal{A}_i$: the keys that query $i$ may see, all or, if causal, those with $j \le i$",
    "S_": r"$S$: a state, zero before the first token; each head has its own",
    r"\phi": r"$\phi$: a map from channels to features",
    r"\sigma": r"$\sigma(x) = \frac{1}{1 + e^{-x}}$",
    r"\odot": r"$\odot$: channel by channel",
}
