"""Faults outside the sharding: the model as it is built, data, loss, optimizer; planted in the loop that trains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from common.harness.selftest.models import FROZEN
from common.harness.selftest.plant import Plant, Scene
from common.harness.selftest.shards import PAIR, TARGET

_TRAIN = "common.harness.train:"
_WORKLOAD = "common.harness.workload:"
_AWAY = 1000
"""Steps further on, no step of a run reads the same tokens."""

OnModel = Callable[[Scene, nn.Module], None]
OnOptimizer = Callable[[Scene, torch.optim.Optimizer], None]


def in_model(change: OnModel) -> Plant:
    """`change` the model before the engine gets it; the change tells of its own hits."""

    def act(scene: Scene, original: Callable[..., Any]) -> Callable[..., Any]:
        def build(*args: Any, **options: Any) -> nn.Module:
            model: nn.Module = original(*args, **options)
            change(scene, model)
            return model

        return build

    return Plant(_TRAIN + "build_task", act)


def in_seed(change: Callable[[Scene, dict[str, Any]], dict[str, Any]]) -> Plant:
    """`change` what the model is built from, by keyword."""
    return _in_arguments(_TRAIN + "build_task", change)


def in_share(change: Callable[[Scene, dict[str, Any]], dict[str, Any]]) -> Plant:
    """`change` which share of which batch is read, by keyword."""
    return _in_arguments(_WORKLOAD + "batch", change)


def _in_arguments(place: str, change: Callable[[Scene, dict[str, Any]], dict[str, Any]]) -> Plant:
    """`change` what the function at `place` is called with, by keyword; a hit if it does."""

    def act(scene: Scene, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            changed = options | change(scene, options)
            if changed != options:
                scene.hit()
            return original(*args, **changed)

        return call

    return Plant(place, act)


def in_loss(change: Callable[[Scene, Tensor, Tensor], Tensor]) -> Plant:
    """`change` the loss, given loss and logits."""

    def act(scene: Scene, original: Callable[..., Any]) -> Callable[..., Any]:
        def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
            scene.hit()
            return change(scene, original(logits, targets), logits)

        return loss_of

    return Plant(_WORKLOAD + "mean_loss", act)


def in_optimizer(change: OnOptimizer) -> Plant:
    """`change` the optimizer once it is made."""

    def act(scene: Scene, original: Callable[..., Any]) -> Callable[..., Any]:
        def build(*args: Any) -> torch.optim.Optimizer:
            optimizer: torch.optim.Optimizer = original(*args)
            change(scene, optimizer)
            scene.hit()
            return optimizer

        return build

    return Plant(_TRAIN + "_build_optimizer", act)


# Models


def casts_an_input(scene: Scene, model: nn.Module) -> None:
    """One block gets its input through bf16."""
    scene.hit()
    model.get_submodule("blocks.1").register_forward_pre_hook(_through_bf16)


def _through_bf16(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0].bfloat16().float(),) if args[0].dtype is torch.float32 else args


def rounds_a_buffer(scene: Scene, model: nn.Module) -> None:
    """A buffer went through bf16, as in a model that was cast as a whole."""
    scene.hit()
    factor = model.get_buffer("blocks.0.scale.factor")
    factor.copy_(factor.bfloat16())


def changes_a_buffer_on_last(scene: Scene, model: nn.Module) -> None:
    """A buffer that is not broadcast: the last rank has another value of one element."""
    if scene.is_last:
        scene.hit()
        model.get_buffer("blocks.0.scale.factor")[0] += 0.5


def unties(scene: Scene, model: nn.Module) -> None:
    """The head gets a weight of its own."""
    scene.hit()
    head = model.get_submodule("head")
    assert isinstance(head, nn.Linear)
    head.weight = nn.Parameter(head.weight.detach().clone())


def loses_a_use(scene: Scene, model: nn.Module) -> None:
    """The tied weight gets no gradient from the head."""
    scene.hit()
    head = model.get_submodule("head")
    assert isinstance(head, nn.Linear)

    def forward(x: Tensor) -> Tensor:
        return F.linear(x, head.weight.detach())

    head.forward = forward  # type: ignore[method-assign,assignment]


def trains_the_frozen(scene: Scene, model: nn.Module) -> None:
    """What was frozen gets a gradient."""
    scene.hit()
    model.get_parameter(FROZEN).requires_grad_(True)


def freezes_one(scene: Scene, model: nn.Module) -> None:
    """One parameter gets none."""
    scene.hit()
    model.get_parameter(TARGET).requires_grad_(False)


# Optimizers


def has_no_rate(scene: Scene, optimizer: torch.optim.Optimizer) -> None:
    """A learning rate of zero."""
    optimizer.param_groups[0]["lr"] = 0.0


def has_twice_the_rate(scene: Scene, optimizer: torch.optim.Optimizer) -> None:
    """Twice the learning rate."""
    optimizer.param_groups[0]["lr"] *= 2


def decays(scene: Scene, optimizer: torch.optim.Optimizer) -> None:
    """Weights decay, which nobody asked for."""
    optimizer.param_groups[0]["weight_decay"] = 1.0


def holds_copies(scene: Scene, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer was made before the engine replaced the parameters."""
    group = optimizer.param_groups[0]
    group["params"] = [param.detach().clone().requires_grad_() for param in group["params"]]


