"""One job: everything that decides what is trained and how it is sharded, as plain data.

A job is the same for every engine that is compared on it; it travels to the ranks and into the records as JSON.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError
from common.gradient import Transport
from common.policy import DTYPES, MixedPrecisionPolicy

BACKENDS = ("eager", "aot_eager", "inductor")
PASSES = ("bucket_gathers", "bucket_reductions", "prefetch_gathers", "delay_reduction_waits")
"""The passes of the compiled engine that a job may leave out; the others are what makes it right, not fast."""
RESHARD = ("always", "never")
OPTIMIZERS = ("sgd", "adamw")
DEVICES = CPU, GPU = ("cpu", "cuda")
DEFAULT_SEQ = 64
FAKE_LINK = "fake"
"""The link that moves nothing: one process stands for all ranks, and nothing can be judged."""


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """What to train, on how many ranks, sharded how.

    Attributes:
        model: a name from `common.models`, or `module:function` returning an `nn.Module` or a task, see `common.task`.
        ranks: data-parallel world size.
        steps: optimizer steps whose loss and gradients are judged.
        batch: sequences, or samples, per step over all ranks; must be divisible by `ranks`.
        seq: tokens per sequence, `DEFAULT_SEQ` if not given; stays None for a task, which brings batches of its own,
            and until it is known whether the user's function returns one.
        plan: bucket plan, see `common.plan.build_plan`.
        reshard_after_forward: "always" frees gathered weights after forward and gathers them again in
            backward; "never" keeps them.
        param_dtype: dtype of gathered weights and of compute, a key of `common.policy.DTYPES`.
        reduce_dtype: dtype in which gradients are summed over ranks.
        backend: what compiles the compiled engine's graph; "eager" leaves it uncompiled.
        block_backend: what compiles each repeated block on engines that leave the model's code as it is, see
            `common.blocks`; "eager" compiles none.
        disabled_passes: of `PASSES`, those that the compiled engine leaves out; given in any order.
        transport: how reductions travel, see `common.gradient`.
        link: what collectives travel on while the job is judged, see `common.harness.link`.
        optimizer: "sgd" or "adamw".
        lr: learning rate.
        data: text file, folder of text, or `.bin` of uint16 tokens; None is the standard library's source, and what
            a task has.
        seed: decides parameters and batches.
        device: where ranks compute, one of `DEVICES`.
        dtype: dtype of the parameters themselves, gradients and optimizer state.
    """

    model: str = "llama-debug"
    ranks: int = 2
    steps: int = 10
    batch: int = 12
    seq: int | None = None
    plan: str = "block"
    reshard_after_forward: str = "always"
    param_dtype: str = "fp32"
    reduce_dtype: str = "fp32"
    backend: str = "inductor"
    block_backend: str = "eager"
    disabled_passes: tuple[str, ...] = ()
    transport: str = Transport.AUTO.value
    link: str = "gloo"
    optimizer: str = "sgd"
    lr: float = 0.1
    data: str | None = None
    seed: int = 0
    device: str = CPU
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        if self.seq is None and not self.has_own_model:
            object.__setattr__(self, "seq", DEFAULT_SEQ)
        least_seq = (("seq", 2),) if self.seq is not None else ()
        for name, least in (("ranks", 1), ("steps", 1), ("batch", 1), *least_seq, ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}: expected a whole number of at least {least}, found {value!r}")
        choices: tuple[tuple[str, tuple[str, ...]], ...] = (
            ("reshard_after_forward", RESHARD),
            ("param_dtype", tuple(DTYPES)),
            ("reduce_dtype", tuple(DTYPES)),
            ("dtype", tuple(DTYPES)),
            ("device", DEVICES),
            ("backend", BACKENDS),
            ("block_backend", BACKENDS),
            ("transport", tuple(t.value for t in Transport)),
            ("optimizer", OPTIMIZERS),
        )
        for name, allowed in choices:
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}: expected one of {', '.join(allowed)}, found {getattr(self, name)!r}")
        object.__setattr__(self, "disabled_passes", in_pass_order(self.disabled_passes))
        if self.disabled_passes and self.backend == "eager":
            raise ConfigError(
                f"disabled_passes: the backend eager compiles nothing, so it has no {self.disabled_passes[0]} to leave "
                "out; choose the backend aot_eager or inductor, or disable none"
            )
        if not self.lr > 0:
            raise ConfigError(f"lr: expected a positive number, found {self.lr!r}")
        if self.batch % self.ranks:
            fits = self.batch + self.ranks - self.batch % self.ranks
            raise ConfigError(
                f"batch: {self.batch} sequences do not divide over {self.ranks} ranks; "
                f"--batch {fits} would (the mean over ranks is the batch mean only with equal shares)"
            )

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """The mixed-precision policy of the sharded model; a dtype equal to the parameters' is no cast."""
        own, compute = DTYPES[self.dtype], DTYPES[self.param_dtype]
        return MixedPrecisionPolicy(
            param_dtype=None if compute is own else compute, reduce_dtype=DTYPES[self.reduce_dtype]
        )

    @property
    def has_own_model(self) -> bool:
        """Whether the model is a user's, named as `module:function`."""
        return ":" in self.model

    @property
    def is_judged(self) -> bool:
        """Whether losses and gradients mean anything: not on a link that moves nothing."""
        return self.link != FAKE_LINK

    @property
    def process_group(self) -> str:
        """The backend of the process group under its link; the emulated links replace what gloo does."""
        return self.link if self.link in ("nccl", FAKE_LINK) else "gloo"

    @property
    def processes(self) -> int:
        """How many processes run it: one per rank, but one that stands for all where nothing moves."""
        return self.ranks if self.is_judged else 1

    def to_dict(self) -> dict[str, Any]:
        """The job as JSON-ready data."""
        return dataclasses.asdict(self) | {"disabled_passes": list(self.disabled_passes)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> JobConfig:
        """The job that `to_dict` described."""
        return cls(**data)


def in_pass_order(names: Iterable[str]) -> tuple[str, ...]:
    """Names of passes, each once, in the order of `PASSES`.

    Raises:
        ConfigError: a name that is none of them.
    """
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        if name not in PASSES:
            close = difflib.get_close_matches(str(name), PASSES, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"disabled_passes: expected names of {', '.join(PASSES)}, found {name!r}{hint}")
    return tuple(name for name in PASSES if name in names)
