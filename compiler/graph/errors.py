"""The error of models that cannot be compiled."""

from __future__ import annotations

from celosia.compiler.program.host.op import clip_sentence
from celosia.plain import Sentence


class ModelError(Sentence, ValueError):
    """A model that cannot be compiled; the message is one sentence that names the part of the model and a remedy."""

    def __init__(self, sentence: str) -> None:
        super().__init__(clip_sentence(sentence))
