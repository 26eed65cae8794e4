"""How the tail samples, as the worker wants it."""

from __future__ import annotations

from ..wire import messages
from ..worker import Sampling


def sampling_of(asked: messages.Sampling) -> Sampling:
    """Millionths on the wire, plain numbers in the worker."""
    return Sampling(
        temperature=asked.temperature / 1e6,
        top_k=asked.top_k,
        top_p=asked.top_p / 1e6,
        min_p=asked.min_p / 1e6,
        repeat_penalty=asked.repeat_penalty / 1e6,
        repeat_last_n=asked.repeat_last_n,
        presence_penalty=asked.presence_penalty / 1e6,
        frequency_penalty=asked.frequency_penalty / 1e6,
        seed=asked.seed,
        typical_p=asked.typical_p / 1e6,
        logprobs=asked.logprobs,
        logit_bias=tuple((token, bias / 1e6) for token, bias in asked.biases),
        grammar=asked.grammar,
    )
