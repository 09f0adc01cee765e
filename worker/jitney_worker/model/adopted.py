"""Every other decoder of transformers, over the same paged cache.

The model is transformers' own; only its attention calls are answered here (paging.py). How its layers attend is not
looked up by family but surveyed (survey.py), and what a survey cannot see, such as a state outside of attention, the
trial shows (trial.py): a model that would answer wrongly is refused when it is loaded.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jitney.errors import ModelError
from jitney.logs import logger
from jitney_worker.model.adopted_config import AdoptedConfig, causal_class, in_one_line, read_config, takes_position_ids
from jitney_worker.model.attention import AttentionStep
from jitney_worker.model.paging import SERVING, SURVEYING, Pager, register, visited_by
from jitney_worker.model.pinned_rope import pin
from jitney_worker.model.pretended_cache import pretended_cache
from jitney_worker.model.quiet import quiet
from jitney_worker.model.survey import Survey, rule_mask
from jitney_worker.model.trial import PositionsByCache, try_out
from jitney_worker.model.weights import refuse_packed, some_of, weight_files


class AdoptedDecoder:
    """A causal language model of transformers as a `Decoder`."""

    def __init__(self, model: Any, config: AdoptedConfig, where: str) -> None:
        """Survey and try the model. Raises ModelError if it cannot serve."""
        self.config = config
        self.model = model
        body_name = _body_name(model, where)
        self.body: Any = model._modules[body_name]
        self._head = _head_alone(model, body_name)
        self._positions_by_cache = False
        with torch.inference_mode():
            survey, hidden_size = _survey(model, self.body, config.max_model_len, where)
            self.config = replace(config, hidden_size=hidden_size)
            self.attention_layers, self._numbers = tuple(survey.layers), survey.numbers
            try:
                try_out(self, where)
            except PositionsByCache:
                self._positions_by_cache = True
                try_out(self, where)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionStep) -> Tensor:
        """Hidden states that the head takes, [T, hidden]."""
        with visited_by(Pager(self._numbers, attention)):
            return self.run_body(token_ids, positions)

    def run_body(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [T, hidden]; whoever visits answers the attention calls."""
        extra: dict[str, Any] = {"use_cache": False}
        if self._positions_by_cache:
            # Such a model adds a token's place in the call to what it takes for the length of the past.
            past = positions - torch.arange(len(positions), device=positions.device)
            extra = pretended_cache(self.body, past)
        output = self.body(input_ids=token_ids[None], position_ids=positions[None], **extra)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [R, vocab] of rows [R, hidden]."""
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()

    def last_hidden_states(self, hidden: Tensor) -> Tensor:
        """Float32 rows [R, hidden] as the body gave them: its last norm is a part of it."""
        return hidden.float()


def load_adopted(directory: Path, config: AdoptedConfig, dtype: torch.dtype, device: torch.device) -> AdoptedDecoder:
    """Read the weights and make sure that the model can serve. Raises ModelError."""
    where = str(directory)
    model = _load(directory, dtype)
    model.requires_grad_(False).eval().to(device)
    pin(model, config.max_model_len)
    if model.config.get_text_config() is model.config:
        # With one, some bodies look through the ids of every call for padding, and warn. Nothing is padded here. What
        # takes pictures too puts it where their tokens stand, and cannot do without.
        vars(model.config)["pad_token_id"] = None  # past the configuration's own checks: to some it must be a number
    try:
        decoder = AdoptedDecoder(model, config, where)
        logger().info(
            "model_adopted", architecture=config.architecture, by=config.source, layers=len(decoder.attention_layers)
        )
        return decoder
    except ModelError:
        raise
    except Exception as error:  # foreign code that was never meant to be called like this
        raise ModelError(
            f"{where}: {config.architecture} cannot serve from a paged cache: {in_one_line(error)}"
        ) from error


def _load(directory: Path, dtype: torch.dtype) -> Any:
    refuse_packed(weight_files(directory))  # which refuses what is pickled or incomplete, in our words
    config = read_config(directory)
    model_class = causal_class(config, {}, directory)
    try:
        with quiet():
            model, found = model_class.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are named below; transformers prints them
            )
    except Exception as error:  # damaged files, missing dependencies
        raise ModelError(f"{directory}: its weights cannot be loaded: {in_one_line(error)}") from error
    for name, shape, needed in sorted(found["mismatched_keys"]):
        raise ModelError(f"{directory}: tensor {name} is {list(shape)}, config.json implies {list(needed)}")
    if found["missing_keys"]:
        raise ModelError(f"{directory}: missing from the weights: {some_of(found['missing_keys'])}")
    if found["unexpected_keys"]:
        logger().warning("weights_unused", model=str(directory), tensors=some_of(found["unexpected_keys"]))
    return model


def _body_name(model: Any, where: str) -> str:
    """Under which name a causal model keeps the part that its head stands on."""
    for name in (model.base_model_prefix, "model"):
        body = model._modules.get(name)
        if body is None:
            continue
        if not takes_position_ids(body):
            raise ModelError(f"{where}: {type(model).__name__} takes no position ids, which is not served")
        return str(name)
    raise ModelError(f"{where}: {type(model).__name__} has no body apart from its head, which is not served")


def _survey(model: Any, body: Any, max_model_len: int, where: str) -> tuple[Survey, int]:
    """Let one token through and see who calls, and how wide the hidden state is that comes out."""
    register(rule_mask)
    model.set_attn_implementation(SURVEYING)
    survey = Survey(max_model_len, where)
    zero = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with visited_by(survey):
        output = body(input_ids=zero, position_ids=zero, use_cache=False)
    if not survey.layers:
        raise ModelError(f"{where}: {type(model).__name__} does not use the attention interface of transformers")
    model.set_attn_implementation(SERVING)
    return survey, int(output.last_hidden_state.shape[-1])


class _BodyOutput:
    """What a head may ask of its body's output; all but the hidden states is absent."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None


class _Passage(nn.Module):
    """Stands in for a body: what comes in as embeddings goes out as hidden states."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.__dict__["body"] = body  # not a submodule

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _BodyOutput:
        return _BodyOutput(inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        return self if name == "decoder" else getattr(self.__dict__["body"], name)


def _head_alone(model: Any, body_name: str) -> nn.Module:
    """The same model, weights shared, whose forward computes nothing but its head: caps, scales and all."""
    head: nn.Module = copy.copy(model)
    head._modules = {**model._modules, body_name: _Passage(model._modules[body_name])}
    return head
