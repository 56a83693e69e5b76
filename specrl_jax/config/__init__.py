"""What a field of a run's configuration is: its kind, when it has an effect, how it is checked.

The rooms declare their fields with this (`fields`), and `specrl_jax.settings` gathers them in a
`schema.Schema`. Nothing here knows a room.
"""

from specrl_jax.config.kinds import flatten, get

__all__ = ["flatten", "get"]
