"""Models of Hugging Face's transformers, built from their configs: no weights are loaded. Needs `pip install .[hf]`.

    fsdp-parity compare --model examples.hf:llama
    fsdp-parity compare --model examples.hf:gpt2
    fsdp-parity compare --model examples.hf:llama_task

The first two are plain modules: token ids in, an output with `logits` out, which is all that training on text needs.
`llama_task` is called as transformers' own trainer calls a model, with keywords, and takes the loss from the output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

SEQ, VOCAB = 32, 256
PLAIN: dict[str, Any] = {"attn_implementation": "eager", "use_cache": False}
"""Attention as written in Python, and no cache of keys and values, which only generation needs."""


def llama() -> nn.Module:
    """A Llama of two blocks with grouped-query attention."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        **PLAIN,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def gpt2() -> nn.Module:
    """A GPT-2 of two blocks, its head tied to the embedding, without dropout."""
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=256,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        **PLAIN,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def llama_task() -> tuple[nn.Module, Any, Any]:
    """The same Llama on random tokens, with labels among its inputs and its own loss."""
    return llama(), batch, loss


def batch(step: int, size: int) -> tuple[dict[str, torch.Tensor], None]:
    """`size` sequences of random tokens, all of them attended to."""
    tokens = torch.randint(VOCAB, (size, SEQ))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}, None


def loss(output: Any, targets: None) -> torch.Tensor:
    """What the model made of its labels: the mean over tokens, of which each sequence has as many."""
    found: torch.Tensor = output.loss
    return found
