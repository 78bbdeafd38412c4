"""The algebra of patterns: laws of values and of sets, printed forms, and what combines."""

import itertools

import pytest

from longspan.patterns import (
    band,
    block,
    by_head,
    by_layer,
    causal,
    columns,
    dilated,
    everywhere,
    globals,
    nowhere,
    parse,
    rows,
    strided,
)
from pattern_cases import ATOMS, expressions

# The algebra's laws, as equal values.
LAWS = {
    "idempotence of &": lambda a, b, c: (a & a, a),
    "idempotence of |": lambda a, b, c: (a | a, a),
    "commutation of &": lambda a, b, c: (a & b, b & a),
    "commutation of |": lambda a, b, c: (a | b, b | a),
    "absorption by &": lambda a, b, c: (a & (a | b), a),
    "absorption by |": lambda a, b, c: (a | (a & b), a),
    "complement and &": lambda a, b, c: (a & (everywhere() - a), nowhere()),
    "complement and |": lambda a, b, c: (a | (everywhere() - a), everywhere()),
    "double complement": lambda a, b, c: (everywhere() - (everywhere() - a), a),
    "de Morgan of |": lambda a, b, c: (everywhere() - (a | b), (everywhere() - a) & (everywhere() - b)),
    "de Morgan of &": lambda a, b, c: (everywhere() - (a & b), (everywhere() - a) | (everywhere() - b)),
    "difference": lambda a, b, c: (a - b, a & (everywhere() - b)),
    "self difference": lambda a, b, c: (a - a, nowhere()),
    "everywhere and &": lambda a, b, c: (a & everywhere(), a),
    "everywhere and |": lambda a, b, c: (a | everywhere(), everywhere()),
    "nowhere and &": lambda a, b, c: (a & nowhere(), nowhere()),
    "nowhere and |": lambda a, b, c: (a | nowhere(), a),
    "minus nowhere": lambda a, b, c: (a - nowhere(), a),
    "minus everywhere": lambda a, b, c: (a - everywhere(), nowhere()),
}


def triples(count: int, seed: int) -> list[tuple]:
    flat = expressions(3 * count, seed=seed)
    return list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))


@pytest.mark.parametrize("law", LAWS)
def test_law_of_values(law):
    for triple in [*itertools.permutations((band(3), strided(4), globals(2)), 3), *triples(150, seed=3)]:
        left, right = LAWS[law](*triple)
        assert left == right, triple
        assert hash(left) == hash(right)
        assert repr(left) == repr(right)


def test_atoms_associate_as_values():
    for a, b, c in itertools.permutations(ATOMS[:9], 3):
        assert (a & b) & c == a & (b & c)
        assert (a | b) | c == a | (b | c)
        assert (a - b) - c == a - (b | c)


def test_operators_are_those_of_sets():
    for a, b, _ in triples(200, seed=5):
        x, y = a.dense(29, heads=2), b.dense(29, heads=2)
        assert ((a & b).dense(29, heads=2) == (x & y)).all(), (a, b)
        assert ((a | b).dense(29, heads=2) == (x | y)).all(), (a, b)
        assert ((a - b).dense(29, heads=2) == (x & ~y)).all(), (a, b)


def test_different_patterns_differ():
    assert len(set(ATOMS)) == len(ATOMS)
    assert band(3) != band(3, 1)
    assert by_head(band(3)) != by_layer(band(3))
    assert globals((2, 0, 1, 1)) == globals(3)
    assert rows(7) == block(7)
    assert columns(7) == strided(7)
    assert dilated(3, 1) != band(3, 3)


@pytest.mark.parametrize("pattern", [*ATOMS, *expressions(400, seed=6)], ids=str)
def test_the_printed_form_is_a_spec_of_the_same_value(pattern):
    assert parse(repr(pattern)) == pattern
    assert parse(pattern) is pattern


def test_precedence_is_that_of_python():
    a, b, c = band(3), strided(4), block(5)
    assert parse("band(3) | strided(4) & block(5) - band(3)") == (a | b & c - a)
    assert parse("(band(3) | strided(4)) & block(5)") == (a | b) & c != (a | b & c)


def test_only_patterns_combine():
    for combine in (lambda a: a & 3, lambda a: a | 3, lambda a: a - 3):
        with pytest.raises(TypeError, match="unsupported operand"):
            combine(causal())
