"""Journals: what is read after a rewind has the bits of never having read the other tokens."""

import pytest
import torch

import longspan
from longspan import states
from longspan.attention import REGISTRY
from longspan.testing.gauge import Subject

TOKENS, LIMIT, MOST = 12, 4, 27
# The bits of a row depend on its place in the batch, on some processors.
BY_ROW = ("gsa", "kda", "mamba3", "path", "rwkv7")
MECHANISMS = [name for name in longspan.list_mechanisms() if "causal" in REGISTRY[name].directions]


def equal(a, b):
    """Whether two states have the same bits. Slots of caches that are not in use may differ."""
    one, other = leaves(a), leaves(b)
    return len(one) == len(other) and all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def leaves(state):
    if hasattr(state, "length"):  # a cache: keys and values, or values alone
        used = torch.arange(state[0].shape[2]) < state.length[:, None]
        return [*(t.transpose(1, 2)[used] for t in state[:-1]), state.length]
    return [leaf for part in state for leaf in leaves(part)] if isinstance(state, tuple) else [state]


def made(name):
    """(module, x) of the first example of a mechanism in float32."""
    subject = Subject(longspan.mechanism_examples(name)[0])
    return subject.make(dtype=torch.float32).eval(), subject.data(n=TOKENS, dtype=torch.float32)


def read(module, x, state, cuts, **given):
    for part in x.split(cuts, 1):
        state = module(part, state, **given)[1]
    return state


