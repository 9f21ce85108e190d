"""The one-turn form of the code world: a thought and edits, scored by likeness to the gold patch (SWE-RL,
2502.18449)."""

import json

from envs.base import EnvSpec, Observation, Step, Task
from envs.code import similarity
from envs.code.episode import GRADED, graded
from envs.code.grade import Grades, protected
from envs.code.repositories import Repositories
from envs.code.suite import Suites
from envs.dataset import task_from_json, task_to_json


class PatchEnv:
    """One turn: a thought and SEARCH/REPLACE edits (similarity.FORM), scored by likeness to the gold patch.

    Facts: similarity (in [0, 1]; -1 of a malformed answer), well_formed ([bool]), success (the tests pass, too, and
    nothing was exploited), exploited, exploits, f2p_frac, p2p_frac, variants_frac (NaN of a malformed answer, and where
    hidden calls were not made).
    """

    def __init__(self, repositories: Repositories, suites: Suites, grades: Grades | None = None) -> None:
        self.spec = EnvSpec("code", ("</solution>",), 1)
        self._repositories, self._suites = repositories, suites
        self._grades = Grades() if grades is None else grades
        self._task: Task | None = None
        self._over = False

    def reset(self, task: Task) -> Observation:
        """Begin `task`. The observation is empty: the prompt is the task's own."""
        self._repositories.of(task)
        self._task, self._over = task, False
        return Observation("")

    def step(self, action: str) -> Step:
        """Read the patch in `action`, up to the first stop string; the episode is over."""
        if self._task is None or self._over:
            raise RuntimeError("no episode is running; call reset(task) first")
        self._over = True
        repository = self._repositories.of(self._task)
        head, stop, _ = action.partition(self.spec.stop[0])
        facts = {"similarity": -1.0, "success": False, "exploited": False, "exploits": [], "well_formed": [False]}
        facts |= {name: float("nan") for name in GRADED[:3]}
        try:
            files = {path: text for path in repository.tree if (text := repository.seen(path)) is not None}
            changed = similarity.read_answer(head + stop, files)
        except similarity.Malformed as wrong:
            return Step(Observation(f"Malformed: {wrong}."), True, facts)
        before = {path: repository.seen(path) for path in {*changed, *repository.start}}
        gold = {path: repository.released(path) for path in repository.start}
        tried = sorted({"tests" for path in changed if protected(repository.package, path)})
        result = graded(self._suites, self._grades, self._repositories, self._task, changed, tried)
        facts |= {
            "similarity": similarity.similarity(before, changed, gold), "success": result.success,
            "exploited": bool(result.exploits), "exploits": list(result.exploits), "well_formed": [True],
            "f2p_frac": result.f2p_frac, "p2p_frac": result.p2p_frac, "variants_frac": result.variants_frac,
        }  # fmt: skip
        return Step(Observation(""), True, facts)

    def snapshot(self) -> bytes:
        """The complete state as UTF-8 JSON."""
        if self._task is None:
            raise RuntimeError("no episode is running; call reset(task) first")
        return json.dumps({"task": task_to_json(self._task), "over": self._over}).encode()

    def restore(self, snapshot: bytes) -> None:
        state = json.loads(snapshot)
        self._task, self._over = task_from_json(state["task"]), state["over"]

    def close(self) -> None:
        self._task = None
