"""Published systems that are guests of the core: one file each.

A recipe says in `COLLECTOR`, `ROLL_OUT` or `SOURCE` what it puts into that slot of the core, and in
`is_asked_for` when. The core names no recipe. Without its file a recipe is gone, and nothing else.
"""

import importlib
import pkgutil
from typing import Any


def chosen(slot: str, config) -> Any | None:
    """Return what the recipe that `config` asks for puts into a slot; None: no recipe does.

    Raises ValueError if two recipes want the slot.
    """
    guests = {}
    for module in pkgutil.iter_modules(__path__):
        recipe = importlib.import_module(f"{__name__}.{module.name}")
        guest = getattr(recipe, slot, None)
        if guest is not None and guest.is_asked_for(config):
            guests[module.name] = guest
    if len(guests) > 1:
        first, second, *_ = sorted(guests)
        raise ValueError(
            f"rollout must ask for {first} or {second}, got both: each decides {_DECIDES[slot]}; "
            "switch one off"
        )
    return next(iter(guests.values()), None)


_DECIDES = {
    "COLLECTOR": "which responses a step trains on",
    "ROLL_OUT": "how rows are rolled out",
    "SOURCE": "when a batch is trained on",
}
