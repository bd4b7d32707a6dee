"""What one request used. A value, no decision."""

from __future__ import annotations

from dataclasses import dataclass

from policies.events import Usage


@dataclass(frozen=True, slots=True)
class Spent:
    """Tokens of one request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of them, found in a cache."""
    output_tokens: int = 0
    counted: bool = False
    """An engine worked on it: it told tokens, or some of its answer came. Else its tenant owes nothing."""

    @classmethod
    def of(cls, usage: Usage, prompt_estimate: int, output_tokens: int) -> Spent:
        """As an engine told it; where it told nothing but answered, the prompt is the estimate."""
        if usage.prompt_tokens is None and not output_tokens:
            return cls()
        prompt = prompt_estimate if usage.prompt_tokens is None else usage.prompt_tokens
        return cls(prompt, min(prompt, usage.cached_tokens or 0), output_tokens, counted=True)
