"""Sizes of models: published counts and limits, fields that change them, sizes that are impossible."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from common.errors import ConfigError
from common.models import (
    LanguageModel,
    build_model,
    describe_fields,
    describe_models,
    model_limits,
    model_names,
)
from common.models.gpt import CONFIGS as GPTS
from common.models.gpt import GPTConfig
from common.models.llama import CONFIGS as LLAMAS
from common.models.llama import (
    Llama,
    LlamaConfig,
    RopeScaling,
)

# --- sizes -----------------------------------------------------------------------------------------------------------

PUBLISHED = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
}
"""Exact counts of the published weights; GPT-3's, which are not published, from the sizes in its table 2.1."""


def closed_formula(config: object) -> int:
    if isinstance(config, LlamaConfig):
        d, kv = config.dim, config.n_kv_heads * (config.dim // config.n_heads)
        block = 2 * d * d + 2 * d * kv + 3 * d * config.ffn_dim + 2 * d
        return 2 * config.vocab_size * d + config.n_layers * block + d
    assert isinstance(config, GPTConfig)
    d, f = config.dim, config.ffn_dim
    block = (3 * d * d + 3 * d) + (d * d + d) + (d * f + f) + (f * d + d) + 4 * d
    heads = 1 if config.tied else 2
    return (heads * config.vocab_size + config.max_seq_len) * d + config.n_layers * block + 2 * d


def test_parameter_counts_are_the_published_ones() -> None:
    """Every model of the list has the count of its closed formula; the published ones have the published count."""
    infos = describe_models()
    counts = {info.name: info.params for info in infos}
    assert tuple(counts) == model_names()
    assert counts == {info.name: closed_formula(info.config) for info in infos}
    assert PUBLISHED.items() <= counts.items()
    assert 3e6 < counts["llama-tiny"] < 6e6


@pytest.mark.parametrize(
    ("name", "positions", "scaling"),
    [
        ("llama3-8b", 8192, None),
        ("llama3-70b", 8192, None),
        ("llama3-405b", 131_072, RopeScaling(factor=8.0, low=1.0, high=4.0, original_seq_len=8192)),
    ],
)
def test_llama_positions_are_the_published_ones(name: str, positions: int, scaling: RopeScaling | None) -> None:
    """What no parameter count shows: base 500,000 and epsilon 1e-5 in all, scaled frequencies in 3.1 alone."""
    config = LLAMAS[name]
    assert (config.max_seq_len, config.rope_scaling) == (positions, scaling)
    assert (config.rope_theta, config.norm_eps, config.head_dim, config.n_kv_heads) == (500_000.0, 1e-5, 128, 8)


@pytest.mark.parametrize("name", ["llama3-405b", "gpt3-175b"])
def test_largest_models_build_on_meta(name: str) -> None:
    """Hundreds of billions of parameters are described without a byte of memory, in the dtype asked for."""
    model = build_model(name, seed=0, dtype=torch.bfloat16, device="meta")
    assert all(param.is_meta and param.dtype is torch.bfloat16 for param in model.parameters())
    assert sum(param.numel() for param in model.parameters()) == PUBLISHED[name]


@pytest.mark.parametrize("name", [*LLAMAS, *GPTS])
def test_models_expose_their_limits(name: str) -> None:
    """Every model says its vocabulary and its longest sequence; bytes fit all of them."""
    model = build_model(name, seed=0, device="meta")
    limits = model_limits(model)
    assert isinstance(model, LanguageModel)
    assert (limits.vocab_size, limits.max_seq_len) == (model.config.vocab_size, model.config.max_seq_len)
    assert limits.vocab_size is not None and limits.vocab_size >= 256


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"n_heads": 3}, "dim 64 does not divide over 3 heads"),
        ({"n_kv_heads": 3}, "4 query heads do not divide over 3"),
        ({"n_heads": 64, "n_kv_heads": 64}, "dim over n_heads must be even, found 1"),
        ({"ffn_dim": 0}, "expected ffn_dim above 0, found 0"),
        ({"norm_eps": -1e-5}, "expected norm_eps above 0, found -1e-05"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, float], message: str) -> None:
    """No size, and heads that do not divide or cannot be turned in pairs, are a ConfigError when the config is made."""
    plain = {"vocab_size": 8, "dim": 64, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 8, "max_seq_len": 8}
    with pytest.raises(ConfigError, match=message):
        LlamaConfig(**plain | sizes)  # type: ignore[arg-type]


def test_fields_change_what_they_name_and_nothing_else() -> None:
    """`NAME,FIELD=VALUE` is the named model's config with these fields, each read as what it is."""
    spec = "llama-debug,dim=30,n_heads=3,n_kv_heads=1,tied=true,frozen=norm+layers.1.attention.wq.weight,norm_eps=1e-3"
    expected = replace(
        LLAMAS["llama-debug"],
        dim=30,
        n_heads=3,
        n_kv_heads=1,
        tied=True,
        frozen=("norm", "layers.1.attention.wq.weight"),
        norm_eps=1e-3,
    )
    for device in ("meta", "cpu"):
        model = build_model(spec, seed=0, device=device)
        assert isinstance(model, Llama) and model.config == expected
        frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
        assert frozen == ["layers.1.attention.wq.weight", "norm.weight"]


def test_a_frozen_tied_weight_is_frozen_under_both_names() -> None:
    """Either name of a tied weight freezes it; a whole block freezes all that is in it and nothing beside it."""
    for name in ("wte", "lm_head", "lm_head.weight"):
        model = build_model(f"gpt-debug-tied,frozen={name}+h.1", seed=0)
        frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
        assert frozen == ["wte.weight", *(f"h.1.{name}" for name, _ in model.get_submodule("h.1").named_parameters())]


def test_fields_that_can_be_set_are_described_with_the_models_that_have_them() -> None:
    """All fields of both configs but the one that is no single value."""
    found = describe_fields()
    for model, config in (("Llama", LlamaConfig), ("GPT", GPTConfig)):
        names = {name for name, (_, models) in found.items() if model in models}
        assert names == {field.name for field in fields(config)} - {"rope_scaling"}
