"""From a plan to the parts of a run. No maths and no loops: constructors and the wiring between them."""

import contextlib
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from tqdm import tqdm

from envs import choose_tasks, dataset, interpreter, make_world
from envs.base import EnvSpec, Task, World
from envs.play import play
from launch import constraints, draws, policy, recipe, worlds
from launch.cli import validating
from launch.plan import Plan
from models.codec import Codec
from models.config import ModelConfig
from models.constraint import Constraint
from models.sampling import Sampling
from models.sharding import make_mesh
from rl.curriculum import fingerprint, permutation, with_hint
from rl.hosts import ALONE, Hosts
from rl.learner import Learner, make_learner, make_optimizer
from rl.losses import recipes
from rl.losses.reward_model import reward_model
from rl.metrics.success import measured, summary
from rl.rewards.compose import RewardTerm
from rl.rewards.terms import make_terms
from rl.rollout.abandon import NEVER, Abandonment
from rl.rollout.batcher import pack
from rl.rollout.concurrency import adapting
from rl.rollout.engine import Engine
from rl.rollout.failures import Budget
from rl.rollout.feeder import MOST_REFUSED
from rl.rollout.pool import Group, Pool
from rl.rollout.replicas import Replicas
from rl.rollout.staleness import StalenessGate
from rl.rollout.worker import run_episode, transcribe
from rl.timeline import Timeline, unrecorded
from rl.types import Trajectory, TrajectoryBatch

MOST_PLAYED = 10  # demonstrations for each that is kept
FAILURES_IN_ROW = 256
WATCHDOG_S, MARGIN_S = 600.0, 60.0  # of a pool: without any progress, and beyond what has a deadline of its own
EVAL_TICKETS = 2**30  # evaluation draws under tickets that training never reaches


def build_world(plan: Plan) -> World:
    """The world of the plan. Errors (ValueError): an unknown world, or options that it does not take."""
    return make_world(plan.world, **plan.world_options)


def check_data(
    plan: Plan, *, demonstrations: bool, held_out: bool = False, kept: Path | None = None, trained: str = "train"
) -> None:
    """Whatever can be wrong with world, tasks, terms, model and tokenizer, before a workdir is made.

    `kept` as in `policy.check_model`; `trained` is the split that is trained on. Errors: ValueError, OSError.
    """
    worlds.check(plan)
    codec = policy.check_model(plan, kept)
    world = build_world(plan)
    choose_tasks(world, plan.eval.split, plan.eval.n, plan.seed)
    if held_out:
        choose_tasks(world, "test", plan.eval.final_n, plan.seed)
    if demonstrations and world.demonstrate is None:
        raise ValueError(f"world {world.name!r} has no demonstrator; start launch.train from a checkpoint with --init")
    draws.build_curriculum(plan, world.tasks(trained))
    draws.check_hints(plan, world)
    check_facts(choose_tasks(world, trained, 1, plan.seed)[0], world, build_terms(plan))
    if codec is not None:
        check_rows(plan, codec, world)
    if plan.eval.constrain_tools:
        constraints.want_tools(env_spec(world))


def check_facts(task: Task, world: World, terms: Sequence[RewardTerm]) -> None:
    """That the world reports every fact that the terms read, by one episode of its no-op, where it has one.

    A misspelt term would be found after the warm start, or, where every episode meets a limit, never: it would be 0.
    """
    env = world.make_env()  # opens what instances share, too: an index, say
    try:
        facts = play(env, task, world.policies["noop"](task))[1] if "noop" in world.policies else None
    finally:
        env.close()
    for term in terms:
        absent = [] if facts is None else sorted({*term.reads} - facts.keys())
        if absent:
            raise ValueError(
                f"reward.terms.{term.name}: reads {absent}, which the world {world.name!r} does not report; want of "
                f"{sorted(facts)}"
            )


def is_one_row(codec: Codec) -> bool:
    """Whether an episode is one row whatever is said in it: the chat template leaves earlier turns as they were."""
    return codec.keeps_turns(codec.world_role)


def check_rows(plan: Plan, codec: Codec, world: World) -> None:
    """Errors (ValueError): a batch may not hold the rows of its episodes. Nothing is left out while a run goes on."""
    if is_one_row(codec):
        return
    episodes, turns = plan.rl.groups_per_batch * plan.rl.group_size, env_spec(world).max_turns
    if plan.batch.rows < episodes * turns:
        raise ValueError(
            f"batch.rows={plan.batch.rows} < {episodes} episodes x {turns} turns = {episodes * turns}: the chat "
            "template rewrites earlier turns (it drops their thinking, say), so each turn may begin a row; raise "
            "batch.rows (rows without tokens cost nothing), or use a template that keeps its turns"
        )


