"""The learner: the only `jit` of training code, its shardings and its donation.

A batch is [B T] with B the most rows that can come; the rows in use stand first. It is cut into micro-batches of
`micro_rows` rows, and one compiled program loops over those that hold tokens. Totals and counts are added over
micro-batches (and, being global arrays, over devices) and divided once: how a batch is cut changes nothing.

With adapters (models/lora.py) only they are trained: gradients, clipping and optimizer see the trainable leaves, and
the base passes through an update untouched, in the same buffers. The state still holds it, so a checkpoint of the state
is whole: it resumes, is evaluated and is exported alone, at a third of the size that training everything would need.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

from models import lora, transformer
from models.config import HEADS, ModelConfig
from models.heads import log_odds, value
from models.logprobs import token_logp
from models.sharding import batch_sharding, born, dispatching, heads_sharding, param_shardings, replicated
from rl.critic import Estimator
from rl.critic import fill as fill_critic
from rl.losses.kl import Penalty, adapted
from rl.losses.recipes import LossFn, Metrics
from rl.types import Max, Mean, Metric, Scored, TrajectoryBatch

Params = Any
MOST_SKIPPED = 5  # refused updates in a row that a run survives
# The matrices. Norms, biases, the key shift and the embedding (with a tied head, the head as well) are not decayed.
DECAYED = frozenset({"wq", "wk", "wv", "wo", "gate", "up", "down", "lm_head"})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What an update changes, all on the device. `step` counts updates that were made, `skipped` those refused."""

    params: Params  # f32 masters
    opt_state: optax.OptState  # of the trainable leaves of params
    step: Int[Array, ""]
    skipped: Int[Array, ""]
    kl_coef: Float[Array, ""] | None = None  # β of the next update, where it is adapted
    ref: Params | None = None  # the reference, where it is refreshed: buffers of its own


@dataclasses.dataclass(frozen=True)
class Learner:
    """Compiled functions of one model, loss, optimizer and mesh.

    `init_params(key | params)` are those of step 0 on their shardings, without an optimizer's state; what lies there is
    not copied. `init_state(key | params)` copies what it is given, or DONATES it where told; a learner of adapters
    wants parameters that have them (from a key it adds them itself). `prepare(state, ref, batch)` and
    `train_step(state, batch)` take NumPy batches, each process its own share of the rows, or device batches, of one
    shape; `train_step` DONATES its state. On the device rows stand as they are dealt to the mesh, in another order than
    on the host. `refresh(state)` makes the reference that the state keeps a copy of its policy, and DONATES too.
    """

    init_params: Callable[[PRNGKeyArray | Params], Params]
    init_state: Callable[..., TrainState]  # (key | params, *, donate=False)
    prepare: Callable[[TrainState, Params | None, TrajectoryBatch], TrajectoryBatch]
    train_step: Callable[[TrainState, TrajectoryBatch], tuple[TrainState, dict[str, Metric]]]
    refresh: Callable[[TrainState], TrainState]
    state_shardings: TrainState  # of NamedShardings: what a checkpoint is restored to
    compiled_steps: Callable[[], int]  # how many programs `train_step` has: 1, or some shape was not fixed
    lower: Callable[[TrainState, TrajectoryBatch], jax.stages.Lowered]  # `train_step`, for an account of its memory


