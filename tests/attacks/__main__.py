"""``python -m attacks [NAME ...]``: run attacks at full length and count, as ``make attack`` does."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from . import failures, module, names


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m attacks", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of: {', '.join(names())}; without any, all")
    parser.add_argument("--seed", type=int, default=0, help="which cases")
    parser.add_argument("--cases", type=int, default=0, help="so many of each; 0: its own number")
    parser.add_argument("--only", default="", help="the case of this label alone")
    args = parser.parse_args()
    broken = 0
    print("| attack | cases | failures | seconds |\n|---|---|---|---|", flush=True)
    for name in args.names or names():
        begin, count, wrong = time.monotonic(), 0, 0
        with tempfile.TemporaryDirectory() as folder:
            for label, said in failures(name, args.seed, args.cases or module(name).LONG, Path(folder), args.only):
                count += 1
                if said is not None:
                    wrong += 1
                    print(f"{name} --seed {args.seed} --only {label!r}: {said}", file=sys.stderr, flush=True)
        print(f"| {name} | {count} | {wrong} | {time.monotonic() - begin:.0f} |", flush=True)
        broken += wrong
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
