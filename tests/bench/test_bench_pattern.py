"""``longspan bench pattern``: nothing is timed that is not right, figures follow from what was measured, and limits."""

import sys
from pathlib import Path

import pytest
import torch

from longspan import patterns
from longspan.ops import sparse
from longspan.ops.native.call import available
from longspan_lab.bench import candidates, case, pattern, worker
from longspan_lab.tools import performance
from support.bench import in_quiet, run_into_o

TEXTS = ("band(5)", "causal & (band(2) | random(2))")
TASK = {"what": "attention", "batch": 2, "length": 23, "heads": 3, "size": 5}
TASK |= {"dtype": "float32", "backward": True, "threads": 1}


@pytest.fixture(autouse=True)
def at(tmp_path, monkeypatch):
    in_quiet(tmp_path, monkeypatch)
    torch.manual_seed(0)
    return tmp_path


def ran(capsys, *words, code=0):
    return run_into_o(capsys, "pattern", "--heads", "3", "--size", "4", "--rounds", "1", *words, code=code)


def local(function):
    """A candidate of which only the function (q, k, v) (B,N,H,D) -> (B,N,H*D) is known."""
    return candidates.Local("it", {"attention": lambda task: function}, candidates.Process([]))


def test_in_whole(capsys, weightless):
    out, result = ran(capsys, "--patterns", "; ".join(TEXTS), "--lengths", "29,17")
    ours = ("native", "torch") if available() else ("torch",)
    rows = {(r["pattern"], r["mode"], r["candidate"], r["length"]): r for r in result["rows"]}
    timed = (*ours, "sdpa all", "sdpa mask")
    assert set(rows) == {
        (text, mode, way, n)
        for text in TEXTS
        for n in (17, 29)
        for mode in pattern.MODES
        for way in (pattern.LAYOUTS if mode == "layout" else timed)
    }
    for (text, mode, _, n), row in rows.items():
        assert row["keys"] == pytest.approx(float(patterns.parse(text).dense(n, heads=3).sum(-1).double().mean()))
        assert row["density"] == pytest.approx(row["keys"] / n)
        assert row.get("mb") == (3.0 if sys.platform == "linux" else None)
        assert ("error" in row) == (mode != "layout")
        if mode != "layout":
            assert row["error"] <= pattern.ALLOWED
            for other in timed:
                assert row[f"times_{other}"] == pytest.approx(rows[text, mode, other, n]["seconds"] / row["seconds"])
            assert f"{row['times_sdpa all']:.2f}x" in out
    assert len(result["growth"]) == len(rows) / 2
    assert all(("exponent" in entry) != ("unfitted" in entry) for entry in result["growth"])
    assert {"refused": result["refused"], "left_out": result["left_out"]} == {"refused": [], "left_out": []}
    assert "keys per query" in out


