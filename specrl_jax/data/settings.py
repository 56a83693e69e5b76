"""Fields of the prompts: their tokenizer, their source, and their order."""

from collections.abc import Iterator
from pathlib import Path

from specrl_jax.config.fields import Check, Section, Values, When, field
from specrl_jax.config.kinds import FINITE, SWITCH, TEXT, choice, integer, text_or


def _of_alphabet():
    from specrl_jax.text.tokenizer import OF_ALPHABET

    return OF_ALPHABET


def _readers():
    from specrl_jax.data.readers import READERS

    return READERS


def _curricula():
    from specrl_jax.data.curriculum import CURRICULA

    return CURRICULA


def _has_splits(config: Values) -> bool:
    root = config.data.path or config.data.name
    return not Path(root).expanduser().is_file()


ALPHABET = When(
    "tokenizer.source", lambda c: c.meaning("tokenizer.source") is not None, "characters"
)
CHAT = When("tokenizer.chat", lambda c: c.tokenizer.chat, "True")
FILES = When("data.source", lambda c: c.meaning("data.source").reads_files, "jsonl")
TAKES_OPTIONS = When("data.source", lambda c: c.meaning("data.source").takes_options, "hf")
HAS_AN_END = When("data.source", lambda c: not c.meaning("data.source").endless, "jsonl")
SPLITS = When("data.path", _has_splits, "FOLDER")
EVAL_SPLITS = When("data.path", lambda c: c.data.eval_path or _has_splits(c), "FOLDER")
COLUMNS = When("data.render", lambda c: not c.data.render, "")
SOLUTIONS = When("sft.steps", lambda c: c.sft.steps > 0, "100")
# Recipes that read the bounds declare when, in their `EFFECTS`.
RATES = When("", lambda c: False)


# fmt: off
TOKENIZER = Section("tokenizer", "", (
    field("source", "characters", "\"\" (the model's own) | characters | directory | hub id",
          text_or(_of_alphabet)),
    field("alphabet", "0123456789 <>;", "its characters: one token each, after pad and end",
          TEXT, ALPHABET),
    field("chat", False, "wrap prompts in the model's chat template", SWITCH),
    field("system_prompt", "", "system message of a chat whose prompt has none",
          TEXT, CHAT, neutral=""),
    field("continue_final_message", False, "the policy continues a prompt's last assistant message",
          SWITCH, CHAT, neutral=False),
))

TEMPLATE_OPTIONS = Section("tokenizer.template_options",
                           "variables of the chat template, like .enable_thinking=False", (),
                           on=CHAT, free=True)

DATA = Section("data", "", (
    field("source", "sort",
          "sort | product | guess | jsonl | parquet | hf | tfds | see docs/data.md",
          choice(_readers)),
    field("name", "sort", "hub id or TFDS name of the data set; task, game or taskset of a package",
          TEXT, files=""),
    field("path", "", "file or directory to read (jsonl, parquet); local copy (hf, tfds)", TEXT,
          FILES, neutral=""),
    field("eval_path", "", 'held-out file; "": the eval_split, or else the last rows of the source',
          TEXT, HAS_AN_END, neutral=""),
    field("render", "", 'module:function that maps a row to (prompt, answer); "": use the columns',
          TEXT, task=""),
    field("prompt_field", "question", "column with the prompt", TEXT, COLUMNS),
    field("answer_field", "answer", "column with the reference answer", TEXT, COLUMNS),
    field("answer_pattern", "",
          'regex whose group 1 is the answer in that column; "": the whole column', TEXT,
          COLUMNS, neutral="", task=""),
    field("solution_field", "",
          'column with the worked solution, for SFT and unsolved groups; "": the answer', TEXT,
          SOLUTIONS, neutral="", task=""),
    field("instruction", "", 'text to append to each prompt, or a template with "{prompt}" in it',
          TEXT, task=""),
    field("split", "train", "split to train on, if the source has splits", TEXT, FILES, SPLITS),
    field("eval_split", "", "split to hold out, if the source has splits", TEXT, FILES,
          EVAL_SPLITS, neutral=""),
    field("prompts", 1024, "training prompts; 0: all of the file or data set; paper 6,144",
          integer(), files=0),
    field("eval_prompts", 256, "number of held-out prompts", integer()),
    field("prompt_len", 24,
          "longest prompt, in tokens; longer ones are left out and counted; paper 1,024",
          integer(1)),
))

DATA_OPTIONS = Section("data.options", "of the data source: here those of sort", (
    field("min_numbers", 6, "shortest list to sort"),
    field("max_numbers", 12, "longest list to sort"),
    field("min_value", 0, "smallest number"),
    field("max_value", 9, "largest number"),
), on=TAKES_OPTIONS, free=True)

CURRICULUM = Section("curriculum", "which prompts a step samples", (
    field("name", "uniform", "uniform (each prompt once per epoch)", choice(_curricula)),
    field("low", 0.0, "a prompt is used only if its mean reward is above this", FINITE,
          RATES),
    field("high", 1.0, "a prompt is used only if its mean reward is below this", FINITE, RATES),
))
# fmt: on


def _tokenizer(config: Values) -> Iterator[Check]:
    source = config.tokenizer.source
    model = config.model.source
    by_character = config.meaning("tokenizer.source") is not None
    rule = f'"" or of a model where model.source is {model!r}'
    yield "tokenizer.source", rule, not (model and by_character)
    rule = f"False where tokenizer.source is {source}"
    yield "tokenizer.chat", rule, not (by_character and config.tokenizer.chat)


RULES = (_tokenizer,)
