"""Published systems, one file each. Nothing else names a file here: without it, its system is gone.

A file takes a slot of the run by a class of its name: COLLECTOR, ROLL_OUT, BATCH_SOURCE, STAGE,
LOSS_TERM or FROZEN. The class says which field of the configuration asks for it, or "":

    asked_by(config) -> str

It adds choices to a table of the core, such as `ADVANTAGES`, by a dict of the table's name.
`training.choices` fills the slots, and docs/extending.md says what a class has besides. A file also
has:

    METRICS   {name: (what it is, unit)}

    SECTIONS  sections of fields (`config.fields.Section`)
    RULES     rules between fields
    EFFECTS   {condition of a room: condition under which fields have the same effect}
    RENAMED   {old name of a field: new name}

`specrl_jax.registry` finds the files.
"""
