"""What the README says of torch's layer, shown with the installed torch.

Where only a GPU could show it, the test reads torch's own source: a cell of the table falls with
the line that it rests on.
"""

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import RankPool
from torch import Tensor, nn
from torch.nn.modules import _functions
from torch.utils.checkpoint import checkpoint

LAYER = inspect.getsource(nn.SyncBatchNorm.forward)
FORWARD = inspect.getsource(_functions.SyncBatchNorm.forward)
BACKWARD = inspect.getsource(_functions.SyncBatchNorm.backward)


def test_native_batch_norm_loses_digits_where_the_mean_dwarfs_the_deviation() -> None:
    x = torch.randn(8, 3, 16, 16) + 1e4
    exact = F.batch_norm(x.double(), None, None, training=True)
    error = (F.batch_norm(x, None, None, training=True).double() - exact).abs().max()
    assert error > 2e-4


def count_no_ranks_outside_a_group(rank: int) -> None:
    assert dist.get_world_size(dist.GroupMember.NON_GROUP_MEMBER) == -1


def test_a_rank_outside_the_group_normalizes_alone(ranks: RankPool) -> None:
    """For such a rank the group has -1 members, and so nobody to synchronize with."""
    ranks.run(2, count_no_ranks_outside_a_group)
    assert "need_sync = world_size > 1" in LAYER


def refuse_the_cpu(rank: int) -> None:
    with pytest.raises(ValueError, match="expected input tensor to be on GPU"):
        nn.SyncBatchNorm(3)(torch.randn(2, 3, 4))


def fail_to_copy_a_group(rank: int) -> None:
    layer = nn.SyncBatchNorm(3, process_group=dist.new_group([0, 1]))
    with pytest.raises(TypeError, match="pickle"):
        copy.deepcopy(layer)


def test_cpu_input_is_refused(ranks: RankPool) -> None:
    ranks.run(2, refuse_the_cpu)


def test_a_layer_with_a_group_cannot_be_copied(ranks: RankPool) -> None:
    ranks.run(2, fail_to_copy_a_group)


def test_an_empty_rank_sends_the_dtype_of_its_input() -> None:
    """Beside peers that send fp32 statistics of half-precision input."""
    assert "2 * num_channels + 1, dtype=input.dtype" in FORWARD


def test_forward_waits_for_the_gpu() -> None:
    """Indexing by a mask needs its number of true elements on the host."""
    assert all(f"{name} = {name}[mask]" in FORWARD for name in ("count_all", "mean_all"))


def test_backward_communicates_only_where_the_input_needs_a_gradient() -> None:
    condition, collective = BACKWARD.index("needs_input_grad[0]"), BACKWARD.index("all_reduce(")
    assert condition < collective


def test_checkpointing_counts_a_step_twice() -> None:
    """The counter is torch's module's, in every batch norm alike."""
    layer = nn.BatchNorm1d(3)
    checkpoint(layer, torch.randn(2, 3, requires_grad=True), use_reentrant=False).sum().backward()
    assert layer.num_batches_tracked == 2


class NormAndActivation(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def test_conversion_drops_hooks_and_a_forward_of_its_own() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), NormAndActivation(3)).eval()
    model[0].register_forward_hook(lambda *_: None)
    nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert not model[0]._forward_hooks
    assert (model(torch.randn(4, 3)) < 0).any()


def test_conversion_leaves_a_shared_layer_behind() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = nn.BatchNorm1d(3)

    model = nn.SyncBatchNorm.convert_sync_batchnorm(Twice())
    assert type(model.first) is nn.SyncBatchNorm
    assert type(model.second) is nn.BatchNorm1d
