"""The command line: one file, one command; ``parser()`` says what it takes, ``run(args)`` returns the exit code."""

from .entry import main as main
