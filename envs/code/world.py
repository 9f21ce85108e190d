"""The code world (SWE-RL): repair a real repository with tools; its own tests, in a sandbox, say whether it works."""

import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from envs.base import Message, ScriptedPolicy, Task, World
from envs.code import cheats, grade, scripted, similarity, tools
from envs.code import lessons as teaching
from envs.code import tasks as making
from envs.code.episode import CodeEnv
from envs.code.grade import Grades
from envs.code.one_turn import PatchEnv
from envs.code.operators import OPERATORS
from envs.code.packages import PACKAGES
from envs.code.repositories import Repositories, read_instances
from envs.code.suite import Suites

SPLITS = ("train", "validation", "test")
SHOWN = ("issue", "function", "files")


def make_world(
    *,
    data_dir: str = "data/code",
    packages: Sequence[str] = (),
    sizes: Mapping[str, int] = making.SIZES,
    families: Sequence[str] = ("one", "several", "regression", "impossible"),
    max_function_lines: int = 0,
    operators: Sequence[str] = (),
    lessons: int = 0,
    seed: int = 0,
    instances: str = "",
    checkouts: str = "",
    protocol: str = "tags",
    max_turns: int = 12,
    max_chars: int = 3000,
    show: str = "issue",
    instruction: str = "",
    sandboxes: int = 0,
    accept_rlimits: bool = False,
    cheat: Sequence[str] = tuple(cheats.CHEATS),
    demonstrations: Mapping[str, Any] = MappingProxyType({}),
) -> World:
    """Repair of real packages. Tasks are made and proved in `data_dir` on first use, for minutes; pip needs a network
    then.

    Args:
        packages, sizes, seed: see tasks.build; without packages, all. families: those that are asked.
        max_function_lines: > 0 asks only for bugs in functions of at most so many lines.
        operators: kinds of bugs; with some of them, no others are made, nor in longer functions: more of these, then.
        lessons: > 0: demonstrations are of so many lessons (lessons.py), with the same bugs, not of training tasks.
        instances, checkouts: a JSONL file in SWE-bench's form and a folder of git repositories: these tasks instead,
            all in the train split. On first use the suite of each is run twice with its gold patch, and one that does
            not pass is refused.
        protocol: "tags" or "json", as CodeEnv; "patch": one turn, as PatchEnv.
        show: in the prompt, the "issue" alone, with the "function" of the bug, or with the whole "files" of the bug.
        instruction: a system message. sandboxes: at once; 0: as many as there are cores.
        accept_rlimits: run untrusted code without namespaces where there are none.
        cheat: names of the cheats among the policies. demonstrations: keyword arguments of `scripted.demonstrator`.
    """
    packages = tuple(packages) or tuple(PACKAGES)
    unknown = {"packages": set(packages) - set(PACKAGES), "families": set(families) - set(making.SIZES),
               "sizes": set(sizes) - set(making.SIZES), "cheat": set(cheat) - set(cheats.CHEATS),
               "operators": set(operators) - set(OPERATORS)}  # fmt: skip
    for name, words in unknown.items():
        if words:
            raise ValueError(f"{name}: got {sorted(words)}, want some of those that there are (envs/code)")
    if show not in SHOWN or (protocol != "patch" and protocol not in tools.PROTOCOLS):
        raise ValueError(
            f"got show={show!r}, protocol={protocol!r}; want one of {SHOWN}, of {(*tools.PROTOCOLS, 'patch')}"
        )
    if bool(instances) != bool(checkouts):
        raise ValueError(f"got instances={instances!r}, checkouts={checkouts!r}; want both or none")
    kinds = making.Kinds(tuple(operators), max_function_lines if operators else 0)
    folder = pathlib.Path(data_dir)
    suites = Suites(sandboxes or os.cpu_count() or 1, accept_rlimits=accept_rlimits)
    repositories = Repositories(folder, suites, pathlib.Path(checkouts).absolute() if checkouts else None)
    prompted = functools.partial(_prompted, repositories, show, instruction, protocol)
    lock, grades = threading.Lock(), Grades()
    made: dict[str, list[Task]] = {}

    def tasks(split: str) -> Sequence[Task]:
        if split not in SPLITS:
            raise ValueError(f"split: got {split!r}, want one of {', '.join(SPLITS)}")
        with lock:
            if not made:
                every = _instances(instances) if instances else _built(folder, packages, suites, sizes, seed, kinds)
                kept = [task for task in every if _wanted(task, families, max_function_lines)]
                if instances:  # measured here, once: no call of an episode has the time
                    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
                        list(pool.map(repositories.data, kept))
                made.update({name: [task for task in kept if task.split == name] for name in SPLITS})
        return _Tasks(made[split], prompted)

    def taught() -> Sequence[Task]:
        return _Tasks(teaching.build(lessons, folder, seed=seed, kinds=kinds), prompted)

    def make_env() -> CodeEnv | PatchEnv:
        if protocol == "patch":
            return PatchEnv(repositories, suites, grades)
        how = {"protocol": protocol, "max_turns": max_turns, "max_chars": max_chars, "grades": grades}
        return CodeEnv(repositories, suites, **how)

    if protocol != "patch":
        make_env()  # bad options end here, not in a worker thread
    write = scripted.write_patch if protocol == "patch" else tools.PROTOCOLS[protocol].write
    policies = scripted.policies(repositories, write)
    if protocol == "patch":
        demonstrations = {"slips": 0.0, **demonstrations}  # there is no second turn
    else:
        policies |= cheats.policies(repositories, write, cheat)
    demonstrate = functools.partial(scripted.demonstrator, repositories=repositories, write=write, **demonstrations)
    by = {
        "version": scripted.VERSION,
        "graded_by": grade.VERSION,
        "protocol": protocol,
        "show": show,
        "slips": scripted.SLIPS,
        **scripted.SHARES,
        **demonstrations,
    }
    lesson_tasks = taught if lessons else None
    # A token that only tasks have would be one that no demonstration of a lesson has taught.
    texts = lambda: _texts(taught() if lessons else tasks("train"), demonstrate)  # noqa: E731
    return World("code", make_env, tasks, policies, texts, demonstrate, by, lessons=lesson_tasks)