# Scripts below donate nothing.
@pytest.mark.parametrize("donate", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", MECHANISMS)
def test_what_is_read_after_a_rewind_is_what_it_would_have_been(name, donate):
    """For each mechanism, token by token, and with a call that is rewound in part."""
    module, x = made(name)
    if module.has_layer_carry:
        pytest.skip("a journal reads no carry")
    with torch.no_grad():
        for cuts, kept in (([1] * 9, [1] * 6), ([5, 1, 3], [5, 1]), ([5, 1, 3], [5, 1, 1])):
            start = states.journal(module.init_state(len(x), TOKENS), tokens=LIMIT)
            state = read(module, x[:, :9], start, cuts, donate=donate)
            back = states.rewind(state, tokens=9 - sum(kept))
            never = read(module, x[:, : sum(kept)], module.init_state(len(x), TOKENS), _calls(kept))
            # The journal that was rewound can be continued too.
            whole = read(module, x[:, :9], module.init_state(len(x), TOKENS), _calls(cuts))
            for one, other in ((back, never), (state, whole)):
                # The room of ``sinkhorn`` for offers of later blocks depends on how its cache grew.
                assert name == "sinkhorn" or equal(states.settle(one), other)
                for token in x[:, 9:].split(1, 1):
                    (y, one), (expected, other) = module(token, one), module(token, other)
                    assert torch.equal(y, expected)


def _calls(cuts):
    """The calls that a journal makes of these: more than ``LIMIT`` tokens are read in two."""
    return [part for cut in cuts for part in ([cut - LIMIT, LIMIT] if cut > LIMIT else [cut])]


class Script:
    """Random reads, draws, rewinds, forks, selections, saves and loads, and the calls that should have the same end."""

    def __init__(self, module, generator, folder):
        self.module, self.generator, self.file = module, generator, folder / "state"
        self.state = states.journal(module.init_state(2, MOST), tokens=LIMIT)
        self.calls: list[torch.Tensor] = []
        self.forks: list[tuple] = []

    def number(self, low, high):
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def run(self):
        acts = (self.read, self.read, self.draw, self.rewind, self.fork, self.back, self.save, self.select)
        acts[self.number(0, len(acts) - 1)]()

    def read(self):
        self.call(self.inputs(self.number(0, LIMIT)))

    def call(self, x):
        if sum(call.shape[1] for call in self.calls) + x.shape[1] <= MOST:
            # A fork must survive what its sibling reads.
            self.last, self.state = self.module(x, self.state, donate=not self.forks)
            self.calls = [*self.calls, *([x] if x.shape[1] else [])]

    def inputs(self, n):
        if isinstance(self.module, longspan.Decoder):
            return torch.randint(0, self.module.config.vocab, (2, n), generator=self.generator)
        return torch.randn(2, n, self.module.dim, generator=self.generator)

    def draw(self):
        """Read what the last output chose."""
        self.call(self.inputs(1))
        chosen = self.last[:, -1:]
        self.call(chosen.argmax(-1) if isinstance(self.module, longspan.Decoder) else chosen)

    def rewind(self):
        left = sum(call.shape[1] for call in self.calls)
        n = self.number(0, states.rewindable(self.state))
        self.state, left = states.rewind(self.state, tokens=n), left - n
        kept = []
        for call in self.calls:
            kept, left = [*kept, call[:, : max(left, 0)]], left - call.shape[1]
        self.calls = [call for call in kept if call.shape[1]]

    def fork(self):
        self.forks.append((self.state, self.calls))

    def back(self):
        if self.forks:
            self.state, self.calls = self.forks.pop()

    def save(self):
        states.save(states.settle(self.state), self.file)
        loaded = states.load(self.file, like=self.module.init_state(2, MOST))
        self.state = states.journal(loaded, tokens=LIMIT)

    def select(self):
        if self.module.__class__ not in (REGISTRY[name] for name in BY_ROW):
            self.state, self.calls = states.select(self.state, [1, 0]), [call.flip(0) for call in self.calls]

    def never(self):
        """The state of the calls alone."""
        state = self.module.init_state(2, MOST)
        for call in self.calls:
            _, state = self.module(call, state)
        return state


@torch.no_grad()
@pytest.mark.parametrize("name", [*MECHANISMS, "decoder"])
def test_any_script_ends_where_its_remaining_tokens_end(name, tmp_path):
    torch.manual_seed(0)
    config = longspan.DecoderConfig(
        dim=16, depth=3, heads=2, vocab=11, attention="gated_deltanet; softmax; local(window=3)"
    )
    module = longspan.Decoder(config).eval() if name == "decoder" else made(name)[0]
    if getattr(module, "has_layer_carry", False):
        pytest.skip("a journal reads no carry")
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        script = Script(module, generator, tmp_path)
        for _ in range(20):
            script.run()
        # The room of ``sinkhorn`` for offers of later blocks depends on how its cache grew.
        never, x = script.never(), script.inputs(1)
        assert name == "sinkhorn" or equal(states.settle(script.state), never)
        y, expected = module(x, script.state)[0], module(x, never)[0]
        # The products of ``path`` have the size of its cache, which depends on how it grew.
        assert torch.equal(y, expected) or (name == "path" and torch.allclose(y, expected, rtol=0.0, atol=1e-6))


@torch.no_grad()
@pytest.mark.parametrize("spec", ["gated_deltanet", "softmax", "ssd(channels=5)", "local(window=5)", "rwkv7"])
def test_rows_are_rewound_by_different_numbers(spec):
    """As if the tokens had been masked; rows with padding lose real tokens."""
    torch.manual_seed(0)
    module = longspan.build(spec, dim=8, heads=2).eval()
    x, mask = torch.randn(3, 8, 8), torch.ones(3, 8, dtype=torch.bool)
    mask[1, 6:] = False
    state = states.journal(module.init_state(3), tokens=8)
    for at in (slice(0, 3), slice(3, 8)):
        _, state = module(x[:, at], state, mask=mask[:, at])
    assert states.rewindable(state) == 6
    back = states.rewind(state, tokens=torch.tensor([0, 2, 3]))
    mask[1, 4:], mask[2, 5:] = False, False
    never = module.init_state(3)
    for at in (slice(0, 3), slice(3, 8)):
        _, never = module(x[:, at], never, mask=mask[:, at])
    assert equal(states.settle(back), never)


@torch.no_grad()
def test_a_journal_is_selected_cloned_and_measured_like_a_state():
    module, x = made("gated_deltanet")
    state = read(module, x[:, :6], states.journal(module.init_state(len(x)), tokens=LIMIT), 1)
    size = states.nbytes(states.settle(state))
    assert size < states.nbytes(state) <= 3 * size + 8 * LIMIT * 2 * x[:, :1].nbytes
    chosen = states.select(states.clone(state), [1, 0])
    swapped = states.rewind(chosen, tokens=3)
    assert equal(states.settle(swapped), states.select(states.settle(states.rewind(state, tokens=3)), [1, 0]))


@torch.no_grad()
def test_gradients_flow_through_what_is_read_again():
    module, x = made("gla")
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        state = read(module, x[:, :6], states.journal(module.init_state(len(x)), tokens=LIMIT), 1)
        y, _ = module(x[:, 6:7], states.rewind(state, tokens=2))
        never = read(module, x[:, :4], module.init_state(len(x)), 1)
        expected, _ = module(x[:, 6:7], never)
        one, other = (torch.autograd.grad(value.sum(), x, retain_graph=True)[0] for value in (y, expected))
    assert torch.equal(one, other)


REFUSED = {
    "more than it remembers": (lambda m, s: states.rewind(s, tokens=7), "tokens=7 cannot be undone.* 0 to 6"),
    "a negative number": (lambda m, s: states.rewind(s, tokens=-1), "tokens=-1 cannot be undone"),
    "a fraction": (lambda m, s: states.rewind(s, tokens=torch.tensor(1.5)), "must be an integer"),
    "an ordinary state": (lambda m, s: states.rewind(m.init_state(2), tokens=1), "LinearState cannot be rewound"),
    "a journal of a journal": (lambda m, s: states.journal(s, tokens=2), "is a journal already"),
    "no tokens": (lambda m, s: states.journal(m.init_state(2), tokens=0), "tokens=0 must be"),
    "a record": (lambda m, s: m(torch.zeros(2, 1, 8), s, record={}), "cannot read record again"),
    "another module": (
        lambda m, s: longspan.build("linear", dim=8, heads=2)(torch.zeros(2, 1, 8), s),
        "another module",
    ),
    "a file": (lambda m, s: states.save(s, "state"), "save takes no journal; pass states.settle"),
    "a join": (lambda m, s: states.join([s, s]), "join takes no journal"),
    "a put": (lambda m, s: states.put(m.init_state(2), [0], s), "put takes no journal"),
    "a fixed capacity": (lambda m, s: states.fix_capacity(s, 9), "fix_capacity takes no journal"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused(case):
    module = longspan.build("linear", dim=8, heads=2)
    with torch.no_grad():
        state = read(module, torch.zeros(2, 6, 8), states.journal(module.init_state(2), tokens=6), 1)
        call, message = REFUSED[case]
        with pytest.raises(ValueError, match=message):
            call(module, state)
