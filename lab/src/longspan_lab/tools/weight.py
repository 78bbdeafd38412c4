"""The weight of the code: lines, long signatures, untyped dictionaries and kernels registered by hand, as a table.

python -m longspan_lab.tools weight [--against COMMIT]
"""

import argparse
import ast
import re
import subprocess
import tempfile
from pathlib import Path

from . import ROOT

LONG = 8  # lines of a signature
UNTYPED = "dict[str, Any]" + " = {"
# Files of the lab; in older commits they are in src/longspan.
LAB = re.compile(
    r"^(lab|tools|benchmarks)/|^src/longspan/(experiments|bench|cli/bench)/|"
    r"^src/longspan/cli/(reproduce|demo|compare)\.py|^src/longspan/_utils/(plots|plot_labels|palette|tables)\.py|"
    r"^src/longspan/data/(arena/|proteins|series)|^src/longspan/speech/(an4|corpora|corpus|digits|errors|fsdd|tones)\.py"
)
KERNEL = re.compile(r"^class \w+\((torch\.autograd\.)?Function\):|custom_op\(|\.register_fake|Library\(", re.MULTILINE)


def measure(root: Path) -> dict[str, int]:
    """Return the figures of a checkout."""
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    kinds = {"product": 0, "laboratory": 0, "tests": 0}
    lines = dict.fromkeys(("signatures", "signature lines", "dictionaries", "kernels by hand", "C++"), 0)
    for name in listed:
        if not (root / name).is_file() or (root / name).is_symlink():
            continue
        if name.startswith("src/") and name.endswith((".cpp", ".h")):
            lines["C++"] += (root / name).read_text().count("\n")
        if not name.endswith(".py"):
            continue
        text = (root / name).read_text()
        tests = name.startswith("tests/") or "/tests/" in name
        kind = "tests" if tests else "laboratory" if LAB.match(name) else "product" if name.startswith("src/") else None
        if kind is None:
            continue
        kinds[kind] += text.count("\n")
        if kind == "tests":
            continue
        lines["dictionaries"] += text.count(UNTYPED)
        lines["kernels by hand"] += len(KERNEL.findall(text))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                long = node.body[0].lineno - node.lineno
                if isinstance(first := node.body[0], ast.Expr) and first.lineno == node.lineno:
                    continue
                if long >= LONG:
                    lines["signatures"] += 1
                    lines["signature lines"] += long
    return {
        "lines of the product": kinds["product"],
        "lines of product and laboratory": kinds["product"] + kinds["laboratory"],
        "lines of tests": kinds["tests"],
        "lines of C++": lines["C++"],
        f"signatures of {LONG} lines or more": lines["signatures"],
        "lines of these signatures": lines["signature lines"],
        f"`{UNTYPED}`": lines["dictionaries"],
        "autograd functions and ops registered by hand": lines["kernels by hand"],
    }


def main(*words: str) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="another commit, for comparison")
    args = parser.parse_args(words)
    columns = [measure(ROOT)]
    if args.against:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["git", "clone", "-q", "--shared", ROOT, folder], check=True)
            subprocess.run(["git", "checkout", "-q", args.against], cwd=folder, check=True)
            columns.insert(0, measure(Path(folder)))
    heads = [args.against, "now"] if args.against else ["now"]
    print(f"| | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    for name in columns[0]:
        print(f"| {name} | {' | '.join(f'{column[name]:,}' for column in columns)} |")
