"""The native kernels: equal to the definition, and never in the way where they cannot be had."""

import os
import stat
import subprocess
import sys
import warnings

import pytest
import torch

import longspan
from longspan import backend
from longspan.config import Config
from longspan.generate import generate, score
from longspan.model import Decoder
from longspan.ops import linear, native
from longspan.ops.features import MAPS
from longspan.ops.native import build

try:
    build.load()
    REASON = ""
except build.Unavailable as error:
    REASON = str(error)
needs_kernels = pytest.mark.skipif(bool(REASON), reason=f"no native kernels here: {REASON}")


def operands(b, h, d, e, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    q, k = (scale * torch.randn(b, 1, h * d, generator=generator) for _ in range(2))
    return q, k, torch.randn(b, 1, h * e, generator=generator), torch.rand(b, h, d, e + 1, generator=generator)


@needs_kernels
class TestStep:
    @pytest.mark.parametrize("name", list(MAPS))
    @pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 3, 7, 5), (5, 8, 32, 32), (3, 2, 13, 64), (1, 1, 251, 128)])
    @pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
    def test_equals_the_reference(self, name, sizes, scale):
        q, k, v, state = operands(*sizes, scale=scale)
        wide = [t.double() for t in (q, k, v, state)]
        with backend("reference"):
            o, s = linear.step(*wide, feature_map=name, eps=1e-6, donate=False)
        with backend("native"):
            found, after = linear.step(q, k, v, state, feature_map=name, eps=1e-6, donate=False)
        torch.testing.assert_close(found.double(), o, atol=2e-6 * o.abs().max().item(), rtol=0)
        torch.testing.assert_close(after.double(), s, atol=2e-6 * s.abs().max().item(), rtol=0)

    def test_only_a_donated_state_is_overwritten(self):
        q, k, v, state = operands(2, 3, 7, 5)
        before = state.clone()
        _, after = linear.step(q, k, v, state, feature_map="elu", eps=1e-6, donate=False)
        assert torch.equal(state, before)
        _, given = linear.step(q, k, v, state, feature_map="elu", eps=1e-6, donate=True)
        assert given.data_ptr() == state.data_ptr()
        assert torch.equal(given, after)

    def test_threads_do_not_change_a_bit(self):
        q, k, v, state = operands(64, 8, 32, 32)
        threads, found = torch.get_num_threads(), []
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                found.append(linear.step(q, k, v, state, feature_map="elu", eps=1e-6, donate=False))
        finally:
            torch.set_num_threads(threads)
        for o, s in found[1:]:
            assert torch.equal(o, found[0][0])
            assert torch.equal(s, found[0][1])

    def test_a_view_is_read_as_it_is(self):
        q, k, v, state = operands(4, 3, 7, 5)
        wide = torch.cat([k, q], -1)[..., 21:]
        assert not wide.is_contiguous()
        expected = linear.step(q, k, v, state, feature_map="elu", eps=1e-6, donate=False)
        torch.testing.assert_close(linear.step(wide, k, v, state, feature_map="elu", eps=1e-6, donate=False), expected)

    def test_too_large_a_head(self):
        with pytest.raises(ValueError, match="heads of 1025 and 1 channels are larger than the native step's 1024"):
            native.linear_step(*operands(1, 1, 1025, 1), feature_map="elu", eps=1e-6)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda t: t.double(), "it takes float32 on the CPU"),
            (lambda t: t.requires_grad_(), "gradients are recorded"),
        ],
    )
    def test_what_it_cannot_serve_goes_to_torch_or_is_refused(self, change, reason):
        q, k, v, state = map(change, operands(2, 3, 7, 5))
        assert linear.step(q, k, v, state, feature_map="elu", eps=1e-6, donate=False)[0].shape == (2, 1, 15)
        with backend("native"), pytest.raises(ValueError, match=f"cannot serve this token .*: {reason}"):
            linear.step(q, k, v, state, feature_map="elu", eps=1e-6, donate=False)
        with backend("native"), pytest.raises(ValueError, match="the feature map is a Python callable"):
            linear.step(*operands(2, 3, 7, 5), feature_map=torch.sigmoid, eps=1e-6, donate=False)

    def test_generation_equals_the_torch_path(self):
        torch.manual_seed(0)
        config = Config(
            dim=24, depth=3, heads=2, feedforward=48, vocab=11, attention="linear; linear(feature_map='exp')"
        )
        model = Decoder(config).eval()
        found = {}
        for name in ("auto", "torch"):
            with backend(name):
                tokens = torch.stack(list(generate(model, batch=5, tokens=40, seed=1)), 1)
                found[name] = tokens, score(model, tokens, chunk=1)
        assert torch.equal(found["auto"][0], found["torch"][0])
        torch.testing.assert_close(found["auto"][1], found["torch"][1], atol=1e-4, rtol=0)

    def test_laws_of_a_state_in_float32(self):
        """Native steps leave the given state, and continue it as one call would."""
        torch.manual_seed(0)
        module, x = longspan.build("linear", 24, 2).eval(), torch.randn(3, 13, 24)
        with torch.no_grad():
            whole, state = module(x)[0], module.init_state(3)
            outputs = []
            for token in x.split(1, 1):
                kept = longspan.clone(state)
                y, after = module(token, state)
                assert torch.equal(state.sums, kept.sums)
                outputs.append(y)
                state = after
        torch.testing.assert_close(torch.cat(outputs, 1), whole, atol=1e-5, rtol=1e-5)


