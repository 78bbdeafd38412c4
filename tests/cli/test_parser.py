"""Options of commands: written with hyphens, understood with underscores; recipes keep the names of their fields."""

import re

import pytest

from longspan.cli.entry import COMMANDS, WRONG, main


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_options_with_hyphens(command, capsys):
    assert main([command, "--help"]) == 0
    options = re.findall(r"(?<![\w-])--[a-z][\w.-]*", capsys.readouterr().out)
    assert options
    assert [option for option in options if "_" in option] == []


@pytest.mark.parametrize("spelling", ["--run.save-every", "--run.save_every"])
@pytest.mark.parametrize("value", [["=7"], ["", "7"]])
def test_both_spellings_are_read(spelling, value, capsys):
    words = [spelling + value[0], *value[1:]]
    assert main(["train", "--run.data", "a_b", *words, "--print-config"]) == 0
    shown = capsys.readouterr().out
    assert "save_every: 7" in shown
    assert "data: a_b" in shown


def test_an_unknown_option_gets_a_suggestion(capsys):
    assert main(["train", "--run.save_evry", "7"]) == WRONG
    said = capsys.readouterr().err
    assert "unknown option '--run.save-evry' (did you mean '--run.save-every'?)" in said


def test_a_value_that_does_not_fit_is_an_error_with_hyphens(capsys):
    assert main(["train", "--run.save-every", "often"]) == WRONG
    assert "--run.save-every" in capsys.readouterr().err