def misses_one(scene: Scene, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer was not given the third parameter."""
    params = optimizer.param_groups[0]["params"]
    del params[2]


def steps_late(scene: Scene, optimizer: torch.optim.Optimizer) -> None:
    """Each step applies the gradients of the step before, the first none."""
    step = optimizer.step

    def late() -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        now = [param.grad for param in params]
        before = scene.kept.get("gradients", [None] * len(params))
        scene.kept["gradients"] = now
        for param, gradient in zip(params, before, strict=True):
            param.grad = gradient
        step()

    optimizer.step = late  # type: ignore[method-assign,assignment]


def keeps_gradients(scene: Scene, optimizer: torch.optim.Optimizer) -> None:
    """Gradients are never cleared, and the next are added."""
    optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]


# Steps


def of_another_micro_batch() -> Plant:
    """The loss is that of the step's tokens, the gradients are those of others."""

    def act(scene: Scene, original: Callable[..., Any]) -> Callable[..., Any]:
        def loss_and_backward(training: Any, step: int, *args: Any) -> Tensor:
            loss: Tensor = original(training, step)
            training.optimizer.zero_grad(set_to_none=True)
            original(training, step + _AWAY, *args)
            scene.hit()
            return loss

        return loss_and_backward

    return Plant(_TRAIN + "Training._loss_and_backward", act)


def keeps_references() -> Plant:
    """Somebody holds on to the gradients of the last step."""

    def act(scene: Scene, original: Callable[..., Any]) -> Callable[..., Any]:
        def update(training: Any, *args: Any) -> None:
            scene.kept["gradients"] = [param.grad for param in training.model.parameters()]
            scene.hit()
            original(training, *args)

        return update

    return Plant(_TRAIN + "Training._update", act)


def on_gradients(change: Callable[[Scene, nn.Module], None]) -> Plant:
    """`change` the model's gradients before they are read."""

    def act(scene: Scene, original: Callable[..., Any]) -> Callable[..., Any]:
        def collect(model: nn.Module, **options: Any) -> Any:
            change(scene, model)
            return original(model, **options)

        return collect

    return Plant(_TRAIN + "collect_gradients", act)


def _stored(model: nn.Module, name: str) -> nn.Parameter:
    """A sharded parameter as it is stored; `get_parameter` reads the module's attribute, which may be a gather."""
    return dict(model.named_parameters())[name]


def loses_one_on_last(scene: Scene, model: nn.Module) -> None:
    """The last rank has no gradient of one parameter."""
    if scene.is_last:
        scene.hit()
        _stored(model, TARGET).grad = None


def replicates_one(scene: Scene, model: nn.Module) -> None:
    """A gradient is left whole on every rank, beside its sharded parameter."""
    param = _stored(model, TARGET)
    assert isinstance(param.grad, DTensor)
    param.grad = param.grad.redistribute(placements=[Replicate()])
    scene.hit()


def swaps_two(scene: Scene, model: nn.Module) -> None:
    """Two neighbours of one shape have each other's gradient."""
    first, second = (_stored(model, name) for name in PAIR)
    first.grad, second.grad = second.grad, first.grad
    scene.hit()


def renames(engine: str) -> Plant:
    """The engine leaves a module under another name."""

    def act(scene: Scene, original: Callable[..., Any]) -> Callable[..., Any]:
        def parallelize(model: nn.Module, *rest: Any) -> nn.Module:
            module: nn.Module = original(model, *rest)
            model.wrapped = model.head
            del model.head
            scene.hit()
            return module

        return parallelize

    return Plant(f"{engine}:parallelize", act)