def make_learner(
    config: ModelConfig,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    micro_rows: int,
    temperature: float = 1.0,
    chunk: int = 256,
    fill_proximal: bool = False,
    fill_world: bool = False,
    adapters: lora.Lora | None = None,
    ref_is_base: bool = False,
    keep_ref: bool = False,
    heads: Sequence[str] = (),
    critic: Estimator | None = None,
    kl: Penalty | None = None,
    minibatches: int = 1,
) -> Learner:
    """Compile `prepare` and `train_step` for a mesh (data, fsdp, tensor).

    `temperature` is the one that training samples at; `chunk` as in `token_logp`; `fill_proximal` lets `prepare`
    compute `proximal_logp`, for decoupled losses, and `fill_world` the `behavior_logp` of observations that are trained
    (`pack(world=True)`). With `adapters` they alone are trained, and `ref_is_base` makes the
    base, adapters off, the reference: it is in the state already, and a `ref` of one's own would be a second copy.
    With `keep_ref` the state holds a reference, at first the policy itself, and `prepare` wants no other.
    `heads` names those on the trunk (models/heads.py) that the parameters have; they are trained beside adapters too.
    With `critic` (rl/critic.py) `prepare` fills values, advantages and returns; the values are those of "value_head",
    or 0 without it. `kl` is needed where the penalty is in the reward or its β adapted, by the `policy/ref_kl` that
    the loss measures; β is then an array of the state, so that no step is compiled anew. A `train_step` makes one
    update for each of `minibatches` shares of a batch's micro-batches; what `prepare` has filled is theirs all.
    """
    if ref_is_base and adapters is None:
        raise ValueError("ref_is_base: got no adapters, want some; without them give `prepare` a reference of its own")
    if keep_ref and adapters is not None:
        raise ValueError("keep_ref: got adapters, want none; their reference is the base (ref_is_base)")
    if kl is not None and kl.in_reward and critic is None:
        raise ValueError("kl.in_reward: got no critic, want one: the reward is made into credit on the device")
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    if minibatches < 1:
        raise ValueError(f"minibatches: got {minibatches}, want at least 1")
    if micro_rows < 1 or micro_rows % shards:
        raise ValueError(f"micro_rows: got {micro_rows}, want a multiple of data x fsdp = {shards} devices")
    fresh = partial(born, config, adapters=adapters, heads=heads)
    new_state = partial(_state, tx=tx, kl_coef=kl.coef if kl and kl.target else None, keep_ref=keep_ref)
    shardings = param_shardings(config, mesh, adapters=adapters, heads=heads)
    state_shardings = _state_shardings(fresh, new_state, tx, shardings, mesh)
    rows, everywhere = batch_sharding(mesh), replicated(mesh)
    own = _own_shards(mesh)
    sharding = NamedSharding(mesh, PartitionSpec(None, *rows.spec))
    split = partial(_split, micro_rows=micro_rows, shards=shards, sharding=sharding)
    join = partial(_join, shards=shards)
    score = partial(_score, config=config, temperature=temperature, chunk=chunk, sharding=heads_sharding(mesh))

    fills = {"fill_proximal": fill_proximal, "fill_world": fill_world, "ref_is_base": ref_is_base}
    fills_any = critic or keep_ref or any(fills.values())
    filled = jax.jit(
        partial(prepare, score=score, split=split, join=join, critic=critic, kl=kl, **fills),
        in_shardings=(state_shardings, None, rows),
        out_shardings=rows,
    )
    step = jax.jit(
        partial(train_step, score=score, loss_fn=loss_fn, tx=tx, split=split, kl=kl, minibatches=minibatches),
        in_shardings=(state_shardings, rows),
        out_shardings=(state_shardings, everywhere),
        donate_argnums=0,
    )
    refreshed = jax.jit(
        lambda state: dataclasses.replace(state, ref=jax.tree.map(jnp.copy, state.params)),
        in_shardings=(state_shardings,),
        out_shardings=state_shardings,
        donate_argnums=0,
    )

    def enqueue(program: Callable, *args: Any, **options: Any) -> Any:
        with dispatching(mesh.devices.flat):
            return program(*args, **options)

    def put(batch: TrajectoryBatch) -> TrajectoryBatch:
        """H2D, once for each batch; nothing to do for one that is there."""
        there = isinstance(batch.tokens, jax.Array)
        share = micro_rows if there else micro_rows * own // shards
        if batch.tokens.shape[0] % share:
            raise ValueError(f"batch: got {batch.tokens.shape[0]} rows, want a multiple of micro_rows={share}")
        if there:
            return enqueue(jax.device_put, batch, rows)
        dealt = jax.tree.map(lambda x: _deal(x, own, share), batch)
        if own == shards:
            return jax.device_put(dealt, rows)
        return jax.tree.map(partial(jax.make_array_from_process_local_data, rows), dealt)

    return Learner(
        init_params=partial(enqueue, _placer(fresh, state_shardings.params)),
        init_state=partial(enqueue, _starter(fresh, new_state, adapters, heads, state_shardings)),
        prepare=lambda state, ref, batch: (
            enqueue(filled, state, ref, put(batch)) if fills_any or ref is not None else put(batch)
        ),
        train_step=lambda state, batch: enqueue(step, state, put(batch)),
        refresh=partial(enqueue, refreshed),
        state_shardings=state_shardings,
        compiled_steps=step._cache_size,
        lower=step.lower,
    )


