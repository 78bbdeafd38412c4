"""The pytest decorator for laws in other packages."""

import pytest

import longspan
from longspan import testing
from longspan.attention import REGISTRY


@testing.parametrize(["linear", "local(window=3); linear"])
def test_the_laws_hold(spec, law):
    if law in ("causal", "padding", "state"):
        assert testing.assert_law(law, spec).status == "passed"


def test_every_law_that_applies_is_a_case():
    mark = testing.parametrize("linear").mark
    names, pairs = mark.args
    assert names == ("spec", "law")
    applying = [
        ("linear", law) for law in testing.laws() if not testing.Subject("linear").why_not(testing._LAWS[law][1])
    ]
    assert pairs == applying
    assert 0 < len(pairs) < len(testing.laws())
    assert mark.kwargs["ids"] == [f"linear-{law}" for _, law in pairs]


def test_several_specs_come_one_after_the_other():
    pairs = testing.parametrize(iter(["gla", "linear; gla"])).mark.args[1]
    assert list(dict.fromkeys(spec for spec, _ in pairs)) == ["gla", "linear; gla"]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "parametrize needs at least one spec"),
        ("linaer", "unknown attention 'linaer'"),
        (["linear", "linear(window=3)"], "linear has no option 'window'"),
    ],
)
def test_errors_are_raised_at_collection(specs, message):
    with pytest.raises(ValueError, match=message):
        testing.parametrize(specs)


def test_a_law_that_fails_raises_with_its_finding(monkeypatch):
    monkeypatch.setattr(REGISTRY["linear"], "exempt", {"causal": "not really"})
    with pytest.raises(AssertionError, match="linear\n  causal +failed +holds after all"):
        longspan.testing.assert_law("causal", "linear")
    with pytest.raises(ValueError, match="unknown law 'casual'"):
        testing.assert_law("casual", "linear")
