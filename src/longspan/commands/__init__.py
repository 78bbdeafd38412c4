"""One file, one command: ``parser()`` says what it takes, ``run(args)`` does it and returns the exit code."""
