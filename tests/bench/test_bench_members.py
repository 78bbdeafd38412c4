"""``longspan bench members``: every mechanism takes part, nothing is dropped in silence, figures follow from rows."""

import json
import re
from pathlib import Path

import pytest
import torch

import longspan
from longspan.attention.families import FAMILIES
from longspan.attention.registry import mechanism
from longspan.cli.entry import INTERRUPTED, main
from longspan.states import nbytes
from longspan_lab.bench import candidates, case, figures, members
from support.bench import in_quiet, run_into_o

SMALL = ["--dim", "8", "--heads", "2", "--rounds", "1"]


@pytest.fixture(autouse=True)
def at(tmp_path, monkeypatch):
    in_quiet(tmp_path, monkeypatch)


def ran(capsys, specs, *words, code=0):
    """A run, to which a page belongs."""
    out, result = run_into_o(capsys, "members", "--members", specs, *SMALL, *words, code=code)
    assert members.page(result) == Path("o/members.md").read_text(encoding="utf-8")
    assert not Path("o/members.partial.json").exists()
    return out, result


def test_members_in_whole(capsys):
    """One run with everything: real processes for memory, a mechanism without a causal form, one with a longest row."""
    specs = "gla; star; local(window=3); synthesizer(length=20)"
    out, result = ran(capsys, specs, "--lengths", "33,9,17")
    at = {(row["candidate"], row["mode"], row["length"]): row for row in result["rows"]}
    causal = ["softmax", "gla", "local(window=3)"]
    expected = {(spec, mode, n) for spec in [*causal, "star"] for mode in members.MODES for n in (9, 17, 33)}
    expected |= {("synthesizer(length=20)", mode, n) for mode in members.MODES for n in (9, 17)}
    assert set(at) == {key for key in expected if key[:2] != ("star", "step")}
    for (spec, mode, length), row in at.items():
        assert row["ratio"] == pytest.approx(at["softmax", mode, length]["seconds"] / row["seconds"])
        assert row["family"] == mechanism(spec.partition("(")[0]).family
        assert row["causal"] == (spec != "star")
        assert ("mb" in row) == (mode != "step")
        if mode == "step":
            module = longspan.build(spec, 8, 2)
            assert row["state_bytes"] == nbytes(module.init_state(1, length))
    assert [one["candidate"] for one in result["growth"]] == [
        "softmax",
        "synthesizer(length=20)",
        "local(window=3)",
        "star",
        "gla",
    ]
    for one in result["growth"]:
        seconds = {
            n: at[one["candidate"], "forward", n]["seconds"]
            for n in (9, 17, 33)
            if (one["candidate"], "forward", n) in at
        }
        assert figures.unfitted(seconds) == "needs 3 lengths, the longest at least 4 times the shortest"
        assert "forward" not in one
        assert one["declared"] == figures.declared(one["cost"])
    assert not result["refused"]
    assert [(one["candidate"], one["mode"]) for one in result["left_out"]] == [
        ("synthesizer(length=20)", mode) for mode in members.MODES
    ]
    assert "Skipped: synthesizer(length=20): forward from N 33 on: ValueError: " in out
    assert all(FAMILIES[family] in out for family in ("softmax", "sparse", "gated"))
    assert "\nstar, bidirectional " in out
    page = Path("o/members.md").read_text(encoding="utf-8").splitlines()
    assert page[0].startswith("| family | mechanism | forward at 9 / 17 / 33 |")
    assert [len(re.findall(r"\|", line)) for line in page[:7]] == [11] * 7
    assert re.search(r"\| star, bidirectional \| .* / .* / .* \| - \| - \| N D \|", "\n".join(page))
    assert re.search(r"\| synthesizer\(length=20\) \| [^|/]* / [^|/]* / - \|", "\n".join(page))
    assert any(line.startswith("* `synthesizer(length=20)`: forward from N 33 on") for line in page)


def test_without_names_every_mechanism_takes_part_by_family(monkeypatch):
    monkeypatch.setattr(members.MembersRun, "check", lambda self: None)
    monkeypatch.setattr(
        members.MembersRun, "compare", lambda self, length, mode: seen.append((length, mode, [*self.modules]))
    )
    seen = []
    options = members.Options(lengths=(5, 3), dim=8, heads=2)
    list(members.run(options, candidates.Process([]), lambda items, *_: items))
    assert [step[:2] for step in seen] == [(n, mode) for n in (3, 5) for mode in members.MODES]
    assert sorted(seen[0][2]) == longspan.list_mechanisms()
    families = [mechanism(name).family for name in seen[0][2]]
    assert families == sorted(families, key=[*FAMILIES].index)


def test_what_differs_from_its_reference_gets_no_figure_and_fails_the_run(capsys, monkeypatch, weightless):
    right = members.find

    def find(spec):
        makers = right(spec)
        wrong = {"attention": lambda task: lambda x: 1.001 * makers["attention"](task)(x)}
        return wrong if spec == "gla" else makers

    monkeypatch.setattr(members, "find", find)
    out, result = ran(capsys, "gla; linear", "--lengths", "9", "--no-backward", code=1)
    assert {row["candidate"] for row in result["rows"]} == {"softmax", "linear"}
    assert {row["mode"] for row in result["rows"]} == {"forward", "step"}
    assert "Refused: gla: its output is off the float64 definition by 0.001" in out


