"""What may follow the affine map in the same pass: a residual added, then an activation.

``y = activation(z + residual)`` with z the normalized, scaled and shifted input. Backward starts
with the gradient of the sum, ``dz = dy * activation'(z + residual)``, for which it computes z anew.
"""

from typing import NamedTuple

from torch import Tensor

ACTIVATIONS = ("relu", "leaky_relu", "silu", "gelu", "hardswish")
# Those whose derivative depends on the sign of their argument alone.
PIECEWISE_LINEAR = ("relu", "leaky_relu")


class Epilogue(NamedTuple):
    """An activation, and the tensors of x's shape that go with it.

    ``residual`` is of x's dtype. ``mask``, uint8 and of x's memory format, tells where the argument
    of a piecewise linear activation is positive: forward writes it, if given, and backward then
    needs no residual.
    """

    activation: str | None = None
    negative_slope: float = 0.01
    residual: Tensor | None = None
    mask: Tensor | None = None

    def saved(self) -> tuple[str | None, Tensor | None]:
        """What backward computes the activation's argument from, beside x: its name, and itself."""
        if self.mask is not None:
            return "mask", self.mask
        return (None, None) if self.residual is None else ("residual", self.residual)


NONE = Epilogue()
