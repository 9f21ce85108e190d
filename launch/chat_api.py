"""The wire format of OpenAI's chat completions: a request read into plain values, a turn written as an answer.

What a policy cannot do is refused by name, never silently left out; so is a parameter that is not known.
"""

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envs import grammar, tool_calls
from envs.base import Message
from launch.cli import MOST_SEED
from models.codec import Codec
from models.sampling import LEAST_TEMPERATURE, Sampling
from rl.types import Turn


class BadRequest(Exception):
    """What the caller is told in an error body, with an HTTP status of 4xx or 5xx."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclasses.dataclass(frozen=True)
class Served:
    """What the requests of one server have in common."""

    model: str
    codec: Codec
    temperature: float  # of a request that names none: the policy's own
    capacity: int  # tokens of a conversation, prompt and answers
    most_n: int


@dataclasses.dataclass(frozen=True, eq=False)
class Chat:
    """One request."""

    messages: tuple[Message, ...]  # in the template's roles; an assistant's calls are part of its text
    prefixes: tuple[bytes, ...]  # digest of tools and messages[:i], for each i from 0 to len(messages)
    tools: tuple[Mapping[str, Any], ...]
    strict: bool  # a call that its schema does not allow is none
    pattern: str | None  # an expression of all that an answer may say
    patterned_by: str  # the parameter that asks for it
    sampling: Sampling
    seed: int | None
    n: int
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    metadata: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Answer:
    """A turn as the caller reads it."""

    message: dict[str, Any]
    finish_reason: str
    wrong_calls: tuple[dict[str, Any], ...]  # number and message of each call that is none

    def after(self, prefix: bytes) -> bytes:
        """The digest of the conversation that `prefix` names, with this answer."""
        return _extended(prefix, _key(self.message))


# Parameters that change nothing here, and those of which one value alone can be served.
_UNUSED = {"user", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "modalities": (["text"],),
}
_READ = {"model", "messages", "tools", "temperature", "top_p", "top_k", "seed", "n", "stop", "stream", "stream_options"}
_READ |= {"max_tokens", "max_completion_tokens", "logprobs", "metadata"}
_READ |= {"tool_choice", "parallel_tool_calls", "response_format"}


def read_chat(body: Any, served: Served) -> Chat:
    """The request in a JSON body. Errors: BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    unknown = sorted(set(given) - _READ - _UNUSED - set(_FIXED))
    if unknown:
        raise BadRequest(f"unknown parameter {unknown[0]!r}; leave it out", param=unknown[0], code="unknown_parameter")
    for name, values in _FIXED.items():
        if name in given and given[name] not in values:
            wanted = " or ".join(map(json.dumps, values))
            raise BadRequest(
                f"{name}: this server takes {wanted} alone; leave it out", param=name, code="unsupported_parameter"
            )
    if given.get("model") != served.model:
        said = f"model: got {given.get('model')!r}, want {served.model!r}"
        raise BadRequest(said, param="model", code="model_not_found", status=404)
    tools = _tools(given, served.codec)
    pattern, patterned_by = _pattern(given, tools, served.codec)
    messages, keys = _messages(given, served.codec)
    options = _typed(given, "stream_options", dict, {})
    start = hashlib.sha256(json.dumps(tools, sort_keys=True).encode()).digest()
    return Chat(
        messages=messages,
        prefixes=tuple(itertools.accumulate(keys, _extended, initial=start)),
        tools=tools,
        strict=any(tool["function"].get("strict") is True for tool in tools),
        pattern=pattern,
        patterned_by=patterned_by,
        sampling=_sampling(given, served.temperature),
        seed=_whole(given, "seed", None, 0, MOST_SEED),
        n=_whole(given, "n", 1, 1, served.most_n),
        max_tokens=_max_tokens(given),
        stop=_stop(given),
        stream=_typed(given, "stream", bool, False),
        include_usage=options.get("include_usage") is True,
        logprobs=_typed(given, "logprobs", bool, False),
        metadata=_metadata(given),
    )


