"""The models compute what their papers say, in each dtype, and start from the same values however they are built."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from common.errors import ConfigError
from common.models import (
    LanguageModel,
    build_model,
    check_seq,
    model_limits,
)
from common.models.gpt import GPT, GPTConfig
from common.models.llama import CONFIGS as LLAMAS
from common.models.llama import (
    Attention,
    LlamaConfig,
    RMSNorm,
    RopeScaling,
    rope_frequencies,
    rope_table,
    rotate,
)

DEBUG = ("llama-debug", "gpt-debug", "gpt-debug-tied")
SHAPED = (
    "llama-debug,dim=30,n_layers=1,n_heads=3,n_kv_heads=1,ffn_dim=7,tied=true,bias=true",
    "gpt-debug,dim=21,n_layers=2,ffn_dim=5,bias=false",
)
"""Both families with everything set that the debug models have not."""
F64 = torch.float64


def tokens(batch: int = 2, seq: int = 33) -> torch.Tensor:
    return torch.randint(0, 256, (batch, seq), generator=torch.Generator().manual_seed(5))


def normal(*shape: int, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=F64).to(dtype)


def debug_model(name: str, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """A model whose every parameter matters: zeros and ones of the initialisation are moved off."""
    model = build_model(name, seed=3, dtype=F64)
    assert isinstance(model, LanguageModel)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn(param.shape, generator=generator, dtype=F64))
    return model.to(dtype)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().to(F64) for name, value in model.state_dict().items()}


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of [batch, heads, seq, head_dim], spelled out."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    future = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ v


def complex_rotation(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of [batch, heads, seq, head_dim] as a product with unit complex numbers."""
    seq, width = x.shape[-2:]
    angles = [[position * theta ** (-2 * i / width) for i in range(width // 2)] for position in range(seq)]
    turns = torch.exp(1j * torch.tensor(angles, dtype=F64))
    pairs = torch.view_as_complex(x.to(F64).reshape(*x.shape[:-1], width // 2, 2).contiguous())
    return torch.view_as_real(pairs * turns).reshape(x.shape)


def split_heads(x: torch.Tensor, n_heads: int) -> torch.Tensor:
    batch, seq, width = x.shape
    return x.reshape(batch, seq, n_heads, width // n_heads).permute(0, 2, 1, 3)


def merge_heads(x: torch.Tensor) -> torch.Tensor:
    batch, n_heads, seq, width = x.shape
    return x.permute(0, 2, 1, 3).reshape(batch, seq, n_heads * width)


def linear(w: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros((), dtype=F64))


def attention_by_hand(x: torch.Tensor, w: dict[str, torch.Tensor], at: str, config: LlamaConfig) -> torch.Tensor:
    q = complex_rotation(split_heads(linear(w, f"{at}wq", x), config.n_heads), config.rope_theta)
    k = complex_rotation(split_heads(linear(w, f"{at}wk", x), config.n_kv_heads), config.rope_theta)
    v = split_heads(linear(w, f"{at}wv", x), config.n_kv_heads)
    served_by = [head // (config.n_heads // config.n_kv_heads) for head in range(config.n_heads)]
    return linear(w, f"{at}wo", merge_heads(softmax_attention(q, k[:, served_by], v[:, served_by])))


def llama_by_hand(w: dict[str, torch.Tensor], ids: torch.Tensor, config: LlamaConfig) -> torch.Tensor:
    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).sum(-1, keepdim=True) / config.dim + config.norm_eps).sqrt() * w[f"{name}.weight"]

    x = w["tok_embeddings.weight"][ids]
    for i in range(config.n_layers):
        at = f"layers.{i}."
        x = x + attention_by_hand(norm(x, f"{at}attention_norm"), w, f"{at}attention.", config)
        y = norm(x, f"{at}ffn_norm")
        gate, up = linear(w, f"{at}feed_forward.w1", y), linear(w, f"{at}feed_forward.w3", y)
        x = x + linear(w, f"{at}feed_forward.w2", gate / (1 + torch.exp(-gate)) * up)
    return norm(x, "norm") @ w["output.weight"].T


def gpt_by_hand(w: dict[str, torch.Tensor], ids: torch.Tensor, config: GPTConfig) -> torch.Tensor:
    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        normed = centred / (centred.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt()
        return normed * w[f"{name}.weight"] + w.get(f"{name}.bias", torch.zeros((), dtype=F64))

    x = w["wte.weight"][ids] + w["wpe.weight"][: ids.shape[1]]
    for i in range(config.n_layers):
        qkv = linear(w, f"h.{i}.attn.c_attn", norm(x, f"h.{i}.ln_1"))
        q, k, v = (split_heads(qkv[..., j * config.dim : (j + 1) * config.dim], config.n_heads) for j in range(3))
        x = x + linear(w, f"h.{i}.attn.c_proj", merge_heads(softmax_attention(q, k, v)))
        y = linear(w, f"h.{i}.mlp.c_fc", norm(x, f"h.{i}.ln_2"))
        gelu = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + linear(w, f"h.{i}.mlp.c_proj", gelu)
    return norm(x, "ln_f") @ w["lm_head.weight"].T


def by_hand(model: LanguageModel, w: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    if isinstance(model.config, LlamaConfig):
        return llama_by_hand(w, ids, model.config)
    assert isinstance(model.config, GPTConfig)
    return gpt_by_hand(w, ids, model.config)


@pytest.mark.parametrize("name", (*DEBUG, *SHAPED))
def test_forward_equals_the_formulas_written_out(name: str) -> None:
    """In float64 the logits are those of the papers' formulas, to rounding of the last bits."""
    model = debug_model(name, F64)
    torch.testing.assert_close(model(tokens()), by_hand(model, weights(model), tokens()), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", (*DEBUG, *SHAPED))
def test_gradients_equal_those_of_the_formulas(name: str) -> None:
    """In float64 every parameter's gradient is that of the formulas; a tied weight's is the sum over both uses."""
    model = debug_model(name, F64)
    F.cross_entropy(model(tokens())[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten()).backward()
    named = {key: value.clone().requires_grad_() for key, value in weights(model).items()}
    F.cross_entropy(by_hand(model, named, tokens())[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten()).backward()
    heads = {"wte.weight": "lm_head.weight", "tok_embeddings.weight": "output.weight"} if model.config.tied else {}
    for key, param in model.named_parameters():
        expected = named[key].grad
        if key in heads:
            head = named[heads[key]].grad
            assert expected is not None and head is not None
            expected = expected + head
        torch.testing.assert_close(param.grad, expected, rtol=1e-9, atol=1e-13, msg=key)


@pytest.mark.parametrize("name", DEBUG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_in_low_precision_stays_near_float64(name: str, dtype: torch.dtype) -> None:
    """Logits keep the parameters' dtype, and their error is a few dozen roundings of that dtype.

    Some 10 roundings per block add up along 3 blocks and the ends: 32 unit roundings, relative to the largest logit.
    """
    model = debug_model(name, dtype)
    logits = model(tokens()).detach()
    exact = by_hand(model, weights(model), tokens())
    assert logits.dtype is dtype
    assert float((logits.to(F64) - exact).abs().max() / exact.abs().max()) < 32 * torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("n_kv_heads", [1, 2, 3, 6])
def test_grouped_attention_equals_repeated_heads(n_kv_heads: int) -> None:
    """Query head h uses key and value head h // (heads / kv heads): one, some or all, spelled out with softmax."""
    config = LlamaConfig(
        vocab_size=8, dim=36, n_layers=1, n_heads=6, n_kv_heads=n_kv_heads, ffn_dim=8, max_seq_len=64, rope_theta=100.0
    )
    attention = Attention(config)
    for param in attention.parameters():
        param.data = normal(*param.shape)
    x = normal(2, 17, 36)
    expected = attention_by_hand(x, weights(attention), "", config)
    torch.testing.assert_close(attention(x), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", DEBUG)
def test_logits_never_depend_on_later_tokens(name: str) -> None:
    """Attention is causal: changing token 20 changes the logits from there on, and none before."""
    model, ids = debug_model(name), tokens()
    changed = ids.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 256
    same = (model(ids) == model(changed)).all(-1)
    assert same[:, :20].all() and not same[:, 20:].any()


def test_rotation_equals_complex_multiplication() -> None:
    """Neighbouring features are real and imaginary part, multiplied by exp(i * position * frequency)."""
    config = LLAMAS["llama-debug"]
    x = normal(2, 3, 40, config.head_dim)
    turned = rotate(x, rope_table(config, 40, x.device, F64))
    torch.testing.assert_close(turned, complex_rotation(x, config.rope_theta), rtol=1e-12, atol=1e-13)


def test_rotation_of_bf16_is_done_in_fp32() -> None:
    """A bf16 vector is rounded once, at the end: within half a bf16 spacing of the exact rotation, plus fp32's."""
    config = LLAMAS["llama3-8b"]
    x = normal(1, 2, 4096, config.head_dim, dtype=torch.bfloat16)
    turned = rotate(x, rope_table(config, 4096, x.device, torch.float32))
    exact = complex_rotation(x, config.rope_theta)
    assert turned.dtype is torch.bfloat16
    allowed = exact.abs() * 2**-8 + x.abs().max().to(F64) * 4 * 2**-24
    assert ((turned.to(F64) - exact).abs() <= allowed).all()


def test_rotary_table_is_exact_far_out() -> None:
    """At the last position of a long context the fp32 table is the true cosine and sine, rounded.

    Angles taken in fp32 would be off by up to 131071 * 2**-24 = 8e-3 there.
    """
    config = LLAMAS["llama3-405b"]
    table = rope_table(config, config.max_seq_len, torch.device("cpu"), torch.float32)
    for pair, frequency in enumerate(scaled_frequencies(config)):
        angle = (config.max_seq_len - 1) * frequency
        for row, true in zip(table[:, -1, pair].tolist(), (math.cos(angle), math.sin(angle)), strict=True):
            assert abs(row - true) <= 2**-25 + 1e-9


def scaled_frequencies(config: LlamaConfig) -> list[float]:
    """Llama 3.1's rule case by case, by wavelength, as its authors state it."""
    plain = [config.rope_theta ** (-2 * i / config.head_dim) for i in range(config.head_dim // 2)]
    if config.rope_scaling is None:
        return plain
    s = config.rope_scaling
    scaled = []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        if wavelength < s.original_seq_len / s.high:
            scaled.append(frequency)
        elif wavelength > s.original_seq_len / s.low:
            scaled.append(frequency / s.factor)
        else:
            smooth = (s.original_seq_len / wavelength - s.low) / (s.high - s.low)
            scaled.append((1 - smooth) * frequency / s.factor + smooth * frequency)
    return scaled


@pytest.mark.parametrize("scaling", [None, RopeScaling(), RopeScaling(factor=32, low=2, high=5, original_seq_len=512)])
def test_rotary_frequencies_follow_the_published_rule(scaling: RopeScaling | None) -> None:
    """Frequencies are theta ** (-2i / head_dim); scaling keeps fast ones, divides slow ones, mixes between."""
    config = LlamaConfig(
        vocab_size=8, dim=128, n_layers=1, n_heads=1, n_kv_heads=1, ffn_dim=8, max_seq_len=8, rope_scaling=scaling
    )
    found = rope_frequencies(config)
    torch.testing.assert_close(found, torch.tensor(scaled_frequencies(config), dtype=F64), rtol=1e-12, atol=0)
    if scaling is not None:
        plain = torch.tensor(scaled_frequencies(LLAMAS["llama3-8b"]), dtype=F64)
        ratio = found / plain
        assert ((ratio < 0.999) & (ratio * scaling.factor > 1.001)).any(), "the case reaches the mixed range"


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_rmsnorm_equals_its_formula(dtype: torch.dtype) -> None:
    """x / sqrt(mean(x^2) + eps) * weight, taken in fp32 or wider.

    The output's dtype rounds once after the division (half an eps) and, unless the weight is one, once more after the
    product; the wider dtype adds a few roundings of its own. Some rows are large, some small against the formula's eps.
    """
    x = torch.cat([normal(64, 50), 1e15 * normal(4, 50), 1e-4 * normal(4, 50)]).to(dtype)
    exact = x.to(F64) / (x.to(F64).pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    unit = torch.finfo(dtype).eps / 2
    wide = 8 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    for weight, roundings in ((torch.ones(50, dtype=dtype), 1), (normal(50, dtype=dtype), 2)):
        norm = RMSNorm(50, eps=1e-5)
        norm.weight.data = weight
        found, expected = norm(x).detach(), exact * weight.to(F64)
        assert found.dtype is dtype
        assert ((found.to(F64) - expected).abs() <= expected.abs() * ((1 + unit) ** roundings - 1 + wide)).all()


@pytest.mark.parametrize("name", ["llama-debug", "gpt-debug"])
def test_sequence_above_the_limit_is_refused(name: str) -> None:
    """A sequence of `max_seq_len` runs; one token more is a ConfigError that names both numbers."""
    model = debug_model(name)
    limit = model.config.max_seq_len
    assert model(tokens(1, limit)).shape == (1, limit, 256)
    message = f"at most {limit} tokens, found {limit + 1}"
    with pytest.raises(ConfigError, match=message):
        model(tokens(1, limit + 1))
    with pytest.raises(ConfigError, match=message):
        check_seq(limit + 1, model_limits(model).max_seq_len)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama-debug", torch.float32),
        ("llama-debug", torch.bfloat16),
        ("gpt-debug", torch.float32),
        ("gpt-debug-tied", torch.bfloat16),
    ],
)
def test_model_compiles_whole_and_keeps_its_bits(name: str, dtype: torch.dtype) -> None:
    """Under `torch.compile(fullgraph=True)` with aot_eager, logits and every gradient have the bits of eager mode."""
    model = debug_model(name, dtype)
    found = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        logits = run(tokens())
        F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens()[:, 1:].flatten()).backward()
        found.append([logits.detach(), *(param.grad for param in model.parameters())])
    for plain, compiled in zip(*found, strict=True):
        assert plain is not None and compiled is not None and torch.equal(plain, compiled)


@pytest.mark.parametrize("name", DEBUG)
def test_modules_take_one_tensor_each(name: str) -> None:
    """Every module's only input is its activation (or token ids): no table that FSDP would cast with the inputs."""
    model, ids = debug_model(name), tokens()
    seen: Counter[tuple[str, torch.dtype]] = Counter()

    def look(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        assert not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor)
        assert args[0].shape[:2] == ids.shape or args[0].shape == ids.shape[1:]
        seen[type(module).__name__, args[0].dtype] += 1

    for module in model.modules():
        module.register_forward_pre_hook(look, with_kwargs=True)
    model(ids)
    assert seen["Block", torch.float32] == model.config.n_layers
    assert not list(model.buffers())


@pytest.mark.parametrize("name", DEBUG)
def test_weights_are_read_once_per_forward(name: str) -> None:
    """Each module reads each of its parameters once: under FSDP a read may be a gather."""
    model = debug_model(name)
    reads: Counter[str] = Counter()

    class Count(nn.Module):
        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            reads[self.key] += 1
            return value

    keys = [key for key, _ in model.named_parameters(remove_duplicate=False)]
    for key in keys:
        owner, _, leaf = key.rpartition(".")
        parametrize.register_parametrization(model.get_submodule(owner), leaf, Count(key), unsafe=True)
    reads.clear()
    model(tokens())
    assert reads == Counter(keys)


def test_tied_head_is_one_parameter() -> None:
    """The tied head is the embedding itself on every device and in every dtype, under both names in the state dict."""
    for dtype, device in ((torch.float32, "cpu"), (torch.bfloat16, "cpu"), (F64, "cpu"), (torch.bfloat16, "meta")):
        model = build_model("gpt-debug-tied", seed=0, dtype=dtype, device=device)
        assert isinstance(model, GPT)
        assert model.lm_head.weight is model.wte.weight
        assert model.lm_head.weight.dtype is dtype
        assert {"wte.weight", "lm_head.weight"} <= set(model.state_dict())
        assert "lm_head.weight" not in dict(model.named_parameters())
    untied = build_model("gpt-debug", seed=0)
    assert isinstance(untied, GPT)
    assert untied.lm_head.weight is not untied.wte.weight


@pytest.mark.parametrize("name", ["llama-debug", "gpt-debug", "gpt-debug-tied"])
def test_debug_models_shard_unevenly(name: str) -> None:
    """On 3 and on 4 ranks some parameter's rows leave a remainder, so that uneven shards are always exercised."""
    rows = [param.shape[0] for param in build_model(name, seed=0, device="meta").parameters()]
    assert any(count % 3 for count in rows) and any(count % 4 for count in rows)


def test_names_are_those_of_torchtitan_and_gpt2() -> None:
    """State-dict keys of a block and of the ends, in order of use."""
    llama = list(build_model("llama-debug", seed=0, device="meta").state_dict())
    assert [key.removesuffix(".weight") for key in llama if not key.startswith(("layers.1.", "layers.2."))] == [
        "tok_embeddings",
        *(f"layers.0.{part}" for part in ("attention_norm", "attention.wq", "attention.wk", "attention.wv")),
        "layers.0.attention.wo",
        *(f"layers.0.{part}" for part in ("ffn_norm", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")),
        "norm",
        "output",
    ]
    gpt = list(build_model("gpt-debug", seed=0, device="meta").state_dict())
    parts = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    block = [f"h.0.{part}.{kind}" for part in parts for kind in ("weight", "bias")]
    expected = ["wte.weight", "wpe.weight", *block, "ln_f.weight", "ln_f.bias", "lm_head.weight"]
    assert [key for key in gpt if not key.startswith(("h.1.", "h.2."))] == expected
