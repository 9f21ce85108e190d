"""One JSON line per workload: is this commit faster or slower than the last one?

Run: python -m launch.bench model|train|engine|decode|step|async|fleet|search|credit|chaos
     [--config=configs/quickstart.py] [--seconds=10] [--timeline=FOLDER]

    model    one update at a fixed shape (4 layers of 512, 8 rows of 512 tokens, f32), its useful FLOP/s over those of a
             matrix product timed right after it, and its peak bytes with and without chunked log-probabilities
    train    tokens trained per second at the config's shapes: full packed rows through `train_step`
    engine   a line each: sampled tokens/s of 16 conversations of 6 turns, beside what the machine allows, and what a
             late turn costs over the first; rows of 4,096 ids over those of 1,024; a decode step over a bare program;
             a group's prompt over a single one; lanes busy with slow worlds
    decode   sampled tokens/s of 8 sessions of the model at the config's model.path
    step     one RL step after another, whole: sampled tokens/s of 128 completions, their update and new weights
    async    a line each: wall seconds of the loop over slow worlds, synchronous and running ahead, beside those of a
             schedule in which worlds alone take time, and who waits in whose phases (with --timeline traces of it for
             ui.perfetto.dev); what interrupting generation is worth (launch/bench_async.py)
    fleet    a line each for worlds in threads and in processes: CPU milliseconds of the host a turn, of 1,000 episodes
             at once whose worlds sleep (launch/bench_fleet.py)
    search   queries per second of one thread on the local index
    credit   no speed: a line for each estimator of advantages and number of samples, its correlation with the right
             credit in a world where that is known (launch/bench_credit.py)
    chaos    no speed: a fifth of 200 episodes faulted; real processes killed at random moments, 20 times each: waiting
             for every batch, running ahead, with worlds in processes; what is left, lost and equal to
             the run that nobody disturbed (launch/bench_chaos.py; many minutes)

Compilation and index building are not in the figure; they are `setup_s`.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from launch import cli
from launch.plan import Plan, make_plan

_CONFIG = cli.define_config("configs/quickstart.py")
_TIMELINE = flags.DEFINE_string("timeline", "", "A folder that is there: async writes a trace of each run into it")
_SECONDS = flags.DEFINE_float("seconds", 10.0, "Measure for about this long", lower_bound=0.01)


def main(argv: Sequence[str]) -> None:
    with cli.validating():
        name = argv[1] if len(argv) == 2 else ""
        if name not in WORKLOADS:
            raise cli.ConfigError(f"got workload {name!r}, want one of {', '.join(WORKLOADS)}")
        if _TIMELINE.value and not Path(_TIMELINE.value).is_dir():
            raise cli.ConfigError(f"--timeline: got {_TIMELINE.value!r}, want a folder that is there")
        plan = make_plan(cli.resolve(_CONFIG.value, None))
    done = WORKLOADS[name](plan, _SECONDS.value)
    for line in [done] if isinstance(done, dict) else done:
        print(json.dumps({"bench": name, **line}), flush=True)


# The fixed workload: small enough for two cores, large enough that matrix products lead.
MODEL = {"n_layers": 4, "d_model": 512, "d_ff": 2048, "n_heads": 8, "n_kv_heads": 4, "head_dim": 64, "vocab_size": 4096}
MODEL_ROWS, MODEL_LENGTH, MODEL_PROMPT, MODEL_CHUNK = 8, 512, 64, 128


def bench_model(plan: Plan, seconds: float) -> dict[str, Any]:
    """Useful FLOP/s of an update over the machine's matrix peak, both timed in turn; bytes with and without chunks.

    Useful FLOP = 6·N·tokens + 6·V·D·tokens + 12·L·T·N_heads·H·tokens / 2, N the matrix parameters without embedding and
    head, the last term causal attention: half of the square. Nothing is counted for what is computed twice.
    """
    import jax

    from launch.bench_engine import matmul_flops
    from models.config import ModelConfig

    begun = time.monotonic()
    config = ModelConfig(**MODEL)
    learner, state, batch = _one_update(config, MODEL_ROWS, MODEL_LENGTH, MODEL_LENGTH, plan.seed)
    peak = matmul_flops()
    for _ in range(2):
        state, metrics = jax.block_until_ready(learner.train_step(state, batch))
    setup_s = time.monotonic() - begun
    tokens = MODEL_ROWS * MODEL_LENGTH
    heads = config.head_dim * (2 * config.n_heads + 2 * config.n_kv_heads)
    matrices = config.n_layers * config.d_model * (heads + 3 * config.d_ff)
    attention = 12 * config.n_layers * MODEL_LENGTH * config.n_heads * config.head_dim / 2
    flops = tokens * (6 * matrices + 6 * config.vocab_size * config.d_model + attention)
    steps, peaks, deadline = [], [], time.monotonic() + seconds
    while time.monotonic() < deadline or len(steps) < 3:
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(learner.train_step(state, batch))
        steps.append(time.perf_counter() - start)
        peaks.append(statistics.median(peak() for _ in range(3)))
    step_s = statistics.median(steps)
    return {
        "tokens_per_s": round(tokens / step_s, 1),
        "step_s": round(step_s, 4),
        "useful_flops_per_s": round(flops / step_s),
        "matmul_flops_per_s": round(statistics.median(peaks)),
        "of_peak": round(statistics.median(flops / s / p for s, p in zip(steps, peaks, strict=True)), 3),
        "steps": len(steps),
        "temp_bytes": _temp_bytes(config, MODEL_LENGTH),
        "temp_bytes_chunked": _temp_bytes(config, MODEL_CHUNK),
        "setup_s": round(setup_s, 2),
        **_device(),
    }


def _one_update(config: Any, rows: int, length: int, chunk: int, seed: int) -> tuple[Any, Any, Any]:
    """A learner on one device, its state, and one batch of `rows` full rows: 32 sampled tokens after 64 observed."""
    import jax
    import numpy as np

    from models.sharding import make_mesh
    from rl.learner import make_learner, make_optimizer
    from rl.losses import recipes
    from rl.types import TrajectoryBatch

    tx = make_optimizer(learning_rate=1e-4, weight_decay=0.01)
    learner = make_learner(config, recipes.grpo(reduce="token"), tx, make_mesh(), micro_rows=rows, chunk=chunk)
    rng = np.random.default_rng(seed)
    at = np.arange(length)
    sampled = (at >= MODEL_PROMPT) & ((at - MODEL_PROMPT) % 96 >= 64)
    zeros = np.zeros((rows, length), np.float32)
    batch = TrajectoryBatch(
        tokens=rng.integers(3, config.vocab_size, (rows, length), np.int32),
        segment=np.ones((rows, length), np.int32),
        position=np.broadcast_to(at.astype(np.int32), (rows, length)).copy(),
        action_mask=np.broadcast_to(sampled, (rows, length)).copy(),
        behavior_logp=zeros - np.log(np.float32(config.vocab_size)),
        staleness=np.zeros((rows, length), np.int32),
        rewards=zeros,
        advantages=np.broadcast_to(rng.normal(size=(rows, 1)).astype(np.float32), (rows, length)).copy(),
    )
    return learner, learner.init_state(jax.random.key(seed)), batch


def _temp_bytes(config: Any, chunk: int) -> int:
    """Bytes that the gradient of the workload's log-probabilities needs besides its arguments and results."""
    import jax
    import jax.numpy as jnp

    from models import transformer
    from models.logprobs import token_logp

    def total(params: Any, tokens: Any) -> Any:
        ones = jnp.ones_like(tokens)
        position = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden = transformer.apply(params, config, tokens, ones, position)
        return jnp.sum(token_logp(params, hidden, tokens, chunk=chunk)[0])

    params = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((MODEL_ROWS, MODEL_LENGTH), jnp.int32)
    return jax.jit(jax.grad(total)).lower(params, tokens).compile().memory_analysis().temp_size_in_bytes


