"""The four launchers by name. Importing this module imports triton."""

from .backward_input import backward_input
from .backward_reduce import backward_reduce
from .channel_stats import channel_stats
from .normalize import normalize

__all__ = ["backward_input", "backward_reduce", "channel_stats", "normalize"]
