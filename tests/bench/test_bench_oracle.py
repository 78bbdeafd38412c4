"""Before it is timed: every candidate is held to a definition, and workers that fail say how."""

import sys
from pathlib import Path

import pytest
import torch

import bench_subjects
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.ops.backends import backend
from longspan.ops.native.call import available
from longspan_lab.bench import candidates, decoders, decoding, local, oracle, worker

ROOT = Path(__file__).parents[2]
FAKE = [sys.executable, "-I", worker.__file__, bench_subjects.__file__]
MISSING = candidates.Process(["no-such-program"])
TASK = {"what": "attention", "batch": 1, "length": 83, "heads": 2, "size": 7}
TASK |= {"dtype": "float32", "backward": True, "threads": 1}


def candidate(name):
    return candidates.Local(name, bench_subjects.SUBJECTS[name], MISSING)


def named(name):
    return candidates.Local(name, local.find(name), MISSING)


@pytest.fixture(scope="module")
def fake():
    """``fake(name)``: a subject of the tests in a worker; all share one process for timing and one for memory."""
    shared = candidates.Remote("", FAKE)

    def make(name):
        remote = candidates.Remote(name, FAKE)
        remote.timing, remote.weigher = shared.timing, shared.weigher
        return remote

    yield make
    shared.close()


@pytest.mark.parametrize("name", ["linear", "linear@reference", "linear(feature_map='squared_relu', eps=0.1)", "sdpa"])
def test_ours_agree_with_the_definition(name):
    errors = oracle.check_attention(named(name), local.read(name), TASK)
    assert set(errors) == {"output", "grad0", "grad1", "grad2"}
    assert max(errors.values()) < 1e-5


@pytest.mark.parametrize("name", ["softmax", "linear@module", "linear(rotary=100.0)"])
def test_whole_modules_agree_with_their_reference(name):
    # Where odd heads are impossible, as with rotary positions, even ones are compared.
    task = TASK | {"module": True, "heads": 3, "size": 4}
    assert max(oracle.check_attention(named(name), local.read(name), task).values()) < 1e-5


def test_bfloat16_is_allowed_its_rounding_and_no_more():
    task = TASK | {"dtype": "bfloat16"}
    assert max(oracle.check_attention(named("linear"), local.read("linear"), task).values()) > 1e-4
    with pytest.raises(candidates.Refused):
        oracle.check_attention(candidate("off"), local.read("linear"), task)


WRONG = {
    "leaking": "output is off the float64 definition by",
    "off": "output is off the float64 definition by",
    "nan": "off the float64 definition by nan at B 2, N 37, H 3, D 5; allowed 0.0001",
    "wrong_gradient": "grad0 is off the float64 definition by 1 at",
    "failing": "TypeError: of no use",
}


def test_a_module_that_cannot_be_built_at_the_small_sizes_is_refused():
    spec = "softmax(kv_heads=2)@module"
    with pytest.raises(candidates.Refused, match=r"cannot be built at .*: kv_heads=2 must divide heads=3"):
        oracle.check_attention(named(spec), local.read(spec), TASK | {"module": True})


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_candidate_is_refused(name):
    with pytest.raises(candidates.Refused, match=WRONG[name]):
        oracle.check_attention(candidate(name), local.read("linear"), TASK)


def test_forward_alone_gradients_may_be_wrong_and_shapes_may_not():
    task = TASK | {"backward": False}
    oracle.check_attention(candidate("wrong_gradient"), local.read("linear"), task)
    with pytest.raises(candidates.Refused, match=r"its output is \(2, 37, 5\), not \(2, 37, 15\)"):
        oracle.check_attention(candidate("narrow"), local.read("linear"), task)


def test_a_gradient_from_the_past_is_refused(monkeypatch):
    """What reads only tokens beyond the prefix shows in the gradients beyond it alone."""

    def far(task):
        def attend(q, k, v):
            out = bench_subjects.attend(q, k, v).flatten(2)
            return out + 0 * out + 1e-9 * v[:, -1:].flatten(2)

        return attend

    spy = candidates.Local("far", {"attention": far}, MISSING)
    monkeypatch.setattr(oracle, "SMALL", {})
    with pytest.raises(candidates.Refused, match="gets a gradient of .* from outputs before it"):
        oracle.check_attention(spy, local.read("linear"), TASK)


@pytest.mark.parametrize("name", ["linear", "linear@torch", "kernel"])
def test_steps_agree_with_the_definition(name):
    if name == "kernel" and not available():
        pytest.skip("no native kernels here")
    task = TASK | {"what": "step", "length": 1, "batch": 3}
    assert oracle.check_step(named(name), {}, task) < 1e-5
    with pytest.raises(candidates.Refused, match="output is off"):
        oracle.check_step(candidate("forgetful"), {}, task | {"batch": 1})


