"""Text → ids, with one `Tokenizer` for a model, used by any number of threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import orjson
from tokenizers import Tokenizer as FastTokenizer

from jitney.call_formats import FAMILIES, PLAIN, CallFormat, family_of
from jitney.errors import InvalidJob, ModelError, first_line
from jitney.text.chat import check_text
from jitney.text.control import ControlTokens
from jitney.text.files import TokenizerFiles
from jitney.text.pieces import Pieces
from jitney.text.template import ChatTemplate, literals
from jitney.tools import ToolUse

SAMPLE: Final = """\
The river had risen in the night, and by six o'clock the lower road was gone. "We'll have to go round by the
bridge," said Anna, who had 24 parcels to deliver before noon; it was 7.5 km further and cost her an hour. Nobody
in the village remembered so much water in spring. The baker lent her his van, because it stood higher than hers,
and asked only that she bring back flour if the mill was open. It was not. She found the miller on his roof with a
radio and two cats, perfectly calm, waiting for the boat that the town had promised him the evening before.

Please summarise the following report in three sentences, and then list the open questions as bullet points:
- Which parts of the system were affected, and since when?
- What did the operators do first, and what would have helped them?

def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0

{"id": 17, "name": "Anna", "tags": ["new", "urgent"], "done": false}
Où est la gare ? Der Zug fährt um 9:45 Uhr. ¿Cuánto cuesta? Сколько это стоит? 駅はどこですか。 你好,世界
"""
"""Prose, code, JSON and other languages, for `bytes_per_token`."""


class Tokenizer:
    """A model's tokenizer and chat template. Nothing changes in it, so threads may share it.

    special_ids: of the special tokens, by their text. vocab_size: ids are below it. eos_token_ids: what ends an answer.
    bytes_per_token: of `SAMPLE`. digest: SHA-256 of the files that decide how text becomes ids. pieces: how ids become
    text.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        templates = [source for source in (files.template, files.tool_template) if source]
        written = "\0".join(map(literals, templates))
        control = ControlTokens(files.added, written)
        self._control = control
        self._fast = _fast(files, control)
        self._template = ChatTemplate(files.template, files.variables, control) if files.template else None
        self._tool_template = self._template
        if files.tool_template:
            self._tool_template = ChatTemplate(files.tool_template, files.variables, control)
        self._family = family_of(written)
        self.special_ids = {token.content: token.id for token in files.added if token.special}
        self.pieces = Pieces(files)
        self.digest = files.digest
        self.vocab_size = int(self._fast.get_vocab_size(with_added_tokens=True))
        self.eos_token_ids = files.end_ids | _named_end(files)
        self.bytes_per_token = round(len(SAMPLE.encode()) / len(self._encode(SAMPLE)), 2)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a raw prompt. Control tokens in it ARE control tokens: a raw prompt is the model's own language.

        What the tokenizer adds by itself (a BOS) is added. Raises InvalidJob for text that is not Unicode,
        and for an empty result (an empty text, and no BOS).
        """
        return _not_empty(self._encode(self._control.rename(check_text(text, "prompt"))), "prompt")

    def encode_part(self, text: str, name: str) -> list[int]:
        """Ids of a text as a part of another: nothing is added at its start or end. May be empty.

        name: of the field, for the InvalidJob that a text raises which is not Unicode.
        """
        return self._encode(self._control.rename(check_text(text, name)), add_special_tokens=False)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tool_use: ToolUse | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Ids of a conversation in the model's chat template.

        Control tokens come from the template alone; in a user's strings, those of tools among them, they are ordinary
        text. Without any there, the ids are those of transformers' `apply_chat_template`, by the same names.
        add_special_tokens: what the tokenizer adds by itself, besides what the template wrote. Raises InvalidJob.
        """
        template = self._template if tool_use is None else self._tool_template
        if template is None:
            raise InvalidJob(
                "this model has no chat template: send `prompt` instead of `messages`",
                param="messages",
                code="no_chat_template",
            )
        tools = None if tool_use is None else tool_use.tools
        text = template.render(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        if tool_use is not None:
            self.call_format(tool_use)
        return _not_empty(self._encode(text, add_special_tokens=add_special_tokens), "messages")

    def call_format(self, tool_use: ToolUse) -> CallFormat:
        """How answers of this model write calls. Raises InvalidJob where it may choose and its form is not known."""
        if self._family is not None:
            return self._family
        if tool_use.is_forced:
            return PLAIN
        known = ", ".join(form.name for form in FAMILIES)
        raise InvalidJob(
            f"how this model writes calls is not known (known: {known}): send tool_choice='required', or name a tool",
            param="tool_choice",
            code="unknown_call_format",
        )

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """In a batch of one: `encode` keeps the interpreter's lock until it is done, and all other threads wait."""
        [encoding] = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of an answer: special tokens and unknown ids are nothing."""
        stream = self.pieces.stream()
        return "".join([stream.push(token_id) for token_id in token_ids]) + stream.flush()


@contextlib.contextmanager
def refusing_damage(name: object) -> Iterator[None]:
    """What damaged files do to the library, down to panics that are no Exception, as ModelError about `name`."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{name}: its tokenizer cannot be used: {first_line(error)}") from error


def _fast(files: TokenizerFiles, control: ControlTokens) -> FastTokenizer:
    """The `tokenizers` object, in which control tokens have their secret names."""
    spec = {**control.renamed_spec(files.spec), "truncation": None, "padding": None}
    try:
        fast = FastTokenizer.from_buffer(orjson.dumps(spec))
    except Exception as error:  # `tokenizers` raises bare Exception
        raise ModelError(f"tokenizer.json cannot be used: {error}") from None
    for token in control.tokens:
        assert fast.encode(control.rename(token.content), add_special_tokens=False).ids == [token.id]
    return fast


def _named_end(files: TokenizerFiles) -> set[int]:
    """The id of the tokenizer's own eos_token."""
    name = files.variables.get("eos_token")
    return {token.id for token in files.added if token.content == name}


def _not_empty(ids: list[int], param: str) -> list[int]:
    if not ids:
        raise InvalidJob(f"{param} is empty: it has no tokens at all", param=param)
    return ids
