"""What options can be given: engines, models and their fields, plans, backends, passes, links, transports, dtypes."""

from __future__ import annotations

import pandas as pd

from bench.documents import Document, Section
from bench.tables import frame
from bench.views import view_plain
from common.engine import SHORT_NAMES
from common.gradient import Transport
from common.harness.link import PRESETS
from common.job import BACKENDS, PASSES
from common.models import describe_fields, describe_models
from common.plan import NAMED_PLANS
from common.policy import DTYPES

_ENGINES = {
    "eager": "FSDP2: hooks gather and free weights while the model runs",
    "compiled": "SimpleFSDP: gathers are traced into one graph, which passes bucket and reorder",
    "single": "one process, the whole batch",
    "ddp": "torch's DistributedDataParallel",
    "torch-fsdp2": "torch's own fully_shard, by the same plan",
    "torch-fsdp2-prefetch": "the same with asynchronous gathers, each one group ahead",
}
_PLANS = {
    "param": "one bucket per parameter",
    "block": "one bucket per repeated block, one per run of other modules between them",
    "model": "one bucket for all",
    "A,B+C": "module names: one bucket for A, one for B and C, one for what is left",
}
_BACKENDS = {
    "eager": "no compilation",
    "aot_eager": "traced, by the engine compiled also bucketed, run operator by operator; needs no C++ compiler",
    "inductor": "compiled to C++",
}
_PASSES = {
    "bucket_gathers": "one gather per bucket; without it, one per parameter",
    "bucket_reductions": "one reduction per bucket; without it, one per parameter",
    "prefetch_gathers": "launches a gather before the wait of the one ahead; without it, where it is needed",
    "delay_reduction_waits": "waits for a reduction after the next is launched; without it, at once",
}
_FIELDS = {
    "vocab_size": "number of token ids",
    "dim": "width of the residual stream",
    "n_layers": "number of blocks",
    "n_heads": "attention heads per block; divides dim",
    "max_seq_len": "longest sequence in tokens",
    "tied": "the output head is the token embedding",
    "bias": "projections inside blocks have biases, and so have norms that can",
    "frozen": "modules and parameters that are not trained",
    "n_kv_heads": "heads of keys and values; divides n_heads",
    "ffn_dim": "hidden width of the feed-forward",
    "rope_theta": "base of the rotary frequencies",
    "norm_eps": "added to the mean square in norms",
}
_TRANSPORTS = {
    "auto": "ordered on gloo, else native",
    "native": "the backend's reduce-scatter",
    "ordered": "an all-to-all, and a sum in rank order",
}


def list_document() -> Document:
    """One table per kind of name."""
    dtypes = {name: str(dtype).removeprefix("torch.") for name, dtype in DTYPES.items()}
    engines = [{"name": name, "module": SHORT_NAMES[name], "what": _ENGINES[name]} for name in SHORT_NAMES]
    tables = {
        "engines": frame(engines, ("name", "module", "what")),
        "models": _models(),
        "fields": _fields(),
        "plans": _names((*NAMED_PLANS, "A,B+C"), _PLANS),
        "backends": _names(BACKENDS, _BACKENDS),
        "passes": _names(PASSES, _PASSES),
        "links": frame([{"name": each.name, "what": each.about} for each in PRESETS.values()], ("name", "what")),
        "transports": _names([transport.value for transport in Transport], _TRANSPORTS),
        "dtypes": _names(list(DTYPES), dtypes),
    }
    notes = {
        "engines": ("or the import path of a module with parallelize(model, mesh, job)",),
        "backends": (
            "--backend: of the engine compiled; --block-backend: of each repeated block on the others but single",
        ),
        "passes": ("of the engine compiled; what --disabled-passes takes",),
        "models": (
            "or module:function, a function without arguments that returns an nn.Module or a task, see common/task.py",
        ),
        "fields": ("of models; in another size: --model llama-debug,n_layers=1,tied=true,frozen=norm+layers.0",),
    }
    return Document(
        title="What options take",
        holds=None,
        lines=(),
        sections=tuple(
            Section(name, name.capitalize(), table, view_plain(table), notes.get(name, ()))
            for name, table in tables.items()
        ),
        machine={},
    )


def _models() -> pd.DataFrame:
    rows = [
        {
            "name": info.name,
            "params": info.params,
            "layers": info.config.n_layers,
            "dim": info.config.dim,
            "heads": info.config.n_heads,
            "vocab": info.config.vocab_size,
            "max_seq": info.config.max_seq_len,
        }
        for info in describe_models()
    ]
    return frame(rows, tuple(rows[0]))


def _fields() -> pd.DataFrame:
    rows = (
        {"name": name, "of": ", ".join(models), "takes": takes, "what": _FIELDS[name]}
        for name, (takes, models) in describe_fields().items()
    )
    return frame(rows, ("name", "of", "takes", "what"))


def _names(names: tuple[str, ...] | list[str], what: dict[str, str]) -> pd.DataFrame:
    return frame(({"name": name, "what": what[name]} for name in names), ("name", "what"))
