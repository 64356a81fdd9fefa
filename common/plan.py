"""The bucket plan: which parameters travel together, in which order; one plan drives both engines.

    spec                     buckets
    `param`                  one per parameter: the naive version, first to read and first to test
    `block` (default)        one per repeated block, one per run of other modules between them
    `model`                  one for everything
    `a,b+c`                  one for module a, one for modules b and c, one for what is left over

The three words are taken: a child of the root that is called `model` can't be named alone. Repeated blocks are the
children of an outermost `ModuleList`, and of a `ModuleDict` or `Sequential` that holds two or more modules, all of one
class and with children of their own.

Order inside a bucket is parameter registration order in both engines, since the offset of an element in a message
can decide the order in which ranks are summed. A parameter that several modules share lives in one bucket: buckets
that share a parameter are merged, and the merged bucket is needed wherever one of its modules runs.

Source: torchtitan `graph_trainer` (`get_transformer_block_buckets`) for the grouping of the ends of a model.
Differs: works on any module tree; a name that matches nothing is an error.
Left out: `auto`, which chooses by cost.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from common.errors import PlanError

NAMED_PLANS = ("param", "block", "model")
MODULE_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
CONTAINERS = (*MODULE_CONTAINERS, nn.ParameterList, nn.ParameterDict)
"""Modules that are never called: no hook on them would run."""


@dataclass(frozen=True)
class Bucket:
    """Parameters that travel in one all-gather and one reduce-scatter.

    Attributes:
        modules: names of the modules that need the bucket, in registration order; "" is the root. Each is the
            first name of its module, and none is a container, which is never called.
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
        buckets: in registration order of their first parameter.
    """

    buckets: tuple[Bucket, ...]

    def bucket_of(self) -> dict[str, int]:
        """The index of the bucket that holds each parameter."""
        return {param: i for i, bucket in enumerate(self.buckets) for param in bucket.params}

    @property
    def labels(self) -> list[str]:
        """A name for each bucket that no other has: those that need the same modules go by their first parameter."""
        uses = Counter(bucket.name for bucket in self.buckets)
        return [bucket.name if uses[bucket.name] == 1 else bucket.params[0] for bucket in self.buckets]


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
    return BucketPlan(tuple(buckets))


def _block_groups(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Repeated blocks one by one; the modules between them run by run."""
    names = _first_names(model)
    run: list[str] = []
    seen: set[nn.Module] = set()  # a module may have two places; it is called in both, and has one bucket
    for module, is_block in _walk_blocks(model):
        if module in seen:
            continue
        seen.add(module)
        if not is_block:
            run.append(names[module])
            continue
        if run:
            yield tuple(run)
            run = []
        yield (names[module],)
    if run:
        yield tuple(run)


def repeated_blocks(model: nn.Module) -> list[str]:
    """The names of the repeated blocks of `model`, each once, in registration order."""
    names = _first_names(model)
    return list(dict.fromkeys(names[module] for module, is_block in _walk_blocks(model) if is_block))


