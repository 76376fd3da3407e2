"""Real English text that every CPython carries, cut into tokens and batches."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from .settings import Settings

VOCABULARY = 2048
RUN = 16

# A word with the space before it, line breaks with the indentation, several spaces, or one character.
PIECE = re.compile(r" ?[A-Za-z_]+|\n+ *| {2,}|.", re.DOTALL)


def read_paragraphs() -> list[str]:
    """The language reference inside `pydoc_data.topics`, each paragraph once, without lines that hold no word.

    Topics quote one another (a fifth of the text occurs twice). A paragraph kept twice could stand in both splits, and
    the validation loss would then measure memory. Lines without a word underline titles and rule tables.
    """
    from pydoc_data.topics import topics

    paragraphs = []
    for part in re.split(r"\n\s*\n", "\n\n".join(topics.values())):
        paragraphs.append("\n".join(line for line in part.split("\n") if re.search(r"\w", line)))
    return list(dict.fromkeys(part for part in paragraphs if part))


def split(paragraphs: list[str]) -> tuple[str, str]:
    """(training text, validation text): every tenth run of RUN paragraphs is held out, so that both span all topics."""
    held_out = [index // RUN % 10 == 9 for index in range(len(paragraphs))]
    train = "\n\n".join(part for part, held in zip(paragraphs, held_out, strict=True) if not held)
    validation = "\n\n".join(part for part, held in zip(paragraphs, held_out, strict=True) if held)
    return train, validation


class Vocabulary:
    """Frequent words and every single character, so that any text of these characters is encoded without loss."""

    def __init__(self, text: str, size: int = VOCABULARY) -> None:
        characters = sorted(set(text))
        words = Counter(piece for piece in PIECE.findall(text) if len(piece) > 1)
        room = max(0, size - len(characters))
        self.tokens = characters + [word for word, _ in words.most_common(room)]
        self.index = {token: number for number, token in enumerate(self.tokens)}

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> Tensor:
        """int64[tokens]; words that are not in the vocabulary are spelled. KeyError: a character it has never seen."""
        numbers: list[int] = []
        for piece in PIECE.findall(text):
            numbers += [self.index[token] for token in ([piece] if piece in self.index else piece)]
        return torch.tensor(numbers, dtype=torch.int64)

    def decode(self, numbers: Tensor) -> str:
        return "".join(self.tokens[number] for number in numbers.tolist())


@dataclass(frozen=True)
class Corpus:
    """Encoded text: `train` and `validation` are int64[tokens]. `characters` counts both."""

    vocabulary: Vocabulary
    train: Tensor
    validation: Tensor
    characters: int


def load_corpus() -> Corpus:
    train, validation = split(read_paragraphs())
    vocabulary = Vocabulary(train + validation)
    return Corpus(vocabulary, vocabulary.encode(train), vocabulary.encode(validation), len(train) + len(validation))


def training_windows(train: Tensor, settings: Settings) -> Tensor:
    """int64[updates, steps, rows, context + 1]: random cuts of the training text, the same for the same seed."""
    generator = torch.Generator().manual_seed(settings.seed)
    shape = (settings.updates, settings.steps, settings.rows, 1)
    starts = torch.randint(len(train) - settings.context, shape, generator=generator)
    return train[starts + torch.arange(settings.context + 1)]


def validation_rows(validation: Tensor, context: int) -> Tensor:
    """int64[rows, context + 1]: the validation text from its beginning, each token predicted once."""
    rows = (len(validation) - 1) // context
    return validation[torch.arange(rows).unsqueeze(1) * context + torch.arange(context + 1)]
