"""A module's own forward as a graph that holds in training and in evaluation.

Children are nodes, but for plain ``nn.Sequential``, which do nothing but call theirs. A forward is
refused if the graph would not tell all that it does: if it depends on its mode, on optional
arguments or on random numbers, makes tensors, changes attributes, or runs parts of it without
gradients, under autocast or checkpointed.
"""

import contextlib
import inspect
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Refused(Exception):  # noqa: N818
    """A forward has no graph that tells all it does; says why."""


def is_hooked(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in _HOOKS)


def is_plain_sequential(module: nn.Module) -> bool:
    """Whether calling a module is calling its children one after the other."""
    if getattr(type(module), "forward", None) is not nn.Sequential.forward:
        return False
    return "forward" not in vars(module) and not is_hooked(module)


def trace(owner: nn.Module, inlined: Callable[[nn.Module], bool] = is_plain_sequential) -> fx.Graph:
    """The graph of a module's forward.

    Args:
        owner: Left as it is.
        inlined: Of its descendants, those whose children are nodes in their place.

    Raises:
        Refused: No graph tells all that forward does.
    """
    if "forward" in vars(owner):
        raise Refused("its forward was set on the object")
    for parameter in list(inspect.signature(type(owner).forward).parameters.values())[1:]:
        if parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise Refused("its forward takes optional arguments")
    # With gradients in training and without in evaluation, so that setting either is noticed.
    graphs = [_trace(owner, inlined, training) for training in (True, False)]
    if len({graph.python_code("self").src for graph in graphs}) > 1:
        raise Refused("its forward depends on its mode")
    return graphs[0]


def _trace(owner: nn.Module, inlined: Callable[[nn.Module], bool], training: bool) -> fx.Graph:
    with _undisturbed(owner), torch.set_grad_enabled(training):
        for module in owner.modules():
            module.training = training
        try:
            return _Tracer(inlined).trace(owner)
        except Refused:
            raise
        except Exception as error:
            said = str(error).strip().split("\n")[0]
            raise Refused(
                f"its forward cannot be traced: {said or type(error).__name__}"
            ) from error


@contextlib.contextmanager
def _undisturbed(owner: nn.Module) -> Iterator[None]:
    """Puts back what tracing changes, and refuses a forward that changes what it should not."""
    modules = list(owner.modules())
    modes = [module.training for module in modules]
    before, states = (
        [_attributes(module) for module in modules],
        (torch.get_rng_state(), random.getstate()),
    )
    no_checkpoints = torch.autograd.graph.disable_saved_tensors_hooks("it uses checkpointing")
    try:
        with warnings.catch_warnings(), no_checkpoints:
            warnings.simplefilter("ignore")
            yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        drew = not torch.equal(states[0], torch.get_rng_state()) or states[1] != random.getstate()
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        changed = False
        for module, attributes in zip(modules, before, strict=True):
            if not _are_same(attributes, vars(module)):
                changed = True
                _put_back(module, attributes)
    if changed:
        raise Refused("its forward changes its attributes")
    if drew:
        raise Refused("its forward draws random numbers")


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value.copy() if isinstance(value, (list, dict, set)) else value
        for name, value in vars(module).items()
    }


def _are_same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    if before.keys() != after.keys():
        return False
    return all(_same(value, after[name]) for name, value in before.items())


def _same(a: Any, b: Any) -> bool:
    """Whether these are the same objects, or containers of the same."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(a[key] is b[key] for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
    if isinstance(a, set) and isinstance(b, set):
        return a == b
    return a is b


def _put_back(module: nn.Module, before: dict[str, Any]) -> None:
    own = vars(module)
    for name in own.keys() - before.keys():
        del own[name]
    for name, value in before.items():
        current = own.get(name)
        if isinstance(value, (dict, set)) and isinstance(current, (dict, set)):
            current.clear()
            current.update(value)
        elif isinstance(value, list) and isinstance(current, list):
            current[:] = value
        else:
            own[name] = value


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, inlined: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self.inlined = inlined
        self.modes = _modes()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not self.inlined(m)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and not isinstance(a, nn.Parameter):
            raise Refused("its forward makes a tensor")
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self.modes:
            raise Refused("its forward switches gradients or autocast")
        return super().create_node(*args, **kwargs)


def _modes() -> tuple[bool, bool, int]:
    # How many autocast contexts there are, which says more than whether one is enabled.
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), depth
