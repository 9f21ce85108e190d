"""Law: imports point downward only (the table below is the layout), envs/ never sees jax, and there is no circle.

Every import counts, also one inside a function; only `if TYPE_CHECKING:` is left out, which never runs.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Longest prefix wins. A module may import its own level and those below; models and envs are siblings.
LEVEL = {
    "launch": 6,
    "rl.loop": 5,
    "rl.supervised": 5,  # the warm start's loop
    "rl": 4,  # learner, rollout, curriculum, checkpoint, episodes, monitor
    "rl.losses": 3,
    "rl.advantages": 3,
    "rl.rewards": 3,
    "rl.metrics": 3,
    "rl.types": 2,
    "rl.masked": 2,
    "models": 0,
    "envs": 0,
}
JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}


def top(module: str) -> str:
    return module.partition(".")[0]


def prefix_of(module: str) -> str | None:
    parts = module.split(".")
    return next((p for i in range(len(parts), 0, -1) if (p := ".".join(parts[:i])) in LEVEL), None)


def faults(module: str, imported: str) -> str | None:
    """What is wrong with `module` importing `imported`, or None."""
    if top(module) == "envs" and top(imported) in JAX:
        return "envs/ is plain Python and NumPy"
    if top(imported) == "configs":
        fine = top(module) in ("launch", "configs")
        return None if fine else "configs/ is imported by launch/ and tests/ only"
    if top(module) == "configs":
        return "configs/ is data: it imports configs/ only" if prefix_of(imported) else None
    if top(imported) in ("tests", "notebooks"):
        return "nothing imports tests/ or notebooks/"
    if imported == "rl" or prefix_of(imported) is None or imported == "rl.rollout" == module:
        return None
    source, target = prefix_of(module), prefix_of(imported)
    if {source, target} == {"models", "envs"}:
        return "models/ and envs/ are siblings"
    if LEVEL[target] > LEVEL[source]:
        return f"upward: {source} is below {target}"
    return None


def modules() -> dict[str, Path]:
    found = {}
    for package in ("launch", "configs", "rl", "models", "envs"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, source: str, known: set[str]) -> list[tuple[int, str]]:
    """(line, module) of every import; `from a import b` names a.b where that is a module."""
    found: list[tuple[int, str]] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.extend((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = module.split(".")[: -node.level]
                name = ".".join([*base, *([node.module] if node.module else [])])
            else:
                name = node.module or ""
            for alias in node.names:
                longer = f"{name}.{alias.name}"
                found.append((node.lineno, longer if longer in known else name))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return found


def test_every_import_points_downward():
    known = modules()
    wrong = []
    for module, path in known.items():
        for line, imported in imports_of(module, path.read_text(), set(known)):
            if fault := faults(module, imported):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {imported}: {fault}")
    assert not wrong, "\n".join(wrong)


def test_no_module_imports_itself_in_a_circle():
    known = modules()
    edges = {
        m: {i for _, i in imports_of(m, p.read_text(), set(known)) if i in known and i != m} for m, p in known.items()
    }
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        assert module not in path, "circle: " + " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for imported in sorted(edges[module]):
                visit(imported, [*path, module])
            done.add(module)

    for module in edges:
        visit(module, [])


@pytest.mark.parametrize(
    ("module", "imported", "fault"),
    [
        ("envs.search.world", "jax.numpy", "plain Python"),
        ("envs.search.world", "flax", "plain Python"),
        ("envs.base", "models.codec", "siblings"),
        ("models.codec", "envs.base", "siblings"),
        ("rl.losses.kl", "rl.learner", "upward"),
        ("rl.types", "rl.advantages", "upward"),
        ("rl.learner", "rl.loop", "upward"),
        ("models.transformer", "rl.types", "upward"),
        ("rl.loop", "launch.cli", "upward"),
        ("rl.loop", "configs.quickstart", "launch/ and tests/ only"),
        ("configs.quickstart", "launch.cli", "configs/ is data"),
        ("launch.train", "tests.conftest", "nothing imports tests"),
        ("launch.train", "configs.arg", None),
        ("configs.quickstart", "configs.arg", None),
        ("rl.rollout.worker", "rl.rollout.engine", None),
        ("rl.rollout.worker", "envs.base", None),
        ("rl.loop", "rl.learner", None),
        ("models.codec", "jax", None),
        ("rl.metrics.behaviour", "rl.types", None),
    ],
)
def test_the_rule_itself(module, imported, fault):
    got = faults(module, imported)
    assert got is None if fault is None else fault in (got or ""), got


def test_the_parser_sees_every_form_of_import():
    source = (
        "import jax.numpy as jnp\nfrom rl import loop, nothing\nfrom . import base\nfrom ..models import codec\n"
        "def f():\n    from jax import lax\n"
        "if TYPE_CHECKING:\n    import optax\nelse:\n    import flax\n"
    )
    known = {"rl.loop", "envs.base", "models.codec"}
    got = [name for _, name in imports_of("envs.qa.world", source, known | {"envs.qa.base"})]
    assert got == ["jax.numpy", "rl.loop", "rl", "envs.qa.base", "envs.models", "jax", "flax"]


def test_importing_all_of_envs_leaves_jax_alone():
    """What the parser cannot see: a third-party package that would bring jax in, or what reads models."""
    names = [m for m in modules() if top(m) == "envs" and not m.endswith("__main__")]
    code = (
        f"import importlib, sys\nfor m in {names}: importlib.import_module(m)\n"
        f"print([m for m in {sorted(JAX | {'transformers', 'tokenizers'})} if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert out.stdout.strip().endswith("[]"), out.stdout + out.stderr
