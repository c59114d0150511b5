"""The sandbox that chat templates run in: nothing can be changed, and steps, sizes and time are bounded.

A template comes from the model's worker. Each pass of a loop and each call is a step; each value that the
template makes is paid for by its size, before it is made where its size can be foreseen. So no template runs, or grows,
for much longer than its `RenderingBudget`, although it runs in this very thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import wraps
from types import BuiltinMethodType
from typing import Any, Final, NoReturn, TextIO, TypeVar

from jinja2 import Environment, Template, nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, _PassArg

from dynamo.text.template_budget import ITEM_BYTES, NO_CLOCK, BudgetExceeded, BudgetSpec, RenderingBudget, items_of

N = TypeVar("N", bound=nodes.Node)

BUDGET_VARIABLE: Final = " budget"  # with a space, which no name in a template has
MAX_NUMBER: Final = 100_000  # as an argument of what fills up or repeats, and of `range`
MAX_POWER_BITS: Final = 4096

_WIDTH: Final = re.compile(r"[0-9]{5,}|\*")  # in a format
_REPEATING: Final = frozenset({"*", "**", "%"})
# Methods that make nothing longer than what they are called on, by far the most calls of any template.
_HARMLESS: Final = frozenset(
    {"startswith", "endswith", "strip", "lstrip", "rstrip", "lower", "upper", "title", "capitalize", "find", "rfind"}
    | {"index", "count", "split", "rsplit", "partition", "rpartition", "splitlines", "get", "items", "keys", "values"}
)
SHORT_CHARACTERS: Final = 4096  # of a text on which a harmless method costs nothing worth counting
# Filters whose numbers determine how much they make.
_FILLING: Final = frozenset(
    {
        "batch",
        "center",
        "filesizeformat",
        "format",
        "indent",
        "pprint",
        "round",
        "slice",
        "tojson",
        "truncate",
        "wordwrap",
    }
)
# Filters that neither grow nor walk what they are given; all others are paid for.
_CHEAP: Final = frozenset(
    {"default", "d", "length", "count", "first", "last", "lower", "upper", "trim", "int", "float", "abs", "safe", "e"}
)


class _BudgetedContext(Context):
    """The context of one rendering, and what is left of its budget."""

    def __init__(
        self,
        environment: Environment,
        parent: dict[str, object],
        name: str | None,
        blocks: dict[str, Callable[[Context], Iterator[str]]],
        globals: MutableMapping[str, object] | None = None,
    ) -> None:
        super().__init__(environment, parent, name, blocks, globals)
        budget = parent.get(BUDGET_VARIABLE)
        self.budget: RenderingBudget = (
            budget if isinstance(budget, RenderingBudget) else RenderingBudget(BudgetSpec(), NO_CLOCK)
        )
        self.step = self.budget.step
        self.made = self.budget.made

    def add(self, left: Any, right: Any) -> Any:
        """Add what `+` adds where neither side is a constant: only that can double."""
        budget = self.budget
        if left.__class__ is str and right.__class__ is str:
            budget.spend(len(left) + len(right))
            return left + right
        budget.spend(budget.text_of(left) + budget.text_of(right))
        return budget.made(left + right)

    def concat(self, parts: tuple[object, ...]) -> str:
        """Join what `~` joins."""
        budget = self.budget
        budget.spend(sum([budget.text_of(part) for part in parts]))
        return str_join(parts)


class _Generator(CodeGenerator):
    """Emits the same program, with a count in every loop and a price on what `~` and literals make."""

    def __init__(
        self, environment: Environment, name: str | None, filename: str | None, stream: TextIO | None = None,
        defer_init: bool = False, optimized: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(environment, name, filename, stream, defer_init, optimized)
        self._loop_bodies: set[int] = set()  # by id
        self._loop_tests: set[int] = set()

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        self._loop_bodies.add(id(node.body))
        if node.test is not None:  # it runs for every item, the body only for some
            self._loop_tests.add(id(node.test))
        super().visit_For(node, frame)

    def visit(self, node: nodes.Node, *args: object, **named: object) -> Any:
        is_test = id(node) in self._loop_tests
        if is_test:
            self._loop_tests.discard(id(node))
            self.write("(not context.step() and ")
        super().visit(node, *args, **named)
        if is_test:
            self.write(")")

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        if id(nodes) in self._loop_bodies:
            self.writeline("context.step()")
        super().blockvisit(nodes, frame)

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        is_plain = isinstance(node.left, nodes.Const) or isinstance(node.right, nodes.Const)
        self.write("(" if is_plain else "context.add(")
        self.visit(node.left, frame)
        self.write(" + " if is_plain else ", ")
        self.visit(node.right, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("context.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._paid(node, node.items, frame, super().visit_List)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._paid(node, [pair.value for pair in node.items], frame, super().visit_Dict)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._paid(node, node.items, frame, super().visit_Tuple)
        else:
            super().visit_Tuple(node, frame)

    def _paid(self, node: N, items: Sequence[nodes.Node], frame: Frame, write: Callable[[N, Frame], None]) -> None:
        is_constant = all(isinstance(item, nodes.Const) for item in items)
        if not is_constant:
            self.write("context.made(")
        write(node, frame)
        if not is_constant:
            self.write(")")


class _Namespace(Namespace):
    """A namespace that does not write itself out: it may hold itself many times over."""

    def __repr__(self) -> str:
        return "<Namespace>"


class BudgetedSandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with a budget. Its templates are rendered with `render_within`."""

    code_generator_class = _Generator
    context_class = _BudgetedContext
    intercepted_binops = _REPEATING

    def __init__(self, **options: Any) -> None:
        # Not optimised: constants would be computed while the template is compiled, without any budget.
        super().__init__(optimized=False, **options)
        for name, function in list(self.filters.items()):
            if name not in _CHEAP:
                self.filters[name] = paid_filter(name, function)
        self.globals["namespace"] = _Namespace
        self.globals.pop("lipsum", None)  # makes text out of nothing

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        assert isinstance(context, _BudgetedContext)
        budget = context.budget
        if operator == "*":
            for number, other in ((left, right), (right, left)):
                if isinstance(number, int) and not isinstance(other, int | float):
                    budget.spend(max(0, number) * budget.text_of(other))
            _check_bits(left, right, lambda a, b: a + b)
        elif operator == "**":
            _check_bits(left, right, lambda a, _: a * (abs(right) if isinstance(right, int) else 1))
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
            budget.spend(len(left) + budget.text_of(right))
        return budget.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Callable[..., object], *args: object, **kwargs: object) -> object:
        if __obj.__class__ is BuiltinMethodType and __obj.__name__ in _HARMLESS:
            owner = __obj.__self__
            if owner.__class__ is not str or len(owner) <= SHORT_CHARACTERS:
                __context.step()  # type: ignore[attr-defined]
                kwargs.pop("_loop_vars", None)  # what jinja2 gives to functions that take a context
                kwargs.pop("_block_vars", None)
                return __obj(*args, **kwargs)
        assert isinstance(__context, _BudgetedContext)
        budget = __context.budget
        budget.step()
        if __obj is range:
            found = super().call(__context, __obj, *args, **kwargs)
            budget.spend(len(found))
            return found
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 puts a function of its own around `str.format`
        if isinstance(method, BuiltinMethodType):
            _foresee(budget, method, args, kwargs)
        return budget.made(super().call(__context, __obj, *args, **kwargs))


