"""Initial values: the same in every process, order, depth and dtype; others by seed and name."""

from __future__ import annotations

import hashlib
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.errors import ConfigError
from common.models import (
    LanguageModel,
    build_model,
    initial_value,
    initialise,
)
from common.models.llama import (
    Llama,
    LlamaConfig,
)
from parity_tests.test_models import DEBUG, F64

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", DEBUG)
def test_initial_values_do_not_depend_on_order_or_neighbours(name: str) -> None:
    """Drawn alone, in any order, amid other use of torch's generators, a parameter gets its value in the model."""
    model = build_model(name, seed=4)
    meta = build_model(name, seed=99, device="meta")
    names = [key for key, _ in model.named_parameters()]
    random.Random(0).shuffle(names)
    for key in names[: len(names) // 2]:
        torch.rand(3)
        assert torch.equal(initial_value(meta, key, 4), model.get_parameter(key))


def test_initial_values_are_the_same_in_a_deeper_model() -> None:
    """A parameter outside the residual outputs keeps its value when blocks are added: its name alone decides."""
    values = []
    for depth in (1, 3):
        config = LlamaConfig(vocab_size=16, dim=8, n_layers=depth, n_heads=2, n_kv_heads=1, ffn_dim=12, max_seq_len=8)
        model = Llama(config)
        initialise(model, 2)
        values.append(dict(model.named_parameters()))
    shallow, deep = values
    for key, value in shallow.items():
        scale = math.sqrt(3) if key.endswith(("wo.weight", "w2.weight")) else 1.0
        torch.testing.assert_close(deep[key] * scale, value, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", DEBUG)
def test_initial_values_in_every_dtype_are_the_fp32_ones(name: str) -> None:
    """A float64 model holds the fp32 values exactly, a bf16 model their roundings."""
    plain = dict(build_model(name, seed=1).named_parameters())
    for dtype in (F64, torch.bfloat16):
        for key, param in build_model(name, seed=1, dtype=dtype).named_parameters():
            assert param.dtype is dtype and torch.equal(param, plain[key].to(dtype))


def test_initial_values_differ_by_seed_and_by_name() -> None:
    """Another seed changes every drawn parameter, and no two parameters of one model share their numbers."""
    drawn = [
        param.flatten()[:16].tolist()
        for seed in (0, 1, 10)
        for _, param in build_model("gpt-debug", seed=seed).named_parameters()
        if param.ndim == 2
    ]
    assert len({tuple(values) for values in drawn}) == len(drawn) == 3 * 15


@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny"])
def test_initial_values_have_the_stated_spread(name: str) -> None:
    """Scales are ones, biases zeros, the rest has deviation 0.02, residual outputs 0.02 / sqrt(2 * layers).

    The deviation of n normal draws strays by 1 / sqrt(2n) of itself, the mean by 1 / sqrt(n): 6 such are allowed.
    """
    model = build_model(name, seed=0)
    assert isinstance(model, LanguageModel)
    residual = ("wo.weight", "w2.weight", "c_proj.weight")
    for key, param in model.named_parameters():
        if key.endswith("bias"):
            assert (param == 0).all()
        elif "norm" in key or "ln_" in key:
            assert (param == 1).all()
        else:
            std = 0.02 / math.sqrt(12) if key.endswith(residual) else 0.02
            n, value = param.numel(), param.detach()
            assert abs(float(value.std()) / std - 1) < 6 / math.sqrt(2 * n), key
            assert abs(float(value.mean())) < 6 * std / math.sqrt(n), key


def test_initial_values_are_the_same_in_every_process() -> None:
    """A process with another hash seed draws the same bits; and building needs none of torch's compiler.

    The compiler takes seconds to import, which every rank of an eager run would pay.
    """
    script = (
        "import hashlib, sys; from common.models import build_model;"
        "build_model('llama-debug', seed=0, device='meta');"
        "model = build_model('gpt-debug-tied', seed=6);"
        "bits = b''.join(param.detach().numpy().tobytes() for param in model.parameters());"
        "print(hashlib.sha256(bits).hexdigest(), 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONHASHSEED": "1234", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    model = build_model("gpt-debug-tied", seed=6)
    bits = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
    assert done.stdout.split() == [hashlib.sha256(bits).hexdigest(), "False"]


def test_building_leaves_torchs_generator_alone() -> None:
    """Neither a model of the registry nor a user's moves the random stream of the caller."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    build_model("llama-debug", seed=0)
    build_model("parity_tests.test_user_model:user_model", seed=0)
    assert torch.equal(before, torch.get_rng_state())


def test_initialise_refuses_a_model_without_memory() -> None:
    """On meta there is nothing to write to; saying nothing would leave the model uninitialised."""
    with pytest.raises(ConfigError, match=r"'tok_embeddings\.weight' is on the meta device"):
        initialise(build_model("llama-debug", seed=0, device="meta"), 0)
