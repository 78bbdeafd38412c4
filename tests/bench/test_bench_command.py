"""``longspan bench``: its files are whole, its figures follow from what was measured, and it refuses what is wrong."""

import importlib.util
import sys

import numpy as np
import pytest
from PIL import Image

import bench_subjects
from longspan.cli.entry import WRONG, main
from longspan.generation.native_decoder import Engine
from longspan.models import pretrained
from longspan.ops.native.call import available
from longspan_lab._utils import plots
from longspan_lab.bench import (
    attention,
    candidates,
    case,
    convolution,
    decoding,
    figures,
    gated,
    guard,
    limits,
    local,
    peers,
)
from longspan_lab.cli import bench
from support.bench import in_quiet, run_into_o

MODEL = ["--dim", "6", "--depth", "1", "--heads", "2", "--feedforward", "5"]


@pytest.fixture(autouse=True)
def at(tmp_path, monkeypatch):
    """A separate folder, products that are soon done, and a machine that is always quiet."""
    in_quiet(tmp_path, monkeypatch)
    monkeypatch.setattr(limits, "gemms", lambda dtype: {"gemm 8": case.bound(limits.gemm(8, dtype))})
    monkeypatch.setattr(candidates, "SETTLE", 0.0)
    return tmp_path


@pytest.fixture
def other(monkeypatch):
    """The subjects of the tests take the place of the other libraries."""
    served = {"ft": bench_subjects.SUBJECTS["ft"]}
    monkeypatch.setattr(peers, "__file__", bench_subjects.__file__)
    monkeypatch.setattr(peers, "SUBJECTS", served)


def ran(capsys, *words, code=0):
    """A run of one round, whose picture shows something."""
    out, result = run_into_o(capsys, *words, "--rounds", "1", code=code)
    with Image.open(f"o/{words[0]}.png") as image:
        picture = np.asarray(image.convert("L"))
    assert len(np.unique(picture)) > 20
    assert {"processor", "cores", "threads", "load", "torch"} <= set(result["machine"])
    assert f"{sum(row['samples'] for row in result['rows'])} kept" in out
    return out, result


def test_attention_in_whole(capsys, other):
    """One run with everything: real processes for memory, and another library."""
    words = ["linear", "linear@torch", "sdpa", "linear@module", "--lengths", "9,17", "--heads", "2", "--size", "4"]
    out, result = ran(capsys, "attention", *words, "--peers", "--peers-python", sys.executable)
    rows = {(row["candidate"], row["mode"], row["length"]): row for row in result["rows"]}
    names = ("linear", "linear@torch", "sdpa", "linear@module", "ft")
    assert set(rows) == {(name, mode, n) for name in names for mode in plots.MODES for n in (9, 17)}
    assert result["baselines"] == {"op": "ft", "module": "linear@module"}
    for row in result["rows"]:
        against = "linear@module" if row["group"] == "module" else "ft"
        base = rows[against, row["mode"], row["length"]]
        assert row["ratio"] == pytest.approx(base["seconds"] / row["seconds"])
        assert 0 < row["fastest"] <= row["seconds"]
        assert row["error"] < 1e-5
        assert ("gflops" in row) == (row["candidate"] in ("linear", "linear@torch", "ft"))
    row = rows["linear", "forward+backward", 17]
    assert row["gflops"] == pytest.approx(14 * 4 * 4 * 2 * 17 / row["seconds"] / 1e9)
    assert row["share"] == pytest.approx(row["gflops"] / result["gemm_gflops"])
    assert result["machine"]["fake"] == "1.2"
    assert all(name in out for name in names)


def test_a_wrong_candidate_of_ours_gets_no_figure_and_fails_the_run(capsys, monkeypatch, weightless):
    wrong = {"attention": bench_subjects.leaking}
    monkeypatch.setattr(local, "find", lambda name: wrong if name == "linear" else bench_subjects.SUBJECTS["right"])
    out, result = ran(capsys, "attention", "linear", "linear@torch", "--lengths", "9", "--no-backward", code=1)
    assert {row["candidate"] for row in result["rows"]} == {"linear@torch"}
    assert "Refused: linear: its output is off the float64 definition by" in out
    assert not any(line.startswith("linear ") for line in out.splitlines())


