"""Text to ids and back, as the model's tokenizer does it. Paths and shapes are vLLM's."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from jitney.cards import QueueCard
from jitney.errors import InvalidJob
from jitney.messages import chat_end
from jitney.text.tokenizer import Tokenizer
from jitney.tools import ToolUse, read_tools, tool_use
from jitney_api.documents import documented
from jitney_api.edge import read_object
from jitney_api.fields import refuse_unsupported
from jitney_api.schemas import DetokenizeRequest, TokenizeRequest, parse
from jitney_api.service import Service, service_of
from jitney_api.tokenizers import NoTokenizer

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", **documented(TokenizeRequest))
async def tokenize(request: Request) -> dict[str, Any]:
    """The ids of a prompt, or of a chat in the model's template; with `return_token_strs` the tokens beside them."""
    service = service_of(request)
    body = await read_object(request, service.settings)
    refuse_unsupported(body, except_for=TokenizeRequest.model_fields)
    asked = parse(TokenizeRequest, body)
    card, tokenizer = await _found(service, asked.model)
    tokens = await service.tokenizers.run(_encoded, tokenizer, asked)
    names = [tokenizer.pieces.token(token_id) for token_id in tokens] if asked.return_token_strs else None
    return {"count": len(tokens), "max_model_len": card.max_model_len, "tokens": tokens, "token_strs": names}


@router.post("/detokenize", **documented(DetokenizeRequest))
async def detokenize(request: Request) -> dict[str, Any]:
    """The text of ids, special tokens included."""
    service = service_of(request)
    asked = parse(DetokenizeRequest, await read_object(request, service.settings))
    card, tokenizer = await _found(service, asked.model)
    for token_id in asked.tokens:
        if not 0 <= token_id < card.vocab_size:
            raise InvalidJob(
                f"tokens holds token id {token_id}; this model's ids are 0 to {card.vocab_size - 1}", param="tokens"
            )
    return {"prompt": await service.tokenizers.run(_decoded, tokenizer, asked.tokens)}


async def _found(service: Service, model: str | None) -> tuple[QueueCard, Tokenizer]:
    """Raises UnknownQueue, QueueUnavailable, NoTokenizer."""
    queue, card = await service.client.card(model)
    tokenizer = await service.tokenizers.find(card.tokenizer_digest)
    if tokenizer is None:
        raise NoTokenizer(queue)
    return card, tokenizer


def _encoded(tokenizer: Tokenizer, asked: TokenizeRequest) -> list[int]:
    if asked.messages is not None:
        return tokenizer.encode_chat(
            [message.plain() for message in asked.messages],
            _shown_tools(asked.tools),
            **chat_end(asked.add_generation_prompt, asked.continue_final_message),
            add_special_tokens=bool(asked.add_special_tokens),
        )
    assert asked.prompt is not None
    if asked.add_special_tokens is False:
        return tokenizer.encode_part(asked.prompt, "prompt")
    return tokenizer.encode_prompt(asked.prompt)


def _shown_tools(tools: Any) -> ToolUse | None:
    """Whether they must be called changes nothing of a prompt."""
    given = read_tools(tools)
    return None if given is None else tool_use(given, "required", None)


def _decoded(tokenizer: Tokenizer, tokens: list[int]) -> str:
    stream = tokenizer.pieces.stream(skip_special_tokens=False)
    return stream.push(*tokens) + stream.flush()
