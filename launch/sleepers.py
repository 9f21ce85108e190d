"""A world of `python -m launch.bench fleet` that takes time and does nothing. It is a module of its own because other
processes make it too, which shall import no more than a world needs.
"""

import time

from envs.base import EnvSpec, Message, Observation, Step, Task, World

WORLD = f"{__name__}:make_world"
TURNS, SECONDS = 5, 1.0
STOP = "</search>"
SAID = f"<search> the capital of a country that {STOP}"
ANSWER = (
    "<result> a passage of some sentences on the country, of its rivers, its cities and how many live there </result>"
)


class SleepyEnv:
    """TURNS turns of SECONDS in all, whatever is said."""

    spec = EnvSpec("sleepy", (STOP,), TURNS)

    def reset(self, task: Task) -> Observation:
        self._turns = 0
        return Observation("")

    def step(self, action: str) -> Step:
        time.sleep(SECONDS / TURNS)
        self._turns += 1
        facts = {"success": self._turns == TURNS, "searches": self._turns, "action": action}
        return Step(Observation(ANSWER), self._turns == TURNS, facts)

    def close(self) -> None:
        pass


def make_world() -> World:
    """The world of sleepers."""
    return World("sleepy", SleepyEnv, lambda split: [make_task(i) for i in range(8)], {}, lambda: [SAID, ANSWER])


def make_task(i: int) -> Task:
    prompt = (Message("user", f"What is the capital of country {i} ?"),)
    return Task(f"sleepy/{i}", "sleepy", "train", i, prompt, {"answers": [str(i)]})