@pytest.mark.parametrize("attention", ["linear", "softmax"])
@pytest.mark.parametrize("prenorm", [True, False])
def test_decoders_agree_with_the_definition(attention, prenorm):
    config = DecoderConfig(
        dim=6, depth=2, heads=2, feedforward=5, vocab=7, attention=attention, positions="none", prenorm=prenorm
    )
    weights = decoders.random_weights(config)
    tokens = torch.randint(7, (2, 9), generator=torch.Generator().manual_seed(0))
    model = Decoder(config).double()
    model.load_state_dict(weights)
    with torch.no_grad(), backend("reference"):
        torch.testing.assert_close(oracle.decoder(config, weights, tokens), model(tokens)[0], rtol=1e-9, atol=1e-9)
    stepped = candidates.Local(attention, decoders.makers(attention), MISSING)
    task = {"what": "model", **decoders.shape(config), "batch": 3, "dtype": "float32"}
    assert oracle.check_model(stepped, config, weights, task) < 1e-5


@pytest.mark.parametrize(
    "part", ["query.weight", "value.bias", "expand.bias", "norm2.weight", "head.bias", "tokens.weight"]
)
def test_a_decoder_that_is_wrong_anywhere_is_refused(part):
    config = DecoderConfig(dim=6, depth=2, heads=2, feedforward=5, vocab=7, positions="none")
    weights = decoders.random_weights(config)
    broken = dict(weights)
    for name in (name for name in weights if name.endswith(part)):
        broken[name] = weights[name] + torch.linspace(0, 0.05, weights[name].numel()).view_as(weights[name])

    def make(task, given):
        return decoders.makers("linear")["model"](task, broken)

    wrong = candidates.Local("wrong", {"model": make}, MISSING)
    task = {"what": "model", **decoders.shape(config), "batch": 3, "dtype": "float32"}
    with pytest.raises(candidates.Refused, match="output is off the float64 definition"):
        oracle.check_model(wrong, config, weights, task)


def test_a_worker_answers_and_is_not_disturbed_by_what_is_printed(fake):
    remote = fake("right")
    assert remote.about() == {"python": sys.version.split()[0], "torch": torch.__version__, "fake": "1.2"}
    assert max(oracle.check_attention(remote, local.read("linear"), TASK).values()) < 1e-5
    assert oracle.check_step(remote, {}, TASK | {"what": "step", "length": 1}) < 1e-5
    sample = remote.sampler(TASK)
    assert sample(3) > 0
    remote.release()
    with pytest.raises(candidates.Refused, match="AssertionError"):
        sample(1)
    with pytest.raises(candidates.Refused, match="ValueError: .* model"):
        remote.sampler(TASK | {"what": "model"})


def test_a_worker_that_fails_or_dies_reports_how(fake):
    with pytest.raises(candidates.Refused, match="^TypeError: of no use$"):
        fake("failing").sampler(TASK)
    sample = fake("dying").sampler(TASK)
    with pytest.raises(candidates.Refused, match="its process ended with code 3: last words"):
        sample(1)
    with pytest.raises(candidates.Refused, match="cannot start no-such-program: No such file"):
        MISSING.ask(do="about")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_one_call_in_a_fresh_process(fake):
    task = TASK | {"backward": False}
    remote = fake("large")
    # Twice: nothing is left of the first call.
    assert [remote.memory(task) for _ in range(2)] == pytest.approx([80, 80], abs=4)
    with pytest.raises(candidates.Refused, match="^TypeError: of no use$"):
        fake("failing").memory(task)
    with pytest.raises(candidates.Refused, match="^its process ended with code 3$"):
        fake("dying").memory(task)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("linaer", "unknown name 'linaer'"),
        ("linear@troch", r"unknown suffix of a candidate 'troch' \(did you mean 'torch'\?\)"),
        ("linear@torch@native", "names more than one backend"),
        ("sdpa@torch", "has a suffix too many"),
    ],
)
def test_names_that_are_not_known_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        local.read(name)


def test_names_say_what_is_compared():
    assert all(local.read(name).module for name in ("linear@module", "softmax", "linear(rotary=10.0)"))
    assert not any(local.read(name).module for name in ("linear", "sdpa"))
    assert local.read("linear@torch@module") == local.Name("linear", "torch", True)
    assert [local.read(n).cost for n in ("linear", "softmax", "sdpa", "kernel")] == ["N D^2", "N^2 D", "N^2 D", "N D^2"]
    assert decoders.read("softmax@engine@bf16") == decoders.Name("softmax", True, True)
    for wrong in ("linear@plain@engine", "linear@bf16@bf16"):
        with pytest.raises(ValueError, match="@plain and @engine"):
            decoders.read(wrong)


def test_other_libraries_agree_where_they_are_installed():
    python = ROOT / ".venv-peers" / "bin" / "python"
    if not python.exists():
        pytest.skip("make peers has not been run")
    remotes = candidates.find_peers(str(python))
    try:
        assert {"pytorch-fast-transformers", "performer-pytorch"} == set(candidates.versions(remotes))
        for remote in remotes:
            assert max(oracle.check_attention(remote, local.read("linear"), TASK).values()) < 1e-5
        (ft,) = (remote for remote in remotes if remote.name == "ft")
        assert oracle.check_step(ft, {}, TASK | {"what": "step", "length": 1}) < 1e-5
        run = decoding.DecodingRun({"ft": ft}, decoding.Options(shape=decoding.SMALL), lambda items, *_: items)
        assert (run.check("ft", 3) or 1) < 1e-5, run.refused
    finally:
        for remote in remotes:
            remote.close()
