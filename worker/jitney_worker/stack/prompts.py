"""The demo's passengers: sixteen chat prompts whose answers have very different lengths."""

from __future__ import annotations

from typing import NamedTuple


class Passenger(NamedTuple):
    """A prompt, and how many tokens its answer may have."""

    prompt: str
    max_tokens: int


PASSENGERS = (
    Passenger("What is the capital of France?", 16),
    Passenger("Tell me a story about a lighthouse keeper and a storm.", 160),
    Passenger("Name three primary colours.", 24),
    Passenger("Explain how a bicycle stays upright.", 120),
    Passenger("What is two plus two?", 12),
    Passenger("Write a short poem about the sea.", 80),
    Passenger("List five things to pack for a day at the beach.", 64),
    Passenger("What is water made of?", 32),
    Passenger("Describe a busy market in the morning.", 140),
    Passenger("Say hello in Spanish.", 12),
    Passenger("Why do leaves change colour in autumn?", 96),
    Passenger("Give me a recipe for pancakes.", 150),
    Passenger("Who wrote Romeo and Juliet?", 20),
    Passenger("What does a queue in a computer do?", 72),
    Passenger("Name a large ocean.", 12),
    Passenger("How does a kettle boil water?", 100),
)
