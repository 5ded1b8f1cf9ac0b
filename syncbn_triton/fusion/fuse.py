"""Activations, and sums before them, into the layers of a model, and back."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..module import SyncBatchNorm
from . import fused
from .forwards import Refused, is_plain_sequential, trace
from .patterns import Match, called, match, replace


@dataclass
class LayerReport:
    """What became of a layer: fused if there is no reason why not."""

    layer: str
    activation: str | None = None
    residual: bool = False
    reason: str | None = None


@dataclass
class FusionReport:
    """What became of each batch norm of a model, one a row; prints as a table."""

    layers: list[LayerReport] = field(default_factory=list)

    @property
    def fused(self) -> list[LayerReport]:
        """The layers that were fused."""
        return [row for row in self.layers if row.reason is None]

    def __str__(self) -> str:
        rows = [("layer", "activation", "residual", "")]
        for row in self.layers:
            what = (row.activation or "", "yes" if row.residual else "", row.reason or "fused")
            rows.append((row.layer or "(the model)", *what))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


def fuse_activations(model: nn.Module) -> FusionReport:
    """Fuses ``activation(bn(x))`` and ``activation(bn(x) + residual)`` into one pass over memory.

    Changes a model whose batch norms are `SyncBatchNorm` already, in place. Each module's forward
    is traced by torch.fx on its own, and a layer is fused where the graph proves that outputs stay
    the same: its output goes to the activation, or to the sum and then the activation, and nowhere
    else. An activation module that is called only there gives way to an identity; otherwise the
    module whose forward calls it, or adds, gets a forward without them, by a class derived from
    its own. Parameters, names and state_dict stay, ``copy.deepcopy`` and pickle work, and
    `unfuse_activations` undoes it.

    A residual of another shape or dtype than the layer's input is added as before. Where a
    forward can't be traced, the layers that it calls itself are left alone, and so are layers that
    are called in several places, have hooks or are parametrized. What calls a submodule's layers
    without that submodule's forward, in a forward that can't be traced or from outside, is not
    seen. A new forward keeps the values that plain attributes have now, and calls the layers of
    an ``nn.Sequential`` one by one where a sum is fused into its last, so that hooks that the
    Sequential gets later are not called: register them before, and it is left alone.

    Args:
        model: Changed in place.

    Returns:
        What became of each batch norm, and why.
    """
    return _Fusion(model).run()


def unfuse_activations(model: nn.Module) -> nn.Module:
    """Undoes `fuse_activations`: modules and forwards are those from before, the same objects.

    Args:
        model: Changed in place.

    Returns:
        The model.
    """
    for module in list(model.modules()):
        if isinstance(module, SyncBatchNorm) and fused.is_fused(module):
            fused.unfuse_layer(module)
        if fused.is_rewritten(module):
            fused.restore(module)
        for name, child in module._modules.items():
            if isinstance(child, fused.FusedActivation):
                (original,) = child.original
                module._modules[name] = original.train(child.training)
    return model


class _Fusion:
    """One run over a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        # How many modules hold a module, and how many nodes call it.
        self.holders = Counter(
            child
            for module in self.names
            for child in module._modules.values()
            if child is not None
        )
        self.calls: Counter[nn.Module] = Counter()
        self.graphs: dict[nn.Module, fx.Graph] = {}
        self.refusals: dict[nn.Module, str] = {}

    def run(self) -> FusionReport:
        self._trace_all()
        rows: dict[nn.Module, LayerReport] = {
            layer: LayerReport(name, reason=self._why_not_found(layer))
            for layer, name in self.names.items()
            if isinstance(layer, _BatchNorm)
        }
        for owner, graph in self.graphs.items():
            matches = self._matches(owner, graph, rows)
            self._fuse(owner, matches)
            for found in matches:
                rows[found.layer] = LayerReport(
                    self.names[found.layer], found.activation, found.residual is not None
                )
        return FusionReport(list(rows.values()))

    def _trace_all(self) -> None:
        """Traces every module above a layer, parents first."""
        for owner in self.names:
            if isinstance(owner, _BatchNorm) or type(owner).forward is nn.Module.forward:
                continue
            if not any(_layers(owner)):
                continue
            if is_plain_sequential(owner) and any(self.calls[layer] for layer in _layers(owner)):
                # Part of a forward above.
                continue
            try:
                self.graphs[owner] = graph = trace(owner)
            except Refused as refused:
                self.refusals[owner] = str(refused)
            else:
                self.calls.update(module for _, module in _called(owner, graph))

    def _why_not_found(self, layer: nn.Module) -> str:
        """Why no graph calls a layer, to stand unless one does."""
        if not isinstance(layer, SyncBatchNorm):
            return f"is a {type(layer).__name__}, not a SyncBatchNorm"
        path = self.names[layer].split(".")
        for length in reversed(range(len(path))):
            above = self.model.get_submodule(".".join(path[:length]))
            if above in self.refusals:
                return f"in {type(above).__name__}, {self.refusals[above]}"
        return "no forward calls it"

    def _matches(
        self, owner: nn.Module, graph: fx.Graph, rows: dict[nn.Module, LayerReport]
    ) -> list[Match]:
        """What can be fused in a forward; notes the reasons why the rest can't."""
        found: list[Match] = []
        for node, layer in _called(owner, graph):
            if not isinstance(layer, SyncBatchNorm):
                continue
            result: Match | str
            if self.calls[layer] > 1 or self.holders[layer] > 1:
                result = "stands or is called in several places"
            else:
                result = match(owner, node)
            if isinstance(result, Match) and not self._gives_way(owner, result):
                result = self._why_not_rewritten(owner) or result
            if isinstance(result, Match):
                found.append(result)
            else:
                rows[layer].reason = result
        for one in list(found):
            rivals = [m for m in found if m.sum is not None and m.sum is one.sum]
            best = min(rivals, key=lambda m: len(_sequentials(owner, m)), default=one)
            if best is not one:
                found.remove(one)
                rows[one.layer].reason = f"is the residual of {self.names[best.layer]}"
        return found

    def _gives_way(self, owner: nn.Module, found: Match) -> bool:
        """Whether an identity can take the place of the activation, and all else stay."""
        activation = called(owner, found.nodes[-1])
        if activation is None or found.sum is not None:
            return False
        return self.calls[activation] == self.holders[activation] == 1

    def _why_not_rewritten(self, owner: nn.Module) -> str | None:
        if type(owner).forward is nn.Sequential.forward:
            # Its children may be called one by one, by a forward that can't be traced.
            return "its activation stands in several places"
        reason = fused.why_not_rewritten(owner)
        return reason and f"{type(owner).__name__} {reason}"

    def _fuse(self, owner: nn.Module, matches: list[Match]) -> None:
        inlined = set()
        rewritten = set()
        for found in matches:
            if self._gives_way(owner, found):
                parent, _, name = str(found.nodes[-1].target).rpartition(".")
                children: dict[str, Any] = owner.get_submodule(parent)._modules
                children[name] = fused.FusedActivation(children[name])
            else:
                rewritten.add(found.layer)
                inlined.update(_sequentials(owner, found))
        if rewritten:
            graph = trace(owner, inlined.__contains__)
            for node, layer in _called(owner, graph):
                if layer in rewritten:
                    again = match(owner, node)
                    assert isinstance(again, Match)
                    replace(graph, again)
            fused.rewrite(owner, graph)
        for found in matches:
            fused.fuse_layer(found.layer, found.activation, found.negative_slope)
            if found.sum is not None:
                fused.add_residual(found.layer, found.added_in_place)


def _layers(module: nn.Module) -> Iterator[SyncBatchNorm]:
    return (layer for layer in module.modules() if isinstance(layer, SyncBatchNorm))


def _called(owner: nn.Module, graph: fx.Graph) -> Iterator[tuple[fx.Node, nn.Module]]:
    """The nodes of a graph that call modules, with these."""
    for node in list(graph.nodes):
        module = called(owner, node)
        if module is not None:
            yield node, module


def _sequentials(owner: nn.Module, found: Match) -> set[nn.Module]:
    """The containers between the owner of a graph and what a match calls."""
    between = set()
    for node in (*found.nodes, *found.proof):
        if node.op == "call_module":
            path = str(node.target).split(".")
            for length in range(1, len(path)):
                between.add(owner.get_submodule(".".join(path[:length])))
    return {module for module in between if is_plain_sequential(module)}