# --- the two functions that run on the device ------------------------------------------------------------------------


def prepare(
    state: TrainState,
    ref: Params | None,
    batch: TrajectoryBatch,
    *,
    score: Callable,
    split: Callable,
    join: Callable,
    fill_proximal: bool,
    fill_world: bool = False,
    ref_is_base: bool = False,
    critic: Estimator | None = None,
    kl: Penalty | None = None,
) -> TrajectoryBatch:
    """Fill `ref_logp` under `ref` if given, or under the reference that the state keeps, `proximal_logp` under the
    state's own parameters if asked, and what the critic says, of rewards less the KL penalty if it is theirs. Pure.

    `ref_is_base`: `ref_logp` is that of the state's own parameters without their adapters. `fill_world`: nobody sampled
    the tokens under `world_mask`, so their `behavior_logp` is that of the state's own parameters too, and their ratio
    is 1 until these move.
    """
    if fill_world and batch.world_mask is None:
        raise ValueError("fill_world: got no world_mask, want that of pack(..., world=True)")
    if ref is not None and (ref_is_base or state.ref is not None):
        raise ValueError("prepare: got a reference, want None; this learner's is in its state")
    if ref is None:
        ref = lora.base(state.params) if ref_is_base else state.ref
    micro = split(batch)

    def fill(params: Params, *names: str) -> dict[str, Float[Array, "B T"]]:
        def one(i: Int[Array, ""], filled: dict[str, Float[Array, "M R T"]]) -> dict[str, Float[Array, "M R T"]]:
            scored = score(params, _take(micro, i))
            return {name: x.at[i].set(getattr(scored, name)) for name, x in filled.items()}

        empty = {name: jnp.zeros(micro.tokens.shape, jnp.float32) for name in names}
        return jax.tree.map(join, jax.lax.fori_loop(0, _used(micro), one, empty))

    if ref is not None:
        batch = dataclasses.replace(batch, ref_logp=fill(ref, "logp")["logp"])
    has_values = critic is not None and "value_head" in state.params
    names = ["logp"] * (fill_proximal or fill_world) + ["values"] * has_values
    own = fill(state.params, *names) if names else {}  # one forward pass for both
    if fill_proximal:
        batch = dataclasses.replace(batch, proximal_logp=own["logp"])
    if fill_world:
        behavior_logp = jnp.where(batch.world_mask, own["logp"], batch.behavior_logp)
        batch = dataclasses.replace(batch, behavior_logp=behavior_logp)
    if critic is None:
        return batch
    coef = kl.coef if kl and state.kl_coef is None else state.kl_coef
    return fill_critic(batch, own.get("values"), critic, kl_coef=coef if kl and kl.in_reward else None)


def train_step(
    state: TrainState,
    batch: TrajectoryBatch,
    *,
    score: Callable,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    split: Callable,
    kl: Penalty | None = None,
    minibatches: int = 1,
) -> tuple[TrainState, dict[str, Metric]]:
    """One optimizer update for each mini-batch, in turn: gradient of Σ totals / Σ counts over the whole of it. Pure.

    Mini-batch k is the micro-batches k, k + minibatches, ... in use. Metrics are summed over them, but for
    `policy/engine_gap_max`: that is the first one's, before the policy has moved.
    Where the loss or the gradient is not finite, or nothing at all was to be trained, the update is refused whole:
    parameters, optimizer (with its schedule's count) and β stay, and `skipped` grows by one.
    """
    update = partial(_update, micro=split(batch), stride=minibatches, score=score, loss_fn=loss_fn, tx=tx, kl=kl)
    if minibatches == 1:
        return update(state, 0)

    def one(k: Int[Array, ""], carry: tuple[TrainState, Metrics]) -> tuple[TrainState, Metrics]:
        state, learned = update(carry[0], k)
        if (gap := learned.get("policy/engine_gap_max")) is not None:
            learned["policy/engine_gap_max"] = Max(jnp.where(k == 0, gap.value, -jnp.inf))
        return state, jax.tree.map(lambda a, b: a + b, carry[1], learned, is_leaf=_is_metric)

    shapes = jax.eval_shape(update, state, 0)[1]
    nothing = jax.tree.map(lambda m: m.identity(), shapes, is_leaf=_is_metric)
    return jax.lax.fori_loop(0, minibatches, one, (state, nothing))


