"""Continues a text with a trained language model, token by token."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dphybrid.recipes.text.tokens import read_tokens
from dphybrid.training.checkpoint import read_state
from dphybrid.util.errors import UserError


def continued(
    checkpoint: Path, model: Any, prompt: str, length: int, temperature: float, seed: int
) -> Iterator[str]:
    """Yield the text that follows `prompt`, in pieces, of at most `length` tokens. Ends early where the model
    ends a document. model: of this checkpoint, in evaluation mode. temperature: 0 for the likeliest token
    each time. Raises UserError for a prompt without tokens."""
    info = read_state(checkpoint).info
    tokens = read_tokens(checkpoint, int(info["num_words"]))
    ids = tokens.encode([prompt])[0]
    if not ids:
        raise UserError(f"--prompt {prompt!r}: has no words; give the beginning of a text")
    return _pieces(tokens, model, ids, int(info["window"]), length, temperature, seed)


@torch.inference_mode()
def _pieces(
    tokens: Any, model: Any, ids: list[int], window: int, length: int, temperature: float, seed: int
) -> Iterator[str]:
    generator = torch.Generator().manual_seed(seed)
    # The text of a token can depend on the one before: a character may be several tokens.
    known = tokens.decode(ids)
    for _ in range(length):
        scores_V = model.next_token(torch.tensor([ids[-window:]]))[0].float().cpu()
        if temperature:
            chosen = torch.multinomial((scores_V / temperature).softmax(0), 1, generator=generator)
        else:
            chosen = scores_V.argmax()
        if int(chosen) == tokens.end:
            return
        ids.append(int(chosen))
        text = tokens.decode(ids)
        if not text.endswith("\ufffd"):  # the first bytes of a character
            yield text[len(known) :]
            known = text
