"""Fields of the run: how long it is, what it evaluates, keeps and shows, where it runs."""

from collections.abc import Iterator

from specrl_jax.config.fields import NEW_RUN, RESUMED, Check, Section, Shards, Values, When, field
from specrl_jax.config.kinds import GREEDY_OR_WARM, SHARE, SWITCH, TEXT, WEIGHT, choice, integer


def _trackers():
    from specrl_jax.telemetry.tracking import TRACKERS

    return TRACKERS


BY_EPOCHS = When("train.steps", lambda c: not c.train.steps, "0")
WARM_UP = When("sft.steps", lambda c: c.sft.steps > 0, "100")
SAMPLED = When("evaluate.temperature", lambda c: c.evaluate.temperature > 0, "1.0")
EVALUATED = When("evaluate.every", lambda c: c.evaluate.every > 0, "8")
# A recipe that provides the source of batches declares when, in its `EFFECTS`.
BESIDE_UPDATES = When("", lambda c: False)


# fmt: off
RUN = Section("", "", (
    field("seed", 0, "of weights, data order, warm-up and all sampling", integer()),
    field("recipes", "", "your own modules that extend a run, separated by commas", TEXT),
))

TRAIN = Section("train", "", (
    field("epochs", 4, "passes over the training prompts, rounded to whole steps; paper 15",
          integer(), BY_EPOCHS),
    field("steps", 0, "steps of the run; 0: as many as train.epochs gives; paper 90", integer()),
), may_change=RESUMED)

WARMUP = Section("sft", "SFT, supervised fine-tuning before step 1", (
    field("steps", 600, "SFT steps before step 1; 0: no SFT", integer()),
    field("batch_size", 64, "demonstrations in one SFT step", integer(1),
          shards=Shards("update", WARM_UP)),
    field("examples", 20_000,
          "demonstrations to train on, none of a held-out prompt; 0: all in the file",
          integer()),
    field("mistake_rate", 0.08,
          "share of the demonstrations' digits that are wrong; 0 if the data has solutions",
          SHARE, neutral=0.0),
    field("learning_rate", 2e-3, "of AdamW in SFT; a cosine takes it down to a tenth", WEIGHT),
), on=WARM_UP)

# launch/evaluate.py and generate.py read temperature and batch size too.
EVALUATE = Section("evaluate", "", (
    field("every", 8, "steps between evaluations; the first and last step also have one; 0: none",
          integer(), may_change=RESUMED),
    field("samples", 1, "responses sampled for each held-out prompt",
          integer(1), EVALUATED, SAMPLED, neutral=1, may_change=RESUMED),
    field("temperature", 1.0, "sampling temperature; 0: greedy; top-k and top-p are the rollout's",
          GREEDY_OR_WARM, may_change=NEW_RUN),
    field("batch_size", 256, "held-out prompts that are sampled together",
          integer(1), may_change=RESUMED, shards=Shards("rollout", EVALUATED)),
))

CHECKPOINT = Section("checkpoint", "", (
    field("every", 16, "steps between checkpoints", integer(1)),
    field("keep_last", 2,
          "newest checkpoints to keep; >= 2, because the last may diverge at the next step",
          integer(2)),
    field("keep_best", 1, "checkpoints to keep of the steps with the best held-out reward",
          integer(), EVALUATED, neutral=0),
), may_change=RESUMED)

LOG = Section("log", "", (
    field("tracker", "wandb",
          "none | wandb (offline unless logged in; see $WANDB_MODE) | tensorboard",
          choice(_trackers)),
    field("report", True, "write WORKDIR/report.html at every checkpoint and at the end", SWITCH),
    field("print_every", 20,
          "N: print and track responses at step 1 and every N steps; 0: never",
          integer()),
    field("rollouts", 0.02,
          "share of a step's prompts to record in WORKDIR/rollouts, at least 8; 0: none", SHARE),
), may_change=RESUMED)

MESH = Section("mesh", "", (
    field("data", -1, "replicas of the weights; -1: all devices that fsdp and tensor leave",
          integer(-1)),
    field("fsdp", 1, "shards of the weights, the optimizer state and the batch", integer(-1)),
    field("tensor", 1, "shards of the heads, the feed-forward width and the vocabulary",
          integer(-1)),
    field("rollout_devices", 0, "more devices, which roll out during updates; 0: both take turns",
          integer(), BESIDE_UPDATES, neutral=0),
), may_change=RESUMED)
# fmt: on


def _lengths(config: Values) -> Iterator[Check]:
    rule = "> 0 where train.steps is 0"
    yield "train.epochs", rule, bool(config.train.epochs or config.train.steps)
    held_out = config.data.eval_prompts or config.data.eval_path or config.data.eval_split
    rule = "> 0 where evaluate.every is > 0"
    yield "data.eval_prompts", rule, bool(held_out or not config.evaluate.every)


def _demonstrations(config: Values) -> Iterator[Check]:
    """Yield the rules for solutions that are learned before step 1."""
    sft = config.sft
    if not sft.steps:
        return
    source = config.data.source
    field = config.data.solution_field
    endless = config.meaning("data.source").endless
    plays = config.meaning("data.source").plays
    rule = f"0 where environment.name is set and data.source is {source} (it has no solutions)"
    yield "sft.steps", rule, not config.environment.name or (endless and not plays)
    rule = f"> 0 where data.source is {source} (it is endless)"
    yield "sft.examples", rule, sft.examples > 0 or not endless
    where = f"data.solution_field is {field!r}" if field else f"data.source is {source}"
    rule = f"0 where {where} (solutions are learned as they are)"
    yield "sft.mistake_rate", rule, not sft.mistake_rate or (endless and not field)


RULES = (_lengths, _demonstrations)
RENAMED = {
    f"warmup.{name}": f"sft.{name}"
    for name in ("steps", "batch_size", "examples", "mistake_rate", "learning_rate")
}