def _update(
    state: TrainState,
    part: int | Int[Array, ""],
    *,
    micro: TrajectoryBatch,
    stride: int,
    score: Callable,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    kl: Penalty | None,
) -> tuple[TrainState, dict[str, Metric]]:
    """One update, on the micro-batches part, part + stride, ... in use."""
    coef = state.kl_coef
    if coef is not None and not kl.in_reward:
        loss_fn = partial(loss_fn, kl_coef=coef)
    trained, frozen = lora.partition(state.params)
    grads, loss, metrics = _accumulate(trained, frozen, micro, score, loss_fn, part, stride)
    # Σ gradients of totals / Σ counts: one global denominator. Dividing before adding would weigh tokens by their cut.
    count = jnp.where(loss.count > 0, loss.count, 1)  # of shares of episodes it may be less than 1
    grads = jax.tree.map(lambda g: g / count, grads)
    norm = optax.global_norm(grads)
    good = jnp.isfinite(norm) & jnp.isfinite(loss.total) & (loss.count > 0)

    def update() -> tuple[Params, optax.OptState]:
        updates, opt_state = tx.update(grads, state.opt_state, trained)
        return optax.apply_updates(trained, updates), opt_state

    trained, opt_state = jax.lax.cond(good, update, lambda: (trained, state.opt_state))
    one = jnp.ones((), jnp.float32)
    metrics = {
        "loss": loss,
        **metrics,
        "optim/grad_norm": Mean(norm, one),  # before clipping
        "optim/skipped": Mean(1 - good.astype(jnp.float32), one),
    }
    if coef is not None:
        metrics["policy/kl_coef"] = Mean(coef, one)
        now = adapted(coef, metrics["policy/ref_kl"].value, target=kl.target, gain=kl.gain)
        coef = jnp.where(good, now, coef)
    params = lora.combine(trained, frozen)
    state = TrainState(params, opt_state, state.step + good, state.skipped + ~good, coef, state.ref)
    return state, metrics


def skipped_in_a_row(learned: Metrics, before: int) -> int:
    """How many batches in a row had all of their updates refused, the one that gave `learned` included. Raises
    RuntimeError at MOST_SKIPPED: such a run would end as if it had trained. A mini-batch without a row is no reason.
    """
    told = learned["optim/skipped"]
    skipped = before + 1 if told.total >= told.count else 0
    if skipped >= MOST_SKIPPED:
        raise RuntimeError(
            f"got {skipped} batches in a row whose updates were refused, want one that can be made: no batch held a "
            "token to train (do prompts leave room in rollout.max_episode_tokens?), or loss and gradient are not "
            "finite (lower the rate); the last checkpoint is intact"
        )
    return skipped


