"""Process groups for the layers."""

import torch.distributed as dist


def new_sync_groups(group_size: int | None = None) -> dist.ProcessGroup:
    """Creates groups of consecutive ranks, and returns the one that this rank is in.

    Every rank must call this, with the same size: creating a group is itself collective, and all
    groups are created by all ranks in the same order.

    With ``group_size=None`` the group holds all ranks, over a communicator of its own. The layers'
    small all-reduces then do not queue behind the large ones of DistributedDataParallel.

    Args:
        group_size: Ranks in a group; divides the world size.

    Returns:
        The group of this rank, for ``process_group``.

    Raises:
        ValueError: group_size is not positive or does not divide the world size; no group is
            created.
    """
    world_size = dist.get_world_size()
    size = world_size if group_size is None else group_size
    if size < 1 or world_size % size:
        raise ValueError(
            f"expected a group size that divides the world size of {world_size} (got {size})"
        )
    groups = [
        dist.new_group(list(range(first, first + size))) for first in range(0, world_size, size)
    ]
    return groups[dist.get_rank() // size]
