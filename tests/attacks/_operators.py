"""Operators of mutation: small mistakes that a person could make, each a change of one node of a syntax tree."""

import ast
import collections
import random
from collections.abc import Iterator
from typing import NamedTuple

from . import _edits

# Each stands in the other's place.
PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Lt, ast.Gt), (ast.LtE, ast.GtE), (ast.Eq, ast.NotEq)),
    *((ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.FloorDiv, ast.Mod)),
    *((ast.BitAnd, ast.BitOr), (ast.And, ast.Or)),
)
SWAPPED = collections.defaultdict(list)
for one, other in PAIRS:
    SWAPPED[one].append(other)
    SWAPPED[other].append(one)
NAMES = dict(
    pair.split("/")
    for pair in """min/max amin/amax minimum/maximum argmin/argmax any/all floor/ceil tril/triu cumsum/cumprod sum/mean
    zeros/ones zeros_like/ones_like new_zeros/new_ones softmax/log_softmax sigmoid/tanh""".split()
)
NAMES |= {two: one for one, two in NAMES.items()}
# Methods whose call may be left out, as in x.masked_fill(...) -> x.
OPTIONAL = set(
    """abs clamp clone cumsum detach exp flip log masked_fill mul_ neg_ relu roll rsqrt sigmoid softmax sort sub_ tril
    triu unsqueeze""".split()
)
# Fields without behavior: annotations, and what is only shown.
SKIPPED = (ast.JoinedStr, ast.Raise, ast.Import, ast.ImportFrom)
ANNOTATIONS = ("annotation", "returns", "type_params", "decorator_list")


class Change(NamedTuple):
    """One mutant: ``place`` is the number of the node among ``_edits.places``, ``new`` what takes its place."""

    place: int
    line: int
    function: str
    operator: str
    old: str
    new: str
    node: ast.AST

    @property
    def words(self) -> str:
        return f"{self.operator}: {_short(self.old)} -> {_short(self.new)}"


def _short(text: str, most: int = 60) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."


def changes(text: str) -> list[Change]:
    """Every change of a module's text that the operators make, in the order of the tree."""
    tree = ast.parse(text)
    owners = {node: name for name, scope in _edits.named(tree) for node in ast.walk(scope)}
    skipped = {id(node) for node in _inert(tree)}
    found = []
    for place, (parent, _, _, node) in enumerate(_edits.places(tree)):
        if id(node) in skipped or not isinstance(node, ast.expr | ast.stmt):
            continue
        for operator, new in variants(node, parent):
            old, written = ast.unparse(node), ast.unparse(ast.fix_missing_locations(new))
            if old != written:
                found.append(Change(place, node.lineno, owners.get(node, ""), operator, old, written, new))
    return found


def applied(text: str, change: Change) -> str:
    """The module's text with one change."""
    tree = ast.parse(text)
    for place, (parent, field, index, _) in enumerate(_edits.places(tree)):
        if place == change.place:
            _edits.put(parent, field, index, change.node)
            break
    return ast.unparse(ast.fix_missing_locations(tree))


def sample(text: str, seed: int, count: int) -> list[Change]:
    """``count`` changes, or all if there are fewer, each with another result; the same ones for the same seed."""
    order = changes(text)
    random.Random(seed).shuffle(order)
    before, chosen = ast.unparse(ast.parse(text)), []
    results = {before}
    for change in order:
        if len(chosen) == count:
            break
        after = applied(text, change)
        if after not in results:
            results.add(after)
            chosen.append(change)
    return chosen


def _inert(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that are left alone: messages, annotations, docstrings and code for type checkers."""
    for node in ast.walk(tree):
        below = []
        if isinstance(node, SKIPPED) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            below.append(node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            below.append(node)
        for field in ANNOTATIONS:
            value = getattr(node, field, None)
            below += [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, ast.AST)]
        for one in below:
            yield from ast.walk(one)


def variants(node: ast.AST, parent: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(operator, new node) of each change of one node. The node itself is not touched."""
    match node:
        case ast.Compare(ops=[op]):
            for other in SWAPPED.get(type(op), ()):
                yield "comparison", ast.Compare(node.left, [other()], node.comparators)
        case ast.BinOp():
            for other in SWAPPED.get(type(node.op), ()):
                yield "arithmetic", ast.BinOp(node.left, other(), node.right)
            if isinstance(node.op, ast.MatMult | ast.Sub | ast.Div | ast.FloorDiv | ast.Pow):
                yield "swapped operands", ast.BinOp(node.right, node.op, node.left)
        case ast.BoolOp():
            yield "and/or", ast.BoolOp(SWAPPED[type(node.op)][0](), node.values)
            for i in range(len(node.values)):
                rest = [value for j, value in enumerate(node.values) if j != i]
                yield "dropped condition", rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
            yield "constant", _number(1 - number)
            yield "constant", _number(-1 - number)
        case ast.UnaryOp(op=ast.Not() | ast.Invert() | ast.USub()):
            yield "dropped sign" if isinstance(node.op, ast.USub) else "dropped not", node.operand
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(number)) if not isinstance(parent, ast.UnaryOp):
            yield "constant", _number(number + 1)
            yield "constant", _number(number - 1)
        case ast.Constant(value=float(number)):
            yield "constant", ast.Constant(number * 2 if number else 1.0)
        case ast.IfExp():
            yield "one branch", node.body
            yield "one branch", node.orelse
        case ast.If() if all(isinstance(one, ast.Raise) for one in node.body):
            yield "dropped check", ast.If(ast.Constant(False), node.body, node.orelse)
        case ast.If():
            yield "negated if", ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
        case ast.Call():
            yield from _calls(node)
        case ast.Slice(lower, upper, step):
            if lower is not None:
                yield "slice", ast.Slice(None, upper, step)
            if upper is not None:
                yield "slice", ast.Slice(lower, None, step)
        case ast.AugAssign():
            for other in SWAPPED.get(type(node.op), ()):
                yield "arithmetic", ast.AugAssign(node.target, other(), node.value)
            yield "assignment", ast.Assign([node.target], node.value)
        case ast.Expr(value=ast.Call()):
            yield "dropped statement", ast.Pass()
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if _uses(value, name):
            yield "dropped statement", ast.Pass()


def _calls(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    function = node.func
    if isinstance(function, ast.Attribute):
        if function.attr in OPTIONAL:
            yield "dropped call", function.value
        if function.attr in NAMES:
            attribute = ast.Attribute(function.value, NAMES[function.attr], ast.Load())
            yield "other function", ast.Call(attribute, node.args, node.keywords)
    elif isinstance(function, ast.Name) and function.id in NAMES:
        yield "other function", ast.Call(ast.Name(NAMES[function.id], ast.Load()), node.args, node.keywords)
    for i in range(len(node.args) - 1):
        if not any(isinstance(one, ast.Starred) for one in node.args[i : i + 2]):
            args = [*node.args[:i], node.args[i + 1], node.args[i], *node.args[i + 2 :]]
            yield "swapped arguments", ast.Call(function, args, node.keywords)
    for i, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            yield "dropped argument", ast.Call(function, node.args, [*node.keywords[:i], *node.keywords[i + 1 :]])


def _number(value: int) -> ast.expr:
    return ast.Constant(value) if value >= 0 else ast.UnaryOp(ast.USub(), ast.Constant(-value))


def _uses(value: ast.AST, name: str) -> bool:
    return any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(value))
