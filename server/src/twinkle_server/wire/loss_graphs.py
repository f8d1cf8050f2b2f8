"""Custom losses, traced by clients with torch.fx: graphs are parsed, validated, and encoded in their own ids.

Names in a graph are only looked up in the tables of this module. The id of a loss is the packed graph, so it needs no
storage, is the same for the same graph, and is available in replays.
"""

import base64
import binascii
import hashlib
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

PREFIX: Final = "loss."
MAX_BYTES: Final = 64 * 2**10
MAX_NODES: Final = 1024
MAX_INPUTS: Final = 16
MAX_DEPTH: Final = 8
"""Maximum nesting of lists, tuples and slices in an argument; `torch.fx` needs at most 3."""
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
"""Operations whose result has the broadcast shape of the arguments."""
FOLDING: Final = _names(
    "all amax amin any dot huber_loss l1_loss logsumexp max mean min mse_loss prod smooth_l1_loss std sum var"
)
"""Operations whose result is at most as large as the broadcast shape of the arguments."""
SHAPING: Final = _names("cat cumsum flatten flip getitem log_softmax logcumsumexp softmax squeeze stack t unsqueeze")
"""Operations whose result has at most as many values as the arguments together."""
FACTS: Final = _names("dim getattr numel size")
"""Operations that read shapes."""
METHODS: Final = POINTWISE | FOLDING | SHAPING | FACTS
_ALIASES: Final[Mapping[str, str]] = {
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
_IGNORED: Final = _names("_stacklevel dtype inplace")
_KEYWORDS: Final = _names(
    "beta correction delta dim dims end_dim input keepdim max min other reduction start_dim target tensors unbiased"
)


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a graph.

    Attributes:
        name: name of its result, for later nodes.
        operation: a name of the tables above; "" for an input.
        args: in the encoding of the protocol.
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
        nodes: in order, without inputs.
        loss: name of the node with the loss.
        metrics: names of nodes by metric, `custom/<name>:sum` or `:mean`.
    """

    inputs: tuple[tuple[str, int], ...]
    nodes: tuple[Node, ...]
    loss: str
    metrics: Mapping[str, str]


def read_graph(inputs: Any, nodes: Any) -> LossGraph:
    """Parse and validate a graph.

    Args:
        inputs: a list of `{"name", "rank"}`.
        nodes: a list of `{"op", "name", "target", "args", "kwargs"}`.

    Raises:
        ValueError: it is invalid, or contains an unsupported operation; the message names it.
    """
    ranks = _read_inputs(inputs)
    if not isinstance(nodes, list) or not 1 <= len(nodes) <= MAX_NODES:
        raise ValueError(f"the graph must have a list of 1 to {MAX_NODES} nodes")
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
    """Return the id of a loss, which contains the packed graph.

    Raises:
        ValueError: it is too large.
    """
    try:
        data = _encoded(graph)
    except TypeError as error:  # for example an integer beyond 64 bits
        raise ValueError(f"cannot encode the graph as JSON: {error}") from error
    if len(data) > MAX_BYTES:
        raise ValueError(f"the graph must have at most {MAX_BYTES} bytes, got {len(data)}")
    return PREFIX + base64.urlsafe_b64encode(zlib.compress(data, 9)).decode().rstrip("=")


def digest_of(graph: LossGraph) -> str:
    """Return the SHA-256 of a loss in hexadecimal; equal graphs have equal digests."""
    return hashlib.sha256(_encoded(graph)).hexdigest()


def _encoded(graph: LossGraph) -> bytes:
    """Return a loss as JSON, in the one form that each graph has."""
    nodes = [(node.name, node.operation, node.args, node.kwargs or {}) for node in graph.nodes]
    whole = {"inputs": graph.inputs, "nodes": nodes, "loss": graph.loss, "metrics": graph.metrics}
    return orjson.dumps(whole, option=orjson.OPT_SORT_KEYS)


def read_loss_id(text: str) -> LossGraph:
    """Return the loss of an id; it is validated again.

    Raises:
        ValueError: the id was not returned by `loss_id`.
    """
    try:
        packed = base64.b64decode(text.removeprefix(PREFIX) + "===", altchars=b"-_")
        data = zlib.decompressobj().decompress(packed, MAX_BYTES)
        if not text.startswith(PREFIX):
            raise ValueError(text)
        fields = orjson.loads(data)
        inputs = [{"name": name, "rank": rank} for name, rank in fields["inputs"]]
        nodes = [{"op": "placeholder", "name": name, "target": name} for name, _ in fields["inputs"]]
        for name, operation, args, kwargs in fields["nodes"]:
            target = f"torch.{operation}"
            nodes.append({"op": "call_function", "name": name, "target": target, "args": args, "kwargs": kwargs})
        metrics = {name: {"ref": node} for name, node in fields["metrics"].items()}
        output = {"tuple": [{"ref": fields["loss"]}, {"dict": metrics}]}
        nodes.append({"op": "output", "name": "output", "target": "output", "args": [output]})
    except (ValueError, TypeError, KeyError, AttributeError, zlib.error, binascii.Error) as error:
        raise ValueError(f"loss_id must be one that create_custom_loss returned, got {text[:40]!r}") from error
    return read_graph(inputs, nodes)


def references(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield the names of nodes in an encoded argument.

    Args:
        value: the argument.
        depth: number of lists around it.

    Raises:
        ValueError: its encoding is unknown, or it is nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"an argument must be nested at most {MAX_DEPTH} levels deep")
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
    ranks = []
    for item in inputs if isinstance(inputs, list) else ():
        name, rank = (item.get("name"), item.get("rank")) if isinstance(item, dict) else (None, None)
        if not isinstance(name, str) or not _NAME.fullmatch(name) or rank not in (0, 1, 2):
            raise ValueError(f"an input must have a name and a rank of 0, 1 or 2, got {str(item)[:80]}")
        ranks.append((name, int(rank)))
    names = [name for name, _ in ranks]
    if not ranks or names[0] != "logprobs" or len(set(names)) != len(names) or len(names) > MAX_INPUTS:
        raise ValueError(
            f"a loss must have at most {MAX_INPUTS} inputs with unique names, of which 'logprobs' is the first"
        )
    return tuple(ranks)


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
    # Dtypes always follow from the inputs; the other ignored arguments concern warnings or save memory.
    kwargs = {key: kwargs[key] for key in kwargs if key not in _IGNORED and kwargs[key] is not None}
    unsupported = [key for key in kwargs if key not in _KEYWORDS]
    if unsupported:
        raise ValueError(f"node {name!r} has the unsupported argument {unsupported[0][:40]!r}")
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
    name = _ALIASES.get(name, name)
    if name not in METHODS:
        raise ValueError(f"unsupported operation {target[:80]!r}; available: {', '.join(sorted(METHODS))}")
    return name


def _read_output(node: Node) -> tuple[str, Mapping[str, str]]:
    try:
        (output,) = node.args
        pair = output["tuple"] if isinstance(output, dict) else output
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
