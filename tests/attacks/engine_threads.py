"""Threads that share one decode engine, each with its own states: the numbers of one thread, to the last bit."""

import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from . import Case, _child

SHORT, LONG = 2, 150
THREADS, RUNS = 8, 32
MODELS = ("linear", "softmax", "linear(rotary=100.0)", "linear; softmax(kv_heads=1)")


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    """See the package."""
    yield from _child.cases(__name__, seed, count)


class Interrupting(torch.Tensor):
    """Tokens that let other threads run while a call looks at them, which a switch by the clock does rarely."""

    @property
    def is_cpu(self) -> bool:
        time.sleep(0)
        return True


def attack(dice: random.Random) -> str | None:
    """One model, decoded by many threads at once."""
    import longspan
    from longspan.generation.native_decoder import Engine

    torch.set_num_threads(1)
    sys.setswitchinterval(1e-5)
    torch.manual_seed(0)
    text, positions = dice.choice(MODELS), dice.choice(["none", "learned", "sinusoidal"])
    config = longspan.DecoderConfig(dim=16, heads=2, depth=2, vocab=11, attention=text, positions=positions, length=64)
    model = longspan.Decoder(config).eval()
    if why_not := Engine.why_not(model):
        # Without native kernels there is no engine to share; plain calls must stand threads as well.
        step, where = plain(model), f"without the engine ({why_not})"
    else:
        step, where = Engine(model), "by the engine"
    tokens = torch.randint(0, 11, (THREADS, 2, dice.choice([5, 17])), generator=torch.Generator().manual_seed(1))
    capacity = dice.choice([0, 2, 20])

    def run(i: int) -> torch.Tensor:
        outputs, state = [], model.init_state(2, capacity)
        for token in tokens[i % THREADS].split(1, 1):
            out, state = step(token.as_subclass(Interrupting), state)
            outputs.append(out)
        return torch.cat(outputs, 1)

    alone = [run(i) for i in range(THREADS)]
    try:
        with ThreadPoolExecutor(THREADS) as threads:
            found = list(threads.map(run, range(RUNS)))
    except Exception as error:  # whatever it is, one thread alone has none
        return f"{type(error).__name__}: {str(error).splitlines()[0][:150]} ({text}, {positions}, {where})"
    wrong = sum(not torch.equal(out, alone[i % THREADS]) for i, out in enumerate(found))
    return f"{wrong} of {len(found)} runs have other numbers ({text}, {positions}, {where})" if wrong else None


def plain(model):
    @torch.no_grad()
    def step(token, state):
        return model(token, state)

    return step
