"""Conformance checks of stacks: every kind passes those of its attentions and of stacks, and each check can fail."""

import pytest
import torch

from longspan import testing
from longspan.cli.entry import WRONG, main
from longspan.models.stacks import STACKS, reversible, universal

STACKED = {
    "plain": "linear",
    "universal(steps=3)": "gated_deltanet",
    "act(steps=4)": "softmax",
    "act(steps=3, coordinates='step')": "linear",
    "reversible": "softmax",
}
# Laws that take many seconds each run in the slow suite.
SLOW = ("compiles", "oracle", "blocks", "adversarial")
QUICK = [law for law in testing.laws() if law not in SLOW]


def test_every_kind_of_stack_is_measured():
    assert {stack.split("(")[0] for stack in STACKED} == set(STACKS)


@pytest.mark.parametrize(
    ("stack", "law"),
    [
        pytest.param(stack, law, marks=[pytest.mark.slow] * (law == "content" and stack != "universal(steps=3)"))
        for stack in STACKED
        for law in QUICK
    ],
)
def test_a_stack_keeps_the_laws(stack, law):
    row = testing.assert_law(law, STACKED[stack], stack=stack)
    of = {"less_memory": True, "reversible": stack == "reversible", "ponder": stack.startswith("act")}
    if law in of:
        assert row.status == ("passed" if of[law] else "does not apply")


@pytest.mark.slow
@pytest.mark.parametrize("law", SLOW)
@pytest.mark.parametrize("stack", STACKED)
def test_a_stack_keeps_the_slow_laws(stack, law):
    testing.assert_law(law, STACKED[stack], stack=stack)


def test_one_attention_is_no_stack():
    assert [testing.check(law, "linear").status for law in ("less_memory", "reversible", "ponder")] == (
        ["does not apply"] * 3
    )


def a_position_too_many(self, blocks, x, state, call, original=universal.Act.forward):
    mixed, after = original(self, blocks, x, state, call)
    return mixed, after if after is None else after._replace(position=after.position + 1)


def remainder_lost(self, blocks, x, state, call, original=universal.Act.forward):
    mixed, after = original(self, blocks, x, state, call)
    return mixed * torch.where(call.own_record["steps"] == self.steps, 0.9, 1.0)[..., None], after


def penalty_without_its_remainder(self, blocks, x, state, call, original=universal.Act.forward):
    mixed, after = original(self, blocks, x, state, call)
    call.own_record["penalty"] = call.own_record["penalty"].detach()
    call.own_record["penalty"] = call.own_record["penalty"] + 0 * self.bias
    return mixed, after


def first_steps_state(state, t, count, original=universal.of_step):
    return original(state, 0, count)


def fresh_generator(x, generators):
    torch.manual_seed(1)


MISTAKES = {
    "a position too many": (universal.Act, "forward", a_position_too_many, "act(steps=4)", "parallel_is_recurrent"),
    "a remainder lost at the cap": (universal.Act, "forward", remainder_lost, "act(steps=4)", "ponder"),
    "a cost without gradient": (universal.Act, "forward", penalty_without_its_remainder, "act(steps=4)", "ponder"),
    "every step reads the first one's states": (
        universal,
        "of_step",
        first_steps_state,
        "universal(steps=3)",
        "parallel_is_recurrent",
    ),
    "another dropout mask": (reversible, "_set", fresh_generator, "reversible", "reversible"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_law_catches(mistake, monkeypatch):
    where, name, wrong, stack, law = MISTAKES[mistake]
    monkeypatch.setattr(where, name, wrong)
    assert testing.check(law, "linear", stack=stack).status == "failed"


def test_the_command(capsys, monkeypatch):
    monkeypatch.setattr(testing, "laws", lambda: ("causal", "ponder", "cross"))
    assert main(["check", "linear", "--stack", "act(steps=2)"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "linear in act(steps=2)"
    found = [line.split()[:2] for line in lines[1:] if not line.startswith("    ")]
    assert found == [["causal", "passed"], ["ponder", "passed"], ["cross", "does"]]
    for words, message in (
        (["linear", "--stack", "universl"], "did you mean 'universal'?"),
        (["linear", "--stack", "act(steps=0)"], "steps=0"),
        (["realformer", "--stack", "reversible"], "realformer"),
    ):
        assert main(["check", *words]) == WRONG
        assert message in capsys.readouterr().err
