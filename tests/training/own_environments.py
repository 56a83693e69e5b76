"""User-written environments, as imported by the workers: they report what they receive."""


class Adds:
    """Answers with what it has got; pays each number in it that it can read; "raise" breaks it."""

    def reset(self, answer, task, metadata):
        self.sum = 0.0

    def step(self, response):
        if response == "raise":
            raise RuntimeError("no")
        paid = float(response) if response.isdecimal() else 0.0
        self.sum += paid
        return f"got {response!r}", paid, response == "done"


class Whole(Adds):
    reads_whole = True


class Scores(Adds):
    """An episode that is cut short is worth a tenth of what it has paid, and 0.5."""

    def score(self):
        return 0.5 + self.sum / 10


class Replayed(Scores):
    replayable = True


class AtTheEnd(Adds):
    pays_at_end = True


class Calls(Adds):
    call_end = ";"


class Opens(Adds):
    """Answers with an opening tag, as a chat template may."""

    def step(self, response):
        said, *rest = super().step(response)
        return f"{said}\n<think>\n", *rest


class BreaksAtScore(Adds):
    def score(self):
        raise RuntimeError("no score")
