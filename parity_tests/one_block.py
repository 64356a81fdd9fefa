"""The debug models with one block in the place of three, as a user's own: `module:function`.

Compiling takes a time that goes with the number of blocks. Where the claim is about ranks, dtypes or packing, one block
between two ends shows it: there are three buckets, of uneven rows. What needs a second block takes a debug model.
"""

from __future__ import annotations

from dataclasses import replace

from common.harness.predict import predict_collectives
from common.harness.records import CollectiveCount
from common.job import JobConfig
from common.models import LanguageModel, build_model, initialise
from common.models.gpt import CONFIGS as GPTS
from common.models.gpt import GPT
from common.models.llama import CONFIGS as LLAMAS
from common.models.llama import Llama

LLAMA, GPT_UNTIED, GPT_TIED = (f"parity_tests.one_block:{name}" for name in ("llama", "gpt", "gpt_tied"))


def llama() -> LanguageModel:
    return _initialised(Llama(replace(LLAMAS["llama-debug"], n_layers=1)))


def gpt() -> LanguageModel:
    return _initialised(GPT(replace(GPTS["gpt-debug"], n_layers=1)))


def gpt_tied() -> LanguageModel:
    return _initialised(GPT(replace(GPTS["gpt-debug-tied"], n_layers=1)))


def predicted(engine: str, job: JobConfig) -> list[CollectiveCount] | None:
    """What the formula says of `job`, also of the models here, which call each module once as those of the list do."""
    model = build_model(job.model, seed=job.seed, device="meta")
    return predict_collectives(engine, model, replace(job, model="llama-debug"))


def _initialised(model: LanguageModel) -> LanguageModel:
    if not next(model.parameters()).is_meta:
        initialise(model, 0)
    return model
