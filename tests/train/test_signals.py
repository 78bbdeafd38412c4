"""What ends work from outside: exit codes, what is kept and said, and locks that let one writer in."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longspan._utils import atomic_io, locks, progress, signals
from longspan.cli import entry
from longspan.cli.entry import main
from longspan.models import checkpoint
from longspan.train import begun, fit, loop, run_dir
from longspan.train.report import Bar
from longspan_lab.bench import candidates, report
from training_process import TINY, tiny

GROUP = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
MODEL = [f"--model.{name}={value}" for name, value in TINY.to_dict().items()]


@pytest.fixture(autouse=True)
def none_ignored():
    """As in a terminal; who starts the tests may ignore some of them, as nohup does."""
    usual = {one: signal.default_int_handler if one is signal.SIGINT else signal.SIG_DFL for one in GROUP}
    before = {one: signal.signal(one, usual[one]) for one in GROUP if signal.getsignal(one) is signal.SIG_IGN}
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


def running(monkeypatch, run):
    """``longspan list`` does this instead."""
    monkeypatch.setattr("longspan.cli.listing.run", run)
    return main(["list"])


@pytest.mark.parametrize("number", GROUP)
def test_a_signal_ends_a_command_with_its_code_and_handlers_are_put_back(number, monkeypatch, capsys):
    before = [signal.getsignal(one) for one in GROUP]
    assert running(monkeypatch, lambda args: signal.raise_signal(number)) == 128 + number
    assert capsys.readouterr().err == "longspan: interrupted\n"
    assert [signal.getsignal(one) for one in GROUP] == before


def test_what_is_ignored_stays_ignored(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert running(monkeypatch, lambda args: signal.raise_signal(signal.SIGHUP) or 0) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_counts_once():
    came = []
    with signals.handled(came.append):
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
    assert came == [signal.SIGHUP, signal.SIGTERM]


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "\u0663"])
def test_a_rank_that_is_no_number(text, tmp_path, monkeypatch, capsys):
    """A training refuses it by name; other commands have no use for it, and end at a signal as ever."""
    monkeypatch.setenv("RANK", text)
    with pytest.raises(signals.Interrupted), signals.raised():
        os.kill(os.getpid(), signal.SIGTERM)
    assert main(["train", "--config", "digits", "--run.steps", "1", "--run.out", str(tmp_path / "r")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"RANK={text!r} in the environment is not an integer" in said
    assert not (tmp_path / "r").exists()


def test_a_process_that_does_not_lead_leaves_it_to_the_first(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert running(monkeypatch, lambda args: signal.raise_signal(signal.SIGTERM) or 0) == 0


@pytest.mark.parametrize(("code", "expected"), [(None, 1), (0, 1), ("text", 1), (7, 7)])
def test_a_library_that_leaves_is_no_success(code, expected, monkeypatch, capsys):
    def leave(args):
        raise SystemExit(code)

    assert running(monkeypatch, leave) == expected
    assert "longspan: error: a library ended the command: SystemExit(" in capsys.readouterr().err
    assert main(["list", "--help"]) == 0


@pytest.mark.full
def test_a_nul_in_an_argument_and_a_full_output_are_one_line(capsys):
    assert main(["eval", "a\0b"]) == entry.WRONG
    assert "NUL character" in capsys.readouterr().err
    if Path("/dev/full").exists():
        with open("/dev/full", "w") as full:
            done = subprocess.run([sys.executable, "-m", "longspan", "list"], stdout=full, stderr=-1, text=True)
        assert (done.returncode, done.stderr) == (2, "longspan: error: standard output: No space left on device\n")


@pytest.mark.full
def test_what_python_thinks_of_a_spec_is_not_said():
    words = [sys.executable, "-W", "default", "-m", "longspan", "show", "linear(eps=1or 2)"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == entry.WRONG
    assert done.stderr.splitlines()[-1].startswith("longspan: error: cannot read '1 or 2' in spec")
    assert "SyntaxWarning" not in done.stderr


@pytest.mark.usefixtures("one_thread")
class TestTraining:
    @pytest.fixture
    def send(self, monkeypatch):
        """``send(index, number, ...)``: signals while micro-batch number ``index`` is being worked on."""
        seed = loop.step_seed

        def at(index, *numbers):
            def sent(run_seed, micro, rank):
                for number in numbers if micro == index else ():
                    signal.raise_signal(number)
                return seed(run_seed, micro, rank)

            monkeypatch.setattr(loop, "step_seed", sent)

        return at

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
    def test_the_step_is_finished_and_saved(self, number, tmp_path, monkeypatch, send, capfd):
        monkeypatch.chdir(tmp_path)
        send(4, number)
        words = [*MODEL, "--run.steps=11", "--run.batch=5", "--run.save_every=1000", "--run.evaluate_every=1000"]
        assert main(["train", *words, "--run.out=run"]) == 128 + number
        _, first, last = capfd.readouterr().err.splitlines()
        assert first.startswith(f"{signal.Signals(number).name}: ")
        assert "step 5" in last
        assert "step-00000005 is saved in run" in last
        assert last.endswith("longspan train --config run/config.yaml --resume")
        checkpoint.load("run")
        send(-1)
        assert main(["train", "--config", "run/config.yaml", "--resume"]) == 0

    def test_no_other_process_writes_into_the_folder(self, tmp_path):
        run = tiny(tmp_path, steps=2)
        with run_dir.held(Path(run.out)):
            for resume in (False, True):
                with pytest.raises(ValueError, match="another process is writing into .*run"):
                    fit(TINY, run, resume=resume, progress=False)
                assert (Path(run.out) / ".lock").exists()
        assert not Path(run.out).exists()
        fit(TINY, run, progress=False)
        assert not list(Path(run.out).glob(".*"))

    def test_what_a_kill_left_before_the_run_began_is_no_run(self, tmp_path):
        run = tiny(tmp_path, steps=1)
        at = Path(run.out)
        at.mkdir()
        for name in (".lock", ".config.yaml.tmp", ".config.yaml.0123456789abcdef.tmp"):
            (at / name).touch()
        assert not begun(at)
        with pytest.raises(ValueError, match="nothing to resume"):
            fit(TINY, run, resume=True, progress=False)
        at.mkdir(exist_ok=True)
        (at / ".config.yaml.tmp").touch()
        fit(TINY, run, progress=False)

    def test_a_refused_run_leaves_nothing(self, tmp_path):
        config = TINY.from_dict(TINY.to_dict() | {"positions": "rotary", "attention": "synthesizer"})
        with pytest.raises(ValueError, match="rotary"):
            fit(config, tiny(tmp_path / "a" / "b"), progress=False)
        assert not list(tmp_path.iterdir())

    def test_without_last_it_goes_on_from_the_newest(self, tmp_path, capfd):
        fit(TINY, tiny(tmp_path, schedule="constant"), progress=False)
        at = tmp_path / "run" / "checkpoints"
        best = (at / "best").read_text()
        for name in ("best", "last"):
            (at / name).unlink()
        result = fit(TINY, tiny(tmp_path, steps=12, schedule="constant"), resume=True)
        assert "last is missing; continuing from step-00000011" in capfd.readouterr().err
        assert result.steps == 12
        assert (at / "last").read_text() == "step-00000012\n"
        assert (at / "best").read_text() in (best, "step-00000012\n")

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("metrics.csv", r"metrics.csv is corrupt: .*; move it away"),
            ("config.yaml", r"config.yaml is corrupt: it holds no model and run"),
            ("checkpoints/last", r"checkpoints/last is corrupt: it does not hold the name of a checkpoint"),
        ],
    )
    def test_bad_bytes_are_named(self, name, message, tmp_path):
        fit(TINY, tiny(tmp_path, steps=1), progress=False)
        (tmp_path / "run" / name).write_bytes(b"\xff\xfe\x00\x81")
        with pytest.raises(ValueError, match=message):
            fit(TINY, tiny(tmp_path, steps=2), resume=True, progress=False)

    @pytest.mark.parametrize("what", ["longspan.train.report.Table.write", "longspan.train.report.Events._add"])
    def test_a_full_disk_is_one_line_with_what_is_kept(self, what, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        done = []

        def full(*_):
            done.append(1)
            if len(done) > 1:
                raise OSError(28, "No space left on device", "x")

        monkeypatch.setattr(what, full)
        words = [*MODEL, "--run.steps=11", "--run.batch=5", "--run.save_every=3", "--run.evaluate_every=4"]
        assert main(["train", *words, "--run.out=run"]) == entry.WRONG
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("longspan: error: cannot write x: No space left on device; ")
        assert said.endswith(f"the last good checkpoint is step-0000000{3 if 'Events' in what else 6}")

    def test_events_are_read_back_and_go_on(self, tmp_path):
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        fit(TINY, tiny(tmp_path, steps=8, schedule="constant"), progress=False)
        fit(TINY, tiny(tmp_path, schedule="constant"), resume=True, progress=False)
        read = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
        read.Reload()
        assert [event.step for event in read.Scalars("validation_bits")] == [4, 8, 11]
        assert [event.step for event in read.Scalars("loss")] == [4, 8, 10, 11]


def growing(count, error):
    """A benchmark of three figures, whose machine fails after ``count``."""
    rows = []
    for i in range(3):
        if i == count:
            raise error
        rows.append({"candidate": "a", "value": i})
        yield {"benchmark": "limits", "rows": rows}


def test_a_benchmark_keeps_what_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr("longspan_lab._utils.plots.draw", lambda *_: None)
    with pytest.raises(
        signals.Interrupted, match=r"interrupted: 2 figures so far are in .*limits.partial.json"
    ) as error:
        report.collect(tmp_path, "limits", growing(2, signals.Interrupted(number=signal.SIGTERM)))
    assert error.value.number == signal.SIGTERM
    kept = json.loads((tmp_path / "limits.partial.json").read_text())
    assert (kept["partial"], len(kept["rows"])) == (True, 2)
    assert report.collect(tmp_path, "limits", growing(3, None))["rows"][2]["value"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["limits.csv", "limits.json"]
    assert "partial" not in json.loads((tmp_path / "limits.json").read_text())
    with pytest.raises(signals.Interrupted, match="before the first figure"):
        report.collect(tmp_path, "limits", growing(0, KeyboardInterrupt()))


@pytest.mark.parametrize(
    ("writes", "kept"),
    [
        (0, "before the first figure; nothing was written"),
        (2, "2 figures so far are in .*limits.partial.json"),
        (3, "3 figures so far are in .*limits.partial.json"),  # the one that is full is limits.json
        (5, "3 figures so far are in .*limits.partial.json"),  # and here the picture
    ],
)
def test_a_full_disk_leaves_a_benchmark_what_it_has(writes, kept, tmp_path, monkeypatch):
    write, done = atomic_io.write, []

    def fills(path, content):
        done.append(path)
        if len(done) > writes:
            raise OSError(28, "No space left on device", str(path))
        write(path, content)

    monkeypatch.setattr(atomic_io, "write", fills)
    monkeypatch.setattr("longspan_lab._utils.plots.draw", lambda path, result: atomic_io.write(path, b""))
    with pytest.raises(ValueError, match=f"limits[.a-z]+: No space left on device; {kept}$"):
        report.collect(tmp_path, "limits", growing(3, None))
    names = {0: [], 2: ["limits.partial.json"], 3: ["limits.partial.json"]}
    assert sorted(path.name for path in tmp_path.iterdir()) == names.get(
        writes, ["limits.csv", "limits.json", "limits.partial.json"]
    )


def test_one_writer_at_a_time(tmp_path, capsys):
    for words in (["bench", "limits", "--rounds", "1"], ["reproduce", "mqar", "--quick"]):
        with locks.exclusive_lock(tmp_path / f".{words[1]}.lock", "it"):
            assert main([*words, "--out", str(tmp_path)]) == entry.WRONG
            assert f"another process is writing {tmp_path / words[1]}.json; wait" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_worker_ends_in_the_middle_of_its_work_with_what_it_has_started(tmp_path):
    code = f"import os, time, pathlib; os.fork(); pathlib.Path('{tmp_path}', str(os.getpid())).touch(); time.sleep(600)"
    process = candidates.Process([sys.executable, "-c", code])
    process._start()
    while len(ids := list(tmp_path.iterdir())) < 2:
        time.sleep(0.01)
    process.close()
    for path in ids:
        for _ in range(1000):
            try:
                state = Path(f"/proc/{path.name}/stat").read_text().rpartition(")")[2].split()[0]
            except FileNotFoundError:
                break
            if state == "Z":
                break
            time.sleep(0.01)
        else:
            pytest.fail("it lives on")


class Screen:
    """A stderr that keeps what is written; a terminal or none."""

    encoding = "utf-8"

    def __init__(self, terminal):
        self.terminal, self.text = terminal, ""

    def isatty(self):
        return self.terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass


class TestProgress:
    @pytest.fixture(autouse=True)
    def due(self, monkeypatch):
        monkeypatch.setattr(progress, "EVERY", 0.0)
        monkeypatch.setattr(progress, "FIRST", 0.0)

    def test_occasional_lines_without_a_terminal(self, monkeypatch):
        monkeypatch.setattr(sys, "stderr", screen := Screen(False))
        assert list(progress.track(["x", "y"], 2, "batch 1")) == ["x", "y"]
        assert screen.text.splitlines() == ["batch 1, x: 0/2, ? left", "batch 1, y: 1/2, 00:00 left"]
        monkeypatch.setattr(progress, "EVERY", 1e9)
        list(progress.track(range(9), 9, "tokens"))
        assert "tokens" not in screen.text

    def test_a_bar_on_a_terminal_that_disappears(self, monkeypatch):
        monkeypatch.setattr(sys, "stderr", screen := Screen(True))
        assert [time.sleep(0.11) or x for x in progress.track("ab", 2, "batch 1")] == ["a", "b"]
        assert "batch 1:  50%" in screen.text
        assert "1/2" in screen.text
        assert ", b]" in screen.text
        assert screen.text.endswith("\r")

    @pytest.mark.parametrize("terminal", [True, False])
    def test_a_training(self, terminal, monkeypatch):
        monkeypatch.setattr(sys, "stderr", screen := Screen(terminal))
        bar = Bar(100, "byte")
        bar.start(40)
        time.sleep(0.11)
        bar.step(50, 1.25, 1.8034, 12345.0)
        bar.line("step 50: [better] than before")
        bar.stop()
        for part in ("50/100", "loss 1.2500", "1.803 bits/byte", "12.3k tokens/s", "[better] than"):
            assert part in screen.text

    def test_a_closed_terminal_ends_nothing(self, monkeypatch):
        monkeypatch.setattr(sys, "stderr", screen := Screen(False))
        monkeypatch.setattr(screen, "write", lambda text: os.read(-1, 1))
        assert list(progress.track("ab", 2, "letters")) == ["a", "b"]
