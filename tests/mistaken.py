"""A mistake on the command line of ``longspan reproduce``: one line on stderr, exit code 2, and nothing written."""

from pathlib import Path

from longspan.cli.entry import WRONG, main


def refused(line: str, message: str, capsys, folder: Path, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    assert main(["reproduce", *line.split()]) == WRONG
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert message in err
    assert not Path("reproduce").exists()