def _walk_blocks(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """The modules that a hook can stand on, and whether each is a repeated block.

    Containers are never called, so the walk goes through them; a module that holds a list of blocks is opened up.
    """
    for child in module.children():
        if next(child.parameters(), None) is None or isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            continue
        if isinstance(child, MODULE_CONTAINERS) or (
            not _is_block_list(module) and any(_is_block_list(inner) for inner in child.modules())
        ):
            yield from _walk_blocks(child)
        else:
            yield child, _is_block_list(module)


def _is_block_list(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList):
        return True
    children = list(module.children())
    return (
        isinstance(module, (nn.ModuleDict, nn.Sequential))
        and len(children) > 1
        and len({type(child) for child in children}) == 1
        and next(children[0].children(), None) is not None
    )


def _named_groups(model: nn.Module, spec: str) -> list[tuple[str, ...]]:
    """Parse `a,b+c` and check each name against the module tree."""
    first = _first_names(model)
    groups: list[tuple[str, ...]] = []
    seen: list[str] = []
    for group in spec.split(","):
        members = []
        for name in (part.strip() for part in group.split("+")):
            member = first[_named_module(model, spec, name)]
            for other in seen:
                if _inside(member, [other]) or _inside(other, [member]):
                    raise PlanError(f"plan {spec!r}: {name!r} overlaps with {other!r}; name each module once")
            seen.append(member)
            members.append(member)
        groups.append(tuple(members))
    return groups


def _named_module(model: nn.Module, spec: str, name: str) -> nn.Module:
    """The module called `name`, if a bucket can be made of it."""
    modules = dict(model.named_modules(remove_duplicate=False))
    if not name:
        raise PlanError(f"plan {spec!r}: expected a name on each side of ',' and '+', found nothing; write a,b+c")
    if name in NAMED_PLANS and name not in modules:
        raise PlanError(f"plan {spec!r}: {name!r} is a whole plan and cannot be one name of several; give it alone")
    if name not in modules:
        raise PlanError(
            f"plan {spec!r}: {name!r} names no module of {type(model).__name__} "
            f"(and is none of {', '.join(NAMED_PLANS)}); {_way_out(model, name, list(modules))}"
        )
    module: nn.Module = modules[name]
    if next(module.parameters(), None) is None:
        raise PlanError(f"plan {spec!r}: module {name!r} has no parameters; leave it out")
    if isinstance(module, CONTAINERS):
        children = _some(f"{name}.{child}" for child, _ in module.named_children())
        raise PlanError(
            f"plan {spec!r}: {name!r} is a {type(module).__name__}, which is never called, so no hook would run; "
            + (f"name its children instead: {children}" if children else "name a module around it, or leave it out")
        )
    return module


def _way_out(model: nn.Module, name: str, modules: list[str]) -> str:
    owner = name.rpartition(".")[0]
    if name in dict(model.named_parameters(remove_duplicate=False)):
        return f"it is a parameter; name its module {owner!r}" if owner else "it is a parameter of the root"
    close = difflib.get_close_matches(name, [*modules, *NAMED_PLANS], n=1) or [
        known for known in modules if known and known.split(".")[-1] == name.split(".")[-1]
    ]
    return f"did you mean {close[0]!r}?" if close else f"its modules are {_some(modules)}"


def _merge_shared(model: nn.Module, groups: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Merge groups that share a parameter."""
    merged: list[tuple[set[int], list[str]]] = []
    for group in groups:
        ids = {id(param) for name in group for param in model.get_submodule(name).parameters()}
        names = list(group)
        rest = []
        for other_ids, other_names in merged:
            if ids & other_ids:
                ids, names = ids | other_ids, other_names + names
            else:
                rest.append((other_ids, other_names))
        merged = [*rest, (ids, names)]
    return [tuple(names) for _, names in merged]


def _assign(model: nn.Module, groups: list[tuple[str, ...]]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Give each parameter to the group of its module; what is left over goes to the root.

    A module outside the group that uses one of its parameters (tied weights) joins the group's modules.
    """
    order = {name: i for i, name in enumerate(_first_names(model).values())}
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
            modules[i] += [user for user in users if not _inside(user, modules[i])]
    # dict order is the registration order of each group's first parameter
    return [(tuple(sorted(modules[i], key=order.__getitem__)), tuple(names)) for i, names in params.items()]


def _owners(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The modules that need each parameter, by the parameter's first name, all in registration order.

    They are the modules that hold it, or, if those are containers, the modules around them, which are called.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    names = _first_names(model)
    order = {name: i for i, name in enumerate(names.values())}
    first: dict[int, str] = {}
    owners: dict[str, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        holder = name.rpartition(".")[0]
        while holder and isinstance(modules[holder], CONTAINERS):
            holder = holder.rpartition(".")[0]
        canonical = first.setdefault(id(param), name)
        owners.setdefault(canonical, set()).add(names[modules[holder]])
    return {name: tuple(sorted(holders, key=order.__getitem__)) for name, holders in owners.items()}


def _first_names(model: nn.Module) -> dict[nn.Module, str]:
    """The first name of each module, in registration order."""
    return {module: name for name, module in model.named_modules()}


def _inside(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def _some(names: Iterable[str], limit: int = 8) -> str:
    """The first few names, for a message."""
    known = [name for name in names if name]
    return ", ".join(known[:limit]) + (", ..." if len(known) > limit else "")