@pytest.mark.parametrize("text", ["band(5)", "fixed(7, summary=2) & causal", "by_head(band(3, right=2), strided(4))"])
@pytest.mark.parametrize("chosen", [[0, 3, 11, 22], list(range(23))], ids=["some", "all"])
def test_the_definition_is_the_dense_one(text, chosen):
    given = torch.randn(3, 2, 23, 3, 5, dtype=torch.float64, requires_grad=True).unbind(0)
    rows, value = torch.tensor(chosen), patterns.parse(text)
    found = pattern.definition(value, *given, rows=rows)
    expected = (
        sparse.dense(*(t.transpose(1, 2) for t in given), pattern=value, how=sparse.Logits(5**-0.5))[0]
        .transpose(1, 2)
        .flatten(2)[:, rows]
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    upstream = torch.randn_like(found)
    grads = [torch.autograd.grad(o, given, upstream, retain_graph=True) for o in (found, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-13)


@pytest.mark.parametrize("text", TEXTS)
def test_a_mask_made_by_rows_is_the_whole_one(text, monkeypatch):
    monkeypatch.setattr(pattern, "CHUNK", 7)
    value = patterns.parse(text)
    assert torch.equal(pattern.matrix(value, 23, 3), value.dense(23, heads=3))


def test_keys_are_counted_at_even_distances(monkeypatch):
    monkeypatch.setattr(pattern, "COUNTED", 10)
    # Of 1 ... 100 keys the tens' sixths: 6, 16, ..., 96.
    assert pattern.keys_per_query(patterns.causal(), 100, 2) == 51.0
    assert pattern.keys_per_query(patterns.by_head(patterns.band(0), patterns.everywhere()), 9, 2) == 5.0


@pytest.mark.parametrize("way", [way for way in pattern.WAYS if way != "flex"])
@pytest.mark.parametrize("text", [*TEXTS, "band(3, right=2) | globals(2)", "causal & strided(16)"])
def test_right_candidates_pass(way, text, monkeypatch):
    if way == "native" and not available():
        pytest.skip("there are no native kernels here")
    monkeypatch.setattr(pattern, "COMPARED", 17)
    value = patterns.parse(text)
    candidate = candidates.Local(way, pattern.find(f"{way}@{text}"), candidates.Process([]))
    assert pattern.check(candidate, pattern._answers(way, value), TASK | {"length": 41}) <= pattern.ALLOWED


def made(name):
    """The attention function of a candidate, by its name."""
    makers = pattern.find(name)
    assert "attention" in makers
    return makers["attention"](TASK)


def right(q, k, v, text="band(5)"):
    return pattern.definition(patterns.parse(text), q, k, v, torch.arange(q.shape[1]))


WRONG_ONES = {
    "its output": lambda q, k, v: right(q, k, v, "band(4)"),
    "its output is off the float64 definition by nan": lambda q, k, v: right(q, k, v) * float("nan"),
    "its grad0": lambda q, k, v: right(q.detach() + 2 * (q - q.detach()), k, v),
    "its grad2": lambda q, k, v: right(q, k, v.detach() + 2 * (v - v.detach())),
    "at N 23": lambda q, k, v: right(q, k, v, "band(5)" if q.shape[1] < 23 else "band(4)"),
}


@pytest.mark.parametrize("message", WRONG_ONES)
def test_wrong_candidates_are_refused(message, monkeypatch):
    monkeypatch.setattr(pattern, "COMPARED", 13)
    monkeypatch.setattr(pattern, "ROWS", 5)
    with pytest.raises(candidates.Refused, match=message):
        pattern.check(local(WRONG_ONES[message]), patterns.band(5), TASK)


def test_a_wrong_candidate_of_ours_gets_no_figure_and_fails_the_run(capsys, monkeypatch, weightless):
    def wrong(name, value, q, k, v):
        return v if name == "torch" else sparse.sparse_attention(q, k, v, value)

    monkeypatch.setattr(pattern, "_ours", wrong)
    out, result = ran(capsys, "--patterns", "band(5)", "--lengths", "17", "--no-backward", code=1)
    assert "Refused: band(5), torch: its output is off the float64 definition by" in out
    assert "torch" not in {row["candidate"] for row in result["rows"]}
    assert {row["mode"] for row in result["rows"]} == {"forward", "layout"}


def test_flex_takes_part_forward_only_and_its_failure_is_not_ours(capsys, monkeypatch, weightless):
    asked = []

    def flex(value, heads):
        asked.append(heads)
        return lambda q, k, v: sparse.dense(q, k, v, value, sparse.Logits(0.5))[0]

    monkeypatch.setattr(pattern, "_flex", flex)
    words = ["--patterns", "band(5)", "--lengths", "17,29", "--matrix", "17"]
    out, result = ran(capsys, *words, "--flex")
    assert {(r["mode"], r["length"]) for r in result["rows"] if r["candidate"] == "flex"} == {("forward", 17)}
    assert set(asked) == {3}
    assert "Skipped: band(5), flex: forward from N 29 on: it needs all 29 x 29 pairs; the limit is 17 tokens" in out
    assert out.count("Skipped: band(5), sdpa mask: forward+backward from N 29 on") == 1

    def broken(value, heads):
        raise RuntimeError("not here" + " and there" * 99)

    monkeypatch.setattr(pattern, "_flex", broken)
    _, result = ran(capsys, *words, "--flex", "--no-backward")
    (refused,) = result["refused"]
    assert refused["reason"].startswith("RuntimeError: not here and there")
    assert refused["reason"].endswith(" ...")
    assert len(refused["reason"]) <= 300
    assert (refused["candidate"], refused["ours"]) == ("band(5), flex", False)


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore")  # inductor warns about its internals
def test_flex_itself(monkeypatch):
    # It cannot place the writes that spoil fresh memory in tests.
    for place, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(place, name, getattr(place, name).__wrapped__)
    text = "causal & (band(2) | strided(16))"
    candidate = candidates.Local("flex", pattern.find(f"flex@{text}"), candidates.Process([]))
    task = TASK | {"length": 67, "size": 16, "backward": False}
    assert pattern.check(candidate, patterns.parse(text), task) <= pattern.ALLOWED


def test_what_would_take_too_long_is_left_out(monkeypatch):
    options = pattern.Options(limit=9.0, matrix=10**6)
    one = pattern.PatternRun(options, candidates.Process([]), lambda items, *_: items)
    one.rows = [
        {"pattern": "p", "mode": "forward", "candidate": way, "length": 100, "seconds": 1.0, "mb": 10.0}
        for way in pattern.WAYS
    ]
    assert not one._too_much("p", "native", 900, "forward")
    assert one._too_much("p", "sdpa all", 400, "forward")
    assert one.left_out["p", "sdpa all", "forward"] == (
        "forward from N 400 on: a call would take about 16 s, longer than the limit of 9 s"
    )
    assert one._too_much("p", "sdpa all", 100, "forward")
    assert not one._too_much("p", "sdpa all", 400, "forward+backward")
    assert one._too_much("p", "torch", 1000, "forward")
    monkeypatch.setattr(case, "available", lambda: 100.0)
    assert not one._too_much("p", "native", 700, "forward")
    assert one._too_much("p", "sdpa mask", 290, "forward")
    assert "it would need about 84 MB of memory; 100 are free" in one.left_out["p", "sdpa mask", "forward"]


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_memory_is_measured_in_a_process_that_finds_candidates_by_name():
    process = pattern.weigher()
    task = TASK | {"length": 700, "heads": 1, "batch": 1}
    masked = process.ask(do="memory", subject="sdpa mask@causal & band(9)", task=task)["mb"]
    assert process.ask(do="memory", subject="listed@causal & band(9)", task=task | {"backward": False})["mb"] >= 0
    process.close()
    # At least the mask of 700 x 700 bytes.
    assert masked > 700 * 700 / 2**20


def test_layouts_are_made_anew():
    for way in pattern.LAYOUTS:
        function = made(f"{way}@band(5) | strided(16)")
        first, second = (function(torch.zeros(1, n, 1, 1), None, None) for n in (40, 40))
        assert first is not second
    assert isinstance(pattern.lay("blocks", "band(5)", 40), patterns.Blocks)


def test_all_pairs_are_causal_where_the_pattern_is():
    assert pattern._answers("sdpa all", patterns.band(3)) == patterns.causal()
    assert pattern._answers("sdpa all", patterns.band(3, 1)) == patterns.everywhere()
    given = worker.inputs(TASK)
    for value in (patterns.band(3), patterns.band(3, 1)):
        found = made(f"sdpa all@{value!r}")(*given)
        expected = pattern.definition(pattern._answers("sdpa all", value), *given, rows=torch.arange(23))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_pages_take_the_figures_of_a_folder(capsys, weightless, monkeypatch, at):
    assert "<!-- pattern:begin -->" in performance.PAGE.read_text(encoding="utf-8")
    monkeypatch.setattr(performance, "PAGE", at / "performance.md")
    monkeypatch.setattr(performance, "RAW", at / "benchmarks")
    monkeypatch.setattr(performance, "RESULTS", at / "results")
    monkeypatch.setattr(performance, "MACHINES", ("new", "old"))
    performance.PAGE.write_text("before\n<!-- pattern:begin -->\n<!-- pattern:end -->\nafter\n")
    performance.main()
    assert "results/new" not in performance.PAGE.read_text()
    assert list(performance.RAW.iterdir()) == []
    ran(capsys, "--patterns", "band(5)", "--lengths", "17", "--no-backward")
    # Kinds of other pages and results of unfinished runs are skipped.
    Path("o/members.json").write_text('{"benchmark": "members"}')
    Path("o/step.partial.json").write_text('{"benchmark": "step", "partial": true}')
    performance.main("o")
    page = performance.PAGE.read_text()
    assert "(../../benchmarks/results/new/pattern.png)" in page
    assert "(benchmarks/new.md#pattern)" in page
    assert page.startswith("before\n<!-- pattern:begin -->\n")
    assert page.endswith("<!-- pattern:end -->\nafter\n")
    raw = (performance.RAW / "new.md").read_text()
    assert "## pattern\n" in raw
    assert "keys per query" in raw
    found = at / "results" / "new"
    assert {path.name for path in found.iterdir()} == {f"pattern.{end}" for end in ("json", "csv", "png")}
    found.rename(at / "results" / "old")  # measured on the other machine alone
    performance.main()
    assert "results/old/pattern.png" in performance.PAGE.read_text()
    assert (performance.RAW / "old.md").exists()
