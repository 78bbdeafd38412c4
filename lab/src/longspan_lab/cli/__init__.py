"""The laboratory's commands, one file or folder per command, as in ``longspan.cli``."""
