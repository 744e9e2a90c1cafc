"""Check an exported program against the rules of the tensor code (docs/development/architecture.md)."""

from typing import Any, NamedTuple

from program_reader import Operation, Variable

ZEROS = "scatter into zeros"
WAITS = "the host waits for the device"
EXPANDED = "index expanded over channels"
IN_PLACE = "in place"

INTEGERS = ("int32", "int64")

SCATTERS = {"scatter", "scatter_nd", "scatter_nd_add", "put_along_axis", "index_add", "index_put"}
FILLS = {"fill_constant", "fill_constant_batch_size_like", "full", "full_batch_size_like", "full_int_array"}
FILLS |= {"fill_any_like", "full_like", "full_with_tensor", "assign_value"}
SHAPE_OPERATIONS = {"shape", "shape64"}
# Operations that move, copy or cast elements: zeros stay zeros.
MOVES = {"assign", "share_data", "cast", "transpose", "transpose2", "reshape", "reshape2", "flatten"}
MOVES |= {"flatten_contiguous_range", "squeeze", "squeeze2", "unsqueeze", "unsqueeze2", "expand", "expand_v2", "tile"}
MOVES |= {"slice", "strided_slice", "gather", "gather_nd", "index_select", "take_along_axis"}
JOINS = {"concat", "stack", "combine", "add", "elementwise_add", "subtract", "elementwise_sub"}
PRODUCTS = {"multiply", "elementwise_mul"}

# The size of the output, or the branch to run, is only known when the device has finished.
WAITING = {"nonzero", "where_index", "masked_select", "unique", "unique_consecutive", "memcpy", "memcpy_d2h", "print"}
WAITING |= {"while", "if", "conditional_block", "conditional_block_infer", "select_input", "py_func", "assert"}
# Operations whose operands after the first are a shape, an index or a count, which the host must know.
SHAPED = {"reshape", "reshape2", "expand", "expand_v2", "slice", "strided_slice", "tile", "topk", "top_k_v2", "split"}
SHAPED |= {"fill_constant", "full_with_tensor", "range", "arange", "linspace", "roll"}
ALL_OPERANDS = {"fill_constant", "full_with_tensor", "range", "arange", "linspace"}  # without a main operand


class Finding(NamedTuple):
    """A rule that an operation breaks."""

    rule: str
    operation: Operation

    def __str__(self) -> str:
        return f"{self.rule}: {self.operation}"


def broken_rules(program: list[Operation], channels: int) -> list[Finding]:
    """The operations of a program that break rules, in the order they run.

    Args:
        program: all operations, from `read_program`.
        channels: C, the size that no index may have along any axis; no other dimension of the program may equal it.
    """
    makers = {out.name: op for op in program for out in op.outputs}
    written: set[str] = set()
    findings = []
    for op in program:
        name = op.name.removesuffix("_")
        if name in SCATTERS and (name == "scatter_nd" or _is_zero(op.inputs[0], makers)):
            findings.append(Finding(ZEROS, op))
        if name in WAITING or _is_shaped_by_values(op, name, makers):
            findings.append(Finding(WAITS, op))
        if any(out.dtype in INTEGERS and channels in out.shape for out in op.outputs):
            findings.append(Finding(EXPANDED, op))
        if _is_in_place(op, makers, written):
            findings.append(Finding(IN_PLACE, op))
        written |= {out.name for out in op.outputs}
    return findings


def _is_zero(variable: Variable, makers: dict[str, Operation]) -> bool:
    """Whether every element is known to be 0 before the program runs."""
    op = makers.get(variable.name)
    if op is None:
        return False
    name = op.name.removesuffix("_")
    if name in FILLS:
        return _is_zero_fill(op, makers)
    if name in MOVES:
        return _is_zero(op.inputs[0], makers)
    if name in JOINS:
        is_list = not op.inputs[0].dtype  # in Paddle 3 a list of tensors, and for concat the axis
        return all(_is_zero(operand, makers) for operand in (op.inputs[:1] if is_list else op.inputs))
    if name in PRODUCTS:
        return any(_is_zero(operand, makers) for operand in op.inputs)
    if name == "scale":
        factor = _is_zero(op.inputs[1], makers) if len(op.inputs) > 1 else op.attributes.get("scale") == 0
        return op.attributes.get("bias", 0) == 0 and (factor or _is_zero(op.inputs[0], makers))
    return False


def _is_zero_fill(op: Operation, makers: dict[str, Operation]) -> bool:
    if op.name == "full_like":  # operands: tensor, value
        return _is_zero(op.inputs[1], makers)
    if op.name == "full_with_tensor":  # operands: value, shape
        return _is_zero(op.inputs[0], makers)
    if op.attributes.get("str_value"):  # of Paddle 2's fill_constant: exact, unlike `value`
        return float(op.attributes["str_value"]) == 0
    names = [key for key in op.attributes if key == "value" or key.endswith("values")]
    values = [value for key in names for value in _as_list(op.attributes[key])]
    return bool(values) and not any(values)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_shaped_by_values(op: Operation, name: str, makers: dict[str, Operation]) -> bool:
    if name not in SHAPED:
        return False
    operands = op.inputs if name in ALL_OPERANDS else op.inputs[1:]
    return any(_depends_on_values(operand, makers) for operand in operands)


def _depends_on_values(variable: Variable, makers: dict[str, Operation]) -> bool:
    """Whether a variable depends on the values of an input or a parameter, not only on constants and shapes."""
    pending, seen = [variable.name], set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        op = makers.get(name)
        if op is None or op.name in ("feed", "data"):
            return True
        like = op.name in ("fill_any_like", "full_like", "fill_constant_batch_size_like", "full_batch_size_like")
        if op.name not in SHAPE_OPERATIONS:
            pending += [operand.name for operand in op.inputs[1 if like else 0 :]]
    return False


def _is_in_place(op: Operation, makers: dict[str, Operation], written: set[str]) -> bool:
    """Whether an operation modifies an existing tensor.

    Allowed are Paddle 3's operations to write a constant (`assign_value_` into a new `full`) and to detach
    (`share_data_`).
    """
    if op.name in ("feed", "fetch", "share_data_"):
        return False
    if op.name == "assign_value_":
        maker = makers.get(op.inputs[0].name)
        return maker is None or maker.name != "full"
    if op.name.startswith("set_value") or op.name.endswith("_"):
        return True
    before = written | {operand.name for operand in op.inputs}
    return any(out.name in before for out in op.outputs)
