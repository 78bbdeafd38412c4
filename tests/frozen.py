"""What mechanisms said of themselves when they were last looked at, in ``frozen.json``: facts and options do not drift.

    python tests/frozen.py

writes it again. A mechanism that is not in it yet, because its file is new, is not held to it.
"""

import json
from pathlib import Path

from longspan.attention.base import REGISTRY, own_options

FILE = Path(__file__).with_name("frozen.json")


def facts() -> dict[str, dict[str, list[str]]]:
    """Of each registered mechanism: directions, arguments, exemptions and options."""
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
    """What the file holds."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def written(found: dict) -> str:
    """The file for these facts: one line for each fact, so that a change shows as what it is."""
    return json.dumps(found, indent=1).replace("[\n   ", "[").replace("\n  ]", "]").replace(",\n   ", ", ") + "\n"


if __name__ == "__main__":
    FILE.write_text(written(facts()), encoding="utf-8")
