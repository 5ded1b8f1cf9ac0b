"""Fusing the activations of a model into its batch norms, and undoing it.

`fuse` decides and does it, from the graphs that `forwards` traces and the patterns that `patterns`
finds in them; `fused` is what then stands in the model.
"""

from .fuse import FusionReport, fuse_activations, unfuse_activations

__all__ = ["FusionReport", "fuse_activations", "unfuse_activations"]
