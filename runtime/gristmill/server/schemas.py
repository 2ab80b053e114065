"""Bodies of requests and responses of the OpenAI API, as strict msgspec structs.

One rule for fields that we do not act on: those listed as ignored below are accepted because they cannot change an answer; those
listed as refused are known to the API and would change it, so a value other than null is a 400 that names them; every other
unknown field is a 400 too.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gristmill.tokenizer.validate import RequestError

# --- requests


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # ignored


class GenerationRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What chat and plain completions share."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    # extensions that vLLM, SGLang and llama.cpp have too
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    # ignored
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    def refuse(self, *names: str) -> None:
        """RequestError for the first of `names` that has a value."""
        for name in names:
            if getattr(self, name) not in (None, [], {}, ""):
                raise RequestError(f"{name} is not supported by this server", name, code="unsupported_parameter")


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None  # refused
    function_call: Any = None  # refused
    audio: Any = None  # refused
    refusal: Any = None  # ignored, as clients send back the messages that they got
    annotations: Any = None  # ignored


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: Any = None  # ignored: there are no tool calls

    # refused
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None


class CompletionRequest(GenerationRequest, kw_only=True):
    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    parse_special: bool | None = None  # control tokens spelt in a text prompt become control tokens (as in llama.cpp)

    suffix: Any = None  # refused
    response_format: Any = None  # refused


class AbortRequest(msgspec.Struct, forbid_unknown_fields=True):
    rid: str = ""
    abort_all: bool = False


# --- responses


class PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class UsageObject(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class AssistantMessage(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class ChatResponse(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject
    object: str = "chat.completion"


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    object: str = "chat.completion.chunk"
    usage: UsageObject | msgspec.UnsetType | None = msgspec.UNSET


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists over tokens; the first token of an echoed prompt has null where nothing precedes it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None


class CompletionResponse(msgspec.Struct):
    """Also every chunk of a stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageObject | msgspec.UnsetType | None = msgspec.UNSET
    object: str = "text_completion"


class ModelCard(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "gristmill"


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"