def test_another_library_that_fails_is_refused_and_the_run_succeeds(capsys, monkeypatch):
    ft = candidates.Local("ft", bench_subjects.SUBJECTS["failing"], candidates.weigher(), ours=False)
    monkeypatch.setattr(ft, "close", lambda: None, raising=False)
    monkeypatch.setattr(candidates, "find_peers", lambda python, names: [ft])
    monkeypatch.setattr(candidates, "versions", lambda remotes: {})
    out, result = ran(capsys, "step", "linear", "--peers", "--batches", "1", "--heads", "2", "--size", "4")
    assert result["refused"] == [{"candidate": "ft", "reason": "TypeError: of no use", "ours": False}]
    assert "Refused: ft: TypeError: of no use" in out


def test_a_candidate_that_fails_while_it_is_timed_is_refused():
    calls = []

    def late(repeat):
        calls.append(repeat)
        if len(calls) > 3:
            raise candidates.Refused("enough")
        return 1.0

    found, failed = case.take({"late": late, "well": lambda repeat: 2.0}, 3, "", lambda items, *_: items)
    assert failed == {"late": "enough"}
    assert set(found) == {"well"}
    assert len(calls) == 4


def test_ratios_are_those_of_the_medians():
    samples = {"ft": iter([9.0] * 2 + [8.0, 2.0, 100.0]), "linear": iter([9.0] * 2 + [0.5, 2.0, 0.4])}
    found, _ = case.take(
        {name: lambda repeat, name=name: next(samples[name]) for name in samples}, 3, "", lambda items, *_: items
    )
    rows = [
        {"candidate": name, "group": "op", "mode": "forward", "length": 1, **figure.row()}
        for name, figure in found.items()
    ]
    assert attention._compare(rows) == {"op": "ft"}
    assert [(row["seconds"], row["fastest"], row["ratio"]) for row in rows] == [(8.0, 2.0, 1.0), (0.5, 0.4, 16.0)]


def test_rejected_samples_are_counted(monkeypatch):
    answers = iter([True, True, False, True, True])
    monkeypatch.setattr(guard.Guard, "quiet", lambda self: next(answers))
    found, _ = case.take({"a": lambda repeat: 1.0}, 2, "", lambda items, *_: items)
    assert (found["a"].samples, found["a"].rejected, found["a"].disturbed) == (2, 1, 0)


def test_short_calls_are_repeated(monkeypatch):
    monkeypatch.setattr(candidates, "LEAST", 5e-3)
    for seconds, repeat in ((1e-9, 1000), (1e-3, 5), (1.0, 1)):
        asked = []
        sample, calls = candidates.repeated(lambda n, asked=asked, seconds=seconds: asked.append(n) or seconds)
        sample()
        assert (calls, asked) == (repeat, [1, 1, repeat])


def run_of(rows, **options):
    one = attention.AttentionRun(
        {}, {"softmax": local.read("softmax")}, attention.Options(**options), lambda items, *_: items
    )
    one.rows = [{"candidate": "softmax", "mode": "forward"} | row for row in rows]
    return one


def test_what_would_take_too_long_is_left_out_and_said_once(monkeypatch):
    one = run_of([{"length": 10, "seconds": 0.1}, {"length": 100, "seconds": 1.0, "mb": 10.0}], limit=99.0)
    assert not one._too_much("softmax", 900, "forward")
    assert one._too_much("softmax", 1000, "forward")
    assert one._too_much("softmax", 2000, "forward")
    (left,) = one.left_out
    assert left["reason"] == "forward from N 1000 on: a call would take about 100 s, longer than the limit of 99 s"
    assert not one._too_much("softmax", 1000, "forward+backward")
    monkeypatch.setattr(case, "available", lambda: 100.0)
    one = run_of([{"length": 100, "seconds": 1e-6, "mb": 10.0}])
    assert not one._too_much("softmax", 700, "forward")
    assert one._too_much("softmax", 900, "forward")
    assert "it would need about 90 MB of memory; 100 are free" in one.left_out[0]["reason"]