def variants(options: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Sequence[str]]]:
    """(options, splits): the tasks of the packages; or the instances that are given, which are one split."""
    return [(options, ("train",) if options.get("instances") else SPLITS)]


def _built(folder, packages, suites, sizes, seed, kinds) -> list[Task]:
    say = functools.partial(print, flush=True)
    built = making.build(
        packages, folder, suites, sizes=sizes, seed=seed, kinds=kinds, say=say, threads=os.cpu_count() or 1
    )
    return [task for found in built.values() for task in found]


def _instances(file: str) -> list[Task]:
    path = pathlib.Path(file)
    if not path.is_file():
        raise ValueError(f"instances: got {file!r}, want a JSONL file in SWE-bench's form")
    return read_instances(path, "train")


def _wanted(task: Task, families: Sequence[str], most_lines: int) -> bool:
    if "instance" in task.data:
        return True
    return task.family in families and (not most_lines or 0 < task.data["lines"] <= most_lines)


class _Tasks(Sequence[Task]):
    """Tasks whose prompts are written when they are looked up."""

    def __init__(self, tasks: Sequence[Task], prompted: Callable[[Task], Task]) -> None:
        self._tasks, self._prompted = tasks, prompted

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self._prompted(task) for task in self._tasks[index]]
        return self._prompted(self._tasks[index])


def _prompted(repositories: Repositories, show: str, instruction: str, protocol: str, task: Task) -> Task:
    parts = [task.data["issue"]]
    repository = repositories.of(task)
    if show == "files":
        files = ((path, repository.seen(path)) for path in sorted(repository.buggy))
        parts = [f"--- BEGIN ISSUE ---\n{parts[0]}\n--- END ISSUE ---"]
        parts += [f"--- BEGIN FILE ---\n### {path}\n{text}\n--- END FILE ---" for path, text in files]
    elif show == "function":
        shown = (scripted.function_text(repository, name) for name in task.data["functions"])
        # A blank before the path, as in an action: its tokens are the same there.
        parts += [f"### {path}\n{text}" for path, text in shown]
    if protocol == "patch":
        parts.append(f"Answer in this form:\n{similarity.FORM}")
    system = (Message("system", instruction),) if instruction else ()
    return dataclasses.replace(task, prompt=(*system, Message("user", "\n".join(parts))))


def _texts(tasks: Sequence[Task], demonstrate: Callable[[Task, int], ScriptedPolicy]) -> Iterator[str]:
    for task in tasks[:2000]:
        yield task.prompt[-1].content
        yield demonstrate(task, 0)([])