def render_within(
    program: Template, variables: Mapping[str, object], spec: BudgetSpec, clock: Callable[[], float] = NO_CLOCK
) -> str:
    """Render a template of a `BudgetedSandbox`. Raises BudgetExceeded, and whatever the template raises."""
    budget = RenderingBudget(spec, clock)
    values = {**program.globals, **variables, BUDGET_VARIABLE: budget}
    context = _BudgetedContext(program.environment, values, program.name, program.blocks, program.globals)
    pieces: list[str] = []
    left = spec.sizes
    for piece in program.root_render_func(context):
        left -= len(piece)
        if left < 0:
            raise BudgetExceeded("sizes", spec.sizes)
        pieces.append(piece)
    return "".join(pieces)


def paid_filter(name: str, function: Callable[..., object]) -> Callable[..., object]:
    """Return a filter that pays for what `function` makes."""
    kind = _PassArg.from_obj(function)

    @wraps(function)
    def paid(context: _BudgetedContext, value: object, *args: object, **kwargs: object) -> object:
        budget = context.budget
        budget.step()
        if name in _FILLING:
            _check_numbers((*args, *kwargs.values()))
        size = budget.text_of(value)
        if name == "replace":
            size = _replaced_size(value, args, kwargs) if isinstance(value, str) else size
        elif name == "format" and isinstance(value, str):
            _check_format(value, (*args, *kwargs.values()))
        elif name == "indent" and isinstance(value, str):
            width = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, int | str)), 4)
            size += (value.count("\n") + 1) * (len(width) if isinstance(width, str) else width)
        elif name == "join":
            joint = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, str)), "")
            size += len(joint) * (len(value) if hasattr(value, "__len__") else 0)
        budget.spend(size)
        if kind is _PassArg.context:
            return budget.made(function(context, value, *args, **kwargs))
        if kind is _PassArg.eval_context:
            return budget.made(function(context.eval_ctx, value, *args, **kwargs))
        if kind is _PassArg.environment:
            return budget.made(function(context.environment, value, *args, **kwargs))
        return budget.made(function(value, *args, **kwargs))

    # `wraps` copied the old mark, of which there may be one only.
    return pass_context(paid)


