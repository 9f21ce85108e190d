"""The HTTP face of a served policy: /v1/chat/completions, /v1/models, /health, as OpenAI's clients speak them.

Beside the standard fields an answer has `token_ids` and `version` (of each sampled token, the end of turn included),
`conversation`, and `wrong_tool_calls`; the whole has `prompt_token_ids`. One event loop talks, threads wait for the
engine. A caller that leaves cancels its request.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from launch import chat_api
from launch.chat_api import BadRequest, Served
from launch.constraints import Constraints
from launch.conversations import Asked, Busy, Cancelled, Conversation, Conversations, Full, Refused, Reply
from rl.rollout.engine import Engine
from rl.rollout.session import CapacityError, EngineClosed, EngineError

GRACE_S = 5  # what requests get to finish in when the server stops
_POLL_S = 0.02  # how often a stream looks for new tokens
_MAX_BODY_BYTES = 32 * 2**20
_SPARE_THREADS = 8  # to say that the queue is full


@dataclasses.dataclass(frozen=True)
class _Job:
    asked: Asked
    conversations: Sequence[Conversation]
    replies: Sequence[concurrent.futures.Future[Reply]]


class Front:
    """Answers requests out of `store`; `tidy` is called every `tidy_s` seconds, in a thread, also after it raised."""

    def __init__(
        self,
        served: Served,
        engine: Engine,
        store: Conversations,
        *,
        threads: int,
        tidy: Callable[[], None],
        tidy_s: float,
    ):
        self._served, self._engine, self._store = served, engine, store
        self._tidy, self._tidy_s = tidy, tidy_s
        self._constraints = Constraints(served.codec)
        self._began, self._failure = int(time.time()), ""
        self._threads = concurrent.futures.ThreadPoolExecutor(threads + _SPARE_THREADS, thread_name_prefix="serve")

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{name:path}", self._model, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
            ],
            exception_handlers={BadRequest: _refuse, HTTPException: _refuse_http, Exception: _refuse_any},
            lifespan=self._lifespan,
        )

    def end(self) -> None:
        """End every request and conversation; idempotent."""
        self._store.close()

    def close(self) -> None:
        """`end`, and the threads; idempotent."""
        self.end()
        self._threads.shutdown(wait=False, cancel_futures=True)  # the store has waited for them, in bounded time

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async def tidy() -> None:
            while True:
                await asyncio.sleep(self._tidy_s)
                try:
                    await asyncio.get_running_loop().run_in_executor(self._threads, self._tidy)
                except Exception:  # a full disk, say: the server goes on, and what was to be kept is still there
                    logging.exception("tidying failed; it is tried again in %s s", self._tidy_s)

        task = asyncio.create_task(tidy())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _health(self, request: Request) -> Response:
        state = {"status": self._failure or "ok", "model": self._served.model, **self._store.stats()}
        return _json({**state, "version": self._engine.stats()["version"]}, 503 if self._failure else 200)

    async def _models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        if request.path_params["name"] != self._served.model:
            raise BadRequest(f"no such model; there is {self._served.model!r}", code="model_not_found", status=404)
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        card = {"id": self._served.model, "object": "model", "created": self._began, "owned_by": "wayfinder"}
        return {**card, "max_model_len": self._served.capacity}

    async def _chat(self, request: Request) -> Response:
        asked = Asked(chat_api.read_chat(await _body(request), self._served))
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self._served.model}
        loop = asyncio.get_running_loop()
        try:
            begun = loop.run_in_executor(self._threads, self._begin, asked)
            job = await self._while_connected(request, asked, begun)
            if not asked.chat.stream:
                await self._while_connected(request, asked, _all_done(job.replies))
                replies = [reply.result() for reply in job.replies]
                choices = [self._choice(i, reply, asked.chat) for i, reply in enumerate(replies)]
                return _json({**head, "object": "chat.completion", "choices": choices, **_account(replies)})
            await self._while_connected(request, asked, self._something(job))
            for reply in job.replies:
                if reply.done():
                    reply.result()  # an error before the first byte has a status of its own
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as err:
            raise self._told(err) from err
        head["object"] = "chat.completion.chunk"
        return _Stream(self._events(job, head), lambda: self._store.cancel(asked))

    def _begin(self, asked: Asked) -> _Job:
        """In a thread: whatever becomes of the caller, what begins here is generated or cancelled to its end."""
        if asked.chat.pattern is not None:
            try:
                asked.constraint = self._constraints.of(asked.chat.pattern)
            except ValueError as err:
                raise BadRequest(str(err), param=asked.chat.patterned_by, code="unsupported_parameter") from err
        conversations = self._store.begin(asked)
        replies = [self._threads.submit(self._store.generate, conversation) for conversation in conversations]
        return _Job(asked, conversations, replies)

    async def _while_connected(self, request: Request, asked: Asked, work: Awaitable[Any]) -> Any:
        """The result of `work`; if the caller leaves, or this task is cancelled, so is what was asked."""
        working = asyncio.ensure_future(work)
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientDisconnect
            return working.result()
        finally:
            gone.cancel()
            if not working.done():
                self._store.cancel(asked)
                working.cancel()

    async def _something(self, job: _Job) -> None:
        """Until there is a token, or the end."""
        while not any(reply.done() for reply in job.replies):
            if any(self._store.sampled_so_far(conversation, job.asked) for conversation in job.conversations):
                return
            await asyncio.sleep(_POLL_S)

    async def _events(self, job: _Job, head: dict[str, Any]) -> AsyncIterator[bytes]:
        chat, shown, open_ = job.asked.chat, [""] * len(job.replies), set(range(len(job.replies)))

        def chunk(i: int, delta: dict[str, Any], **more: Any) -> bytes:
            choice = {"index": i, "delta": delta, "finish_reason": None, "logprobs": None, **more}
            return _event({**head, "choices": [choice], **({"usage": None} if chat.include_usage else {})})

        try:
            for i in sorted(open_):
                yield chunk(i, {"role": "assistant", "content": ""})
            while open_:
                for i in sorted(open_):
                    if job.replies[i].done():
                        open_.remove(i)
                        reply = job.replies[i].result()
                        text, end = reply.answer.message["content"] or "", self._choice(i, reply, chat)
                        delta = {"content": _rest(text, shown[i])} if text != shown[i] else {}
                        calls = end.pop("message").get("tool_calls", [])
                        if calls:
                            delta["tool_calls"] = [{"index": k, **call} for k, call in enumerate(calls)]
                        yield chunk(i, delta)
                        yield chunk(i, {}, **{**end, "prompt_token_ids": reply.prompt_ids})
                        continue
                    ids = self._store.sampled_so_far(job.conversations[i], job.asked)
                    text = chat_api.shown_so_far(self._served.codec, ids, chat) if ids else ""
                    if len(text) > len(shown[i]):
                        yield chunk(i, {"content": _rest(text, shown[i])})
                        shown[i] = text
                await asyncio.sleep(_POLL_S if open_ else 0)
            if chat.include_usage:
                replies = [reply.result() for reply in job.replies]
                yield _event({**head, "choices": [], "usage": _account(replies)["usage"]})
            yield b"data: [DONE]\n\n"
        except Exception as err:  # the status is sent already: the error is an event
            yield _event(self._told(err).body)

    def _choice(self, index: int, reply: Reply, chat: chat_api.Chat) -> dict[str, Any]:
        more = {"wrong_tool_calls": list(reply.answer.wrong_calls)} if chat.tools else {}
        return {
            "index": index,
            "message": dict(reply.answer.message),
            "finish_reason": reply.answer.finish_reason,
            "logprobs": chat_api.logprobs(self._served.codec, reply.turn) if chat.logprobs else None,
            "token_ids": reply.turn.ids,
            "version": reply.turn.version,
            "conversation": reply.conversation,
            **more,
        }

    def _told(self, err: Exception) -> BadRequest:
        """What the caller is told of an error."""
        if isinstance(err, BadRequest):
            return err
        if isinstance(err, Full):
            return BadRequest(f"{err}; try again later", code="overloaded", status=503)
        if isinstance(err, Busy):
            return BadRequest(f"{err}; try again later", code="engine_busy", status=429)
        if isinstance(err, Refused):
            return BadRequest(str(err), param="messages")
        if isinstance(err, CapacityError):
            return BadRequest(str(err), param="messages", code="context_length_exceeded")
        if isinstance(err, Cancelled | EngineClosed):
            return BadRequest("the server is closing", code="closing", status=503)
        if isinstance(err, EngineError):
            self._failure = str(err)
        logging.error("a request failed", exc_info=err)
        return BadRequest(f"{type(err).__name__}: {err}", code="internal_error", status=500)


class Server(uvicorn.Server):
    """To be run with `run(sockets=[...])`; `should_exit = True` or a signal stops it: no new requests, those in flight
    have GRACE_S seconds and are told then that it closes.
    """

    def __init__(self, front: Front):
        limits = {"timeout_graceful_shutdown": GRACE_S + 15}  # the store's own is 10
        super().__init__(uvicorn.Config(front.app(), log_level="warning", access_log=False, ws="none", **limits))
        self._front = front

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end(self) -> None:
        await asyncio.sleep(GRACE_S)
        await asyncio.to_thread(self._front.end)


class _Stream(StreamingResponse):
    """A stream of events; `ended` is called when it is over, whoever ended it."""

    def __init__(self, events: AsyncIterator[bytes], ended: Callable[[], None]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._ended = ended

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


async def _body(request: Request) -> Any:
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > _MAX_BODY_BYTES:
            raise BadRequest(f"the body is over {_MAX_BODY_BYTES} bytes", status=413)
    try:
        body = json.loads(data, parse_constant=_no_constant)
        json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as err:  # also half of a surrogate pair, which nothing can write down
        raise BadRequest(f"the body is not JSON ({str(err)[:200]})") from err
    return body


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _all_done(replies: Sequence[concurrent.futures.Future[Reply]]) -> None:
    """Until all have ended, well or not. Cancelling this cancels none of them."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def look(_: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(done.set)

    for reply in replies:
        reply.add_done_callback(look)
    while not all(reply.done() for reply in replies):
        await done.wait()
        done.clear()


def _account(replies: Sequence[Reply]) -> dict[str, Any]:
    prompt, sampled = len(replies[0].prompt_ids), sum(len(reply.turn.ids) for reply in replies)
    usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    usage["prompt_tokens_details"] = {"cached_tokens": replies[0].kept}
    return {"prompt_token_ids": replies[0].prompt_ids, "usage": usage}


def _rest(text: str, shown: str) -> str:
    if not text.startswith(shown):
        raise RuntimeError(f"stream: {shown[-40:]!r} was sent, which is no beginning of the answer {text[:80]!r}")
    return text[len(shown) :]


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(body), status, headers, media_type="application/json")


async def _refuse(request: Request, err: BadRequest) -> Response:
    return _json(err.body, err.status, {"Retry-After": "1"} if err.status in (429, 503) else None)


async def _refuse_http(request: Request, err: HTTPException) -> Response:
    told = BadRequest(f"{request.method} {request.url.path}: {err.detail}", status=err.status_code)
    return _json(told.body, err.status_code, dict(err.headers or {}))


async def _refuse_any(request: Request, err: Exception) -> Response:
    return _json(BadRequest(f"{type(err).__name__}: {err}", code="internal_error", status=500).body, 500)
