"""The house rules that a reader relies on: who imports whom, which files are pairs, where private names may be.

Each rule is a function from a parsed file to its violations, so that it can be tried on a bad example too.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ("fsdp_eager", "fsdp_compiled")
ROOMS = ("common", *ENGINES, "bench", "parity_tests", "examples")
PAIRED = ("api", "bucket", "collectives", "parallelize", "param", "reshard", "schedule")
MAX_LINES = 400
MAY_IMPORT = {
    "common": {"common"},
    "common.harness": {"common", "common.harness"},
    "fsdp_eager": {"common", "fsdp_eager"},
    "fsdp_compiled": {"common", "fsdp_compiled"},
    "bench": {"common", "common.harness", "bench"},
    "parity_tests": {"common", "common.harness", *ENGINES, "parity_tests"},
    "examples": {"common"},
}
"""Which rooms of our own each room may import; engines and examples are found by name, at run time."""
TESTS_OF_BENCH = {
    f"parity_tests/{name}.py"
    for name in (
        "cli_calls",
        "conftest",
        "fuzz",
        "test_baseline",
        "test_baseline_files",
        "test_bench",
        "test_cli",
        "test_cli_words",
        "test_explain",
        "test_fake_link",
        "test_gpu_trace",
        "test_own_model",
        "test_random_configurations",
        "test_render",
        "test_scripts",
        "test_selftest",
        "test_store",
        "test_tables",
        "test_trace",
    )
}
TORCH_FSDP = "torch.distributed.fsdp"
INDUCTOR_PASSES = re.compile(
    r"torch\._inductor\.(comms|fx_passes\.(bucketing|overlap_\w+|ddp_fusion|fsdp|micro_pipeline_tp))(\.|$)"
)
INDUCTOR_SWITCH = re.compile(
    r"(bucket_\w+_fx|reorder_for_(compute_comm_overlap|peak_memory)|enable_overlap_scheduling)$"
)


@dataclass(frozen=True)
class Source:
    """One file of ours: its path below the root, with slashes, and its parsed text."""

    path: str
    text: str

    @property
    def room(self) -> str:
        return "common.harness" if self.path.startswith("common/harness/") else self.path.split("/")[0]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.tree) or ""

    def imports(self) -> Iterator[tuple[str, int]]:
        """Every dotted name that is imported, wherever in the file, and its line; `from a import b` gives a.b."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}:{node.lineno}: a relative import; write the whole name"
                yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)

    def dotted(self) -> Iterator[tuple[str, int]]:
        """Every chain of attributes `a.b.c`, its first name replaced by what was imported under it, and its line."""
        names = _bound_names(self.tree)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                chain = _chain(node)
                yield ".".join((names.get(chain[0], chain[0]), *chain[1:])), node.lineno


