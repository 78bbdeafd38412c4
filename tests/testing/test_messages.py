"""Messages: every option that one names exists, and an interrupted run prints the command that resumes it."""

import ast
import re
from pathlib import Path

from longspan.cli import entry
from longspan.cli.parser import kebab
from longspan_lab import cli as lab
from longspan_lab.cli import bench, reproduce
from longspan_lab.experiments import EXPERIMENTS


def test_options_that_messages_name_exist():
    """Every --option in a text of the command line belongs to a command, or to the tool that the text is about."""
    parsers = [entry.load(name).parser() for name in entry.COMMANDS]
    parsers += [bench.subparser(name) for name in bench.BENCHMARKS]
    parsers += [reproduce.series(), *(reproduce.subparser(name) for name in EXPERIMENTS)]
    known = {spelling for parser in parsers for o in parser._option_string_actions for spelling in (o, kebab(o))}
    known |= {"--debug", "--import", "--version"}
    foreign = {"--porcelain", "--spec"}  # of git, and of the process that measures a mechanism
    named: dict[str, str] = {}
    folders = (Path(cli.__file__).parent for cli in (entry, lab))
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= dict.fromkeys(re.findall(r"(?<![\w-])--[a-zA-Z][\w.-]*", node.value), path.name)
    unknown = {option: place for option, place in named.items() if option.rstrip(".") not in known | foreign}
    assert not unknown
    assert "--peers-python" in named


def test_an_interrupted_run_prints_how_to_resume(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def interrupted(config, run, *, resume):
        raise KeyboardInterrupt(text)

    monkeypatch.setattr("longspan.train.fit", interrupted)
    text = ""
    assert entry.main(["train", "--run.out", "a b"]) == 130
    assert "--resume" not in capsys.readouterr().err
    Path("a b").mkdir()
    Path("a b/config.yaml").touch()
    text = "interrupted at step 3; step-00000003 is saved in a b; continue with resume=True"
    assert entry.main(["train", "--run.out", "a b"]) == 130
    command = "longspan train --config 'a b/config.yaml' --resume"
    (line,) = capsys.readouterr().err.splitlines()
    assert "step-00000003" in line
    assert line.endswith(command)
