"""Sealed folders: nothing in them changes unnoticed, and several writers and readers do not disturb each other."""

import json
import os
import threading

import pytest
import torch
from test_checkpoint import decoder, same

from longspan._utils import atomic_io, sealed_dir
from longspan.models import checkpoint, pretrained

FILES = ("model.safetensors", "training.pt", "config.json")


@pytest.fixture
def folder(tmp_path):
    checkpoint.save(decoder(), tmp_path / "a", training={"step": 7, "moment": torch.arange(3.0)}, extra={"step": 7})
    return tmp_path / "a"


class TestDamage:
    @pytest.mark.parametrize("name", ["model.safetensors", "training.pt"])
    def test_one_bit(self, folder, name):
        content = (folder / name).read_bytes()
        for at in (0, 100, len(content) // 2, len(content) - 1):
            (folder / name).write_bytes(content[:at] + bytes([content[at] ^ 8]) + content[at + 1 :])
            with pytest.raises(ValueError, match=rf"{name} was changed .* its sha256 is .* restore it from a copy, or"):
                checkpoint.restore(folder, decoder(1))
        (folder / name).write_bytes(content)
        model = decoder(1)
        assert checkpoint.restore(folder, model)["step"] == 7
        assert same(model, decoder())

    def test_a_number_of_the_config(self, folder):
        path = folder / "config.json"
        changed = path.read_text().replace('"step": 7', '"step": 3')
        path.write_text(changed)
        with pytest.raises(ValueError, match=r"config\.json .*sha256"):
            checkpoint.read_config(folder)
        # The first sha256 of the message is the one to write.
        header = json.loads(changed)
        path.write_text(json.dumps(header | {"sha256": sealed_dir.digest(header)}))
        assert checkpoint.read_config(folder)["step"] == 3

    def test_the_layout_of_the_config_does_not_matter(self, folder):
        path = folder / "config.json"
        header = json.loads(path.read_text())
        path.write_text(json.dumps(dict(reversed(header.items()))))
        assert checkpoint.read_config(folder) == header

    @pytest.mark.parametrize("name", FILES)
    def test_a_file_of_another_checkpoint(self, folder, tmp_path, name):
        checkpoint.save(decoder(1), tmp_path / "b", training={"step": 8, "moment": torch.arange(3.0)})
        os.replace(tmp_path / "b" / name, folder / name)
        with pytest.raises(ValueError, match=r"(model.safetensors|training.pt) was changed or damaged"):
            checkpoint.restore(folder, decoder())

    def test_a_training_state_that_was_not_written_with_it(self, folder, tmp_path):
        checkpoint.save(decoder(1), tmp_path / "b")
        os.replace(folder / "training.pt", tmp_path / "b" / "training.pt")
        with pytest.raises(ValueError, match=r"training\.pt .* config\.json .*None"):
            checkpoint.load_training(tmp_path / "b")

    def test_a_removed_training_state_leaves_the_model(self, folder):
        (folder / "training.pt").unlink()
        assert same(checkpoint.load(folder), decoder())
        with pytest.raises(ValueError, match=r"its training cannot be resumed"):
            checkpoint.load_training(folder)

    def test_the_models_of_the_package_are_whole(self):
        for name in pretrained.names():
            pretrained.load(name)

    def test_a_damaged_record_is_named(self, tmp_path, monkeypatch):
        monkeypatch.setattr(pretrained, "FOLDER", tmp_path)
        (tmp_path / "x").mkdir()
        for name in ("config.json", "record.json"):
            (tmp_path / "x" / name).write_bytes(b"{\xff")
        with pytest.raises(ValueError, match=r"x/record.json is corrupt"):
            pretrained.record("x")


class TestNames:
    @pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"\n", b"..", b"a\0b"])
    def test_a_damaged_pointer_is_named(self, tmp_path, content):
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / "last").write_bytes(content)
        with pytest.raises(ValueError, match=r"checkpoints/last is damaged"):
            checkpoint.resolve(tmp_path)

    @pytest.mark.parametrize(
        ("name", "message"), [("a\0b", r"a\\x00b'.*NUL"), ("a" * 300, "cannot read .*: File name too long")]
    )
    def test_a_path_that_no_file_can_have(self, tmp_path, name, message):
        for call in (checkpoint.load, checkpoint.load_training, checkpoint.read_config, checkpoint.resolve):
            with pytest.raises(ValueError, match=message):
                call(f"{tmp_path}/{name}")

    def test_a_link_to_a_checkpoint_is_replaced(self, folder, tmp_path):
        (tmp_path / "b").symlink_to(folder)
        checkpoint.save(decoder(1), tmp_path / "b")
        assert same(checkpoint.load(tmp_path / "b"), decoder(1))
        assert same(checkpoint.load(folder), decoder())
        assert sorted(os.listdir(tmp_path)) == ["a", "b"]