def build_demonstrations(plan: Plan, world: World) -> Sequence[dataset.Demonstration]:
    """`plan.n_demos` scripted, imperfect episodes on training tasks, or on the lessons of a world that has some: played
    once, then kept as a TFDS dataset.
    """
    if world.demonstrate is None:
        raise ValueError(f"world {world.name!r} has no demonstrator; start launch.train from a checkpoint with --init")
    made_by = _as_json(
        {
            "world": plan.world,
            "options": plan.world_options,
            "tasks": fingerprint(_taught(world)),
            "by": world.demonstrated_by,
            "n": plan.n_demos,
            "seed": plan.seed,
            **({"without": plan.demos_without} if plan.demos_without else {}),
            **({"hinted": True} if plan.demos_hinted else {}),
        }
    )
    digest = hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()[:12]
    folder = Path(plan.world_options.get("data_dir", f"data/{plan.world}"))
    name = f"{plan.world}_demonstrations_{digest}"
    if not dataset.is_built(folder, name):
        dataset.build_demonstrations(
            {"train": _demonstrate(world, plan.n_demos, plan.seed, plan.demos_without, hinted=plan.demos_hinted)},
            folder,
            name=name,
            options=made_by,
        )
    return dataset.read_demonstrations(folder, "train", name=name, options=made_by)


def _taught(world: World) -> Sequence[Task]:
    return world.lessons() if world.lessons is not None else world.tasks("train")


def _as_json(tree: Any) -> Any:
    """`tree` as it comes back from a JSON file."""
    return json.loads(json.dumps(tree, default=dict))


