"""SRT's draft model in plain Python: a tree over every substring, with weighted counts.

What `suffix_match.py` is compared with (arXiv 2601.09083, section 3; counts, budget and cut are
those of the suffix tree that its authors build on). One tree serves one
prompt. Nodes are dictionaries of children; every appended token walks the paths of all suffixes.

Differs from the paper, with `literal` off, to make it stronger: occurrences of the matched suffix
that nothing follows are not counted. The row's own newest one always is such; counted, it halves
the path probability of a long match that was seen once before.
"""

BEGIN = -1


class Node:
    """A substring: how often it was seen (weighted), and what followed it."""

    __slots__ = ("children", "count")

    def __init__(self):
        self.count = 0.0
        self.children = {}

    def child(self, token: int) -> "Node":
        if token not in self.children:
            self.children[token] = Node()
        return self.children[token]


class SuffixTree:
    """Substrings of up to `depth` + `width` tokens: `depth` to match and `width` to draft.

    Every source begins with `depth` BEGIN tokens, which stand for the prompt.
    """

    def __init__(self, depth: int, width: int, literal: bool = False):
        self.depth, self.width, self.literal = depth, width, literal
        self.root = Node()
        self.open = {}  # source → the nodes of all suffixes of what it holds, longest last
        self.texts = {}

    def add(self, source, tokens, weight: float = 1.0) -> None:
        """Append tokens to a source, begin it if it is new."""
        if source not in self.open:
            self.texts[source] = [BEGIN] * self.depth
            self.open[source] = [self.root]
            node = self.root
            for _ in range(self.depth):
                node = node.child(BEGIN)
                node.count += weight
                self.open[source].append(node)
        for token in tokens:
            nodes = [node.child(token) for node in self.open[source]]
            for node in nodes:
                node.count += weight
            self.open[source] = [self.root, *nodes][: self.depth + self.width + 1]
            self.texts[source].append(token)

    def propose(self, source, factor: float, offset: float, min_prob: float) -> list[int]:
        """The draft with the largest sum of path probabilities over all suffix lengths."""
        best, best_score = [], 0.0
        for matched in range(self.depth, 0, -1):
            node = self._find(self.texts[source][-matched:])
            if node is None:
                continue
            budget = min(self.width, int(matched * factor + offset + 1e-6))
            draft, score = _follow(node, budget, min_prob, self.literal)
            if score > best_score:
                best, best_score = draft, score
        return best

    def _find(self, tokens) -> Node | None:
        node = self.root
        for token in tokens:
            node = node.children.get(token)
            if node is None:
                return None
        return node


def _follow(node: Node, budget: int, min_prob: float, literal: bool) -> tuple[list[int], float]:
    """The most frequent child, again and again; the score is the sum of path probabilities."""
    draft, prob, score = [], 1.0, 0.0
    while len(draft) < budget:
        children = {t: child for t, child in node.children.items() if t != BEGIN}
        if not children:
            break
        token = max(children, key=lambda t: children[t].count)
        followed = sum(child.count for child in children.values())
        prob *= children[token].count / (node.count if draft or literal else followed)
        if prob < min_prob:
            break
        node = children[token]
        draft.append(token)
        score += prob
    return draft, score