class TestSmallFiles:
    def test_a_planted_link_is_not_followed(self, tmp_path, monkeypatch):
        (tmp_path / "precious").write_text("mine")
        monkeypatch.setattr(atomic_io.secrets, "token_hex", lambda n: "0" * 2 * n)
        for name in (".last.tmp", f".last.{0:016x}.tmp"):
            (tmp_path / name).symlink_to(tmp_path / "precious")
        with pytest.raises(OSError, match=r"File exists: '.*/last'"):
            checkpoint.write_text(tmp_path / "last", "new")
        assert (tmp_path / "precious").read_text() == "mine"

    def test_what_cannot_be_written_is_named_and_the_old_content_stays(self, tmp_path, monkeypatch):
        checkpoint.write_text(tmp_path / "last", "old")

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*/last'"):
            checkpoint.write_text(tmp_path / "last", "new")
        assert (tmp_path / "last").read_text() == "old"
        assert os.listdir(tmp_path) == ["last"]


class TestWhatIsLeft:
    """A killed process leaves its temporary; a living one still needs it."""

    def test_of_the_dead_is_removed_and_of_the_living_stays(self, folder):
        dead = [folder.with_name(f".a.{number:016x}.{end}") for number, end in ((1, "tmp"), (2, "old"))]
        for path in dead:
            path.mkdir()
        other = folder.with_name(f".b.{3:016x}.tmp")
        other.mkdir()
        with atomic_io.new_folder(folder) as living:
            checkpoint.save(decoder(1), folder)
            assert not any(path.exists() for path in dead)
            assert living.exists()
            assert other.exists()
        assert not living.exists()

    def test_a_writer_whose_temporary_is_swept_before_it_is_locked_makes_another(self, tmp_path, monkeypatch):
        swept, flock = [], atomic_io.fcntl.flock

        def late(descriptor, how):
            if not swept and how == atomic_io.fcntl.LOCK_EX:
                swept.append(None)
                atomic_io.tidy(tmp_path / "last")
            flock(descriptor, how)

        monkeypatch.setattr(atomic_io.fcntl, "flock", late)
        checkpoint.write_text(tmp_path / "last", "new")
        assert swept
        assert os.listdir(tmp_path) == ["last"]
        assert (tmp_path / "last").read_text() == "new"

    def test_or_before_it_is_opened(self, folder, monkeypatch):
        swept, opened = [], os.open

        def late(path, *arguments, **keywords):
            if not swept and str(path).endswith(".tmp"):
                swept.append(None)
                os.rmdir(path)
            return opened(path, *arguments, **keywords)

        monkeypatch.setattr(os, "open", late)
        checkpoint.save(decoder(1), folder)
        assert swept
        assert same(checkpoint.load(folder), decoder(1))

    def test_what_has_stepped_aside_stays_while_it_is_the_only_one(self, folder):
        aside = folder.with_name(f".a.{1:016x}.old")
        os.rename(folder, aside)
        checkpoint.tidy(folder)
        assert same(checkpoint.load(folder), decoder())
        checkpoint.save(decoder(1), folder)
        assert not aside.exists()

    def aside(self, folder, token, number):
        """A checkpoint that was written at that time and has stepped aside."""
        atomic_io.remove(folder)
        path = folder.with_name(f".a.{token:016x}.old")
        checkpoint.save(decoder(number), path)
        os.utime(path / "config.json", (number, number))
        return path

    def test_of_several_that_have_stepped_aside_the_newest_counts(self, folder):
        self.aside(folder, 2, 1)
        self.aside(folder, 1, 2)
        assert same(checkpoint.load(folder), decoder(2))

    def test_one_that_has_stepped_aside_may_be_half_removed(self, folder):
        self.aside(folder, 1, 1)
        atomic_io.remove(self.aside(folder, 2, 2) / "model.safetensors")
        assert same(checkpoint.load(folder), decoder(1))


