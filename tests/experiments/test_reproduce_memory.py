"""Reinforcement learning of memory tasks: the algorithm by hand, agents whose states are exact, tasks and figures."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from longspan_lab.experiments import agents, memory, ppo, tasks
from longspan_lab.experiments.experiment import Place
from support.experiments import unwatched

LEARNING = ppo.Learning(0.9, 0.8, 0.2, 0.0, 0.5, 2, 2)


class Cards:
    """Episodes of one length, random observations of three numbers; the reward is the action, and time may run out."""

    observation_space, action_space = SimpleNamespace(shape=(3,)), SimpleNamespace(n=3)

    def __init__(self, length: int, timed: bool = False):
        self.length, self.timed = length, timed

    def reset(self, seed: int | None = None):
        if seed is not None:
            self.chance = torch.Generator().manual_seed(seed)
        self.gone = 0
        return torch.rand(3, generator=self.chance), {}

    def step(self, action: int):
        self.gone += 1
        over = self.gone == self.length
        seen = torch.rand(3, generator=self.chance)
        return seen, float(action), over and not self.timed, over and self.timed, {}


def agent(kind: str, seed: int = 0) -> agents.Agent:
    return agents.born(seed, kind, 6, 3, 3, depth=2, heads=2, memory=4).double()


def wide(seen: torch.Tensor, first: torch.Tensor, state, who: agents.Agent):
    """The agent in float64 on what the environments show in float32."""
    return who(seen.double(), first, state)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def beginnings(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(5)) < 0.2


def rollout(ended: torch.Tensor) -> ppo.Rollout:
    b, n = ended.shape
    values, rewards, after = drawn(b, n, seed=1), drawn(b, n, seed=2), drawn(b, seed=3)
    actions = torch.arange(b * n).view(b, n) % 3
    first = torch.zeros(b, n, dtype=torch.bool)
    log_probs = -drawn(b, n, seed=4).abs()
    return ppo.Rollout(drawn(b, n, 3), first, actions, log_probs, values, rewards, ended, (), after)


class TestAlgorithm:
    @pytest.mark.parametrize("last", [False, True])
    def test_advantages_are_the_sum_of_what_surprises(self, last):
        """Over the rest of the episode alone, each surprise worth (discount trace)^l, as in the paper."""
        ended = beginnings(5, 11)
        ended[:, -1] = last
        one = rollout(ended)
        found = ppo.advantages(one, 0.9, 0.8)
        for b in range(5):
            values = [*one.values[b].tolist(), one.after[b].item()]
            for t in range(11):
                total = 0.0
                for far in range(t, 11):
                    over = bool(ended[b, far])
                    delta = one.rewards[b, far].item() + (0.0 if over else 0.9 * values[far + 1]) - values[far]
                    total += (0.9 * 0.8) ** (far - t) * delta
                    if over:
                        break
                assert found[b, t].item() == pytest.approx(total, abs=1e-12)

    def test_the_clipped_objective_by_hand(self):
        ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1], dtype=torch.float64)
        advantage = torch.tensor([2.0, -2.0, 2.0, -2.0, 3.0], dtype=torch.float64)
        expected = torch.tensor([-2.4, 3.0, -1.0, 1.6, -3.3], dtype=torch.float64)
        torch.testing.assert_close(ppo.clipped(ratio, advantage, 0.2), expected)

    def test_the_loss_by_hand(self):
        """For an agent whose output does not depend on the input."""
        one, advantage = rollout(torch.zeros(2, 3, dtype=torch.bool)), drawn(2, 3, seed=9)
        chances = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)

        def same(observations, first, state):
            return chances.log().expand(2, 3, 3), torch.full((2, 3), 0.7, dtype=torch.float64), state

        learning = LEARNING._replace(entropy=0.1, value=0.25)
        entropy = -sum(p * math.log(p) for p in (0.5, 0.3, 0.2))
        even = ((advantage - advantage.mean()) / advantage.std()).flatten().tolist()
        total = 0.0
        flat = zip(
            even, one.actions.flatten(), one.log_probs.flatten(), (advantage + one.values).flatten(), strict=True
        )
        for a, action, old, target in flat:
            ratio = chances[action].item() / math.exp(old)
            total += -min(ratio * a, min(max(ratio, 0.8), 1.2) * a) + 0.25 * (0.7 - target.item()) ** 2 / 2
        expected = total / 6 - 0.1 * entropy
        assert ppo.objective(same, one, advantage, learning).item() == pytest.approx(expected, abs=1e-6)

    def test_what_is_rewarded_becomes_likely(self):
        batch = tasks.Batch([Cards(4) for _ in range(8)])
        who = agents.born(0, "LSTM", 6, 3, 3, depth=1, heads=2, memory=4)
        optimizer, chance = torch.optim.Adam(who.parameters(), lr=0.02), torch.Generator().manual_seed(0)
        batch.begin(range(8))
        state, means = who.init_state(8), []
        for _ in range(15):
            one, state, returns = ppo.play(who, batch, state, 8, chance)
            ppo.learn(who, optimizer, one, LEARNING, chance)
            means.append(sum(returns) / len(returns))
        assert means[0] < 5 < 7 < means[-1]  # of 8 at most, 4 by chance

    def test_all_rows_are_learned_from_in_each_epoch(self, monkeypatch):
        seen = []

        def counted(who, part, advantage, learning):
            seen.append((part.actions, advantage))
            return nn.functional.mse_loss(who.weight, torch.zeros(1, 1))

        monkeypatch.setattr(ppo, "objective", counted)
        one, who = rollout(beginnings(5, 4)), nn.Linear(1, 1, bias=False)
        ppo.learn(who, torch.optim.SGD(who.parameters(), 0.1), one, LEARNING, torch.Generator().manual_seed(0))
        whole = ppo.advantages(one, 0.9, 0.8)
        assert len(seen) == 4
        for epoch in (seen[:2], seen[2:]):
            found = sorted(torch.cat([advantage for _, advantage in epoch]).tolist())
            assert found == sorted(whole.tolist())


@pytest.mark.parametrize("kind", agents.CORES)
class TestAgents:
    def test_many_steps_in_one_call_are_those_steps(self, kind):
        """With episodes that end anywhere, after a state in which one is going on."""
        who, seen, first = agent(kind), drawn(3, 17, 3), beginnings(3, 17)
        first[:, 0] = torch.tensor([True, False, False])
        _, _, before = who(drawn(3, 5, 3, seed=8), torch.zeros(3, 5, dtype=torch.bool), who.init_state(3))
        logits, values, after = who(seen, first, before)
        state, steps = before, []
        for t in range(17):
            *said, state = who(seen[:, t : t + 1], first[:, t : t + 1], state)
            steps.append(said)
        torch.testing.assert_close(logits, torch.cat([one for one, _ in steps], 1), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(values, torch.cat([one for _, one in steps], 1), rtol=1e-9, atol=1e-11)
        again = who(seen, torch.zeros_like(first), after)[0], who(seen, torch.zeros_like(first), state)[0]
        torch.testing.assert_close(*again, rtol=1e-9, atol=1e-11)

    def test_an_episode_knows_nothing_of_those_before(self, kind):
        who, seen = agent(kind), drawn(2, 9, 3)
        first = torch.zeros(2, 9, dtype=torch.bool)
        first[:, 4] = True
        state = who(drawn(2, 5, 3, seed=8), torch.zeros(2, 5, dtype=torch.bool), who.init_state(2))[2]
        logits, _, _ = who(seen, first, state)
        alone, _, _ = who(seen[:, 4:], first[:, 4:], who.init_state(2))
        torch.testing.assert_close(logits[:, 4:], alone, rtol=1e-9, atol=1e-11)
        other, _, _ = who(seen, first, who.init_state(2))
        assert (logits[:, :4] - other[:, :4]).abs().max() > 1e-6

    def test_training_gives_the_probabilities_of_acting(self, kind):
        """Rollout after rollout, whose boundaries are not those of the episodes."""
        who = agent(kind)
        batch = tasks.Batch([Cards(length, timed=length == 4) for length in (3, 4, 7)])
        batch.begin([1, 2, 3])
        state, chance = who.init_state(3), torch.Generator().manual_seed(0)

        def acting(seen, first, state):
            return wide(seen, first, state, who)

        for _ in range(3):
            one, after, _ = ppo.play(acting, batch, state, 5, chance)
            logits, values, end = acting(one.observations, one.first, one.state)
            taken = logits.log_softmax(-1).gather(-1, one.actions[..., None])[..., 0]
            torch.testing.assert_close(taken, one.log_probs, rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(values, one.values, rtol=1e-9, atol=1e-11)
            more = batch.observations[:, None], batch.first[:, None]
            torch.testing.assert_close(one.after, acting(*more, end)[1][:, 0], rtol=1e-9, atol=1e-11)
            assert torch.equal(one.first[:, 1:], one.ended[:, :-1])
            assert torch.equal(one.ended[:, -1], batch.first)
            state = after

    def test_agents_are_of_equal_size(self, kind):
        for settings, observed, actions in ((memory.Settings(), 4, 4), (memory.EXPERIMENT.scales["gpu"], 980, 7)):
            sizes, seen = settings.sizes, (observed, actions)
            dim = agents.fitting(kind, settings.parameters, *seen, **sizes)
            assert dim % settings.heads == 0
            found = agents.count(kind, dim, *seen, **sizes)
            assert found == pytest.approx(settings.parameters, rel=0.04)
            for other in (dim - settings.heads, dim + settings.heads):
                off = agents.count(kind, other, *seen, **sizes)
                assert abs(off - settings.parameters) >= abs(found - settings.parameters)


def test_gates_and_norms_are_those_of_the_names():
    built = {kind: agent(kind).core for kind in ("TrXL", "TrXL-I", "GTrXL")}
    blocks = {kind: core.stack.blocks[0] for kind, core in built.items()}
    config = {kind: (block.prenorm, type(block.join1).__name__) for kind, block in blocks.items()}
    assert config == {"TrXL": (False, "Add"), "TrXL-I": (True, "Add"), "GTrXL": (True, "GRU")}


def test_a_batch_goes_on_with_the_next_episode():
    batch = tasks.Batch([Cards(2), Cards(3, timed=True)])
    batch.begin([7, 8])
    assert batch.first.tolist() == [True, True]
    assert batch.observations.shape == (2, 3)
    steps_taken = [(batch.step([1, 2]), batch.first.tolist()) for _ in range(6)]
    assert [rewards.tolist() for (rewards, _), _ in steps_taken] == [[1.0, 2.0]] * 6
    assert [returns for (_, returns), _ in steps_taken] == [[], [2.0], [6.0], [2.0], [], [2.0, 6.0]]
    # The environments whose next episode begins after each step.
    begun = [{i for i, new in enumerate(first) if new} for _, first in steps_taken]
    assert begun == [set(), {0}, {1}, {0}, set(), {0, 1}]
    chance = torch.Generator().manual_seed(7)
    batch.begin([7, 8])
    assert torch.equal(batch.observations[0], torch.rand(3, generator=chance))


def test_rewards_are_scaled_for_learning_alone():
    who, batch = agent("LSTM").float(), tasks.Batch([Cards(2), Cards(2)])
    batch.begin([1, 2])
    one, _, returns = ppo.play(who, batch, who.init_state(2), 4, torch.Generator().manual_seed(0), 10.0)
    torch.testing.assert_close(one.rewards, 10.0 * one.actions.float())
    assert sum(returns) == one.actions.sum()


class TestTasks:
    @pytest.fixture(autouse=True)
    def needs(self):
        for package in tasks.PACKAGES:
            pytest.importorskip(package, reason="the tasks are others': pip install ./lab[reinforcement]")

    @pytest.mark.parametrize("name", tasks.TASKS)
    def test_observations_are_vectors_and_actions_numbers(self, name):
        batch = tasks.Batch([tasks.make(name)])
        batch.begin([0])
        assert batch.observations.shape == (1, batch.observed)
        assert batch.observations.unique().tolist() == [0.0, 1.0]
        again = tasks.Batch([tasks.make(name)])
        again.begin([0])
        for i in range(5):
            rewards = batch.step([i % batch.actions])[0]
            assert torch.equal(rewards, again.step([i % batch.actions])[0])
            assert torch.equal(batch.observations, again.observations)

    def test_perfect_memory_has_the_full_return(self):
        """``blind`` is the mean return without a memory, over many episodes."""
        previous, autoencode = tasks.Batch([tasks.make("repeat_previous")]), tasks.Batch([tasks.make("autoencode")])
        previous.begin([3])
        suits, returns = [], []
        while not returns:
            suits.append(int(previous.observations[0].argmax()))
            returns = previous.step([suits[-4] if len(suits) >= 4 else 0])[1]
        assert returns == pytest.approx([1.0])
        autoencode.begin([3])
        suits, returns = [], []
        for i in range(103):
            play, watch = autoencode.observations[0, :2].tolist()
            # With the last card of the deck the playing begins.
            assert [play, watch] == [i >= 51, i < 51]
            if i <= 51:
                suits.append(int(autoencode.observations[0, 2:].argmax()))
            returns = autoencode.step([suits.pop() if play else 0])[1]
        assert returns == pytest.approx([1.0])

    @pytest.mark.parametrize("name", ["repeat_previous", "repeat_previous_medium", "autoencode"])
    def test_constant_actions_have_the_return_of_a_blind_agent(self, name):
        batch = tasks.Batch([tasks.make(name) for _ in range(4)])
        batch.begin(range(4))
        returns = []
        while len(returns) < 40:
            returns += batch.step([len(returns) % 4] * 4)[1]
        assert sum(returns) / len(returns) == pytest.approx(tasks.TASKS[name].blind, abs=0.05)

    def test_the_figures_are_those_of_the_episodes(self, tmp_path, monkeypatch):
        found = []

        def kept(*arguments):
            found.append(ppo.play(*arguments))
            return found[-1]

        monkeypatch.setattr(memory, "play", kept)
        point = memory.points(memory.EXPERIMENT.quick)[1]
        row = memory.measure(memory.EXPERIMENT.quick, point, Place(tmp_path, unwatched))
        means = [round(sum(returns) / len(returns), 5) for *_, returns in found]
        assert [value for _, value in row["curve"]] == means
        # Two environments, a rollout of 55 steps and episodes of 51: a block ends one each.
        assert [len(returns) for *_, returns in found] == [2, 2]
        assert row["parameters"] == agents.count("GTrXL", row["dim"], 4, 4, **memory.EXPERIMENT.quick.sizes)
        assert not torch.equal(found[0][0].observations, found[1][0].observations)
        assert bool(found[1][0].first[:, 0].all())


def test_every_agent_plays_the_same_cards(tmp_path):
    """In one task and with one seed."""
    points = memory.points(replace(memory.Settings(), seeds=(4, 5)))
    assert len(points) == 2 * 2 * 5
    assert points[0] == {"task": "repeat_previous", "agent": "LSTM", "seed": 4}


def test_the_end_of_a_training_is_its_last_tenth():
    values = [None, *range(1, 19), 8.0]
    row = {"curve": [[10 * i, value] for i, value in enumerate(values)]}
    assert memory.ends(row) == 13.0
    assert memory.ends({"curve": [[1, 5.0]]}) == 5.0
    assert memory.ends({"curve": [[1, None]]}) is None