def _bound_names(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def _chain(node: ast.expr) -> list[str]:
    """The names of `a.b.c`; what is no name, such as a call, counts as one called "()"."""
    if isinstance(node, ast.Attribute):
        return [*_chain(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else ["()"]


@cache
def sources() -> tuple[Source, ...]:
    paths = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return tuple(Source(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths)


def foreign_rooms(source: Source) -> list[str]:
    """Imports of rooms of ours that this file's room may not know."""
    allowed = set(MAY_IMPORT[source.room])
    if source.path in TESTS_OF_BENCH:
        allowed.add("bench")
    found = []
    for name, line in source.imports():
        parts = name.split(".")
        room = "common.harness" if parts[:2] == ["common", "harness"] else parts[0]
        if parts[0] in ROOMS and room not in allowed:
            found.append(f"{source.path}:{line} imports {name}")
    return found


def torch_fsdp_in_eager(source: Source) -> list[str]:
    """Uses of torch's own FSDP in the eager engine."""
    used = [*source.imports(), *source.dotted()] if source.room == "fsdp_eager" else []
    return [f"{source.path}:{line} uses {name}" for name, line in used if _is_under(name, TORCH_FSDP)]


def inductor_passes_in_compiled(source: Source) -> list[str]:
    """Uses of Inductor's own bucketing and overlap passes in the compiled engine, or a switch that turns one on."""
    if source.room != "fsdp_compiled":
        return []
    used = [*source.imports(), *source.dotted()]
    found = [f"{source.path}:{line} uses {name}" for name, line in used if INDUCTOR_PASSES.match(name)]
    for node in ast.walk(source.tree):
        pairs: list[tuple[str, ast.expr]] = []
        if isinstance(node, ast.Dict):
            keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
            pairs = [(key, value) for key, value in zip(keys, node.values, strict=True) if isinstance(key, str)]
        elif isinstance(node, ast.Call):
            pairs = [(keyword.arg or "", keyword.value) for keyword in node.keywords]
        elif isinstance(node, ast.Assign):
            pairs = [(target.attr, node.value) for target in node.targets if isinstance(target, ast.Attribute)]
        for name, value in pairs:
            off = isinstance(value, ast.Constant) and value.value in (False, None, "none")
            if INDUCTOR_SWITCH.search(name) and not off:
                found.append(f"{source.path}:{value.lineno} switches on {name}")
    return found


def private_names(source: Source) -> list[str]:
    """Private names of torch outside the file that is kept for them.

    A name is private if it, or a module it is in, begins with one underscore, and it is not defined in this file.
    Operators (`torch.ops`, `aten`) are not Python names: the underscore is part of their schema's name.
    """
    if source.path.endswith("/torch_private.py"):
        return []
    own = _own_names(source.tree)
    found = [
        f"{source.path}:{line} imports {name}"
        for name, line in source.imports()
        if name.startswith("torch.") and (_has_private_part(name) or "_internal" in name)
    ]
    operators = {"torch.ops"} | {name for name, value in _aliases(source) if value.startswith("torch.ops.")}
    for name, line in source.dotted():
        *_, last = name.split(".")
        is_private = last.startswith("_") and not last.endswith("__") and last not in own
        is_ours_or_stdlib = name.split(".")[0] in ("os", "sys", "self", "cls", *ROOMS)
        if is_private and not is_ours_or_stdlib and not any(_is_under(name, operator) for operator in operators):
            found.append(f"{source.path}:{line} uses {name}")
    return found


def _own_names(tree: ast.Module) -> set[str]:
    """Names that a file defines itself: functions, classes, fields, and attributes that it sets on `self`."""
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _chain(node)[0] == "self":
            own.add(node.attr)
    return own


def _aliases(source: Source) -> Iterator[tuple[str, str]]:
    """Names that stand for a chain of attributes, such as `aten = torch.ops.aten`."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, ".".join(_chain(node.value))


def _has_private_part(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def _is_under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def missing_docstring(source: Source) -> list[str]:
    return [] if source.docstring else [f"{source.path} has no docstring"]


def too_long(source: Source) -> list[str]:
    lines = source.text.count("\n")
    return [f"{source.path} has {lines} lines, more than {MAX_LINES}"] if lines > MAX_LINES else []


def unpaired(source: Source) -> list[str]:
    """A paired file whose docstring does not point at the same file of the other engine."""
    room, _, name = source.path.partition("/")
    if room not in ENGINES or name.removesuffix(".py") not in PAIRED:
        return []
    other = f"{ENGINES[1 - ENGINES.index(room)]}/{name}"
    named = re.search(r"^Counterpart: (\S+\.py)\b", source.docstring, re.MULTILINE)
    return [] if named and named[1] == other else [f"{source.path}: expected 'Counterpart: {other}' in its docstring"]


RULES: tuple[Callable[[Source], list[str]], ...] = (
    foreign_rooms,
    torch_fsdp_in_eager,
    inductor_passes_in_compiled,
    private_names,
    missing_docstring,
    too_long,
    unpaired,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_tree_keeps_the_rule(rule: Callable[[Source], list[str]]) -> None:
    """No file of ours breaks the rule."""
    found = [violation for source in sources() for violation in rule(source)]
    assert not found, "\n" + "\n".join(found)


def test_tree_has_every_pair_and_every_room() -> None:
    """Both engines have each paired file, and each room has files, so that no rule passes for lack of any."""
    paths = {source.path for source in sources()}
    assert {f"{engine}/{name}.py" for engine in ENGINES for name in PAIRED} <= paths
    assert {source.room for source in sources()} == set(MAY_IMPORT)


def test_tree_rules_name_modules_that_exist() -> None:
    """The modules that engines may not use are torch's; a rule about a misspelt one would never fail."""
    inductor = ("comms", "fx_passes.bucketing", "fx_passes.overlap_scheduling")
    for name in (TORCH_FSDP, *(f"torch._inductor.{module}" for module in inductor)):
        assert importlib.util.find_spec(name) is not None, name
        assert name == TORCH_FSDP or INDUCTOR_PASSES.match(name)


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (foreign_rooms, "common/plan.py", "from fsdp_eager import fully_shard"),
        (foreign_rooms, "common/plan.py", "def f():\n    import common.harness.records"),
        (foreign_rooms, "common/harness/train.py", "import fsdp_compiled.graph as g"),
        (foreign_rooms, "fsdp_eager/api.py", "from fsdp_compiled.api import data_parallel"),
        (foreign_rooms, "fsdp_compiled/api.py", "from common.harness.records import Run"),
        (foreign_rooms, "bench/tables.py", "from parity_tests import faulty"),
        (foreign_rooms, "bench/tables.py", "import fsdp_eager"),
        (foreign_rooms, "parity_tests/test_plan.py", "from bench import tables"),
        (foreign_rooms, "examples/my_engine.py", "from common.harness.train import train"),
        (foreign_rooms, "common/task.py", "from examples import my_model"),
        (torch_fsdp_in_eager, "fsdp_eager/api.py", "from torch.distributed.fsdp import fully_shard"),
        (torch_fsdp_in_eager, "fsdp_eager/api.py", "from torch.distributed import fsdp"),
        (torch_fsdp_in_eager, "fsdp_eager/api.py", "import torch.distributed as dist\ndist.fsdp.fully_shard(m)"),
        (inductor_passes_in_compiled, "fsdp_compiled/x.py", "from torch._inductor.fx_passes import bucketing"),
        (inductor_passes_in_compiled, "fsdp_compiled/x.py", "import torch\ntorch._inductor.comms.raise_comms(s)"),
        (inductor_passes_in_compiled, "fsdp_compiled/x.py", "C = {'bucket_all_gathers_fx': 'all'}"),
        (inductor_passes_in_compiled, "fsdp_compiled/x.py", "config.reorder_for_compute_comm_overlap = True"),
        (inductor_passes_in_compiled, "fsdp_compiled/x.py", "patch(enable_overlap_scheduling=flag)"),
        (private_names, "common/job.py", "from torch._dynamo import reset"),
        (private_names, "common/job.py", "from torch.testing._internal.distributed import fake_pg"),
        (private_names, "common/job.py", "from torch.fx.graph import _BoxedCodeGen"),
        (private_names, "common/job.py", "import torch\ntorch._C._current_graph_task_id()"),
        (private_names, "common/job.py", "def f(x): return x._local_tensor"),
        (private_names, "common/job.py", "def f(m): return m.blocks[0]._parameters['weight']"),
        (missing_docstring, "common/job.py", "import os"),
        (too_long, "common/job.py", "\n" * 401),
        (too_long, "parity_tests/test_job.py", "\n" * 401),
        (unpaired, "fsdp_eager/api.py", '"""X.\n\nCounterpart: fsdp_compiled/param.py, the same.\n"""'),
        (unpaired, "fsdp_compiled/api.py", '"""X."""'),
    ],
)
def test_tree_rule_finds_a_violation(rule: Callable[[Source], list[str]], path: str, text: str) -> None:
    """Each rule sees each way to break it."""
    assert len(rule(Source(path, text))) >= 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "fsdp_compiled/x.py",
            "import torch\naten = torch.ops.aten\naten._to_copy.default\ntorch.ops._c10d_functional.a",
        ),
        ("fsdp_compiled/x.py", "C = {'reorder_for_peak_memory': False, 'bucket_all_gathers_fx': 'none'}"),
        ("common/x.py", "import os\nclass A:\n    _n: int\n    def f(self): self._x = 1\ndef g(a): return a._x + a._n"),
        ("parity_tests/test_cli.py", "from bench.__main__ import main\nfrom fsdp_eager.api import fully_shard"),
    ],
)
def test_tree_rules_pass_what_is_allowed(path: str, text: str) -> None:
    """Operators, switches turned off, a file's own private names, and the tests of bench break no rule."""
    found = [violation for rule in RULES if rule is not missing_docstring for violation in rule(Source(path, text))]
    assert found == []