class TestAtOnce:
    def test_a_reader_between_two_renames_gets_one_whole_model(self, folder, monkeypatch):
        """Config and weights are opened one after the other; here, the folder is replaced in between each time."""
        opened, number = atomic_io.open_regular, [0]

        def replaced(path, *arguments, **keywords):
            found = opened(path, *arguments, **keywords)
            if str(path).endswith("/a/config.json") and number[0] < 3:
                number[0] += 1
                checkpoint.save(decoder(number[0]), folder, training={"of": number[0]})
            return found

        monkeypatch.setattr(atomic_io, "open_regular", replaced)
        model = decoder()
        assert checkpoint.restore(folder, model)["of"] == 3
        assert same(model, decoder(3))

    def test_a_reader_that_found_it_aside_gets_what_has_come_in_its_place(self, folder, monkeypatch):
        os.rename(folder, folder.with_name(f".a.{1:016x}.old"))
        opened = sealed_dir.opened

        def late(path, *names, **options):
            checkpoint.save(decoder(1), folder)
            return opened(path, *names, **options)

        monkeypatch.setattr(sealed_dir, "opened", late)
        assert checkpoint.read_config(checkpoint.resolve(folder))["kind"] == "decoder"
        assert same(checkpoint.load(folder), decoder(1))

    def test_a_checkpoint_is_there_while_it_steps_aside_and_another_comes(self, folder, monkeypatch):
        settled, times = sealed_dir.resolve_replaced, [0]

        def late(path):
            os.rename(folder, aside := folder.with_name(f".a.{times[0]:016x}.old"))
            found, times[0] = settled(path), times[0] + 1
            os.rename(aside, folder)
            if times[0] > 3:
                monkeypatch.setattr(sealed_dir, "resolve_replaced", settled)
            return found

        monkeypatch.setattr(sealed_dir, "resolve_replaced", late)
        assert checkpoint.resolve(folder) == folder
        assert times == [4]

    @pytest.mark.parametrize("when", ["found", "opened"])
    def test_a_reader_of_a_run_whose_pointer_moves(self, when, tmp_path, monkeypatch):
        at = tmp_path / "run" / "checkpoints"
        for number in (1, 2):
            checkpoint.save(decoder(number), at / f"step-{number}")
        (at / "best").write_text("step-1\n")
        name = {"found": "there", "opened": "opened"}[when]
        before = getattr(sealed_dir, name)

        def late(path, *names, **options):
            if path.name == "step-1":
                (at / "best").write_text("step-2\n")
                atomic_io.remove(at / "step-1")
            return before(path, *names, **options)

        monkeypatch.setattr(sealed_dir, name, late)
        assert same(checkpoint.load(tmp_path / "run"), decoder(2))

    def test_threads_write_one_file(self, tmp_path):
        failed = []

        def write(text):
            try:
                for _ in range(20):
                    checkpoint.write_text(tmp_path / "last", text)
            except OSError as error:
                failed.append(error)

        threads = [threading.Thread(target=write, args=(letter * 5000,)) for letter in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert len(set((tmp_path / "last").read_text())) == 1
        assert os.listdir(tmp_path) == ["last"]
