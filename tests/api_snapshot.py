"""A snapshot of the facts and options of each mechanism, in ``api_snapshot.json``, so that changes are deliberate.

    python tests/api_snapshot.py

writes it. A mechanism that is not in the file yet is not compared.
"""

import json
from pathlib import Path

from longspan.attention.base import REGISTRY, own_options

FILE = Path(__file__).with_name("api_snapshot.json")


def facts() -> dict[str, dict[str, list[str]]]:
    """Return directions, arguments, exemptions and options of each registered mechanism."""
    return {
        name: {
            "directions": list(cls.directions),
            "supported_args": sorted(cls.supported_args),
            "exempt": sorted(cls.exempt),
            "options": sorted(own_options(cls)),
        }
        for name, cls in sorted(REGISTRY.items())
    }


def kept() -> dict[str, dict[str, list[str]]]:
    """Return the contents of the file."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def written(found: dict) -> str:
    """Return the text of the file: one line per fact, for readable diffs."""
    return json.dumps(found, indent=1).replace("[\n   ", "[").replace("\n  ]", "]").replace(",\n   ", ", ") + "\n"


if __name__ == "__main__":
    FILE.write_text(written(facts()), encoding="utf-8")