def bench_train(plan: Plan, seconds: float) -> dict[str, Any]:
    """Trained tokens/s: every place of every row is a token, so padding is not flattered."""
    import jax
    import numpy as np

    from models.config import ModelConfig
    from models.sharding import make_mesh
    from rl.learner import make_learner, make_optimizer
    from rl.losses import recipes
    from rl.types import TrajectoryBatch

    begun = time.monotonic()
    config = ModelConfig(vocab_size=plan.vocab_size, **plan.model)
    rows, length = plan.batch.rows, plan.batch.length
    with cli.validating():
        mesh = make_mesh(*plan.mesh)
    learner = make_learner(
        config,
        recipes.grpo(),
        make_optimizer(learning_rate=1e-4),
        mesh,
        micro_rows=plan.batch.micro_rows,
        chunk=plan.batch.logp_chunk,
    )
    rng = np.random.default_rng(plan.seed)
    zeros = np.zeros((rows, length), np.float32)
    batch = TrajectoryBatch(
        tokens=rng.integers(0, plan.vocab_size, (rows, length), np.int32),
        segment=np.ones((rows, length), np.int32),
        position=np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)).copy(),
        action_mask=np.broadcast_to(np.arange(length) >= length // 2, (rows, length)).copy(),
        behavior_logp=zeros,
        staleness=np.zeros((rows, length), np.int32),
        rewards=zeros,
        advantages=rng.normal(size=(rows, length)).astype(np.float32),
    )
    state = learner.init_state(jax.random.key(plan.seed))
    state, _ = jax.block_until_ready(learner.train_step(state, batch))
    setup_s = time.monotonic() - begun

    def once() -> int:
        nonlocal state
        state, metrics = learner.train_step(state, batch)
        jax.block_until_ready(metrics)
        return rows * length

    return {**_rate(once, seconds, "tokens"), "setup_s": round(setup_s, 2), **_device()}


