"""How many functions of the package lie between a decoder and a kernel."""

import sys
from pathlib import Path

import pytest
import torch

import longspan
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.ops.native.build import loaded
from longspan.ops.native.call import available

PACKAGE = str(Path(longspan.__file__).parent)


def to_kernel(call, family, unit) -> list[str]:
    """The functions of the package that are active when the kernel of a unit is called."""
    found: list[list[str]] = []
    library, kernel = loaded(f"{family}/{unit}"), f"longspan_{family}_{unit}"
    original = getattr(library, kernel)

    def recorded(*arguments):
        frame, names = sys._getframe(1), []
        while frame is not None:
            path = frame.f_code.co_filename
            if path.startswith(PACKAGE):
                names.append(f"{Path(path).relative_to(PACKAGE)}:{frame.f_code.co_name}")
            frame = frame.f_back
        found.append(names[::-1])
        return original(*arguments)

    setattr(library, kernel, recorded)
    try:
        call()
    finally:
        setattr(library, kernel, original)
    return found[0]


@pytest.mark.skipif(not available(), reason="no native kernels here")
@pytest.mark.parametrize("unit", ["forward", "step"])
@pytest.mark.parametrize(("spec", "family"), [("linear", "linear"), ("gated_deltanet", "gated")])
def test_few_functions_from_a_decoder_to_a_kernel(spec, family, unit):
    model = Decoder(DecoderConfig(dim=16, depth=2, heads=2, feedforward=16, attention=spec, vocab=7)).eval()
    tokens, state = (9, None) if unit == "forward" else (1, model.init_state(1))
    with torch.no_grad():
        hops = to_kernel(lambda: model(torch.zeros(1, tokens, dtype=torch.long), state), family, unit)
    assert hops[0] == "models/decoder.py:forward"
    own = hops[hops.index("attention/base.py:forward") :]
    assert len(own) <= 6, own
    assert len(hops) - len(own) <= 4, hops
