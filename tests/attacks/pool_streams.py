"""Streams that share a pool, with numbers at their extremes, cancels and listeners that raise: each draws as if alone.

Prompts come with states, in several streams, with known beginnings, and while others are read.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import longspan
from longspan import states
from longspan.serving import Full, Pool, Sampling, Stream
from longspan.serving.sampler import sample

from . import Case

SHORT, LONG = 6, 500
VOCAB, STREAMS = 23, 12
ATTENTIONS = ("gated_deltanet", "linear; softmax", "gla; local(window=3)", "mamba")
TEMPERATURES = (0, 5e-324, 1e-310, 1e-300, 1e-40, 0.7, 1, 1.0, 3.0, 10**30, 3.4e38)
TOP_K = (0, 1, 3, VOCAB, 2**53, 2**63 - 1)
TOP_P = (5e-324, 1e-310, 1e-20, 0.5, 1 - 1e-16, 1, 1.0)
SEEDS = (-(2**63), -1, 0, 1, 2**53, 2**53 + 1, 2**63 - 1)


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    models: dict[str, Any] = {}
    for number in range(count):
        dice = random.Random(f"{seed}/{number}")
        attention = dice.choice(ATTENTIONS)
        if attention not in models:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                config = longspan.DecoderConfig(vocab=VOCAB, dim=8, heads=2, depth=2, attention=attention)
                models[attention] = longspan.Decoder(config).double().eval()
        yield f"{number}-{attention}", lambda attention=attention, dice=dice: _attack(models[attention], dice)


def _attack(model: Any, dice: random.Random) -> str | None:
    options = {"slots": dice.randrange(1, 6), "prefill": dice.choice((1, 3, 7, 40)), "queue": STREAMS}
    crowd = Pool(model, capacity=200, prefix_bytes=dice.choice((0, 10_000, 1 << 20)), **options)
    asked: list[
        tuple[Stream, tuple[int, ...], int]
    ] = []  # a stream, what its state has read, its listener's last token
    base = [dice.randrange(VOCAB) for _ in range(20)]
    for _ in range(STREAMS):
        prompt, before, state = [dice.randrange(VOCAB) for _ in range(dice.randrange(1, 9))], (), None
        if dice.random() < 0.4:
            prompt = base[: dice.randrange(1, 20)] + prompt
        ended = [(stream, read) for stream, read, _ in asked if stream.state is not None]
        if ended and dice.random() < 0.5:
            stream, read = dice.choice(ended)
            before, state = (*read, *stream.prompt, *stream.tokens[:-1]), stream.state
            prompt = [stream.tokens[-1], *prompt]
        ways = [_sampling(dice) for _ in range(dice.randrange(1, min(3, crowd.slots) + 1))]
        last = dice.choice((0, 0, dice.randrange(1, 9)))

        def listener(stream: Stream, token: int | None, last: int = last) -> None:
            if last and (token is None or len(stream.tokens) == last):
                raise ValueError("a bug of a callback")

        try:
            streams = crowd.submit(
                prompt,
                max_new_tokens=dice.randrange(1, 9),
                sampling=ways,
                stop=[dice.randrange(VOCAB)],
                state=state,
                keep_state=dice.random() < 0.5,
                top=dice.choice((0, 2)),
                listener=listener,
            )
        except Full:
            streams = []
        asked += [(stream, before, last) for stream in streams]
        for _ in range(dice.randrange(4)):
            crowd.step()
        if asked and dice.random() < 0.2:
            crowd.cancel(dice.choice(asked)[0])
    crowd.run()
    return next(filter(None, (_wrong(model, *one) for one in asked)), None)


def _sampling(dice: random.Random) -> Sampling:
    return Sampling(dice.choice(TEMPERATURES), dice.choice(TOP_K), dice.choice(TOP_P), dice.choice(SEEDS))


@torch.no_grad()
def _wrong(model: Any, stream: Stream, before: tuple[int, ...], last: int) -> str | None:
    """What a stream has that it would not have alone."""
    way, drawn = stream.sampling, len(stream.tokens)
    whole = torch.tensor([[model.start, *before, *stream.prompt, *stream.tokens]])
    outputs, _ = model(whole, model.init_state(1, 200))
    places = len(before) + len(stream.prompt)
    scores = model.likelihood.log_probs(outputs[0, places : places + drawn])
    expected = sample(scores, [way] * drawn, torch.arange(drawn)).tolist()
    if way.temperature < 1e-30 or way.top_k == 1 or way.top_p < 1e-10:
        expected = scores.argmax(-1).tolist()
    if stream.tokens != expected:
        return f"{way} drew {stream.tokens}, alone {expected}"
    if drawn and not torch.tensor(stream.log_probs).allclose(
        scores.gather(1, whole[0, 1 + places :, None])[:, 0].float()
    ):
        return f"{way} has other log-probabilities than alone"
    if stream.finished == "cancelled" and stream.cancelled and not last:
        return None
    reason = "stop" if stream.tokens[-1:] and stream.tokens[-1] in stream.stop else "length"
    if last:
        # Each of these listeners raises at the end if not before.
        reason = "error"
    if stream.finished != reason and not (last and stream.cancelled):
        return f"it ended as {stream.finished} {stream.error}, not {reason}"
    if stream.finished == "length" and drawn != stream.max_new_tokens:
        return f"it drew {drawn} tokens of {stream.max_new_tokens}"
    if stream.state is not None and int(stream.state.position) != places + drawn:
        return f"its state has read {int(stream.state.position)} tokens, not {places + drawn}"
    if stream.state is not None and not all(bool(t.isfinite().all()) for t in states.utils.tensors(stream.state)):
        return "its state is not finite"
    return None
