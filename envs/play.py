"""Playing a world with a policy that is a plain function."""

from collections.abc import Mapping
from typing import Any

from envs.base import Env, ScriptedPolicy, Task


def play(
    env: Env, task: Task, policy: ScriptedPolicy, max_turns: int | None = None
) -> tuple[list[tuple[str, str]], Mapping[str, Any]]:
    """One episode: its turns (action, observation) in order, and the facts at its end.

    The episode ends when the world says so, or after `max_turns` (default: the world's own), as with a rollout worker.
    """
    first = env.reset(task).text
    observations = [first] if first else []
    turns: list[tuple[str, str]] = []
    facts: Mapping[str, Any] = {}
    for _ in range(env.spec.max_turns if max_turns is None else max_turns):
        action = policy(observations)
        step = env.step(action)
        turns.append((action, step.observation.text))
        observations.append(step.observation.text)
        facts = step.facts
        if step.done:
            break
    return turns, facts
