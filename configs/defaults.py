"""Every key an experiment may set, with its default. An experiment starts from `defaults()` and changes a few.

Units are in the names. `launch/plan.py` reads every leaf once, checks it, and hands plain values down; a leaf that
nothing reads is an error, and so is a key that is not here.
"""

import ml_collections


def defaults() -> ml_collections.ConfigDict:
    """The whole tree of keys (every leaf typed, so that `--config.a.b=c` is checked)."""
    c = ml_collections.ConfigDict()
    c.name = "unnamed"  # the experiment's name in results/
    c.seed = 0

    c.world = ml_collections.ConfigDict()
    c.world.name = "search"
    c.world.options = ml_collections.ConfigDict()  # handed to envs.make_world as they are

    c.tokenizer = ml_collections.ConfigDict()
    c.tokenizer.vocab_size = 1024  # trained on the world's texts when the workdir has none
    c.tokenizer.path = ""  # a Hugging Face folder instead

    c.model = ml_collections.ConfigDict()
    # A Hugging Face folder, a .gguf file, or package:NAME of an installed package that holds one: shape, weights and
    # tokenizer come from there. Of the keys below only dtype, remat and attention may then be set.
    c.model.path = ""
    c.model.d_model = 128
    c.model.n_layers = 3
    c.model.n_heads = 4
    c.model.n_kv_heads = 4
    c.model.head_dim = 32
    c.model.d_ff = 256
    c.model.rope_theta = 10_000.0
    c.model.tie_embeddings = True
    c.model.qk_norm = True
    c.model.attention_bias = False
    c.model.key_shift = False
    c.model.init = "normal"
    c.model.dtype = "float32"
    c.model.remat = "none"
    c.model.attention = "auto"  # the kernel over packed rows: by platform, or "xla", "cudnn", "splash"

    c.lora = ml_collections.ConfigDict()
    c.lora.rank = 0  # > 0: adapters W + alpha/rank A B alone are trained; everything else is frozen
    c.lora.alpha = 16.0
    c.lora.targets = ("wq", "wk", "wv", "wo", "gate", "up", "down")

    c.mesh = ml_collections.ConfigDict()
    c.mesh.data, c.mesh.fsdp, c.mesh.tensor = 1, 1, 1  # the learner's devices, those of all processes together

    c.batch = ml_collections.ConfigDict()  # packed rows of RL: the shapes that train_step compiles for
    c.batch.length = 640  # tokens a row: well over the longest episode, so that little is padding
    c.batch.rows = 128  # rows at most, RL: an episode may fill one
    c.batch.micro_rows = 2
    c.batch.logp_chunk = 640

    c.engine = ml_collections.ConfigDict()
    c.engine.lanes = 32
    c.engine.residents = 128
    c.engine.capacity = 384  # tokens a session may hold
    c.engine.round_tokens = 8
    c.engine.prefill_rows = 16
    c.engine.prefill_chunk = 64
    c.engine.contexts = (192, 384)  # attention widths that are compiled
    # Data-parallel engines, each over `tensor` devices, on the first replicas x tensor of this process; the sizes above
    # are those of each.
    c.engine.replicas = 1
    c.engine.tensor = 1
    c.engine.split = False  # True: on the devices after those of the learner's mesh; weights go from device to device
    c.engine.kv_on_update = "recompute"  # live KV at a weight update; or "keep": cheaper, later logp mixes versions

    c.rollout = ml_collections.ConfigDict()
    c.rollout.threads = 64
    c.rollout.max_turn_tokens = 24
    c.rollout.max_episode_tokens = 384
    c.rollout.call_deadline_s = 30.0  # a world call past it ends its episode as ENV_ERROR
    c.rollout.max_world_s = 0.0  # > 0: an episode whose world took longer in all ends as TIME_LIMIT, a failure
    # Where the worlds are: "threads" of this process; "processes", so many, each with a world of its own and its share
    # of the instances; or "ray", as many actors.
    c.rollout.worlds = "threads"
    c.rollout.processes = 2
    c.rollout.ray_address = ""  # of a cluster that runs ("auto": this host's); "": one on this host, for the run
    c.rollout.calls_at_once = 0  # > 0: that the world bears, a search service say; the others wait, off the clock
    # True: of `threads` only as many episodes are in flight as keep the lanes busy; fewer where the world slows down.
    c.rollout.adaptive = False
    # Further tries of an ENV_ERROR member, each on a fresh world, before it is left out of its group: after failures of
    # the infrastructure (a hang, a lost connection or process, no memory), of a group in all; after other failures.
    c.rollout.retries = 2
    c.rollout.group_retries = 8
    c.rollout.data_retries = 1
    # A task whose groups fail alike on fresh worlds is not played again: its ticket passes. More of them, over the
    # tasks met so far: an error.
    c.rollout.max_quarantined_frac = 0.25
    # Training alone: an episode is given up between two turns (ABANDONED) by the rules that are on.
    c.rollout.abandon = ml_collections.ConfigDict()
    c.rollout.abandon.repeats = 0  # > 1: when an action was said so often after the same observation, in all
    c.rollout.abandon.prm_below = 0.0  # > 0: when P(success) after a turn is below it, by a reward model of rm.kind=prm
    c.rollout.abandon.prm_path = ""  # the launch.train_rm run of that
    c.rollout.abandon.value_below = 0.0  # > 0: when ppo's critic expects less of the state before the next turn
    c.rollout.abandon.value_after = 10  # and has been trained on so many batches: it begins at 0, below any threshold
    c.rollout.abandon.audit_frac = 0.1  # share of these that is played to its end all the same: the bias, measured
    c.rollout.abandoned = "failure"  # of its group; or "excluded": the group is compared without it
    c.rollout.constrain_tools = False  # True is refused: the learner knows of no constraint; see eval.constrain_tools

    c.demos = ml_collections.ConfigDict()
    c.demos.n = 12_000  # scripted, imperfect; of training tasks, or of the lessons of a world that has some
    c.demos.hinted = False  # True: of tasks for which the world has a hint, the prompt has it
    c.demos.without = ()  # facts: a demonstration in which one of them is not 0 is left out, and another one played

    c.sft = ml_collections.ConfigDict()  # b2 and clip_norm of the optimizer: as in rl
    c.sft.steps = 400
    c.sft.rows = 8  # packed rows a step
    c.sft.length = 384  # tokens a row
    c.sft.micro_rows = 4
    c.sft.learning_rate = 3e-3
    c.sft.warmup_steps = 15
    c.sft.weight_decay = 0.0
    c.sft.eval_every = 0
    c.sft.save_every = 200

    c.rft = ml_collections.ConfigDict()  # launch.rft: roll out, imitate what succeeded, again; rates and rows of sft
    c.rft.rounds = 3
    c.rft.tasks = 256  # a round, each played rl.group_size times
    c.rft.per_task = 2  # successes of one task that are kept at most
    c.rft.steps = 100  # of optimisation, a round

    c.rm = ml_collections.ConfigDict()  # launch.train_rm: a reward model; rows, warm-up and decay of sft
    c.rm.kind = "orm"  # judges an episode at its end; or "prm": each turn at its end
    c.rm.steps = 300
    c.rm.learning_rate = 1e-3  # falls by a cosine
    c.rm.held_out = 0.2  # share of the tasks that are measured on and not trained on, with all their episodes
    c.rm.episodes = 0  # that are used at most, drawn by the seed; 0: all
    c.rm.roll_ins = 4  # prm: continuations of each turn that its label is the success of

    c.rl = ml_collections.ConfigDict()
    # grpo, dapo, dr_grpo, rloo, reinforce_pp, gspo, gspo_token, gigpo, cispo, ppo, ppo_decoupled
    # (rl/losses/recipes.py). Clip, kind of KL, scale and credit.name are the recipe's own, its paper's, where they are
    # -1 or "".
    c.rl.recipe = "grpo"
    c.rl.steps = 100
    c.rl.groups_per_batch = 16
    c.rl.group_size = 8
    # Updates on a batch, each on its share of the micro-batches; each is a step, so that rl.steps and whatever counts
    # steps must be multiples.
    c.rl.minibatches = 1
    c.rl.temperature = 1.0
    # Versions that a trained token may be older than the learner: 0 samples a batch, then learns from it; with more,
    # sampling runs ahead by so many batches while the learner computes. "ppo_decoupled" corrects for what that does.
    c.rl.max_staleness = 0
    c.rl.learning_rate = 1e-3
    c.rl.warmup_steps = 3
    c.rl.schedule = "constant"  # or "cosine", "linear": to zero at rl.steps
    c.rl.weight_decay = 0.0
    c.rl.clip_norm = 1.0
    c.rl.b2 = 0.98
    c.rl.clip_low = -1.0
    c.rl.clip_high = -1.0
    c.rl.dual_clip = 0.0  # > 1: of an action with A < 0 the loss is at most that many |A|, however likely it has become
    # > 0: each token's loss has the weight min(w, is_cap), w = π/π_behavior with π the learner's before the update: for
    # what rounding and stale weights make of the engine's π. Of ppo_decoupled, whose 0 is 5: a token over it has none.
    c.rl.is_cap = 0.0
    # π of before the update, where such a weight is read: a "forward" pass when the batch is cut; or "loglinear", no
    # pass: between π_behavior and π by the token's staleness (a token of the newest weights has π_behavior, and w = 1).
    c.rl.proximal = "forward"
    c.rl.kl_coef = 0.0  # > 0 keeps a reference policy: the weights at the start of RL
    c.rl.kl_kind = ""  # its estimator in the loss: "k1", "k2", "k3"; in the reward it is k1
    # A term of the "loss"; or off the "reward": the estimate of each token (returns, and a critic's), of the whole
    # episode (group, others), before anything is compared.
    c.rl.kl_in = "loss"
    c.rl.kl_target = 0.0  # nats a token of policy/ref_kl: > 0 adapts kl_coef to it, by at most .2 · batch / horizon
    c.rl.kl_horizon = 10_000.0  # episodes
    c.rl.ref_every = 0  # steps after which the reference is the policy of that moment; 0: never
    c.rl.entropy_coef = 0.0
    c.rl.reduce = "sequence"  # the loss: mean over episodes of their token means; or "token": over all tokens alike
    c.rl.loss_tokens = 0  # dr_grpo, rloo: what an episode's sum is divided by, the same for every batch
    c.rl.value_coef = 0.5  # ppo
    c.rl.value_clip = 0.2  # ppo, in units of the reward
    c.rl.scale = ""  # group advantage: "std" or "none"
    c.rl.drop_equal_groups = False  # DAPO's dynamic sampling
    c.rl.filter_overlong = False  # DAPO's: an episode cut by a token or turn limit is in its group, but adds no loss
    # True: the tokens of observations, with the glue around them, are trained like those that the policy sampled; the
    # prompt is not. The ablation of Search-R1 (2503.09516, loss masking for retrieved tokens), never of use itself.
    c.rl.train_on_world = False
    c.rl.save_every = 25

    c.ttrl = ml_collections.ConfigDict()  # launch.ttrl: adaptation to tasks without their labels, by their majority
    c.ttrl.split = "test"  # what is adapted to; eval.n tasks of eval.split, another one, are held out
    c.ttrl.n = 64
    c.ttrl.samples = 16  # of each task, before and after: avg@k, pass@k and maj@k for k up to it
    c.ttrl.per_query = False  # True (--per_query): to one task at a time, from the start's weights each time
    c.ttrl.queries = 8  # so many tasks
    c.ttrl.steps = 8  # on each, of one group

    c.curriculum = ml_collections.ConfigDict()
    # Which tasks are drawn: uniform (epochs of all), easy_to_hard, success_band, learnability, adarft, plr. Defaults
    # are the papers', see rl/task_samplers.py.
    c.curriculum.name = "uniform"
    c.curriculum.epsilon = 0.1  # share of the draws that goes through all tasks, whatever the sampler prefers
    c.curriculum.decay = 0.9  # success_band, learnability: of a task's counts at each new group of it
    c.curriculum.low, c.curriculum.high = 0.2, 0.8  # success_band: of the expected success
    c.curriculum.start_frac = 0.25  # easy_to_hard: share of the tasks at first
    c.curriculum.steps = 100  # and all of them from so many batches' worth of tickets on
    c.curriculum.target = 0.0  # adarft: the difficulty to begin with, 0 the easiest task and 100 the hardest
    c.curriculum.step = 50.0
    c.curriculum.sensitivity = 2.0
    c.curriculum.wanted = 0.5  # the success rate that keeps the target where it is
    c.curriculum.temperature = 0.1  # plr
    c.curriculum.staleness = 0.1
    c.curriculum.replay = 0.5  # share of its draws that play a task again
    # A group is trained on where the success rate of its members is within these; its place goes to the next ticket
    # otherwise. 0 and 1 admit all. rl.drop_equal_groups is DAPO's gate, by the reward.
    c.curriculum.admit_low, c.curriculum.admit_high = 0.0, 1.0

    c.hints = ml_collections.ConfigDict()  # of worlds that have some, in the prompts of training tasks alone
    c.hints.prob = 0.0  # of a group at the start; falls to 0 in a line
    c.hints.steps = 50  # batches' worth of tickets (refused groups have some too), after which no prompt has one

    c.credit = ml_collections.ConfigDict()
    # Whose merit a reward is. On the host: "group" (relative to the group), "others" (leave one out), "anchor" (by
    # turns, GiGPO's), "process" (by turns, of what is still to come of their rewards). On the device: "returns" (no
    # critic), or GAE of ppo's critic over "token", "turn", "bi_level".
    c.credit.name = ""
    c.credit.discount = 1.0  # of a token; of a turn for "turn" and "anchor"
    c.credit.lambda_ = 1.0
    c.credit.turn_discount = 1.0  # bi_level
    c.credit.weight = 1.0  # anchor: of the step's part beside the episode's
    c.credit.whiten = True  # on the device: advantages of mean 0, variance 1 over the batch

    c.reward = ml_collections.ConfigDict()
    c.reward.terms = ml_collections.ConfigDict({"success": 1.0})  # term (rl/rewards/terms.py) or fact -> weight
    c.reward.reach = ml_collections.ConfigDict()  # of a fact that is a count: the largest difference it can make
    c.reward.options = ml_collections.ConfigDict()  # of a term, by its name: c.reward.options.repetition = {"ngram": 4}
    c.reward.leader = "success"  # the term that is the outcome: the others may move it by max_shaping at most
    c.reward.max_shaping = 0.3

    # Limits of the alarms in metrics.jsonl (alarm/NAME) and on the console; rl/metrics/alarms.py has the table.
    c.alarms = ml_collections.ConfigDict()
    c.alarms.window = 5  # records
    c.alarms.entropy_frac = 0.1  # of the entropy at first
    c.alarms.kl_nats = 0.5  # a token
    c.alarms.length_ratio = 2.0  # longer or shorter than at first
    c.alarms.gap_nats = 0.1  # between engine and learner, the largest of a batch
    c.alarms.equal_groups_frac = 0.8
    c.alarms.env_error_frac = 0.1
    c.alarms.unsupported_rise = 0.1  # of answers in no passage shown, while success rises

    c.eval = ml_collections.ConfigDict()
    # Of hyper-parameters and keep-best; quickstart and sweep read the test split, before and after.
    c.eval.split = "validation"
    c.eval.every = 20  # RL steps
    c.eval.n = 128
    c.eval.final_n = 256
    c.eval.final_samples = 1  # episodes of each of these: more where there are few tasks
    # Of a world with tools: whatever the policy, each of its turns is one call that parses, its strings of up to 60
    # characters. It is another measure than that of the policy as it is trained.
    c.eval.constrain_tools = False
    return c
