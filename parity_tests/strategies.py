"""Random jobs, each drawn as the `fsdp-parity compare` that runs it, so that a failure is its own command.

What a job may be grows with the engines: an option that the command line does not have is in `UNKNOWN_OPTIONS`, and
one that it has is drawn here. Of combinations that cannot run, `REFUSALS` knows those that are refused before a rank
starts.

Every size is drawn from its least upwards, and every choice from the plainest, since that is where shrinking goes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import nn

from common.gradient import Transport
from common.job import OPTIMIZERS, PASSES, RESHARD, JobConfig
from common.models import build_model
from common.models.spec import CONFIGS
from common.plan import CONTAINERS
from common.policy import DTYPES

ENGINES = ("eager", "eager,torch-fsdp2", "eager,compiled", "eager,compiled,torch-fsdp2")
"""The single process and its float64 run always take part; the compiled engine costs as much as ten others."""
BYTES = 256
"""Token ids of the data that every user has, the standard library's source."""
COMMAND = ("fsdp-parity", "compare")
LARGEST_RANKS = 4
LEARNING_RATES = {"sgd": "0.01", "adamw": "0.0001"}
"""Small, so that training is stable and every step is judged: where it is not, the judge leaves steps out."""

UNKNOWN_OPTIONS = {"--mesh": "2x2", "--grad-accum": "2", "--ac": "full"}
"""Options that are not there yet, and a value that each would take."""
DEFAULTS = {name: str(value) for name, value in JobConfig().to_dict().items()} | {"disabled_passes": "none"}
"""What need not be said, so that a command is no longer than its job is odd."""
REFUSALS = {
    "an option that is not there yet": rf"unrecognized arguments: ({'|'.join(UNKNOWN_OPTIONS)}) ",
    "hooks inside blocks that are compiled apart": r"plan '.*': puts hooks on '.*' inside the block '.*', where they",
}
"""Why a job that is drawn here may be refused, and the start of what the command line then says."""


def refusal(message: str) -> str | None:
    """The entry of `REFUSALS` that `message` belongs to."""
    return next((reason for reason, pattern in REFUSALS.items() if re.match(pattern, message)), None)


@st.composite
def commands(draw: DrawFn, *, backends: Sequence[str] = ("aot_eager",)) -> str:
    """A job with its model and how it is sharded, as a command; `backends` are those of the compiled engine."""
    engines = draw(st.sampled_from(ENGINES))
    spec = draw(model_sizes())
    model = build_model(spec, seed=0, device="meta")
    ranks = draw(st.integers(1, LARGEST_RANKS))
    optimizer = draw(st.sampled_from(OPTIMIZERS))
    dtypes = st.sampled_from(tuple(DTYPES))
    options = {
        "engines": engines,
        "model": spec + draw(frozen_parts(model)),
        "ranks": str(ranks),
        "steps": str(draw(st.integers(1, 3))),
        "batch": str(ranks * draw(st.integers(1, 3))),
        "seq": str(draw(st.integers(2, 24))),
        "optimizer": optimizer,
        "lr": LEARNING_RATES[optimizer],
        "seed": str(draw(st.integers(0, 99))),
        "plan": draw(plans(model)),
        "reshard_after_forward": draw(st.sampled_from(RESHARD)),
        "param_dtype": draw(dtypes),
        "reduce_dtype": draw(dtypes),
        "block_backend": draw(st.sampled_from(("eager", "eager", "eager", "aot_eager"))),
        "transport": draw(st.sampled_from([transport.value for transport in Transport])),
        "link": draw(st.sampled_from(("gloo", "none"))),
    }
    if "compiled" in engines:
        options["backend"] = draw(st.sampled_from(backends))
        options["disabled_passes"] = ",".join(draw(st.one_of(st.just([]), subsets(PASSES)))) or "none"
    unknown = draw(st.sampled_from((*[None] * 60, *UNKNOWN_OPTIONS)))
    words = [word for name, value in options.items() if value != DEFAULTS.get(name) for word in (_option(name), value)]
    return shlex.join((*COMMAND, *words, *((unknown, UNKNOWN_OPTIONS[unknown]) if unknown else ())))


@st.composite
def model_sizes(draw: DrawFn) -> str:
    """One of the two families in an odd size, of one to three blocks."""
    is_llama = draw(st.booleans())
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * (draw(st.integers(1, 3)) if is_llama else 1)
    head_dim = 2 * draw(st.integers(1, 6)) if is_llama else draw(st.integers(2, 12))
    fields = {
        "dim": heads * head_dim,
        "n_layers": draw(st.integers(1, 3)),
        "n_heads": heads,
        "ffn_dim": draw(st.integers(1, 40)),
        "vocab_size": BYTES + draw(st.integers(0, 30)),
        "tied": draw(st.booleans()),
        "bias": draw(st.booleans()),
    }
    if is_llama:
        fields["n_kv_heads"] = kv_heads
    name = "llama-debug" if is_llama else "gpt-debug"
    changed = {field: value for field, value in fields.items() if value != getattr(CONFIGS[name], field)}
    return ",".join((name, *(f"{field}={str(value).lower()}" for field, value in changed.items())))


@st.composite
def frozen_parts(draw: DrawFn, model: nn.Module) -> str:
    """The field `frozen` of a spec, or nothing; something is always left to train."""
    places = [*dict(model.named_modules()), *dict(model.named_parameters())][1:]
    names = draw(st.one_of(st.just([]), subsets(places, least=1, most=4)))
    frozen = {param for name in names for param in _params(model, name)}
    return ",frozen=" + "+".join(names) if 0 < len(frozen) < len(list(model.parameters())) else ""


@st.composite
def plans(draw: DrawFn, model: nn.Module) -> str:
    """A plan by one of the three words, or modules in random groups and random order."""
    modules = [name for name, module in model.named_modules() if name and not isinstance(module, CONTAINERS)]
    named = subsets(modules, least=1, most=5).map(_disjoint).flatmap(_grouped)
    return draw(st.one_of(st.sampled_from(("block", "model", "param")), named))


def subsets(values: Sequence[str], *, least: int = 0, most: int | None = None) -> SearchStrategy[list[str]]:
    """Some of `values`, each at most once, in any order."""
    return st.lists(st.sampled_from(values), unique=True, min_size=least, max_size=most)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _disjoint(names: list[str]) -> list[str]:
    """Without those that are inside another one, which a plan does not take."""
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def _grouped(names: list[str]) -> SearchStrategy[str]:
    """The names with random separators of a plan between them."""
    separators = st.lists(st.sampled_from(",+"), min_size=len(names) - 1, max_size=len(names) - 1)
    return separators.map(lambda marks: "".join(a + b for a, b in zip(names, [*marks, ""], strict=True)))


def _params(model: nn.Module, name: str) -> list[nn.Parameter]:
    params = dict(model.named_parameters(remove_duplicate=False))
    return [params[name]] if name in params else list(model.get_submodule(name).parameters())
