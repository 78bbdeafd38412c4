"""The spec language: names, options, literals, three operators, and clear refusals."""

import pytest

from longspan import spec

NAMES = {
    "linear": lambda *, eps=1e-6, name="elu": ("linear", eps, name),
    "band": lambda left, right=0: {("band", left, right)},
    "sparse": lambda *, pattern: ("sparse", pattern),
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("linear", ("linear", 1e-6, "elu")),
        (" linear(eps=-2, name='relu') ", ("linear", -2, "relu")),
        ("band(3)", {("band", 3, 0)}),
        ("band(3, right=1) | band(4)", {("band", 3, 1), ("band", 4, 0)}),
        ("(band(3) | band(4)) & band(4)", {("band", 4, 0)}),
        ("(band(3) | band(4)) - band(4)", {("band", 3, 0)}),
        ("sparse(pattern=band(3))", ("sparse", {("band", 3, 0)})),
        ("sparse(pattern=(1, True, 'x'))", ("sparse", (1, True, "x"))),
    ],
)
def test_parse(text, value):
    assert spec.parse(text, NAMES) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("linaer", r"unknown name 'linaer' \(did you mean 'linear'\?\); known: band, linear, sparse"),
        ("zzz()", "unknown name 'zzz'; known: band, linear, sparse"),
        ("linear(epz=1)", "linear has no option 'epz'; it has eps, name"),
        ("linear(1)", "cannot build 'linear.1.': too many positional arguments; linear has eps, name"),
        ("sparse", "missing a required argument: 'pattern'"),
        ("linear(", "'linear.' is not a spec; a spec reads name or name"),
        ("linear(**x)", r"cannot read \* or \*\*"),
        ("linear(eps=1|1)", "join patterns, not numbers"),
        ("linear(eps=1+1)", r"cannot read '1 \+ 1'"),
        ("linear(eps=x.y)", r"cannot read 'x.y'"),
        ("linear(eps=[i for i in y])", "cannot read"),
        ("__import__('os')", "unknown name '__import__'"),
        ("linear & band(1)", "join patterns, not numbers or strings"),
        ("band(1) * band(2)", "cannot read"),
        ("linear(eps=None)", "cannot read 'None'"),
        ("linear(eps=true)", r"unknown value 'true' of eps in spec 'linear.eps=true.'; write eps=True"),
        ("linear(name=far(2))", r"unknown value 'far.2.' of name in spec .*; write name='far.2.'"),
        ("sparse(pattern=band(1) & bnd(1))", r"unknown name 'bnd' \(did you mean 'band'\?\)"),
        ("linear(name=long)", "unknown value 'long' of name in spec .*; write name='long'"),
    ],
)
def test_refused(text, message):
    with pytest.raises(ValueError, match=message):
        spec.parse(text, NAMES)


def test_a_spec_is_a_string():
    with pytest.raises(ValueError, match="a spec is a string .*, not int"):
        spec.parse(3, NAMES)  # type: ignore[arg-type]


def test_split():
    assert spec.split("linear; band(3) ;linear") == ["linear", "band(3)", "linear"]
    with pytest.raises(ValueError, match="empty spec in 'linear;;band'"):
        spec.split("linear;;band")
