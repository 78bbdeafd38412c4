"""``python -m longspan_lab.tools NAME``: run one of the programs."""

import importlib
import inspect
import sys

from longspan._utils import terminal
from longspan._utils.spec import known

from . import blocks

# module here -> what it writes
PROGRAMS = {
    "architecture": "the picture of the packages and their list",
    "choosing": "the page of all mechanisms measured, and the table for choosing one",
    "cli_page": "the page of the command line",
    "configs_page": "the page of configs",
    "digests": "digests of the outputs of all mechanisms, to compare two versions of the code",
    "figures": "the figures and pictures of the demo",
    "laws": "the tables of conformance checks and tolerances",
    "leaks": "the table of what published causal forms leak",
    "mechanism_pages": "the pages of mechanisms",
    "models_page": "the tables of recurrent models of Hugging Face",
    "performance": "the pages of benchmarks",
    "playground": "the pictures of the playground",
    "redraw": "pictures of benchmarks and experiments, from their JSON files",
    "reliability": "the counts of the attacks",
    "reproduction": "the pages of reproduced papers",
    "scaling": "the tables of training over many GPUs",
    "shipped": "a packaged model of images or text, from a training run",
    "shipped_speech": "a packaged model of speech, from an experiment",
    "sizing": "the table of states and KV caches",
    "tree": "the page of source files",
    "weight": "the size of the code",
}


def main(words: list[str]) -> None:
    """Run the program that the first word names, with the other words as its arguments."""
    if not words or words[0] in ("-h", "--help"):
        print("usage: python -m longspan_lab.tools NAME [arguments]\n\nPrograms, and what they write:\n")
        print("\n".join(line for name, does in PROGRAMS.items() for line in terminal.entry(f"  {name}", [does], 20)))
        return
    try:
        name = known(words[0], PROGRAMS, "program")
        program = importlib.import_module(f"{__package__}.{name}")
        if hasattr(program, "main"):
            takes = inspect.signature(program.main)
            try:
                takes.bind(*words[1:])
            except TypeError as error:
                raise ValueError(f"{error}; the arguments are {takes}") from None
            program.main(*words[1:])
        else:
            blocks.write(program.PAGES)
    except ValueError as error:
        sys.exit(f"{words[0]}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