def _foresee(
    budget: RenderingBudget, method: BuiltinMethodType, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Pay for what a method of a built-in value will make."""
    owner, name = method.__self__, method.__name__
    if isinstance(owner, str | bytes | int | float):
        _check_numbers((*args, *kwargs.values()))
    if not isinstance(owner, str):
        return
    if name in _HARMLESS:
        budget.spend(len(owner) * (ITEM_BYTES if "split" in name else 1))
    elif name == "replace":
        budget.spend(_replaced_size(owner, args, kwargs))
    elif name == "join" and args:
        budget.spend(budget.text_of(args[0]) + len(owner) * (len(args[0]) if hasattr(args[0], "__len__") else 0))
    elif name in ("format", "format_map"):
        _check_format(owner, (*args, *kwargs.values()))
    elif name == "expandtabs":
        budget.spend(owner.count("\t") * next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, int)), 8))
    elif name == "translate" and args and isinstance(args[0], Iterable):
        budget.spend(len(owner) * (1 + max((budget.text_of(each) for each in items_of(args[0])), default=0)))


def _replaced_size(text: str, args: tuple[object, ...], kwargs: dict[str, object]) -> int:
    words = [str(arg) for arg in (*args, *kwargs.values())]
    if len(words) < 2:
        return len(text)
    return len(text) + text.count(words[0]) * len(words[1])


def _check_numbers(values: tuple[object, ...]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            _refuse(f"a number above {MAX_NUMBER} as an argument")


def _check_format(pattern: str, values: tuple[object, ...]) -> None:
    """Refuse widths that fill up far."""
    if _WIDTH.search(pattern) is not None:
        _refuse("a width of more than four digits in a format")
    if "{" in pattern and pattern.count("{") > pattern.count("}}") + 1:  # a width may be one of the values
        _check_numbers(values)


def _check_bits(left: object, right: object, bits: Callable[[int, int], int]) -> None:
    if (
        isinstance(left, int)
        and isinstance(right, int)
        and bits(left.bit_length(), right.bit_length()) > MAX_POWER_BITS
    ):
        _refuse(f"a number of more than {MAX_POWER_BITS} bits")


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"templates may not use {what}")