@pytest.mark.parametrize(
    ("cost", "power"),
    [
        ("N D^2", 1),
        ("N^2 D", 2),
        ("N^1.5 D", 1.5),
        ("N W D", 1),
        ("N log N D", 1),
        ("D log N", 0),
        ("D^2", 0),
        ("N D + N^2", 2),
    ],
)
def test_declared_powers(cost, power):
    assert figures.declared(cost) == power


def test_exponents_need_lengths_that_show_growth():
    def times(*lengths, first=1e-3):
        return {n: first * n / lengths[0] for n in lengths}

    assert figures.unfitted(times(256, 512, 1024)) == ""
    assert "needs 3 lengths" in figures.unfitted(times(256, 1024))
    assert "needs 3 lengths" in figures.unfitted(times(256, 300, 512))
    assert "overhead" in figures.unfitted(times(256, 512, 1024, first=1e-6))


def test_exponents_are_fitted():
    assert figures.exponent({n: 3e-6 * n**1.5 for n in (64, 256, 1024)}) == pytest.approx(1.5)


def test_crossovers():
    quadratic = {n: float(n * n) for n in (16, 64, 256, 1024)}
    linear = {n: 100.0 * n for n in (16, 64, 256, 1024, 4096)}
    assert figures.crossover(linear, quadratic) == "from 100"
    assert figures.crossover(quadratic, linear) == "at no size"
    assert figures.crossover({16: 1.0}, quadratic) == "at every size"
    assert figures.crossover(linear, linear) == "at no size"
    # Ahead twice: from the second time on for good.
    assert figures.crossover({1: 2.0, 4: 1.0, 16: 4.0, 64: 1.0}, dict.fromkeys((1, 4, 16, 64), 2.0)) == "from 32"


def test_step(capsys, weightless):
    words = ["linear", "linear@reference", "--batches", "3,1", "--heads", "2", "--size", "5"]
    out, result = ran(capsys, "step", *words)
    rows = {(row["candidate"], row["batch"]): row for row in result["rows"]}
    assert set(rows) == {(n, b) for n in ("linear", "linear@reference", "state in place") for b in (1, 3)}
    for (_, batch), row in rows.items():
        assert row["to_bound"] == pytest.approx(row["seconds"] / rows["state in place", batch]["seconds"])
    assert "batch 3" in out


def test_convolution(capsys):
    out, result = ran(capsys, "convolution", "--length", "9", "--channels", "6", "--batches", "1,3")
    rows = {(row["what"], row["dtype"], row["batch"], row["candidate"]): row for row in result["rows"]}
    ways, bounds = ("longspan", "without silu", "longspan@torch"), ("copy", "copy to new memory")
    expected = {("sequence", dtype, 1, name) for dtype in convolution.DTYPES for name in (*ways, "conv1d", *bounds)}
    expected |= {("step", d, b, n) for d in convolution.DTYPES for b in (1, 3) for n in (*ways, "state in place")}
    assert set(rows) == expected
    for (what, dtype, batch, _), row in rows.items():
        bound = rows[what, dtype, batch, convolution.BOUNDS[what]]
        assert row["to_bound"] == pytest.approx(row["seconds"] / bound["seconds"])
    assert "float32, 3 rows" in out


