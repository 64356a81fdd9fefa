"""A user's own model, named as `module:function`, and names that are wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from common.errors import ConfigError
from common.models import (
    build_model,
    check_seq,
    model_limits,
)
from parity_tests.test_models import F64


class UserModel(nn.Module):
    """Tied weights, a frozen one, and buffers of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
        self.inner["head"].weight = self.inner["embed"].weight
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("turns", torch.exp(1j * torch.arange(4.0)))
        self.register_buffer("counts", torch.arange(4))


def user_model() -> nn.Module:
    return UserModel()


def number() -> int:
    return 3


def needs_width(width: int, *, depth: int, heads: int = 2) -> nn.Module:
    return nn.Linear(width, depth, bias=bool(heads))


THIS = "parity_tests.test_user_model"
HERE = Path(__file__)
"""Something that is no function."""


@pytest.mark.parametrize("target", ["user_model", "UserModel"])
def test_user_model_is_drawn_at_the_seed(target: str) -> None:
    """A user's function or class is called with torch's generators at `seed`, and keeps the values it draws."""
    torch.manual_seed(8)
    expected = UserModel().get_parameter("inner.embed.weight")
    torch.rand(5)
    for seed, same in ((8, True), (9, False)):
        found = build_model(f"{THIS}:{target}", seed=seed).get_parameter("inner.embed.weight")
        assert torch.equal(found, expected) is same


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
def test_user_model_is_cast_and_otherwise_kept(dtype: torch.dtype) -> None:
    """Real floating-point parameters and buffers are cast; ties, flags, complex and integer buffers stay."""
    model = build_model(f"{THIS}:user_model", seed=0, dtype=dtype)
    assert isinstance(model, UserModel)
    assert model.inner["head"].weight is model.inner["embed"].weight
    assert {param.dtype for param in model.parameters()} == {dtype}
    assert not model.frozen.requires_grad
    buffers = dict(model.named_buffers())
    assert {key: buffer.dtype for key, buffer in buffers.items()} == {
        "table": dtype,
        "turns": torch.complex64,
        "counts": torch.int64,
    }
    assert "table" not in model.state_dict()
    assert buffers["turns"].imag.abs().max() > 0


def test_user_model_builds_on_meta() -> None:
    """On meta a user's model has shapes and ties, and no memory."""
    model = build_model(f"{THIS}:user_model", seed=0, device="meta", dtype=F64)
    assert isinstance(model, UserModel)
    assert all(param.is_meta and param.dtype is F64 for param in model.parameters())
    assert model.inner["head"].weight is model.inner["embed"].weight


def test_user_model_is_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed command does not search the working directory; build_model does."""
    (tmp_path / "my_net_a.py").write_text("from torch import nn\ndef build():\n    return nn.Linear(2, 3)\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    assert isinstance(build_model("my_net_a:build", seed=0), nn.Linear)


def test_errors_inside_the_users_code_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing import in the user's module, and whatever its function raises, are the user's to see as they are."""
    (tmp_path / "my_net_b.py").write_text("import no_such_package_at_all\n")
    (tmp_path / "my_net_c.py").write_text("def build():\n    raise KeyError('inside')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package_at_all"):
        build_model("my_net_b:build", seed=0)
    with pytest.raises(KeyError, match="inside"):
        build_model("my_net_c:build", seed=0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama-debg", r"'llama-debg' is unknown \(did you mean 'llama-debug'\?\); known are llama-debug, .*gpt3-175b"),
        ("zzz", r"'zzz' is unknown; known are llama-debug"),
        ("", r"'' is unknown"),
        ("no_such_module_here:build", r"no module 'no_such_module_here' in .*PYTHONPATH"),
        ("parity_tests.nothing.here:build", r"no module 'parity_tests\.nothing'"),
        ("llama-debgu,dim=32", r"'llama-debgu,dim=32' is unknown \(did you mean 'llama-debug'\?\)"),
        (
            "llama-debug,dmi=32",
            r"found 'dmi=32' \(did you mean 'dim'\?\); fields of llama-debug are vocab_size, .*eps$",
        ),
        ("llama-debug,", r"expected FIELD=VALUE, found ''; fields"),
        ("llama-debug,tied", r"expected FIELD=VALUE, found 'tied' \(did you mean 'tied'\?\)"),
        ("gpt-debug,n_kv_heads=2", r"found 'n_kv_heads=2' \(did you mean 'n_heads'\?\); fields of gpt-debug"),
        ("llama-debug,rope_scaling=1", r"found 'rope_scaling=1'"),
        ("llama-debug,dim=32,dim=64", r"expected each field once, found dim twice"),
        ("llama-debug,dim=32.5", r"dim: expected a whole number from 1 to 9999999, found '32\.5'"),
        ("llama-debug,dim=0", r"dim: expected a whole number from 1"),
        ("llama-debug,dim=10000000", r"dim: expected a whole number from 1"),
        ("llama-debug,norm_eps=inf", r"norm_eps: expected a number above 0, found 'inf'"),
        ("llama-debug,tied=yes", r"tied: expected true or false, found 'yes'"),
        ("llama-debug,frozen=norm+", r"frozen: expected names with \+ between them, found 'norm\+'"),
        (
            "llama-debug,frozen=layrs.0",
            r"frozen: 'layrs\.0' .* \(did you mean 'layers\.0'\?\); its parts are tok_embed",
        ),
        ("llama-debug,dim=65", r"dim 65 does not divide over 4 heads"),
        ("llama-debug:dim=32", r"expected module:function, .*; for another size write llama-debug,dim=32"),
        (f"{THIS}:user_modl", r"has no 'user_modl' \(did you mean 'user_model'\?\)"),
        (f"{THIS}:HERE", r"expected a function, found 'HERE' of type \w*PosixPath"),
        (f"{THIS}:number", r"expected the function to return an nn\.Module, or a task of three .*, found int"),
        (f"{THIS}:needs_width", r"found one that needs width, depth"),
        ("nets/mine.py:build", r"expected an import path, found a file; write nets\.mine:build"),
        (":build", r"expected module:function"),
        ("module:", r"expected module:function"),
        ("a:b:c", r"expected module:function"),
        (".:f", r"expected module:function"),
    ],
)
def test_wrong_model_names_are_refused_in_one_line(name: str, message: str) -> None:
    """Each wrong name is a ConfigError (exit code 2) of one line that says what to write instead."""
    with pytest.raises(ConfigError, match=message) as error:
        build_model(name, seed=0)
    assert "\n" not in str(error.value) and error.value.exit_code == 2


def test_limits_are_read_from_foreign_configs() -> None:
    """Hugging Face's name for the longest sequence counts as well; a model without a config says nothing."""

    class Config:
        vocab_size = 7
        max_position_embeddings = 9

    model = nn.Linear(1, 1)
    assert (model_limits(model).vocab_size, model_limits(model).max_seq_len) == (None, None)
    model.config = Config()  # type: ignore[assignment]
    assert (model_limits(model).vocab_size, model_limits(model).max_seq_len) == (7, 9)
    check_seq(10**9, None)