def write_answer(codec: Codec, turn: Turn, chat: Chat, name: str) -> Answer:
    """The assistant's message of a sampled turn; `name` makes the ids of its calls unique.

    A call that is none (malformed, or without its end) stays in the content, and `wrong_calls` says why. A turn cut
    inside a call is all content: nothing of it should be run.
    """
    whole, shown = codec.turn_text(turn.ids), shown_text(codec, turn.ids, chat.stop)
    message: dict[str, Any] = {"role": "assistant", "content": shown}
    finish = "length" if turn.reason == "length" else "stop"
    if not chat.tools:
        return Answer(message, finish, ())
    said = tool_calls.parse(whole, chat.tools if chat.strict else None, cut=turn.reason == "length")
    calls = [call for call in said.calls if isinstance(call, tool_calls.Call)]
    wrong = [{"number": c.number, "message": c.message} for c in said.calls if isinstance(c, tool_calls.BadCall)]
    if calls and not said.truncated:
        message["content"] = said.text.removesuffix(whole[len(shown) :]).rstrip() or None
        message["tool_calls"] = [
            {
                "id": f"call_{name}_{call.number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in calls
        ]
        finish = "length" if finish == "length" else "tool_calls"
    return Answer(message, finish, tuple(wrong))


def shown_text(codec: Codec, ids: Sequence[int], stop: Sequence[str]) -> str:
    """The text of a turn up to its first stop string, without it."""
    text = codec.turn_text(ids)
    ends = [at for string in stop if (at := text.find(string, len(codec.opened))) >= 0]
    return text[: min(ends, default=len(text))]


def shown_so_far(codec: Codec, ids: Sequence[int], chat: Chat) -> str:
    """The beginning of what `write_answer` will give as content, as far as it cannot change any more."""
    text = shown_text(codec, ids, chat.stop).rstrip("\ufffd")
    for string in chat.stop:
        begun = next((n for n in range(min(len(string) - 1, len(text)), 0, -1) if text.endswith(string[:n])), 0)
        text = text[: len(text) - begun]
    return tool_calls.settled(text) if chat.tools else text


def logprobs(codec: Codec, turn: Turn) -> dict[str, Any]:
    """Every sampled token with its log-probability in nats. `bytes` are None where a token is part of a character."""

    def one(token: int, logp: float) -> dict[str, Any]:
        text = codec.view([token])
        data = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": logp, "bytes": data, "top_logprobs": []}

    return {"content": [one(*pair) for pair in zip(turn.ids, turn.logp, strict=True)], "refusal": None}


# --- parts of a request ----------------------------------------------------------------------------


def _extended(prefix: bytes, key: str) -> bytes:
    return hashlib.sha256(prefix + key.encode("utf-8", "surrogatepass")).digest()


def _key(message: Mapping[str, Any]) -> str:
    """What makes two messages the same: not the ids of calls, nor how their arguments or an assistant's space are
    written.
    """
    text = _text(message)
    if message["role"] != "assistant":
        return json.dumps([message["role"], text])
    calls = [(c["function"]["name"], _arguments(c["function"])) for c in message.get("tool_calls") or ()]
    return json.dumps(["assistant", text.strip(), calls], sort_keys=True)


def _messages(given: Mapping[str, Any], codec: Codec) -> tuple[tuple[Message, ...], list[str]]:
    """The messages, and what makes each the same as another."""
    messages = _typed(given, "messages", list, [])
    if not messages:
        raise BadRequest("messages: want a list of one message or more", param="messages")
    found, keys = [], []
    for i, message in enumerate(messages):
        try:
            found.append(_message(message, codec))
            keys.append(_key(message))
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as err:
            said = err.args[0] if isinstance(err, ValueError) else "want a role, and content that is text"
            raise BadRequest(f"messages[{i}]: {said}", param=f"messages[{i}]") from err
    if found[-1].role == "assistant":
        raise BadRequest("messages: the last one is the assistant's; want one that it can answer", param="messages")
    return tuple(found), keys


def _message(message: Mapping[str, Any], codec: Codec) -> Message:
    role, text = message["role"], _text(message)
    roles = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
    if role not in roles:
        raise ValueError(f"got role {role!r}, want one of {', '.join(roles)}")
    if role == "assistant":
        calls = message.get("tool_calls") or ()
        written = [tool_calls.write(c["function"]["name"], _arguments(c["function"]), codec.tool_form) for c in calls]
        return Message("assistant", "\n".join([*([text] if text else []), *written]))
    return Message(codec.world_role if role == "tool" else roles[role], text)


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        return ""
    if isinstance(content, str):
        return content
    if any(part["type"] != "text" for part in content):
        raise ValueError(f"got content of types {[part['type'] for part in content]}, want text alone")
    return "".join(part["text"] for part in content)


def _arguments(function: Mapping[str, Any]) -> Any:
    """The arguments of an earlier call: an object, in the text of which clients keep no order and no space."""
    arguments = json.loads(function["arguments"])
    if not isinstance(arguments, dict):
        raise ValueError(f"got arguments {function['arguments'][:80]!r} of a call, want a JSON object")
    return arguments


def _tools(given: Mapping[str, Any], codec: Codec) -> tuple[Mapping[str, Any], ...]:
    tools = tuple(_typed(given, "tools", list, []))
    if not tools or given.get("tool_choice") == "none":
        return ()
    try:
        tool_calls.check_tools(tools)
        codec.start([Message("user", "")], tools)
    except ValueError as err:
        raise BadRequest(str(err), param="tools") from err
    if not codec.takes_tools:
        raise BadRequest(
            "tools: the model's chat template has no place for them; tell of them in a system message",
            param="tools",
            code="unsupported_parameter",
        )
    return tools


def _pattern(given: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], codec: Codec) -> tuple[str | None, str]:
    """The expression of what an answer may say, and the parameter that asks for it; None where it may say anything."""
    param = "tools" if tools else "response_format"
    try:
        answers, calls = _answers(given), _calls(given, tools, codec)
        if answers and tools:
            raise ValueError("response_format with tools is text alone; leave one out, or give tool_choice none")
        if answers and codec.opened:
            raise ValueError("every answer of this model begins with a thought; want type text")
    except (ValueError, RecursionError) as err:
        raise BadRequest(f"{param}: {err}", param=param, code="unsupported_parameter") from err
    return (answers if calls is None else calls), param