def one(rows, spec="softmax", **options):
    """A run with these rows behind it."""
    run = members.MembersRun(
        [spec], candidates.Process([]), members.Options(dim=8, heads=2, **options), lambda items, *_: items
    )
    run.rows = [{"candidate": spec, "mode": "forward"} | row for row in rows]
    return run


def test_what_would_take_too_long_is_left_out_and_said_once():
    run = one([{"length": 10, "seconds": 0.1, "mb": 0.1}, {"length": 100, "seconds": 1.0, "mb": 1.0}], limit=99.0)
    assert run._takes_part("softmax", 900, "forward")
    assert not run._takes_part("softmax", 1000, "forward")
    assert not run._takes_part("softmax", 2000, "forward")
    (left,) = run.left_out
    assert left["reason"] == "forward from N 1000 on: a call would take about 100 s, longer than the limit of 99 s"
    assert run._takes_part("softmax", 1000, "forward+backward")
    # As many tokens are read before the one of a step.
    assert not run._takes_part("softmax", 1000, "step")


def test_what_would_need_too_much_memory_is_left_out(monkeypatch):
    monkeypatch.setattr(case, "available", lambda: 100.0)
    # By its declared cost at first, and by what was seen to grow then.
    run = one([{"length": 100, "seconds": 1e-6, "mb": 1.0}])
    assert run._takes_part("softmax", 800, "forward")
    assert not run._takes_part("softmax", 1000, "forward")
    assert "forward from N 1000 on: it would need about 100 MB of memory; 100 are free" in run.left_out[0]["reason"]
    run = one([{"length": 50, "seconds": 1e-6, "mb": 0.5}, {"length": 100, "seconds": 1e-6, "mb": 1.0}])
    assert run._takes_part("softmax", 7000, "forward")
    assert not run._takes_part("softmax", 9000, "forward")
    assert run._takes_part("softmax", 9000, "step")


def test_what_needs_more_memory_than_there_is_is_left_out_too(capsys, monkeypatch, weightless):
    monkeypatch.setattr(case, "available", lambda: 3.5)
    out, result = ran(capsys, "linear", "--lengths", "9", "--no-backward")
    assert {(row["candidate"], row["mode"]) for row in result["rows"]} == {("linear", "step"), ("softmax", "step")}
    assert "Skipped: linear: forward from N 9 on: it needs 3 MB of memory; 4 are free" in out


@pytest.mark.parametrize("spec", ["softmax", "gla", "local(window=3)", "average"])
def test_every_sample_of_a_step_begins_after_so_many_tokens(spec, monkeypatch):
    module, asked, begun = members.built(spec, 8, 2), [], []
    forward = module.forward

    def watched(x, state, **given):
        asked.append((x.shape[1], given))
        begun.append(longspan.states.clone(state))
        return forward(x, state, **given)

    monkeypatch.setattr(module, "forward", watched)
    monkeypatch.setattr(members, "CHUNK", 7)
    size, sample = members.stepping(module, 17)
    assert [tokens for tokens, _ in asked] == [7, 7, 3, 1]
    assert size == nbytes(longspan.build(spec, 8, 2).init_state(1, 17))
    assert sample(3) > 0
    assert sample(2) > 0
    # One to see that it can, three, two.
    assert asked[3:] == [(1, {"donate": True})] * 6
    for first in (4, 7):
        torch.testing.assert_close(begun[3], begun[first], rtol=0, atol=0, equal_nan=True)


def test_what_has_no_token_more_after_so_many_is_left_out_of_the_steps(capsys, weightless):
    out, result = ran(capsys, "synthesizer(length=9)", "--lengths", "9", "--no-backward")
    assert ("synthesizer(length=9)", "step") not in {(row["candidate"], row["mode"]) for row in result["rows"]}
    assert "synthesizer(length=9): step from N 9 on: ValueError: position 9" in out


def test_what_there_is_is_kept_when_it_is_interrupted(capsys, monkeypatch, weightless):
    take, times = case.take, []

    def interrupted(*arguments):
        times.append(1)
        if len(times) == 3:
            raise KeyboardInterrupt
        return take(*arguments)

    monkeypatch.setattr(case, "take", interrupted)
    assert main(["bench", "members", "--members", "linear", "--lengths", "9", *SMALL, "--out", "o"]) == INTERRUPTED
    assert "interrupted: 4 figures so far are in o/members.partial.json" in capsys.readouterr().err
    partial = json.loads(Path("o/members.partial.json").read_text(encoding="utf-8"))
    assert partial["partial"]
    assert {row["mode"] for row in partial["rows"]} == {"forward", "forward+backward"}
    assert not Path("o/members.json").exists()