def _accumulate(
    trained: Params,
    frozen: Params,
    micro: TrajectoryBatch,
    score: Callable,
    loss_fn: LossFn,
    part: int | Int[Array, ""],
    stride: int,
) -> tuple[Params, Mean, Metrics]:
    """Σ over the micro-batches part, part + stride, ... of (gradient of the loss's total, loss, metrics), the gradient
    in f32 and by `trained`.
    """

    def total(trained: Params, piece: TrajectoryBatch) -> tuple[Float[Array, ""], tuple[Mean, Metrics]]:
        loss, metrics = loss_fn(score(lora.combine(trained, frozen), piece), piece)
        return loss.total, (loss, dict(metrics))

    def one(i: Int[Array, ""], sums: tuple) -> tuple:
        grads, measured = jax.grad(total, has_aux=True)(trained, _take(micro, part + stride * i))
        grads = jax.tree.map(lambda s, g: s + g.astype(jnp.float32), sums[0], grads)
        return grads, *jax.tree.map(lambda s, m: s + m, sums[1:], measured, is_leaf=_is_metric)

    measured = jax.eval_shape(total, trained, jax.eval_shape(_take, micro, jnp.int32(0)))[1]
    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), trained)
    nothing = jax.tree.map(lambda m: m.identity(), measured, is_leaf=_is_metric)
    return jax.lax.fori_loop(0, (_used(micro) - part + stride - 1) // stride, one, (zeros, *nothing))


def _score(
    params: Params,
    batch: TrajectoryBatch,
    *,
    config: ModelConfig,
    temperature: float,
    chunk: int,
    sharding: NamedSharding,
) -> Scored:
    hidden = transformer.apply(params, config, batch.tokens, batch.segment, batch.position, sharding=sharding)
    scores = token_logp(params, hidden, batch.tokens, n_ids=config.n_ids, temperature=temperature, chunk=chunk)
    values = value(params["value_head"], hidden, batch.segment) if "value_head" in params else None
    return Scored(*scores, values, log_odds(params, hidden, batch.segment, batch.turn, batch.action_mask))


# --- rows and micro-batches ------------------------------------------------------------------------------------------


# On the host [B T] = [M S r T]: micro-batches, each with r rows for each of S shards. On the devices [S M r T]: a shard
# holds its rows of every micro-batch, so that cutting a batch moves nothing between them, nor between processes.


def _own_shards(mesh: Mesh) -> int:
    """How many of the shards of a batch lie in this process. Errors: two processes share one."""
    shards, processes = mesh.shape["data"] * mesh.shape["fsdp"], len({d.process_index for d in mesh.devices.flat})
    places = batch_sharding(mesh).addressable_devices_indices_map((shards,)).values()
    own = len({place[0].start or 0 for place in places})
    if own * processes != shards:
        raise ValueError(
            f"mesh data={mesh.shape['data']} fsdp={mesh.shape['fsdp']} tensor={mesh.shape['tensor']}: got {processes} "
            f"processes, {own} of {shards} shards of a batch in this one; want data x fsdp to be a multiple of the "
            "processes, and tensor no larger than the devices of one process"
        )
    return own


def _deal(x: np.ndarray, shards: int, micro_rows: int) -> np.ndarray:
    """[M S r ...] -> [S M r ...]: this process's rows as its shards hold them."""
    rest = x.shape[1:]
    return x.reshape(-1, shards, micro_rows // shards, *rest).swapaxes(0, 1).reshape(-1, *rest)


def _split(batch: TrajectoryBatch, *, micro_rows: int, shards: int, sharding: NamedSharding) -> TrajectoryBatch:
    """[S M r ...] -> [M R ...]: every device has its rows of each micro-batch already."""

    def one(x: Array) -> Array:
        rest = x.shape[1:]
        x = x.reshape(shards, -1, micro_rows // shards, *rest).swapaxes(0, 1).reshape(-1, micro_rows, *rest)
        return jax.lax.with_sharding_constraint(x, sharding)

    return jax.tree.map(one, batch)


def _join(x: Float[Array, "M R T"], *, shards: int) -> Float[Array, "B T"]:
    """What `_split` cut, in one piece again."""
    m, r, *rest = x.shape
    return x.reshape(m, shards, r // shards, *rest).swapaxes(0, 1).reshape(m * r, *rest)


def _used(micro: TrajectoryBatch) -> Int[Array, ""]:
    """How many micro-batches to run: up to the last one that holds a token."""
    holds = jnp.any(micro.segment != 0, axis=(1, 2))
    return jnp.max(jnp.where(holds, jnp.arange(1, holds.shape[0] + 1), 0))


def _take(micro: TrajectoryBatch, i: Int[Array, ""]) -> TrajectoryBatch:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), micro)


def _is_metric(x: Any) -> bool:
    return isinstance(x, Metric)


# --- state and optimizer ---------------------------------------------------------------------------------------------


def _placer(fresh: Callable[[PRNGKeyArray], Params], shardings: Params) -> Callable[[PRNGKeyArray | Params], Params]:
    born_sharded = jax.jit(fresh, out_shardings=shardings)
    return lambda start: born_sharded(start) if isinstance(start, jax.Array) else jax.device_put(start, shardings)


def _starter(
    fresh: Callable[[PRNGKeyArray], Params],
    new_state: Callable[[Params], TrainState],
    adapters: lora.Lora | None,
    heads: Sequence[str],
    shardings: TrainState,
) -> Callable[..., TrainState]:
    from_key = jax.jit(lambda key: new_state(fresh(key)), out_shardings=shardings)
    # A copy, unless told: the state will be donated, and what was given belongs to somebody else.
    from_copy = jax.jit(lambda params: new_state(jax.tree.map(jnp.copy, params)), out_shardings=shardings)
    from_given = jax.jit(new_state, out_shardings=shardings, donate_argnums=0)

    def init_state(start: PRNGKeyArray | Params, *, donate: bool = False) -> TrainState:
        if isinstance(start, jax.Array):
            return from_key(start)
        if lora.adapted(start) != (adapters is not None):
            got, want = ("with", "without") if adapters is None else ("without", "with")
            raise ValueError(
                f"init_state: got parameters {got} adapters and a learner {want}; use models.lora.merge or add first"
            )
        if {name for name in HEADS if name in start} != set(heads):
            got = [name for name in HEADS if name in start]
            raise ValueError(f"init_state: got parameters with heads {got} and a learner with {list(heads)}")
        return (from_given if donate else from_copy)(start)

    return init_state


def _state(params: Params, *, tx: optax.GradientTransformation, kl_coef: float | None, keep_ref: bool) -> TrainState:
    trained, _ = lora.partition(params)
    return TrainState(
        params,
        tx.init(trained),
        step=jnp.zeros((), jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
        kl_coef=None if kl_coef is None else jnp.asarray(kl_coef, jnp.float32),
        ref=jax.tree.map(jnp.copy, params) if keep_ref else None,
    )


def _state_shardings(
    fresh: Callable[[PRNGKeyArray], Params],
    new_state: Callable[[Params], TrainState],
    tx: optax.GradientTransformation,
    params: Params,
    mesh: Mesh,
) -> TrainState:
    """Optimizer moments and a reference lie where their parameters lie (`params`, of shardings); numbers are
    everywhere.
    """
    everywhere = replicated(mesh)
    state = jax.eval_shape(lambda key: new_state(fresh(key)), jax.random.key(0))
    opt_state = optax.tree_utils.tree_map_params(
        tx,
        lambda _, sharding: sharding,
        state.opt_state,
        lora.partition(params)[0],
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(
        params,
        opt_state,
        step=everywhere,
        skipped=everywhere,
        kl_coef=None if state.kl_coef is None else everywhere,
        ref=None if state.ref is None else params,
    )


def make_schedule(
    *,
    learning_rate: float,
    warmup_steps: int = 0,
    decay_steps: int = 0,
    schedule: str = "constant",
    final_frac: float = 0.0,
) -> optax.Schedule:
    """Learning rate at a count of updates made: linear warm-up that ends at `learning_rate`, then "constant", "linear"
    or "cosine" down to final_frac · learning_rate over the `decay_steps` after it. The first update has 1/warmup_steps,
    not 0.
    """
    if schedule not in ("constant", "linear", "cosine"):
        raise ValueError(f"schedule: got {schedule!r}, want 'constant', 'linear' or 'cosine'")
    if (schedule == "constant") != (decay_steps == 0):
        raise ValueError(
            f"decay_steps: got {decay_steps} with schedule={schedule!r}, want 0 for 'constant', else at least 1"
        )

    def rate(count: Int[Array, ""]) -> Float[Array, ""]:
        warm = jnp.minimum(1.0, (count + 1) / max(warmup_steps, 1))
        done = jnp.clip((count + 1 - warmup_steps) / max(decay_steps, 1), 0.0, 1.0)
        left = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + jnp.cos(jnp.pi * done))}[schedule]
        return learning_rate * warm * (final_frac + (1 - final_frac) * left)

    return rate


def make_optimizer(
    *,
    learning_rate: float,
    warmup_steps: int = 0,
    decay_steps: int = 0,
    weight_decay: float = 0.0,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    clip_norm: float = 1.0,
    schedule: str = "constant",
    final_frac: float = 0.0,
) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm, at the rate of `make_schedule`; DECAYED matrices alone are decayed, or
    the two of the adapter beside one: towards 0, that is towards the base.
    """
    rate = make_schedule(
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=decay_steps,
        schedule=schedule,
        final_frac=final_frac,
    )
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=_decayed),
    )


def _decayed(params: Params) -> Params:
    return jax.tree_util.tree_map_with_path(lambda path, _: lora.adapted_name(path[-1].key) in DECAYED, params)
