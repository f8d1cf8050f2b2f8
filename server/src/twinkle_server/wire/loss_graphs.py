"""Losses that clients trace with torch.fx and send as data: read, checked, and carried by their own name.

Nothing of a graph is looked up by its name anywhere but in the tables here. A loss's id is the graph itself, packed: it
needs no place in the store, is the same for the same graph, and is there when operations are done again.
"""

import base64
import binascii
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

PREFIX: Final = "loss."
MOST_BYTES: Final = 64 * 2**10
MOST_NODES: Final = 1024
MOST_INPUTS: Final = 16
MOST_DEPTH: Final = 8
"""Lists, tuples and slices of an argument that may be nested; the deepest that `torch.fx` makes has 3."""
_SLICE = range(1, 4)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


POINTWISE: Final = _names(
    "abs add and_ bool ceil clamp clamp_max clamp_min clone cos detach div double eq erf exp expm1 float floor fmod ge "
    "gt isfinite isinf isnan le log log1p log_sigmoid logical_and logical_not logical_or logical_xor lt maximum "
    "minimum mul ne neg nan_to_num ones_like or_ pow reciprocal relu round rsqrt sigmoid sign sin softplus sqrt square "
    "sub tanh truediv where xor zeros_like"
)
"""Whose result has the shape that the arguments have together."""
FOLDING: Final = _names(
    "all amax amin any dot huber_loss l1_loss logsumexp max mean min mse_loss prod smooth_l1_loss std sum var"
)
"""Whose result is no larger than what the arguments have together."""
SHAPING: Final = _names("cat cumsum flatten flip getitem log_softmax logcumsumexp softmax squeeze stack t unsqueeze")
"""Whose result has as many numbers as the arguments, or fewer."""
FACTS: Final = _names("dim getattr numel size")
"""That look at shapes."""
METHODS: Final = POINTWISE | FOLDING | SHAPING | FACTS
_SAME: Final[Mapping[str, str]] = {
    "absolute": "abs",
    "clip": "clamp",
    "concat": "cat",
    "divide": "div",
    "invert": "logical_not",
    "logsigmoid": "log_sigmoid",
    "multiply": "mul",
    "negative": "neg",
    "subtract": "sub",
    "true_divide": "div",
}
_MODULES: Final = ("torch.", "torch.nn.functional.", "torch._C._nn.", "operator.", "torch.Tensor.", "torch.special.")
_SAID_FOR_NOTHING: Final = _names("_stacklevel dtype inplace")
_KEYWORDS: Final = _names(
    "beta correction delta dim dims end_dim input keepdim max min other reduction start_dim target tensors unbiased"
)


@dataclass(frozen=True, slots=True)
class Node:
    """A step of a graph.

    Attributes:
        name: by which later steps refer to its result.
        operation: a name of the tables above; "" gives an input.
        args: as the wire encodes them.
        kwargs: likewise.
    """

    name: str
    operation: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class LossGraph:
    """A loss of one row.

    Attributes:
        inputs: name and rank of each argument; the first is "logprobs".
        nodes: steps in order, inputs left out.
        loss: name of the node that is the loss.
        metrics: names of nodes by metric, `custom/<name>:sum` or `:mean`.
    """

    inputs: tuple[tuple[str, int], ...]
    nodes: tuple[Node, ...]
    loss: str
    metrics: Mapping[str, str]


def read_graph(inputs: Any, nodes: Any) -> LossGraph:
    """Read what a client sent.

    Args:
        inputs: a list of `{"name", "rank"}`.
        nodes: a list of `{"op", "name", "target", "args", "kwargs"}`.

    Raises:
        ValueError: it is no graph, or has a step that a loss may not have; the message names it.
    """
    ranks = _read_inputs(inputs)
    if not isinstance(nodes, list) or not 1 <= len(nodes) <= MOST_NODES:
        raise ValueError(f"the graph must have a list of 1 to {MOST_NODES} nodes")
    known: set[str] = set()
    steps: list[Node] = []
    for place, fields in enumerate(nodes):
        op, node = _read_node(fields, place)
        if op == "output":
            if place != len(nodes) - 1:
                raise ValueError("the graph must not have nodes after its output")
            loss, metrics = _read_output(node)
            _check_known(node, [loss, *metrics.values()], known)
            return LossGraph(ranks, tuple(steps), loss, metrics)
        _check_known(node, references([*node.args, *(node.kwargs or {}).values()]), known)
        if op == "placeholder" and node.name not in dict(ranks):
            raise ValueError(
                f"the graph uses the undeclared input {node.name!r}; its inputs are {[name for name, _ in ranks]}"
            )
        if op != "placeholder":
            steps.append(node)
        known.add(node.name)
    raise ValueError("the graph must have an output")


def loss_id(graph: LossGraph) -> str:
    """Return the id of a loss: all of it, packed.

    Raises:
        ValueError: it is too large.
    """
    nodes = [(node.name, node.operation, node.args, node.kwargs or {}) for node in graph.nodes]
    whole = {"inputs": graph.inputs, "nodes": nodes, "loss": graph.loss, "metrics": graph.metrics}
    try:
        data = orjson.dumps(whole, option=orjson.OPT_SORT_KEYS)
    except TypeError as error:  # an integer beyond 64 bits, say
        raise ValueError(f"cannot encode the graph as JSON: {error}") from error
    if len(data) > MOST_BYTES:
        raise ValueError(f"the graph must have at most {MOST_BYTES} bytes, got {len(data)}")
    return PREFIX + base64.urlsafe_b64encode(zlib.compress(data, 9)).decode().rstrip("=")


