"""Convert text to tokens and back, for models whose metadata list the text of each token."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.program import InputError
from celosia.plain import from_json

METADATA_KEY = "vocabulary"
"""Key of the model's metadata: a JSON list of texts, one for each token."""


class Vocabulary:
    """Vocabulary of a model: texts[token] is the text of `token`. ModelError where a text is empty or occurs twice."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = list(texts)
        self._tokens = {text: token for token, text in enumerate(self.texts)}
        if "" in self._tokens or len(self._tokens) != len(self.texts):
            raise ModelError(f"the metadata's {METADATA_KEY} has a text twice, or an empty one")
        self._longest = max(map(len, self.texts), default=0)

    def tokens_of(self, text: str) -> list[int]:
        """Split `text` into tokens, each the longest that fits. InputError at the first character that begins none.

        >>> Vocabulary(["a", "b", "ab"]).tokens_of("aabb")
        [0, 2, 1]
        """
        tokens, start = [], 0
        while start < len(text):
            candidate_ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in candidate_ends if text[start:end] in self._tokens), None)
            if end is None:
                raise InputError(
                    f"the model has no token for {text[start]!r}, character {start} of the prompt; its tokens begin "
                    f"with {', '.join(map(repr, self.texts[:8]))}"
                )
            tokens.append(self._tokens[text[start:end]])
            start = end
        return tokens

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the joined texts of `tokens`."""
        return "".join(self.texts[token] for token in tokens)


def vocabulary_of(proto: onnx.ModelProto) -> Vocabulary | None:
    """Return the Vocabulary in the model's metadata; None where it has none.

    ModelError where it is no list of texts.
    """
    text = next((entry.value for entry in proto.metadata_props if entry.key == METADATA_KEY), None)
    if text is None:
        return None
    try:
        texts = from_json(text)
    except ValueError:
        texts = None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ModelError(f"the metadata's {METADATA_KEY} is no JSON list of texts")
    return Vocabulary(texts)