def test_weights(capsys):
    words = "--inputs 256 --outputs 96 --rows 1,3 --formats Q8_0,Q4_K --megabytes 1 --depth 1 --batches 2"
    out, result = ran(capsys, "weights", *words.split())
    rows = {(row["what"], row["rows"], row["candidate"]): row for row in result["rows"]}
    own = [f"{form} {kind}" for form in ("Q8_0", "Q4_K") for kind in ("int16", "int8", "float32")]
    expected = {("product", n, name) for n in (1, 3) for name in ("read", "float32", "bfloat16", *own)}
    models = ("float32", "bfloat16", "int8 int16", "int4 int16", "int4 int8")
    assert set(rows) == expected | {("decoder", 2, name) for name in models}
    read, one = rows["product", 3, "read"], rows["product", 3, "Q8_0 int16"]
    assert one["of_read"] == pytest.approx(one["GB_per_second"] / read["GB_per_second"])
    assert 1e-7 < one["error"] < 1e-4
    assert rows["decoder", 2, "int4 int8"]["megabytes"] < 0.3 * rows["decoder", 2, "float32"]["megabytes"]
    assert "of read" in out


def test_a_convolution_that_is_wrong_gets_no_figure(capsys, monkeypatch):
    monkeypatch.setitem(convolution.WAYS, "conv1d", lambda given: 1.01 * convolution.conv1d(given))
    out, result = ran(capsys, "convolution", "--length", "9", "--channels", "6", "--batches", "1")
    assert ("conv1d", "float32") not in {(row["candidate"], row["dtype"]) for row in result["rows"]}
    assert "Refused: conv1d sequence float32: it differs from the definition by 0.01" in out


def test_generate(capsys, weightless, monkeypatch):
    words = ["linear@plain", "linear@plain@bf16", "softmax@plain", "--positions", "4,2", "--batches", "1,3"]
    out, result = ran(capsys, "generate", *words, *MODEL, "--images", "1", "--tokens", "5")
    steps = {(r["candidate"], r["batch"], r["position"]): r for r in result["rows"] if r["what"] == "step"}
    measured = ("linear@plain", "linear@plain@bf16", "softmax@plain")
    bounds = tuple(f"{bound}{kind}" for bound in decoding.BOUNDS for kind in ("", " bf16"))
    assert set(steps) == {(n, b, p) for n in measured + bounds for b in (1, 3) for p in (2, 4)}
    for (name, batch, position), row in steps.items():
        if name in measured:
            kind = " bf16" if name.endswith("bf16") else ""
            one, two, three = (steps[f"{bound}{kind}", batch, position]["seconds"] for bound in decoding.BOUNDS)
            assert row["to_parameters"] == pytest.approx(row["seconds"] / one)
            assert row["to_gemm_and_state"] == pytest.approx(row["seconds"] / (two + three))
            assert row["tokens_per_second"] == pytest.approx(batch / row["seconds"])
    images = {(r["candidate"], r["batch"]): r for r in result["rows"] if r["what"] == "images"}
    assert set(images) == {(n, b) for n in ("linear", "softmax") for b in (1, 3)}
    assert images["linear", 3]["images_per_second"] == pytest.approx(3 / images["linear", 3]["seconds"])
    assert "whole images" in out


def test_generate_at_the_sizes_of_a_trained_model(capsys, weightless, monkeypatch):
    words = ["linear@plain", "--positions", "2", "--batches", "1", "--images", "0", "--like", "mnist"]
    _, result = ran(capsys, "generate", *words)
    config = pretrained.load("mnist").config
    for field in ("dim", "depth", "heads", "feedforward", "vocab"):
        assert result["options"]["shape"][field] == getattr(config, field), field


def test_generate_leaves_out_what_does_not_fit(capsys, weightless, monkeypatch):
    monkeypatch.setattr(case, "available", lambda: 0.002)
    words = ["linear@plain", "softmax@plain", "--positions", "9", "--batches", "1", "--limit", "1e-9", "--tokens", "5"]
    out, result = ran(capsys, "generate", *words, *MODEL)
    assert "softmax@plain" not in {row["candidate"] for row in result["rows"]}
    assert "Skipped: softmax@plain: batch 1, position 9: its state would need" in out
    assert "Skipped: linear, whole images: batch 1: an image takes about" in out


