"""The doctor: tells whether the kernels are there, why not, and clears what it may."""

import pytest

from longspan.cli import main
from longspan.ops.native import build


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))
    return tmp_path


def test_tells_of_kernels_that_are_there(cache, capsys, monkeypatch):
    monkeypatch.setattr(build, "load", lambda: None)
    (cache / "mnist").mkdir()
    (cache / "mnist" / "images").write_bytes(bytes(1234))
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert "native kernels  compiled and ready" in told
    assert f"{cache} (mnist: 1,234 bytes)" in told
    assert "lightning: there" in told


def test_tells_why_they_are_not(cache, capsys, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["doctor"]) == 0
    assert (
        "not here, since no C++ compiler no-such-compiler was found; install one, or set CXX" in capsys.readouterr().out
    )


def test_clears_the_kernels_and_nothing_else(cache, capsys):
    for name in ("native", "mnist"):
        (cache / name).mkdir()
        (cache / name / "file").write_bytes(bytes(7))
    assert main(["doctor", "--clear"]) == 0
    assert [path.name for path in cache.iterdir()] == ["mnist"]
    assert "7 bytes" in capsys.readouterr().out
    assert main(["doctor", "--clear"]) == 0
