"""Function for workers that is no scorer: a text, repeated, and which rooms its process knows."""

import sys


class Repeats:
    starts_program = False
    hint = ""

    def __init__(self, text):
        self.text = text

    def call(self, count):
        if not isinstance(count, int):
            raise ValueError("no count")
        if count < 0:
            return None  # which `check` refuses
        rooms = [f"specrl_jax.{room}" for room in ("agents", "rewards", "types")]
        return [self.text * count, [room for room in rooms if room in sys.modules]]

    def check(self, value):
        text, rooms = value
        return [text, rooms]

    def may_share(self, count):
        return True


def prepare(text):
    return Repeats(text)