def test_generate_leaves_out_the_engine_where_it_does_not_serve(capsys, weightless, monkeypatch):
    monkeypatch.setattr(Engine, "why_not", staticmethod(lambda model: "a good reason"))
    words = ["linear@engine", "linear@plain", "--positions", "2", "--batches", "1", "--images", "0"]
    _, result = ran(capsys, "generate", *words, *MODEL)
    assert result["left_out"] == [{"candidate": "linear@engine", "reason": "a good reason"}]
    assert "linear@engine" not in {row["candidate"] for row in result["rows"]}


def test_generate_by_the_engine(capsys, weightless):
    if not available():
        pytest.skip("the engine needs the native kernels")
    words = ["linear@engine", "linear@engine@bf16", "softmax@engine", "--positions", "2", "--batches", "1,3"]
    _, result = ran(capsys, "generate", *words, *MODEL, "--images", "0")
    assert {row["candidate"] for row in result["rows"] if "error" in row} == set(words[:3])


def test_gated(capsys, monkeypatch):
    monkeypatch.setattr(gated, "transformers", lambda: None)
    words = ["gated", "gated delta", "decay", "--length", "70", "--heads", "4", "--key-heads", "2", "--size", "8"]
    printed, result = ran(capsys, *words, "--batches", "1,3")
    found = {(row["rule"], row["mode"], row["candidate"]) for row in result["rows"]}
    assert ("gated delta", "forward+backward", "torch") in found
    assert ("decay", "forward", "loop") in found
    assert ("decay", "step", "state in place") in found
    assert ("gated delta", "forward", "native") in found or not available()
    assert "of bound" in printed
    for row in result["rows"]:
        assert row.get("error", 0.0) <= gated.ALLOWED
        if row["mode"] != "step":
            assert row[f"times_{row['candidate']}"] == 1.0


def test_a_wrong_rule_gets_no_figure(capsys, monkeypatch):
    monkeypatch.setattr(gated, "loop", lambda given: given["v"])
    words = ["gated", "delta", "--length", "9", "--heads", "2", "--size", "4", "--batches", "0"]
    printed, result = ran(capsys, *words, code=1)
    assert "Refused: delta, loop: its output is off the float64 definition by" in printed
    assert not any(row["candidate"] == "loop" for row in result["rows"])


def test_limits(capsys, monkeypatch):
    monkeypatch.setattr(limits, "SIZES", (8, 16))
    monkeypatch.setattr(limits, "MEGABYTES", (0.01, 0.02))
    monkeypatch.setattr(limits, "FRESH", 0.02)
    out, result = ran(capsys, "limits")
    rows = {(row["limit"], row["dtype"], row["size"]): row for row in result["rows"]}
    kinds = {("gemm", dtype, size) for dtype in limits.DTYPES for size in (8, 16)}
    kinds |= {(name, "float32", mb) for name in ("copy", "scale in place", "read") for mb in (0.01, 0.02)}
    assert set(rows) == kinds | {("fill fresh pages", "float32", 0.02)}
    product, copied = rows["gemm", "float32", 16], rows["copy", "float32", 0.02]
    assert product["value"] == pytest.approx(2 * 16**3 / product["seconds"] / 1e9)
    assert copied["value"] == pytest.approx(2 * 4 * int(0.02 * 2**18) / copied["seconds"] / 1e9)
    assert "GEMM, GFLOP/s" in out


def test_rewind(capsys):
    sizes = "--dim 16 --depth 1 --heads 2 --drafts 1,3 --tokens 5 --rounds 1 --dtypes float32"
    out, result = ran(capsys, "rewind", *"--length 40 --rooms 2 --edits 1".split(), *sizes.split())
    found = [(row["part"], row["candidate"]) for row in result["rows"]]
    drafts = [("text", name) for name in ("no drafts", "prompt lookup", "right drafts", "wrong drafts")] * 2
    calls = [("verify", name) for name in ("step", "verify 1", "verify 3")]
    # llama.cpp's row is there if its package is.
    others = [name for part, name in found if part == "edit" and "llama.cpp" not in name]
    assert others[:2] == ["2 states", "no states"]
    assert len(others) == 2 + 2 * (importlib.util.find_spec("transformers") is not None)
    assert [one for one in found if one[0] != "edit"] == [*drafts, *calls, *drafts]
    assert "of the whole prompt" in out


