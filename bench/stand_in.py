"""A driver that compiles and records kernels where there is no GPU.

After `install(target)`, a launch on CPU tensors goes through Triton's own host path: it binds the
arguments, specialises on their types, alignment and divisibility, and compiles for the target. Only
the last step is replaced: the launch is recorded, and nothing runs.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from syncbn_triton.kernels.plan import forget_plans
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class Launch(NamedTuple):
    """One recorded launch: what was compiled, with which constants, over which grid, on what."""

    name: str
    binary: bytes
    constants: dict[str, Any]
    grid: tuple[int, int, int]
    num_warps: int
    shared: int
    arguments: tuple[Any, ...]


@dataclass
class StandInDriver:
    """The part of Triton's driver interface that compiling and launching use."""

    target: GPUTarget
    device: int
    launches: list[Launch] = field(default_factory=list)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def utils(self) -> "StandInDriver":
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        # An H200's, from its data sheet.
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """The machine code stands for the module and the function it would be loaded as."""
        registers, spills, max_threads = 0, 0, 1024
        return kernel, kernel, registers, spills, max_threads

    def unload_module(self, module: bytes) -> None:
        """Nothing was loaded."""

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        constants = {src.fn.arg_names[path[0]]: value for path, value in src.constants.items()}

        def record(x: int, y: int, z: int, stream: int, function: bytes, *rest: Any) -> None:
            # After the packed metadata, the launch's metadata and two hooks.
            sizes = (x, y, z), metadata.num_warps, metadata.shared
            self.launches.append(Launch(metadata.name, function, constants, *sizes, rest[4:]))

        return record


def install(target: str) -> StandInDriver:
    """Compiles for a target named in `TARGETS` and records launches, from here on.

    There is no way back: Triton cannot name a default driver where there is no GPU. Targets can
    follow one another, each as a device of its own.
    """
    stand_in = StandInDriver(TARGETS[target], list(TARGETS).index(target))
    driver.set_active(stand_in)
    forget_plans()
    return stand_in