def _demonstrate(
    world: World, n: int, seed: int, without: Sequence[str] = (), *, hinted: bool = False
) -> list[dataset.Demonstration]:
    """Errors (ValueError): the world reports no such fact, or hardly any episode is without it."""
    tasks = _taught(world)
    order = permutation(len(tasks), seed, 0)
    env, demos = world.make_env(), []
    try:
        for i in itertools.count():
            if len(demos) == n:
                break
            if i >= MOST_PLAYED * n:
                raise ValueError(f"demos.without={without}: {len(demos)} of {i} demonstrations are so, want {n}")
            task = tasks[int(order[i % len(tasks)])]
            if hinted and (hint := world.hint(task)):
                task = with_hint(task, hint)
            if env.reset(task).text:
                raise ValueError(f"world {world.name!r}: reset shows a text, which demonstrations do not keep yet")
            turns, facts = play(env, task, world.demonstrate(task, seed + i // len(tasks)))
            if absent := sorted(set(without) - facts.keys()):
                raise ValueError(f"demos.without: got {absent}, want of {sorted(facts)}, what the world reports")
            if any(facts[name] for name in without):
                continue
            demos.append(dataset.Demonstration(f"demo-{i}", task, tuple(turns), bool(facts["success"]), facts))
    finally:
        env.close()
    return demos


def pack_demonstrations(
    plan: Plan, codec: Codec, demonstrations: Sequence[dataset.Demonstration], world: World
) -> TrajectoryBatch:
    """All demonstrations as `pack_examples`, with the ids that live episodes would have."""
    spec = env_spec(world)
    episodes = [
        transcribe(codec, demo.task, demo.steps, demo.facts, stop=spec.stop, ticket=i, tools=spec.tools)
        for i, demo in enumerate(demonstrations)
    ]
    return pack_examples(plan, codec, episodes)


def pack_examples(plan: Plan, codec: Codec, episodes: Sequence[Trajectory], *, version: int = 0) -> TrajectoryBatch:
    """Episodes to imitate, sampled at `version` at the latest, as packed rows; those with a row over sft.length are
    left out.

    Errors (ValueError): that leaves none.
    """
    length, per_step = plan.sft.length, plan.sft.rows
    fitting = [t for t in episodes if max(len(row.tokens) for row in t.rows) <= length]
    if len(fitting) < len(episodes):
        over = len(episodes) - len(fitting)
        print(f"{over} of {len(episodes)} examples are over sft.length={length}: left out")
    if not fitting:
        raise ValueError(f"no example fits a row of sft.length={length} tokens; raise it")
    episodes = fitting
    none = {(t.ticket, t.member): 0.0 for t in episodes}
    tokens = sum(len(row.tokens) for t in episodes for row in t.rows)
    rows = 2 * per_step * -(-tokens // (per_step * length))  # room for the padding, cut off below
    shape = {"rows": rows, "length": length, "micro_rows": plan.sft.micro_rows}
    batch, packing = pack(episodes, none, none, **shape, version=version, pad_id=codec.pad_id)
    return jax.tree.map(lambda x: x[: int(packing["rows"])], batch)


def env_spec(world: World) -> EnvSpec:
    env = world.make_env()
    try:
        return env.spec
    finally:
        env.close()


def greedy_and_sampled(
    plan: Plan, pool: Pool, tasks: Sequence[Task], hosts: Hosts = ALONE
) -> tuple[dict[str, float], list[Trajectory]]:
    """Success at the training temperature, with its interval and by family, and greedy; and this process's episodes."""
    episodes: list[Trajectory] = []
    how = Sampling(temperature=plan.rl.temperature, greedy=True)
    sampled = play_all(pool, tasks, seed=plan.seed, keep=episodes, hosts=hosts)
    greedy = play_all(pool, tasks, sampling=how, keep=episodes, hosts=hosts)
    low, high = sampled["success_ci"]
    families = sampled["families"].items()
    result = {"sampled": sampled["success"], "sampled_low": low, "sampled_high": high, "greedy": greedy["success"]}
    by_family = {f"sampled_{family}": own["success"] for family, own in families if own["success"] is not None}
    return result | by_family, episodes


def play_groups(pool: Pool, tasks: Sequence[Task], *, first: int = 0, hosts: Hosts = ALONE, **how: Any) -> list[Group]:
    """`pool.run_many`, with a bar on the terminal; task i has the ticket of evaluation's task `first` + i.

    Of several processes each plays its share of the tasks, under the tickets they would have in one.
    """
    share = {"first_ticket": EVAL_TICKETS + first + hosts.index, "ticket_step": hosts.count}
    own = tasks[hosts.index :: hosts.count]
    with tqdm(total=len(own), unit="task", leave=False, disable=True if hosts.index else None) as bar:
        return pool.run_many(own, on_group=lambda _: bar.update(), **share, **how)


def play_all(
    pool: Pool, tasks: Sequence[Task], *, keep: list[Trajectory] | None = None, hosts: Hosts = ALONE, **how: Any
) -> dict[str, Any]:
    """The summary of `play_groups` of all processes; the episodes of this one are added to `keep`."""
    groups = play_groups(pool, tasks, hosts=hosts, **how)
    if keep is not None:
        keep += [t for group in groups for t in group.trajectories]
    played = hosts.exchange([measured(group.task, group.trajectories) for group in groups])
    return summary([played[i % hosts.count][i // hosts.count] for i in range(len(tasks))])


def build_gate(plan: Plan, version: int, hosts: Hosts = ALONE) -> StalenessGate:
    """The gate of a run that has published `version` batches: every one of them took this process's groups."""
    batch, ahead = plan.rl.groups_per_batch // hosts.count, plan.rl.max_staleness
    gate = StalenessGate(batch=batch, max_staleness=ahead, max_running=(ahead + 1) * batch)
    gate.start_at(version)
    return gate


def build_sft_learner(plan: Plan, model: ModelConfig) -> Learner:
    """Cross-entropy on demonstrations; the rate falls by a cosine over `sft.steps`, after the warm-up. Its parameters
    are the policy's alone, without heads: what reads a checkpoint in order to sample uses it too.
    """
    tx = _supervised(plan, plan.sft.learning_rate, plan.sft.steps)
    return _learner(plan, model, recipes.sft(), tx, micro_rows=plan.sft.micro_rows, temperature=1.0, ref_is_base=False)


def build_rl_learner(plan: Plan, model: ModelConfig) -> Learner:
    """The plan's recipe. With adapters and a KL penalty the reference is the base that they are on."""
    rl = plan.rl
    tx = make_optimizer(
        learning_rate=rl.learning_rate,
        warmup_steps=rl.warmup_steps,
        decay_steps=0 if rl.schedule == "constant" else max(1, rl.steps - rl.warmup_steps),
        schedule=rl.schedule,
        weight_decay=rl.weight_decay,
        b2=rl.b2,
        clip_norm=rl.clip_norm,
    )
    return _learner(
        plan,
        model,
        recipe.build_loss(plan),
        tx,
        micro_rows=plan.batch.micro_rows,
        temperature=rl.temperature,
        fill_proximal=recipe.wants_proximal(plan),
        fill_world=rl.train_on_world,
        ref_is_base=plan.lora is not None and rl.kl_coef > 0,
        keep_ref=rl.ref_every > 0,
        heads=recipe.heads(plan),
        critic=recipe.build_critic(plan),
        kl=recipe.build_penalty(plan),
        minibatches=rl.minibatches,
    )


def _supervised(plan: Plan, learning_rate: float, steps: int) -> Any:
    """An optimizer whose rate falls by a cosine over `steps`, after the warm-up of `sft`."""
    return make_optimizer(
        learning_rate=learning_rate,
        warmup_steps=plan.sft.warmup_steps,
        decay_steps=max(1, steps - plan.sft.warmup_steps),
        schedule="cosine",
        final_frac=0.1,
        weight_decay=plan.sft.weight_decay,
        b2=plan.rl.b2,
        clip_norm=plan.rl.clip_norm,
    )


def _learner(plan: Plan, model: ModelConfig, loss: recipes.LossFn, tx: Any, **options: Any) -> Learner:
    data, fsdp, tensor = plan.mesh
    mesh = make_mesh(data, fsdp, tensor)
    return make_learner(
        model,
        loss,
        tx,
        mesh,
        chunk=plan.batch.logp_chunk,
        adapters=plan.lora,
        **options,
    )


def build_rm_learner(plan: Plan, model: ModelConfig) -> Learner:
    """A reward model of the plan's kind, with the rows and the warm-up of `sft`; the rate falls by a cosine."""
    tx = _supervised(plan, plan.rm.learning_rate, plan.rm.steps)
    heads = (f"{plan.rm.kind}_head",)
    return _learner(plan, model, reward_model(), tx, micro_rows=plan.sft.micro_rows, heads=heads)


def build_terms(
    plan: Plan,
    view: Callable[[Sequence[int]], str] | None = None,
    scorers: Mapping[str, Callable] | None = None,
) -> list[RewardTerm]:
    """Reward terms by name; `view` for those that read text, `scorers` for those that ask a reward model. Errors
    (ValueError): as `make_terms`.
    """
    return make_terms(
        plan.reward_terms,
        plan.reward_reach,
        plan.reward_options,
        leader=plan.reward_leader,
        max_shaping=plan.max_shaping,
        view=view,
        scorers=scorers,
    )


def build_packer(
    plan: Plan, codec: Codec, world: World | None, hosts: Hosts = ALONE
) -> Callable[..., tuple[Any, Mapping[str, float]]]:
    """`pack` into this process's share of the rows of a batch, and of each micro-batch. Without a world the episodes
    are stored ones, of any age. Errors: as `check_rows`.
    """
    if world is not None:
        check_rows(plan, codec, world)
    return partial(
        pack,
        rows=plan.batch.rows // hosts.count,
        length=plan.batch.length,
        micro_rows=plan.batch.micro_rows // hosts.count,
        minibatches=plan.rl.minibatches,
        pad_id=codec.pad_id,
        max_staleness=None if world is None else plan.rl.max_staleness,
        shares=not is_one_row(codec),
        chains=recipe.build_critic(plan) is not None,
        world=plan.rl.train_on_world,
    )


def build_engine(
    plan: Plan, model: ModelConfig, params: Any, version: int, codec: Codec, timeline: Timeline | None = None
) -> Engine | Replicas:
    """One engine, or several with the face of one, on the learner's devices or on those after them; a track each of
    `timeline`. Errors (ConfigError): more devices than this process has.
    """
    e, first = plan.engine, math.prod(plan.mesh) if plan.engine.split else 0
    devices, want = jax.local_devices()[first:], e.replicas * e.tensor
    with validating():
        if want > len(devices):
            raise ValueError(
                f"engine.replicas={e.replicas} x engine.tensor={e.tensor} = {want} devices, but this process has "
                f"{len(devices)}{' beside those of the learner' if first else ''}; lower one of them"
            )
    # Every thread may hold a session; beyond the residents they share rows.
    sessions = max(e.residents, -(-plan.rollout.threads // e.replicas))

    def one(mesh: Mesh | None, track: str = "engine") -> Engine:
        return Engine(
            model,
            params,
            version=version,
            lanes=e.lanes,
            residents=e.residents,
            capacity=e.capacity,
            view=codec.view,
            end_ids=codec.end_ids,
            round_tokens=e.round_tokens,
            prefill_rows=e.prefill_rows,
            prefill_chunk=e.prefill_chunk,
            contexts=e.contexts,
            sessions=sessions,
            kv_on_update=e.kv_on_update,
            mesh=mesh,
            span=unrecorded if timeline is None else timeline.track(track),
        )

    if want == 1 and not first:
        return one(None)
    places = [devices[i * e.tensor : (i + 1) * e.tensor] for i in range(e.replicas)]
    with validating():
        names = ["engine", *(f"engine-{i}" for i in range(1, e.replicas))]
        engines = zip(places, names, strict=True)
        return Replicas([one(make_mesh(tensor=e.tensor, devices=place), name) for place, name in engines])


def build_pool(
    plan: Plan,
    engine: Engine | Replicas,
    place: worlds.Placed,
    codec: Codec,
    constraint: Constraint | None = None,
    episode: Callable[..., Trajectory] = run_episode,
    abandonment: Abandonment = NEVER,
) -> Pool:
    """A pool that can train; with a constraint, of every turn, one that can only evaluate; with rules to give an
    episode up one that can only train. Its watchdog waits ten minutes at least, and always longer than a call of the
    world may take, and than a fleet without members needs to say why.
    """
    r, most = plan.rollout, FAILURES_IN_ROW
    patience_s = place.calls.patience_s if place.calls else 0.0
    if plan.ttrl.per_query:  # every query may fail, when it is measured and while it is adapted to; the next one comes
        episodes = plan.ttrl.samples + 1 + MOST_REFUSED * plan.rl.group_size
        most = max(most, 1 + plan.ttrl.queries * episodes * (1 + r.data_retries))
    return Pool(
        engine,
        place.make_env,
        codec,
        threads=r.threads,
        seed=plan.seed,
        sampling=Sampling(temperature=plan.rl.temperature),
        call_deadline_s=r.call_deadline_s,
        failures_in_row=most,
        watchdog_s=max(WATCHDOG_S, r.call_deadline_s + MARGIN_S, patience_s + MARGIN_S),
        budget=Budget(infrastructure=r.retries, data=r.data_retries, group=r.group_retries),
        max_seconds=r.max_world_s or None,
        max_turn_tokens=r.max_turn_tokens,
        max_tokens=r.max_episode_tokens,
        constraint=constraint,
        abandonment=abandonment,
        episode=episode,
        calls=place.calls,
        counts=place.counts,
        **({"clock": place.calls.clock} if place.calls else {}),
    )


@contextlib.contextmanager
def evaluating(plan: Plan, engine: Engine | Replicas, pool: Pool, world: World, codec: Codec) -> Iterator[Pool]:
    """The pool that evaluates: `pool`, or, with eval.constrain_tools or where training gives episodes up, one of its
    own for as long as the block runs.

    Errors (ValueError): as `constraints.of_world`.
    """
    if not (plan.eval.constrain_tools or plan.rollout.abandon.is_on):
        yield pool
        return
    with validating():
        constraint = constraints.of_world(env_spec(world), codec) if plan.eval.constrain_tools else None
    place = worlds.Placed(pool.make_env, pool.calls)
    with contextlib.closing(build_pool(plan, engine, place, codec, constraint)) as own, adapted(plan, engine, own):
        yield own


@contextlib.contextmanager
def serving(
    plan: Plan,
    model: ModelConfig,
    params: Any,
    version: int,
    world: World,
    codec: Codec,
    abandonment: Abandonment = NEVER,
    timeline: Timeline | None = None,
) -> Iterator[tuple[Engine | Replicas, Pool]]:
    """Engine, worlds and pool for as long as the block runs; all are closed whatever happens in it."""
    with (
        worlds.placed(plan, world) as place,
        contextlib.closing(build_engine(plan, model, params, version, codec, timeline)) as engine,
        contextlib.closing(build_pool(plan, engine, place, codec, abandonment=abandonment)) as pool,
        interpreter.shared_by(plan.rollout.threads),
        adapted(plan, engine, pool),
    ):
        yield engine, pool


def adapted(plan: Plan, engine: Engine | Replicas, pool: Pool) -> contextlib.AbstractContextManager[None]:
    """How many episodes of `pool` are in flight while the block runs: all that it has threads for, unless
    rollout.adaptive.
    """
    if not plan.rollout.adaptive:
        return contextlib.nullcontext()
    lanes = plan.engine.replicas * plan.engine.lanes
    return adapting(engine, pool, lanes=lanes, cap=plan.rollout.threads)


def use_compilation_cache(folder: Path = Path("data/jax_cache")) -> None:
    """Compiled programs survive the process: the second run of a shape starts at once. A cache that the environment
    names (JAX_COMPILATION_CACHE_DIR) is taken as it is.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder.resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