MISTAKES = {
    "": "KIND",
    "memory": "unknown benchmark 'memory' (did you mean 'members'?); known: attention, convolution, depth, ",
    "--lengths 3": "unknown option '--lengths'; known: --help",
    "attention --length 3": "unknown option '--length' (did you mean '--lengths'?)",
    "attention --lengths 3,x": "--lengths=3,x: expected positive integers",
    "attention --lengths 0": "--lengths=0: expected positive integers",
    "attention --rounds 0": "--rounds=0 must be at least 1",
    "attention --dtype float61": "unknown dtype 'float61' (did you mean 'bfloat16'?); known: bfloat16, float32",
    "attention --limit 0": "--limit=0.0 must be a positive number of seconds",
    "attention linaer": "unknown name 'linaer' (did you mean 'linear'?)",
    "attention linear@x": "unknown suffix of a candidate 'x'",
    "attention kernel": "kernel is one token; longspan bench step measures it",
    "attention --peers": "there is no .venv-peers/bin/python; build the other libraries with: make peers",
    "step linear ft": "there is no .venv-peers/bin/python",
    "attention --peers-python x": "--peers-python requires --peers",
    "attention --out f/o": "cannot make the folder f/o",
    "step softmax": "'softmax'",
    "generate --like mnist --dim 8": "leave out --dim",
    "generate --like mnits": "(mnist",
    "generate --images -1": "--images=-1 must not be negative",
    "generate --dim 7": "dim=7 is not a multiple of heads=8",
    "generate linear(eps=0.1)": "whole decoders are measured for linear and softmax",
    "generate linear@fast": "unknown suffix of a candidate 'fast'",
    "members --members linaer": "unknown attention 'linaer' (did you mean 'linear'?)",
    "members --members linear;": "empty spec in 'linear;'",
    "members --members linear(x=1)": "linear has no option 'x'",
    "members --dim 7": "dim=7 is not a multiple of heads=4",
    "members --heads 0": "--heads=0 must be at least 1",
    "pattern --patterns bond(3)": "unknown name 'bond' (did you mean 'band'?)",
    "pattern --patterns band(3);;causal": "empty spec in 'band(3);;causal'",
    "pattern --patterns 3": "'3' is not a pattern; write one like 'band(256) | strided(64)'",
    "pattern --matrix -1": "--matrix=-1 must not be negative",
    "depth --depths 2,x": "--depths=2,x: expected positive integers",
    "depth --limit 0": "--limit=0.0 must be a positive number of MB",
    "depth --length 0": "length",
    "depth --dim 8 --heads 3": "dim=8 is not a multiple of heads=3",
    "depth --attention linaer": "linaer",
    "limits linear": "unrecognized arguments: linear",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_and_code_2(line, at, capsys):
    (at / "f").write_text("")
    assert main(["bench", *line.split()]) == WRONG
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("longspan: error: ")
    assert MISTAKES[line] in err
    assert err.count("\n") == 1
    assert not list(at.rglob("*.json"))


def test_peers_may_be_named_by_the_environment(capsys, monkeypatch):
    monkeypatch.setenv("LONGSPAN_PEERS", "elsewhere/python")
    assert main(["bench", "step", "--peers"]) == WRONG
    assert "there is no elsewhere/python" in capsys.readouterr().err


@pytest.mark.parametrize("kind", bench.BENCHMARKS)
def test_help_documents_every_flag(kind, capsys):
    assert main(["bench", kind, "--help"]) == 0
    shown = capsys.readouterr().out
    for action in bench.subparser(kind)._actions:
        assert action.help, action.dest
        assert all(option in shown for option in action.option_strings)
