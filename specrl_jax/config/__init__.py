"""Definition of a run's configuration fields: their kind, when they matter, how they are checked.

Subpackages declare their fields with this (`fields`), and `specrl_jax.settings` gathers them in a
`schema.Schema`. Nothing here depends on a subpackage.
"""

from specrl_jax.config.kinds import flatten, get

__all__ = ["flatten", "get"]
