"""``python -m attacks [NAME ...]``: run attacks at full length and count, as ``make attack`` does.

``--json FILE`` keeps the counts, from which ``python -m longspan_lab.tools reliability FILE`` writes the table of that
page.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from longspan_lab.experiments import provenance

from . import failures, module, names


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m attacks", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of: {', '.join(names())}; without any, all")
    parser.add_argument("--seed", type=int, default=0, help="which cases")
    parser.add_argument(
        "--cases", type=int, default=0, help="number of cases of each attack; 0: the default of the attack"
    )
    parser.add_argument("--only", default="", help="the case of this label alone")
    parser.add_argument("--json", type=Path, help="write the counts into this file too")
    args = parser.parse_args()
    if args.only and len(args.names) != 1:
        parser.error("--only takes the one attack whose case it is")
    rows = []
    print("| attack | cases | failures | seconds |\n|---|---|---|---|", flush=True)
    for name in args.names or names():
        begin, count, wrong = time.monotonic(), 0, 0
        with tempfile.TemporaryDirectory() as folder:
            for label, said in failures(name, args.seed, args.cases or module(name).LONG, Path(folder), args.only):
                count += 1
                if said is not None:
                    wrong += 1
                    print(f"{name} --seed {args.seed} --only {label!r}: {said}", file=sys.stderr, flush=True)
        rows.append({"attack": name, "cases": count, "failures": wrong, "seconds": round(time.monotonic() - begin)})
        print("| " + " | ".join(map(str, rows[-1].values())) + " |", flush=True)
    cases, broken, seconds = (sum(row[key] for row in rows) for key in ("cases", "failures", "seconds"))
    print(f"| all | {cases} | {broken} | {seconds} |", flush=True)
    if args.json:
        about = {"commit": provenance.commit(), **provenance.machine(), "seed": args.seed, "attacks": rows}
        args.json.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
