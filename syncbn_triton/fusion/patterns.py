"""Batch norm, activation and the sum between them, in the graph of a forward."""

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..activation import activation_of
from ..module import SyncBatchNorm
from .forwards import is_hooked
from .fused import is_fused

_FUNCTIONS = {
    F.relu: "relu",
    F.relu_: "relu",
    torch.relu: "relu",
    torch.relu_: "relu",
    F.leaky_relu: "leaky_relu",
    F.leaky_relu_: "leaky_relu",
    F.silu: "silu",
    F.gelu: "gelu",
    F.hardswish: "hardswish",
}
_METHODS = {"relu": "relu", "relu_": "relu"}
# Their output is a new tensor, which nothing but the graph can change.
_MAKES_NEW = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


@dataclass
class Match:
    """Nodes that can be one call of a layer."""

    layer: SyncBatchNorm
    activation: str
    negative_slope: float
    # In order, with what returns its input between them: the layer's, the sum's, the activation's.
    nodes: list[fx.Node]
    # Others that the graph must show.
    proof: list[fx.Node] = field(default_factory=list)
    sum: fx.Node | None = None
    residual: fx.Node | None = None
    added_in_place: str | None = None


def called(owner: nn.Module, node: fx.Node) -> nn.Module | None:
    """The module that a node of the owner's graph calls."""
    return owner.get_submodule(str(node.target)) if node.op == "call_module" else None


def match(owner: nn.Module, node: fx.Node) -> Match | str:
    """What can be fused into the layer that a node calls, or why nothing can."""
    layer = called(owner, node)
    assert isinstance(layer, SyncBatchNorm)
    reason = _why_not_fused(layer)
    if reason is not None:
        return reason
    if len(node.args) + len(node.kwargs) != 1 or len(node.all_input_nodes) != 1:
        return "is called with more than an input"
    nodes = [node]
    following = _follow(owner, nodes)
    if isinstance(following, str):
        return following
    operands = _operands(following)
    if operands is None:
        activation = _activation(owner, nodes[-1], following)
        if activation is None:
            return "no activation follows that can be fused"
        return Match(layer, *activation, [*nodes, following])

    left, right, in_place = operands
    ours, residual = nodes[-1], right if left is nodes[-1] else left
    if residual is ours or not isinstance(residual, fx.Node):
        return "what is added is not another tensor"
    added_in_place, proof = None, []
    if in_place and left is ours:
        added_in_place = "output"
    elif in_place:
        if not isinstance(called(owner, residual), SyncBatchNorm) or len(residual.users) > 1:
            return "is added in place to another tensor"
        added_in_place = "residual"
        proof.append(residual)
    if not _is_next(nodes, following):
        (x,) = node.all_input_nodes
        if not _stays_same(owner, x):
            return "its input may change before the sum"
        proof.append(x)
    chain = [*nodes, following]
    after = _follow(owner, chain)
    if isinstance(after, str):
        return after.replace("its output", "the sum")
    activation = _activation(owner, chain[-1], after)
    if activation is None:
        return "no activation follows the sum that can be fused"
    return Match(layer, *activation, [*chain, after], proof, following, residual, added_in_place)


def replace(graph: fx.Graph, found: Match) -> None:
    """Makes one call of the nodes of a match."""
    first, last = found.nodes[0], found.nodes[-1]
    if found.sum is None:
        last.replace_all_uses_with(found.nodes[-2])
        graph.erase_node(last)
        return
    with graph.inserting_before(found.sum):
        (x,) = first.all_input_nodes
        fused = graph.call_module(str(first.target), (x, found.residual))
    last.replace_all_uses_with(fused)
    for node in reversed(found.nodes):
        graph.erase_node(node)


def _why_not_fused(layer: SyncBatchNorm) -> str | None:
    if is_fused(layer):
        return "is fused already"
    if layer.activation is not None:
        return "has an activation"
    if type(layer) is not SyncBatchNorm:
        return f"is a {type(layer).__name__}"
    if "forward" in vars(layer):
        return "its forward was set on the object"
    if is_hooked(layer):
        return "has hooks"
    return None


def _follow(owner: nn.Module, nodes: list[fx.Node]) -> fx.Node | str:
    """What alone uses the last node, or why nothing does; extends nodes by identities between."""
    while True:
        users = list(nodes[-1].users)
        if len(users) > 1:
            return "its output is used more than once"
        if not users or users[0].op == "output":
            return "no activation follows in the same forward"
        module = called(owner, users[0])
        if type(module) is not nn.Identity or is_hooked(module):
            return users[0]
        nodes.append(users[0])


def _operands(node: fx.Node) -> tuple[object, object, bool] | None:
    """Both operands of a sum, and whether it goes into the first."""
    adds = (node.op == "call_function" and node.target in (operator.add, torch.add)) or (
        node.op == "call_method" and node.target == "add"
    )
    adds_in_place = (node.op == "call_function" and node.target is operator.iadd) or (
        node.op == "call_method" and node.target == "add_"
    )
    if not (adds or adds_in_place):
        return None
    named = dict(node.kwargs)
    if named.pop("alpha", 1) != 1:
        return None
    operands = list(node.args)
    for name in ("input", "other"):
        if name in named:
            operands.append(named.pop(name))
    return (operands[0], operands[1], adds_in_place) if len(operands) == 2 and not named else None


def _activation(owner: nn.Module, x: fx.Node, node: fx.Node) -> tuple[str, float] | None:
    """Name and negative slope of the activation that a node applies to x, and to nothing else."""
    module = called(owner, node)
    if module is not None:
        found = None if is_hooked(module) or "forward" in vars(module) else activation_of(module)
        return None if found is None or found[0] is None else (found[0], found[1])
    names: dict[Any, str] = {}
    if node.op == "call_function":
        names = _FUNCTIONS
    elif node.op == "call_method":
        names = _METHODS
    name = names.get(node.target)
    options = dict(node.kwargs)
    positional = list(node.args)
    if name is None or (options.pop("input", None) or positional.pop(0)) is not x:
        return None
    slope: Any = 0.01
    if name == "leaky_relu":
        slope = options.pop("negative_slope", positional.pop(0) if positional else slope)
    options.pop("inplace", None)
    if options.pop("approximate", "none") != "none" or options or not isinstance(slope, float):
        return None
    # What may be left is inplace.
    return (name, slope) if all(isinstance(value, bool) for value in positional) else None


def _is_next(nodes: list[fx.Node], following: fx.Node) -> bool:
    """Whether nothing else is called between nodes and what follows them."""
    between = nodes[0].next
    while between in nodes or between.op == "get_attr":
        between = between.next
    return between is following


def _stays_same(owner: nn.Module, x: fx.Node) -> bool:
    """Whether nothing can change a tensor but the one node that uses it."""
    source = called(owner, x)
    if type(source) not in _MAKES_NEW or len(x.users) > 1:
        return False
    return source is not None and not is_hooked(source)
