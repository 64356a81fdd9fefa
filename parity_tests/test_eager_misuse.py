"""What users do wrong with the eager engine, and what they are told."""

from __future__ import annotations

import pytest

from common.harness.launch import RankPool
from parity_tests import eager_misuse_cases as misuse

MESSAGES = {
    "twice": ("FSDPLinear is sharded already", "once"),
    "parallelize_twice": ("sharded already", "build a new model"),
    "list_container": ("ModuleList has no forward", "each module inside"),
    "scalar": ("Linear.scale", "no dimensions", "shape [1]"),
    "strided": ("Linear.weight", "not contiguous", "copy"),
    "two_dtypes": ("'bias'", "torch.bfloat16", "'weight'", "different groups"),
    "meta": ("Linear.weight", "meta device", "to_empty"),
    "shared": ("Linear.weight", "already managed", "FSDPEmbedding", "fully_shard([a, b])"),
    "outside_in": ("already managed", "FSDPNet", "from the inside out"),
    "inner_first": ("'blocks.0'", "call the outermost sharded module first"),
    "no_single_root": ("FSDPLayerNorm", "FSDPLinear", "holds both"),
    "converted_part": ("parameter 'blocks.1.up.weight'", "torch.float64", "different groups"),
    "replaced": ("parameter blocks.1.up.weight", "replaced", "before sharding"),
    "assigned_plain": ("parameter gain", "replaced", "assign=True"),
    "sparse": ("Embedding.weight", "dense", "sparse=False"),
    "opaque": ("module FSDPOpaque", "list_iterator", "dataclasses"),
    "deepcopy": ("FSDPNet", "cannot be copied", "state_dict"),
    "no_mesh": ("mesh", "none", "one dimension"),
    "reshard_number": ("reshard_after_forward", "bool", "divisor", "5"),
    "early_optimizer": ("optimizer SGD", "22 parameters", "after fully_shard"),
    "optimizer_while_whole": ("optimizer SGD", "5 parameters", "while they were whole", "between unshard and reshard"),
    "no_such_dimension": ("Linear.bias", "1 dimensions", "Shard(dim=1)"),
    "no_placement": ("Linear.weight", "shard_placement_fn", "found 1"),
    "pinned_without_gpu": ("CPUOffloadPolicy", "pin_memory=False"),
    "three_dimensions": ("mesh", "3 dimensions", "build_mesh"),
    "pickled": ("FSDPNet", "cannot be pickled", "state_dict"),
    "divided_by_nothing": ("divide factor", "positive", "0.0"),
    "prefetch_of_plain": ("prefetch", "Linear", "shard it first"),
    "reset_inside": ("reset_iter_state", "FSDPBlock is not the root", "FSDPNet"),
    "assigned_after_optimizer": ("optimizer SGD", "22 parameters", "load_state_dict(assign=True)"),
    "assigned_after_a_step": ("optimizer SGD", "22 parameters", "load_state_dict(assign=True)"),
    "converted_before_backward": ("module FSDP", "converted", "between forward and backward"),
    "sharded_while_whole": ("already managed", "FSDPBlock"),
    "gradients_of_gradients": ("module FSDPNet", "create_graph", "not sharded"),
    "penalty_with_kept_weights": ("module FSDPLinear", "create_graph", "not sharded"),
    "no_messages": ("max_input_buffers", "from 1 on", "0"),
    "no_gathers": ("limit", "from 1 on", "True"),
    "reshard_to_two": ("reshard_after_forward", "bool", "2"),
    "no_such_method": ("FSDPNet", "'generate'"),
    "custom_gather": ("set_custom_all_gather", "left out"),
    "stream_of_hook": ("set_all_reduce_hook", "stream"),
}


def test_every_misuse_has_its_message() -> None:
    """Each misuse that is tried below has an expected message and the other way round."""
    assert MESSAGES.keys() == misuse.MISUSES.keys()


@pytest.fixture(scope="module")
def refused(pool: RankPool) -> list[dict[str, str]]:
    """What each misuse ends in, by rank."""
    return pool.run(misuse.errors, ranks=2)


@pytest.mark.parametrize("name", MESSAGES)
def test_misuse_is_refused_and_named(refused: list[dict[str, str]], name: str) -> None:
    """A misuse raises EngineError with the module or parameter, what was found, and the way out."""
    for message in (of_rank[name] for of_rank in refused):
        assert message.startswith("EngineError: "), message
        assert all(part in message for part in MESSAGES[name]), message
