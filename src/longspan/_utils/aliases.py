"""Names of other libraries and the longspan names that messages suggest for them."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Name elsewhere, in lower case with underscores -> names here; a message suggests the first that exists.
ALIASES: dict[str, tuple[str, ...]] = {
    # sizes of a model
    **dict.fromkeys(("num_layers", "n_layers", "n_layer", "layers", "num_hidden_layers", "num_blocks"), ("depth",)),
    **dict.fromkeys(("num_heads", "n_heads", "n_head", "nhead", "num_attention_heads"), ("heads",)),
    **dict.fromkeys(("d_model", "embed_dim", "hidden_size", "n_embd", "width", "model_dim"), ("dim",)),
    **dict.fromkeys(
        ("ffn", "ff", "ffn_dim", "d_ff", "dim_feedforward", "intermediate_size", "mlp_dim", "hidden_dim"),
        ("feedforward",),
    ),
    **dict.fromkeys(("vocab_size", "num_tokens", "n_vocab"), ("vocab",)),
    **dict.fromkeys(("max_length", "max_len", "seq_len", "max_seq_len", "block_size", "n_positions"), ("length",)),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), ("kv_heads",)),
    **dict.fromkeys(("norm_first", "pre_norm"), ("prenorm",)),
    **dict.fromkeys(("tie_weights", "tie_word_embeddings", "tied_weights"), ("tied",)),
    **dict.fromkeys(("mechanism", "attn", "attention_type", "mixer"), ("attention", "text")),
    **dict.fromkeys(("is_causal",), ("causal",)),
    **dict.fromkeys(("rope", "rope_theta", "rotary_base"), ("rotary",)),
    # calls
    **dict.fromkeys(("tokens", "num_tokens_to_generate", "new_tokens", "steps"), ("max_new_tokens",)),
    **dict.fromkeys(("num_beams", "beam_size", "beam_width", "beam"), ("beams",)),
    **dict.fromkeys(("num_return_sequences", "n_best"), ("best", "n_best")),
    **dict.fromkeys(("eos_token_id", "eos", "stop_token"), ("stop",)),
    **dict.fromkeys(("input_ids", "inputs", "prompt_ids"), ("prompt", "tokens")),
    **dict.fromkeys(("batch_size", "num_samples"), ("batch", "count")),
    **dict.fromkeys(("past_key_values", "cache", "initial_state"), ("state",)),
    **dict.fromkeys(("attention_mask", "padding_mask"), ("mask",)),
    **dict.fromkeys(("cu_seqlens", "segment_ids"), ("segments",)),
    **dict.fromkeys(("memory", "encoder_hidden_states"), ("context",)),
    # training
    **dict.fromkeys(("lr",), ("learning_rate",)),
    **dict.fromkeys(("max_steps", "num_steps", "iterations"), ("steps",)),
    **dict.fromkeys(("grad_clip", "max_grad_norm", "gradient_clip_val"), ("clip",)),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), ("accumulate",)),
    **dict.fromkeys(("output_dir", "output"), ("out",)),
    **dict.fromkeys(("dataset",), ("data",)),
    # mechanisms
    **dict.fromkeys(("mamba1", "mamba_1", "selective_ssm"), ("mamba",)),
    **dict.fromkeys(("mamba2", "mamba_2"), ("ssd",)),
    **dict.fromkeys(("mamba_3",), ("mamba3",)),
    **dict.fromkeys(("xlstm", "m_lstm"), ("mlstm",)),
    **dict.fromkeys(("flash", "flash_attention", "sdpa", "full", "vanilla", "mha", "multihead"), ("softmax",)),
    **dict.fromkeys(("sliding_window", "swa", "window", "sliding"), ("local",)),
    **dict.fromkeys(("retnet", "lightning"), ("retention",)),
    **dict.fromkeys(("delta_net", "delta", "delta_rule"), ("deltanet",)),
    **dict.fromkeys(("gated_delta_net", "gdn", "gated_delta_rule"), ("gated_deltanet",)),
    **dict.fromkeys(("gated_linear_attention", "gated_linear"), ("gla",)),
    **dict.fromkeys(("kimi", "kimi_delta_attention", "kimi_linear"), ("kda",)),
    **dict.fromkeys(("rwkv", "rwkv_7", "goose"), ("rwkv7",)),
    **dict.fromkeys(("linear_attention", "linear_transformer"), ("linear",)),
    **dict.fromkeys(("big_bird",), ("bigbird",)),
    **dict.fromkeys(("nystromformer",), ("nystrom",)),
    **dict.fromkeys(("favor", "favor_plus", "random_features"), ("performer",)),
    **dict.fromkeys(("infini_attention",), ("infini",)),
    **dict.fromkeys(("lsh", "lsh_attention"), ("reformer",)),
    **dict.fromkeys(("fnet",), ("fourier",)),
    **dict.fromkeys(("xl", "transformerxl"), ("transformer_xl",)),
}
# Arguments whose meaning differs, so that a name alone is not enough.
HINTS = {
    "key_padding_mask": "True means keep here: pass mask=~key_padding_mask",
    "src_key_padding_mask": "True means keep here: pass mask=~src_key_padding_mask",
    "attention_mask": "pass mask=attention_mask.bool(), True on real tokens",
}


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return the known name that was probably meant, by ``ALIASES`` and then by similarity; "" if there is none.

    Command-line options are compared by their last part: ``--model.layers`` gives ``--model.depth``.

    >>> suggestion("mamba2", ["linear", "ssd"]), suggestion("--model.layers", ["--model.heads", "--model.depth"])
    ('ssd', '--model.depth')
    """
    names = list(names)
    bare = _bare(name)
    for meant in ALIASES.get(bare, ()):
        for one in names:
            if _bare(one) == meant:
                return one
    same = [one for one in names if _bare(one) == bare]
    close = difflib.get_close_matches(name, names, n=1)
    return (same or close or [""])[0]


def hinted(call: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that its error for an unknown argument suggests a known one."""
    parameters = list(inspect.signature(call).parameters)

    @functools.wraps(call)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        if not options.keys() <= set(parameters):
            refuse(call.__qualname__, options, parameters)
        return call(*args, **options)

    return checked


def refuse(owner: str, options: Iterable[str], names: Iterable[str]) -> None:
    """Raise TypeError for the first option that is not in ``names``, with a suggestion.

    >>> refuse("build", ["embed_dim"], ["dim", "heads"])
    Traceback (most recent call last):
    ...
    TypeError: build() has no argument 'embed_dim' (did you mean 'dim'?); it has dim, heads
    """
    names = [name for name in names if name not in ("self", "unknown")]
    for name in options:
        if name not in names:
            meant = suggestion(name, names)
            hint = HINTS.get(name) if "mask" in names else ""
            guess = f"; {hint}" if hint else f" (did you mean {meant!r}?)" if meant else ""
            raise TypeError(f"{owner}() has no argument {name!r}{guess}; it has {', '.join(names)}")


def _bare(name: str) -> str:
    return name.rpartition(".")[2].lstrip("-").replace("-", "_").lower()
