"""The spec language: names, options, literals, three operators, and clear refusals."""

from typing import Literal

import pytest
import torch

import longspan
from longspan._utils import spec


def _kinds(
    *,
    whole: int = 1,
    real: float = 1.0,
    flag: bool = False,
    text: str = "",
    pair: int | tuple[int, int] = 1,
    many: tuple[int, ...] = (),
    choice: Literal["a", "b"] = "a",
):
    return whole, real, flag, text, pair, many, choice


NAMES = {
    "kinds": _kinds,
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
        ("kinds", (1, 1.0, False, "", 1, (), "a")),
        ("kinds(real=3, flag=True, pair=(2, 3), many=[1, 2], choice='b')", (1, 3, True, "", (2, 3), (1, 2), "b")),
    ],
)
def test_parse(text, value):
    assert spec.parse(text, NAMES) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("linaer", r"unknown name 'linaer' \(did you mean 'linear'\?\); known: band, kinds, linear, sparse"),
        ("zzz()", "unknown name 'zzz'; known: band, kinds, linear, sparse"),
        ("linear(epz=1)", r"linear has no option 'epz' \(did you mean 'eps'\?\); it has eps, name"),
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
        ("kinds(whole=0.5)", "kinds: whole=0.5 must be a whole number$"),
        ("kinds(whole=True)", "kinds: whole=True must be a whole number$"),
        (
            "kinds(whole=99999999999999999999999)",
            "kinds: whole=9{23} must be a whole number, finite and within the range",
        ),
        ("kinds(real=1e999)", "kinds: real=inf must be a number, finite and within the range of int64 and float32"),
        ("kinds(real=-1e39)", "kinds: real=-1e.39 must be a number, finite"),
        ("kinds(real=())", r"kinds: real=\(\) must be a number$"),
        ("kinds(real=True)", "kinds: real=True must be a number$"),
        ("kinds(flag=1)", "kinds: flag=1 must be True or False"),
        ("kinds(text=band(3))", r"kinds: text=\{\('band', 3, 0\)\} must be a string"),
        (
            "kinds(pair=(1, 2, 3))",
            r"kinds: pair=\(1, 2, 3\) must be a whole number or \(a whole number, a whole number\)",
        ),
        ("kinds(many=(1, 'x'))", r"kinds: many=\(1, 'x'\) must be a tuple, each of it a whole number"),
        ("kinds(choice='c')", "kinds: choice='c' must be 'a' or 'b'"),
        ("(" * 300 + "linear" + ")" * 300, r"\.\.\. \(608 characters\) is not a spec"),
        ("band(" * 70 + "1" + ")" * 70, "is nested more than 64 deep"),
        ("-" * 5000 + "linear", "characters. is not a spec"),
        (" | ".join(f"band({i})" for i in range(101)), "joins 101 parts by & | -; at most 100"),
        ("band(" + "1" * 1_000_001 + ")", "a spec of 1000007 characters"),
        ("linear\0", "'linear.x00' is not a spec"),
        ("\ud800", "is not a spec"),
    ],
)
def test_refused(text, message):
    with pytest.raises(ValueError, match=message):
        spec.parse(text, NAMES)


def test_a_nested_spec_is_passed_on_as_text():
    def both(of: spec.Spec = "linear", times: int = 1):
        return of, times

    def later(times: int = 1, *, of: spec.Spec = "linear"):
        return of, times

    names = {**NAMES, "both": both, "later": later}
    assert spec.parse("both(local(window = 3))", names) == ("local(window=3)", 1)
    assert spec.parse("both(of=unknown(x='a'), times=2)", names) == ("unknown(x='a')", 2)
    assert spec.parse("both('linear', 3)", names) == ("linear", 3)
    assert spec.parse("both", names) == ("linear", 1)
    assert spec.parse("later(4, of=-3)", names) == ("-3", 4)
    with pytest.raises(ValueError, match="both: of=3 must be a spec"):
        spec.parse("both(3)", names)
    with pytest.raises(ValueError, match="unknown name 'unknown'"):
        spec.parse("later(unknown)", names)


def test_a_spec_is_a_string():
    with pytest.raises(ValueError, match="a spec is a string .*, not int"):
        spec.parse(3, NAMES)


def test_split():
    assert spec.split("linear; band(3) ;linear") == ["linear", "band(3)", "linear"]
    with pytest.raises(ValueError, match="empty spec in 'linear;;band'"):
        spec.split("linear;;band")


@pytest.mark.parametrize(
    "text", ["fourier(eps=99999999999999999999999)", "kernel(similarity='rbf', bandwidth=9223372036854775807)"]
)
def test_whole_numbers_of_any_size_are_numbers(text):
    built = longspan.build(text, 8, 2)
    assert built(torch.zeros(1, 3, 8))[0].shape == (1, 3, 8)
    assert longspan.build(built.spec, 8, 2).spec == built.spec
