"""The bucket plan: which parameters travel together, in which order; one plan drives both engines.

    spec                     buckets
    `param`                  one per parameter: the naive version, first to read and first to test
    `block` (default)        one per repeated block, one per run of other modules between them
    `model`                  one for everything
    `a,b+c`                  one for module a, one for modules b and c, one for what is left over

Order inside a bucket is parameter registration order in both engines, since the offset of an element in a message
can decide the order in which ranks are summed. A parameter that several modules share lives in one bucket: buckets
that share a parameter are merged, and the merged bucket is needed wherever one of its modules runs.

Source: torchtitan `graph_trainer` (`get_transformer_block_buckets`) for the grouping of the ends of a model.
Differs: works on any module tree; a name that matches nothing is an error.
Left out: `auto`, which chooses by cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from common.errors import PlanError

NAMED_PLANS = ("param", "block", "model")
CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Bucket:
    """Parameters that travel in one all-gather and one reduce-scatter.

    Attributes:
        modules: names of the modules that need the bucket, in registration order; "" is the root.
        params: names of the parameters, in registration order.
        reshard_after_forward: free the gathered parameters after forward, gather them again in backward.
        prefetch: launch this bucket's gather one bucket ahead of its use.
    """

    modules: tuple[str, ...]
    params: tuple[str, ...]
    reshard_after_forward: bool = True
    prefetch: bool = True

    @property
    def name(self) -> str:
        """What tables call the bucket."""
        return "+".join(module or "(root)" for module in self.modules)


@dataclass(frozen=True)
class BucketPlan:
    """Ordered buckets that together hold each parameter of a model once.

    Attributes:
        spec: what the plan was built from.
        buckets: in registration order of their first parameter.
    """

    spec: str
    buckets: tuple[Bucket, ...]

    def bucket_of(self) -> dict[str, int]:
        """The index of the bucket that holds each parameter."""
        return {param: i for i, bucket in enumerate(self.buckets) for param in bucket.params}


def build_plan(
    model: nn.Module, spec: str = "block", *, reshard_after_forward: bool = True, prefetch: bool = True
) -> BucketPlan:
    """Group the parameters of `model` into buckets.

    Args:
        model: the plain model, before it is sharded.
        spec: `param`, `block`, `model`, or module names: `,` between buckets, `+` inside one.
        reshard_after_forward: set on every bucket.
        prefetch: set on every bucket.

    Raises:
        PlanError: a name that is no module, a module without parameters, a module named twice or inside
            another named one, or a model without parameters.
    """
    names = [name for name, _ in model.named_parameters()]
    if not names:
        raise PlanError(f"plan {spec!r}: {type(model).__name__} has no parameters to shard")
    groups: list[tuple[tuple[str, ...], tuple[str, ...]]]
    if spec == "param":
        groups = [(owners, (name,)) for name, owners in _owners(model).items()]
    elif spec == "model":
        groups = [(("",), tuple(names))]
    else:
        module_groups = list(_block_groups(model)) if spec == "block" else _named_groups(model, spec)
        groups = _assign(model, _merge_shared(model, module_groups))
    buckets = (Bucket(modules, params, reshard_after_forward, prefetch) for modules, params in groups)
    return BucketPlan(spec, tuple(buckets))


def _block_groups(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Children of the outermost `ModuleList`s one by one; the modules between them run by run."""
    run: list[str] = []
    for name, is_block in _walk_blocks(model, ""):
        if not is_block:
            run.append(name)
            continue
        if run:
            yield tuple(run)
            run = []
        yield (name,)
    if run:
        yield tuple(run)


def _walk_blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, bool]]:
    """Name the modules that a hook can stand on, and say which are repeated blocks.

    Containers are never called, so the walk goes through them; a module that holds a list of blocks is opened up.
    """
    for child_name, child in module.named_children():
        name = f"{prefix}{child_name}"
        if next(child.parameters(), None) is None:
            continue
        if isinstance(child, CONTAINERS) or (
            not isinstance(module, nn.ModuleList) and any(isinstance(inner, nn.ModuleList) for inner in child.modules())
        ):
            yield from _walk_blocks(child, f"{name}.")
        else:
            yield name, isinstance(module, nn.ModuleList)


def _named_groups(model: nn.Module, spec: str) -> list[tuple[str, ...]]:
    """Parse `a,b+c` and check each name against the module tree."""
    modules = dict(model.named_modules())
    groups = [tuple(name.strip() for name in group.split("+")) for group in spec.split(",")]
    seen: list[str] = []
    for name in (name for group in groups for name in group):
        if name not in modules or not name:
            close = [known for known in modules if known and known.split(".")[-1] == name.split(".")[-1]]
            hint = f"did you mean {close[0]!r}?" if close else f"its modules are {_some(modules)}"
            raise PlanError(
                f"plan {spec!r}: {name!r} names no module of {type(model).__name__} "
                f"(and is none of {', '.join(NAMED_PLANS)}); {hint}"
            )
        if next(modules[name].parameters(), None) is None:
            raise PlanError(f"plan {spec!r}: module {name!r} has no parameters; leave it out")
        if isinstance(modules[name], CONTAINERS):
            children = _some(f"{name}.{child}" for child, _ in modules[name].named_children())
            raise PlanError(
                f"plan {spec!r}: {name!r} is a {type(modules[name]).__name__}, which is never called, so no hook "
                f"would run; name its children instead: {children}"
            )
        for other in seen:
            if _inside(name, [other]) or _inside(other, [name]):
                raise PlanError(f"plan {spec!r}: {name!r} overlaps with {other!r}; name each module once")
        seen.append(name)
    return groups


def _merge_shared(model: nn.Module, groups: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Merge groups that share a parameter; keep registration order inside the merged group."""
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    merged: list[tuple[set[int], list[str]]] = []
    for group in groups:
        ids = {id(p) for name in group for p in model.get_submodule(name).parameters()}
        names = list(group)
        rest = []
        for other_ids, other_names in merged:
            if ids & other_ids:
                ids, names = ids | other_ids, other_names + names
            else:
                rest.append((other_ids, other_names))
        merged = [*rest, (ids, names)]
    return [tuple(sorted(names, key=order.__getitem__)) for _, names in merged]


def _assign(model: nn.Module, groups: list[tuple[str, ...]]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Give each parameter to the group of its module; what is left over goes to the root.

    A module outside the group that uses one of its parameters (tied weights) joins the group's modules.
    """
    owner = {
        id(param): i
        for i, group in enumerate(groups)
        for name in group
        for param in model.get_submodule(name).parameters()
    }
    modules = {i: list(group) for i, group in enumerate(groups)} | {-1: [""]}
    params: dict[int, list[str]] = {}
    for name, users in _owners(model).items():
        i = owner.get(id(model.get_parameter(name)), -1)
        params.setdefault(i, []).append(name)
        if i >= 0:
            outside = [user for user in users if not _inside(user, modules[i])]
            modules[i].extend(dict.fromkeys(outside))
    # dict order is the registration order of each group's first parameter
    return [(tuple(modules[i]), tuple(names)) for i, names in params.items()]


def _owners(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The modules that hold each parameter, by the parameter's first name, in registration order."""
    first: dict[int, str] = {}
    owners: dict[str, tuple[str, ...]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        canonical = first.setdefault(id(param), name)
        owners[canonical] = (*owners.get(canonical, ()), name.rpartition(".")[0])
    return owners


def _inside(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def _some(names: Iterable[str], limit: int = 8) -> str:
    """The first few names, for a message."""
    known = [name for name in names if name]
    return ", ".join(known[:limit]) + (", ..." if len(known) > limit else "")
