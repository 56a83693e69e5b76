"""Published systems, one file each. Nothing else names a file here: removing it removes its system.

A file fills a slot of the run with a class of the slot's name: COLLECTOR, ROLL_OUT, BATCH_SOURCE,
STAGE, LOSS_TERM or FROZEN. The class returns the config field that selects it, or "":

    asked_by(config) -> str

It adds choices to a table of the core, such as `ADVANTAGES`, with a dict of the table's name.
`training.choices` fills the slots, and docs/extending.md describes what else a class has. A file
also has:

    METRICS   {name: (what it is, unit)}

    SECTIONS  sections of fields (`config.fields.Section`)
    RULES     rules between fields
    EFFECTS   {condition of a subpackage: condition under which fields have the same effect}
    RENAMED   {old name of a field: new name}

`specrl_jax.registry` finds the files.
"""