def _calls(given: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], codec: Codec) -> str | None:
    """The expression that `tool_choice` and `strict` ask for. Errors: BadRequest; ValueError for schemas that none
    covers.
    """
    choice, many = given.get("tool_choice", "auto"), _typed(given, "parallel_tool_calls", bool, True)
    named = choice.get("function", {}).get("name") if isinstance(choice, dict) else None
    if isinstance(named, str):
        chosen, many = [tool for tool in tools if tool["function"]["name"] == named], False
    elif choice in ("auto", "none", "required"):
        chosen = list(tools)
    else:
        said = f"tool_choice: got {str(choice)[:80]!r}, want auto, none, required or a function by its name"
        raise BadRequest(said, param="tool_choice")
    if not chosen and (named is not None or choice == "required"):
        said = f"tool_choice: got {str(choice)[:80]!r}, which is none of the tools; give it among tools"
        raise BadRequest(said, param="tool_choice")
    if named is not None or choice == "required":
        return grammar.call_regex(chosen, codec.tool_form, opened=codec.opened, many=many)
    strict = {tool["function"].get("strict") is True for tool in tools}
    if strict == {True, False}:
        raise ValueError("some are strict and some are not; want all or none to be")
    if True in strict:
        return grammar.text_or_calls_regex(tools, codec.tool_form, many=many)
    if strict and not many:
        said = "parallel_tool_calls: false is served with strict tools, or where tool_choice wants a call; leave it out"
        raise BadRequest(said, param="parallel_tool_calls", code="unsupported_parameter")
    return None


def _answers(given: Mapping[str, Any]) -> str | None:
    """The expression that `response_format` asks for. Errors: BadRequest; ValueError for a schema that none covers."""
    wanted = _typed(given, "response_format", dict, {"type": "text"})
    if wanted.get("type") == "json_object":
        return grammar.object_regex()
    if wanted.get("type") == "json_schema":
        described = wanted.get("json_schema")
        return grammar.schema_regex(described.get("schema") if isinstance(described, dict) else None)
    if wanted != {"type": "text"}:
        said = f"response_format: got {str(wanted)[:80]!r}, want type text, json_object or json_schema"
        raise BadRequest(said, param="response_format")
    return None


def _sampling(given: Mapping[str, Any], temperature: float) -> Sampling:
    temperature = _number(given, "temperature", temperature, 0, 2)
    top_p = _number(given, "top_p", 1.0, 0, 1)
    top_k = _whole(given, "top_k", 0, 0, 2**31 - 1)
    if top_p == 0:
        raise BadRequest("top_p: got 0, want more than 0; for the likeliest token give temperature 0", param="top_p")
    if temperature < LEAST_TEMPERATURE:
        return Sampling(greedy=True)
    return Sampling(temperature=float(temperature), top_p=float(top_p), top_k=top_k)


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    both = [_whole(given, name, None, 1, 2**31 - 1) for name in ("max_completion_tokens", "max_tokens")]
    return both[0] if both[0] is not None else both[1]


def _stop(given: Mapping[str, Any]) -> tuple[str, ...]:
    stop = given.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > 4 or not all(isinstance(s, str) and s for s in stop):
        raise BadRequest("stop: want a string or up to four, none of them empty", param="stop")
    return tuple(stop)


def _metadata(given: Mapping[str, Any]) -> dict[str, str]:
    found = _typed(given, "metadata", dict, {})
    if not all(isinstance(value, str) for value in found.values()):
        raise BadRequest("metadata: want strings by name", param="metadata")
    return found


def _typed(given: Mapping[str, Any], name: str, wanted: type, default: Any) -> Any:
    value = given.get(name, default)
    if not isinstance(value, wanted):
        raise BadRequest(f"{name}: got {str(value)[:80]!r}, want a {wanted.__name__}", param=name)
    return value


def _number(given: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    return _bounded(
        given, name, default, least, most, lambda v: isinstance(v, int) or (isinstance(v, float) and math.isfinite(v))
    )


def _whole(given: Mapping[str, Any], name: str, default: Any, least: int, most: int) -> Any:
    return default if name not in given else _bounded(given, name, 0, least, most, lambda v: isinstance(v, int))


def _bounded(
    given: Mapping[str, Any], name: str, default: Any, least: float, most: float, right: Callable[[Any], bool]
) -> Any:
    value = given.get(name, default)
    if isinstance(value, bool) or not right(value) or not least <= value <= most:
        raise BadRequest(f"{name}: got {str(value)[:80]!r}, want a number from {least} to {most}", param=name)
    return value