def read_loss_id(text: str) -> LossGraph:
    """Return the loss that an id stands for; it is checked like one that was just sent.

    Raises:
        ValueError: it is no id that `loss_id` gives.
    """
    try:
        packed = base64.b64decode(text.removeprefix(PREFIX) + "===", altchars=b"-_")
        data = zlib.decompressobj().decompress(packed, MOST_BYTES)
        if not text.startswith(PREFIX):
            raise ValueError(text)
        said = orjson.loads(data)
        inputs = [{"name": name, "rank": rank} for name, rank in said["inputs"]]
        nodes = [{"op": "placeholder", "name": name, "target": name} for name, _ in said["inputs"]]
        for name, operation, args, kwargs in said["nodes"]:
            target = f"torch.{operation}"
            nodes.append({"op": "call_function", "name": name, "target": target, "args": args, "kwargs": kwargs})
        metrics = {name: {"ref": node} for name, node in said["metrics"].items()}
        ended = {"tuple": [{"ref": said["loss"]}, {"dict": metrics}]}
        nodes.append({"op": "output", "name": "output", "target": "output", "args": [ended]})
    except (ValueError, TypeError, KeyError, AttributeError, zlib.error, binascii.Error) as error:
        raise ValueError(f"loss_id must be one that create_custom_loss returned, got {text[:40]!r}") from error
    return read_graph(inputs, nodes)


def references(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield the names of nodes in an encoded argument.

    Args:
        value: the argument.
        depth: lists around it.

    Raises:
        ValueError: it is encoded in an unknown way, or nested too deeply.
    """
    if depth > MOST_DEPTH:
        raise ValueError(f"an argument must be nested at most {MOST_DEPTH} levels deep")
    if isinstance(value, list):
        for item in value:
            yield from references(item, depth + 1)
    elif isinstance(value, dict):
        kind, inner = next(iter(value.items())) if len(value) == 1 else ("", None)
        if kind == "ref" and isinstance(inner, str):
            yield inner
        elif isinstance(inner, list) and (kind == "tuple" or (kind == "slice" and len(inner) in _SLICE)):
            yield from references(inner, depth + 1)
        elif not (kind == "ellipsis" or (kind == "float" and inner in ("inf", "-inf", "nan"))):
            keys = [key[:40] for key in list(value)[:4]]
            raise ValueError(f"unsupported argument with the keys {keys}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f'an argument must not be {value}; write {{"float": "{value}"}}')
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise ValueError(f"unsupported argument of type {type(value).__name__}")


def _read_inputs(inputs: Any) -> tuple[tuple[str, int], ...]:
    found = []
    for item in inputs if isinstance(inputs, list) else ():
        name, rank = (item.get("name"), item.get("rank")) if isinstance(item, dict) else (None, None)
        if not isinstance(name, str) or not _NAME.fullmatch(name) or rank not in (0, 1, 2):
            raise ValueError(f"an input must have a name and a rank of 0, 1 or 2, got {str(item)[:80]}")
        found.append((name, int(rank)))
    names = [name for name, _ in found]
    if not found or names[0] != "logprobs" or len(set(names)) != len(names) or len(names) > MOST_INPUTS:
        raise ValueError(
            f"a loss must have at most {MOST_INPUTS} inputs with unique names, of which 'logprobs' is the first"
        )
    return tuple(found)


def _check_known(node: Node, names: Iterable[str], known: set[str]) -> None:
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(f"node {node.name!r} must refer to earlier nodes, got {missing[0][:80]!r}")


def _read_node(fields: Any, place: int) -> tuple[str, Node]:
    if not isinstance(fields, dict):
        raise ValueError(f"node {place} must be an object")
    op, name, target = fields.get("op"), fields.get("name"), fields.get("target")
    args, kwargs = fields.get("args") or [], fields.get("kwargs") or {}
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(target, str):
        raise ValueError(f"node {place} must have a name and a target")
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise ValueError(f"node {name!r} must have a list of arguments")
    # Types are those of the inputs here; what else these say is how a Python function is reported, or saves memory.
    kwargs = {key: kwargs[key] for key in kwargs if key not in _SAID_FOR_NOTHING and kwargs[key] is not None}
    odd = [key for key in kwargs if key not in _KEYWORDS]
    if odd:
        raise ValueError(f"node {name!r} has the unsupported argument {odd[0][:40]!r}")
    if op == "placeholder":
        return op, Node(target, "")
    if op == "output":
        return op, Node(name, "", tuple(args))
    if op not in ("call_function", "call_method"):
        raise ValueError(f"node {name!r} has the unsupported op {str(op)[:40]!r}; a loss may only call torch functions")
    return op, Node(name, _operation(op, target), tuple(args), kwargs)


def _operation(op: str, target: str) -> str:
    if op == "call_function" and target in ("getattr", "builtins.getattr"):
        return "getattr"
    name = target
    if op == "call_function":
        module = max((module for module in _MODULES if target.startswith(module)), key=len, default=None)
        name = "" if module is None else target.removeprefix(module)
    name = _SAME.get(name, name)
    if name not in METHODS:
        raise ValueError(f"unsupported operation {target[:80]!r}; available: {', '.join(sorted(METHODS))}")
    return name


def _read_output(node: Node) -> tuple[str, Mapping[str, str]]:
    try:
        (ended,) = node.args
        pair = ended["tuple"] if isinstance(ended, dict) else ended
        loss, metrics = pair[0]["ref"], pair[1]["dict"]
        named = {str(name): str(inner["ref"]) for name, inner in metrics.items()}
        if not isinstance(loss, str):
            raise TypeError(loss)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError("a loss must return (loss, {metric: tensor})") from error
    wrong = [name for name in named if not _METRIC.fullmatch(name)]
    if wrong:
        raise ValueError(f"a metric must be named custom/<name>:sum or custom/<name>:mean, got {wrong[0][:80]!r}")
    return loss, named
