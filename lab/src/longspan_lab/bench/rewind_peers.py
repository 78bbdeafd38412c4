"""An edit in a long prompt of a model of transformers: in the pool, in transformers, and in llama.cpp."""

import importlib.util
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from longspan import states
from longspan.compat import gguf
from longspan.compat.servable import servable
from longspan.compat.transformers import accelerate
from longspan.models.sampling import Sampling
from longspan.serving.pool import Pool

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "state_size": 64,
    "num_heads": 8,
    "head_dim": 64,
    "n_groups": 1,
}
VOCAB = 256

# Seconds of the processor until the first token after the prompt, then after the edited prompt.
Engine = Callable[[list[int], list[int]], tuple[float, float]]


def edits(length: int, new: int, room: int, count: int) -> Iterator[dict[str, Any]]:
    """The rows of ``count`` edits of ``new`` tokens at random places of a prompt, in each engine that is installed."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    torch.manual_seed(0)
    model: Any = Mamba2ForCausalLM(Mamba2Config(vocab_size=VOCAB, expand=2, **SIZES)).eval()
    chance = random.Random(0)
    prompt = [chance.randrange(VOCAB) for _ in range(length)]
    places = [chance.randrange(1, length) for _ in range(count)]
    texts = [prompt[:place] + [chance.randrange(VOCAB) for _ in range(new)] for place in places]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        peers: dict[str, Engine] = {}
        if importlib.util.find_spec("xllamacpp"):
            gguf.save(model, path, tokenizer=tokenizer())
            peers["llama.cpp"] = _llama(path, length + new + 64)
        accelerate(model)
        ours: dict[str, Engine] = {f"longspan, {room} states": _pool(model, room)}
        for name, engine in (ours | {"transformers, from its start": _again(model)} | peers).items():
            found = [engine(prompt, text) for text in texts]
            shares = [edit / whole for whole, edit in found]
            yield {
                "part": "edit",
                "candidate": f"Mamba-2: {name}",
                "samples": len(found),
                "whole": fmean(whole for whole, _ in found),
                "share": fmean(shares),
                "worst": max(shares),
            }


def _timed(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def _pool(model: Any, room: int) -> Engine:
    adapted = servable(model)
    state = adapted.init_state(1)

    def run(prompt: list[int], edited: list[int]) -> tuple[float, float]:
        size = room * (states.nbytes(state) + 4 * adapted.likelihood.size) + 16 * len(prompt)
        pool = Pool(model, slots=1, prefix_bytes=size)

        def read(tokens: list[int]) -> None:
            pool.submit(tokens, max_new_tokens=1, sampling=Sampling(temperature=0.0))
            pool.run()

        return _timed(lambda: read(prompt)), _timed(lambda: read(edited))

    return run


def _again(model: Any) -> Engine:
    @torch.no_grad()
    def read(tokens: list[int]) -> None:
        model(torch.tensor([tokens]), use_cache=True, logits_to_keep=1)

    return lambda prompt, edited: (_timed(lambda: read(prompt)), _timed(lambda: read(edited)))


def tokenizer() -> str:
    """A tokenizer of bytes, which llama.cpp needs in a file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made: Any = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return made.to_str()


def llama(path: Path, context: int) -> Any:
    """Return llama.cpp's server for a file, with as many threads as torch."""
    import xllamacpp  # pyright: ignore[reportMissingImports] (optional)

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(path), context, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    params.verbosity = 0
    return xllamacpp.Server(params)


def _llama(path: Path, context: int) -> Engine:
    """llama.cpp's server with the defaults of its checkpoints."""

    def run(prompt: list[int], edited: list[int]) -> tuple[float, float]:
        server = llama(path, context)

        def read(tokens: list[int]) -> None:
            server.handle_completions({"prompt": tokens, "n_predict": 1, "cache_prompt": True, "temperature": 0})

        return _timed(lambda: read(prompt)), _timed(lambda: read(edited))

    return run
