"""Which implementation of the operations runs on a device."""

import os
from functools import cache

VARIABLE = "SYNCBN_TRITON_BACKEND"
CHOICES = ("auto", "triton", "aten")


@cache
def backend_for(device_type: str) -> str:
    """``"triton"`` or ``"aten"`` for tensors on a type of device.

    ``SYNCBN_TRITON_BACKEND`` decides, read once: ``triton`` and ``aten`` force the choice, ``auto``
    (the default) takes Triton on a GPU, and on the CPU only under ``TRITON_INTERPRET=1``.

    Raises:
        ValueError: The variable holds none of these.
        RuntimeError: Triton is asked for where it cannot run, or is not installed.
    """
    choice = os.environ.get(VARIABLE, "auto")
    if choice not in CHOICES:
        raise ValueError(f"expected {VARIABLE} to be one of {', '.join(CHOICES)} (got {choice!r})")
    if choice == "aten":
        return "aten"
    interpreted = device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if device_type == "cpu" and not interpreted:
        if choice == "auto":
            return "aten"
        raise RuntimeError(
            f"{VARIABLE}=triton cannot run on CPU tensors, except interpreted: set "
            "TRITON_INTERPRET=1 before the first import, or move the tensors to a GPU"
        )
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"tensors on {device_type} need Triton, which is not installed: pip install triton, "
            f"or set {VARIABLE}=aten"
        ) from error
    return "triton"