@needs_kernels
class TestCache:
    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
        return tmp_path / "cache" / "native"

    def test_is_private_and_used_again(self, folder, monkeypatch):
        build.load()
        files = sorted(folder.iterdir())
        assert [path.suffix for path in files] == [".sha256", ".so"]
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
        build.load()

    @pytest.mark.parametrize("damage", ["other bytes", "others may write", "no seal"])
    def test_a_file_that_cannot_be_trusted_is_compiled_anew(self, folder, damage):
        build.load()
        library, seal = folder.glob("*.so").__next__(), folder.glob("*.sha256").__next__()
        good = library.read_bytes()
        match damage:
            case "other bytes":
                library.unlink()
                library.write_bytes(good + b"\0")
            case "others may write":
                library.chmod(0o666)
            case "no seal":
                seal.unlink()
        build.load()
        assert stat.S_IMODE(library.stat().st_mode) == 0o600
        assert build._trusted(library)

    def test_a_changed_source_or_processor_has_another_key(self, monkeypatch, tmp_path):
        compiler = build.find_compiler()
        before = build.key(compiler)
        monkeypatch.setattr(build, "_processor", lambda: "another processor")
        assert build.key(compiler) != before
        monkeypatch.undo()
        source = tmp_path / "step.cpp"
        source.write_text(build.SOURCES[0].read_text() + "\n")
        monkeypatch.setattr(build, "SOURCES", (source,))
        assert build.key(compiler) != before

    def test_a_folder_that_cannot_be_made_is_replaced_by_a_temporary_one(self, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "file"))
        monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path))
        kernels = build.load()
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
        q, k, v, state = operands(1, 1, 2, 3)
        out = torch.empty_like(v)
        pointers = (t.data_ptr() for t in (state, q, k, v, out))
        assert kernels.longspan_linear_step(*pointers, 1, 2, 3, 0, 1e-6, 1) == 0

    def test_nowhere_to_store_it(self, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "file"))
        monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path / "file"))
        with pytest.raises(build.Unavailable, match="the compiled kernels cannot be stored or loaded: "):
            build.load()

    def test_two_processes_at_once(self, folder):
        environment = os.environ | {"LONGSPAN_CACHE": str(folder.parent)}
        code = "from longspan.ops.native import build; build.load()"
        processes = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
        assert len(list(folder.iterdir())) == 2


class TestWithout:
    """No compiler, a failing one, a crashing one: one warning, and the torch path serves."""

    @pytest.fixture(autouse=True)
    def _fresh(self, tmp_path, monkeypatch):
        monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
        build.loaded.cache_clear()
        yield
        build.loaded.cache_clear()

    def script(self, tmp_path, text):
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            (None, "no C.. compiler .* was found; install one, or set CXX"),
            ("echo it is broken >&2; exit 3", "failed with code 3: it is broken"),
            ("kill -SEGV $$", "failed with code -11"),
        ],
        ids=["absent", "failing", "crashing"],
    )
    def test_one_warning_and_the_torch_path(self, text, reason, tmp_path, monkeypatch):
        monkeypatch.setenv("CXX", str(tmp_path / "none") if text is None else self.script(tmp_path, text))
        module, x = longspan.build("linear", 8, 2), torch.randn(2, 1, 8)
        with torch.no_grad():
            with pytest.warns(RuntimeWarning, match=f"without its native CPU kernels: .*{reason}"):
                y, _ = module(x, module.init_state(2))
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                again, _ = module(x, module.init_state(2))
        assert torch.equal(y, again)
        torch.testing.assert_close(y, module(x)[0].detach(), atol=1e-6, rtol=1e-6)
        with backend("native"), torch.no_grad(), pytest.raises(ValueError, match="the kernels could not be compiled"):
            module(x, module.init_state(2))

    def test_windows_is_not_served_yet(self, monkeypatch):
        monkeypatch.setattr(sys, "platform", "win32")
        with pytest.raises(build.Unavailable, match="not built on Windows yet"):
            build.find_compiler()

    def test_a_compiler_without_openmp_serves_with_one_thread(self, tmp_path, monkeypatch):
        if REASON:
            pytest.skip(f"no compiler: {REASON}")
        real = build.find_compiler()
        text = f'case "$*" in *-fopenmp*) echo no OpenMP >&2; exit 1;; esac; exec {real} "$@"'
        monkeypatch.setenv("CXX", self.script(tmp_path, text))
        kernels = build.load()
        q, k, v, state = operands(2, 3, 7, 5)
        expected = linear.step(
            q.double(), k.double(), v.double(), state.double(), feature_map="elu", eps=1e-6, donate=False
        )
        out = torch.empty_like(v)
        pointers = (t.data_ptr() for t in (state, q, k, v, out))
        assert kernels.longspan_linear_step(*pointers, 6, 7, 5, 0, 1e-6, 2) == 0
        torch.testing.assert_close(out.double(), expected[0], atol=1e-5, rtol=1e-5)