def bench_engine(plan: Plan, seconds: float) -> Iterator[dict[str, Any]]:
    """The workloads of launch/bench_engine.py, a line each."""
    from launch import bench_engine

    for workload in bench_engine.workloads(plan.seed):
        yield {**workload, **_device()}


def bench_async(plan: Plan, seconds: float) -> Iterator[dict[str, Any]]:
    """The workloads of launch/bench_async.py, a line each. They take their own time: about six minutes."""
    from launch import bench_async

    folder = Path(_TIMELINE.value) if _TIMELINE.value else None
    for workload in bench_async.workloads(plan.seed, folder):
        yield {**workload, **_device()}


def bench_fleet(plan: Plan, seconds: float) -> Iterator[dict[str, Any]]:
    """The workload of launch/bench_fleet.py, a line each. They take their own time: about ten seconds."""
    from launch import bench_fleet

    yield from bench_fleet.workloads(plan.seed)


def bench_decode(plan: Plan, seconds: float) -> dict[str, Any]:
    """See launch/bench_engine.py."""
    from launch import bench_engine, policy

    with cli.validating():
        if not plan.model_path:
            raise cli.ConfigError("decode: got no model.path, want --config=configs/search_smollm2.py or the like")
        _, model = policy.describe(plan)
    found = bench_engine.pretrained(model, policy.load_weights(plan), plan.seed, seconds)
    return {"model": plan.model_path, **found, **_device()}


def bench_step(plan: Plan, seconds: float) -> dict[str, Any]:
    """See launch/bench_engine.py."""
    from launch import bench_engine

    return {**bench_engine.whole_step(plan.seed, seconds), **_device()}


def bench_search(plan: Plan, seconds: float) -> dict[str, Any]:
    """Queries/s of one thread: three words of random passages, so that nothing is answered from a cache."""
    import numpy as np

    from envs.search import questions
    from envs.search.index import SearchIndex, build_index
    from envs.search.retrieve import TantivyRetriever

    begun = time.monotonic()
    passages = questions.load().corpus.passages
    index = SearchIndex(build_index(passages, f"{plan.world_options.get('data_dir', 'data/search')}/index"))
    retriever = TantivyRetriever(index, "train")
    rng = np.random.default_rng(plan.seed)
    setup_s = time.monotonic() - begun

    def once() -> int:
        for i in rng.integers(0, len(passages), 100):
            words = passages[i].pages[0].split()
            retriever.search(" ".join(rng.choice(words, min(3, len(words)), replace=False)), 3)
        return 100

    return {**_rate(once, seconds, "queries"), "setup_s": round(setup_s, 2), "passages": len(passages)}


def bench_credit(plan: Plan, seconds: float) -> Iterator[dict[str, Any]]:
    """See launch/bench_credit.py."""
    from launch import bench_credit

    yield from bench_credit.lines(plan.seed)


def bench_chaos(plan: Plan, seconds: float) -> dict[str, Any]:
    """See launch/bench_chaos.py."""
    from launch import bench_chaos

    return bench_chaos.workload(plan.seed)


WORKLOADS: dict[str, Callable[[Plan, float], dict[str, Any] | Iterator[dict[str, Any]]]] = {
    "model": bench_model,
    "train": bench_train,
    "engine": bench_engine,
    "decode": bench_decode,
    "step": bench_step,
    "async": bench_async,
    "fleet": bench_fleet,
    "search": bench_search,
    "credit": bench_credit,
    "chaos": bench_chaos,
}


def _rate(once: Callable[[], int], seconds: float, unit: str) -> dict[str, Any]:
    done, begun = 0, time.monotonic()
    while time.monotonic() - begun < seconds:
        done += once()
    elapsed = time.monotonic() - begun
    return {f"{unit}_per_s": round(done / elapsed, 1), unit: done, "seconds": round(elapsed, 2)}


def _device() -> dict[str, Any]:
    import jax

    return {"device": jax.devices()[0].device_kind, "devices": jax.device_count()}


if __name__ == "__main__":
    cli.run(main, positional=True)
