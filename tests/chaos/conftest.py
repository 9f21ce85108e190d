"""One tiny run for all of tests/chaos."""

import dataclasses

import jax
import pytest

from launch import bench_chaos, reinforce
from launch.plan import make_plan
from launch.workdir import open_workdir

STEPS = 6


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """run(folder): a run there, or the rest of it; all have the learner of the first, compiled once. `whole` is the one
    that nothing disturbs: several epochs over few tasks, of which some are broken.
    """
    root, made = tmp_path_factory.mktemp("chaos"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # for the processes that the tests start
        config = bench_chaos.to_kill(root, 1, 0, steps=STEPS)
        plan = make_plan(config)

        def run(folder, change=lambda parts: parts):
            with open_workdir(root / folder if isinstance(folder, str) else folder, config) as workdir:
                parts = reinforce.build_parts(plan, workdir, None)
                learner = made.setdefault("learner", parts.learner)
                parts = change(dataclasses.replace(parts, learner=learner))
                with reinforce.opened(parts, steps=STEPS) as live:
                    made["pool"] = live.pool
                    reinforce.train(parts, live, steps=STEPS)

        run.root, run.config, run.pool = root, config, lambda: made["pool"]
        least = jax.config.jax_persistent_cache_min_compile_time_secs
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        try:
            run("whole")
        finally:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
        yield run
