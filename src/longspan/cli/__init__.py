"""The command line, one file per command: ``parser()`` defines its arguments, ``run(args)`` returns the exit code."""

from .entry import main as main
