"""The tools of the code world: how a turn is read, and what edits do. Nothing is repaired: a wrong edit says why.

Two forms of one game: `tags`, `<edit> path`, then SEARCH/REPLACE lines, `</edit>`; and `json`, tool calls
(envs/tool_calls.py).
"""

import dataclasses
import difflib
import pathlib
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from envs import tool_calls

_PATH = {"type": "string", "minLength": 1, "maxLength": 300}
_ANY = {"type": "string"}
_TEXT = {"type": "string", "minLength": 1}
_LINE = {"type": "integer", "minimum": 1}


def _tool(
    name: str, description: str, required: Mapping[str, Any], optional: Mapping[str, Any] = {}
) -> Mapping[str, Any]:
    schema = {"type": "object", "properties": {**required, **optional}, "required": list(required)}
    schema["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = (
    _tool("list", "List the files below a folder.", {}, {"path": _PATH}),
    _tool("read", "Read a file, or its lines start to end.", {"path": _PATH}, {"start": _LINE, "end": _LINE}),
    _tool("search", "Find a text in all files.", {"text": _TEXT}),
    _tool("test", "Run the tests, or those of one file.", {}, {"path": _PATH}),
    _tool("run", "Run a shell command in the repository.", {"command": _TEXT}),
    _tool("edit", "Replace a text that occurs once in a file.", {"path": _PATH, "search": _TEXT, "replace": _ANY}),
    _tool("patch", "Apply a unified diff.", {"diff": _TEXT}),
    _tool("submit", "Hand the change in; it ends the task.", {}),
    _tool("give_up", "Say why the task cannot be done; it ends the task.", {"reason": _TEXT}),
)  # fmt: skip
NAMES = tuple(tool["function"]["name"] for tool in TOOLS)
STOP = tuple(f"</{name}>" for name in NAMES)
FORMS = "one of " + ", ".join(f"<{name}> ... </{name}>" for name in NAMES)

_TAG = re.compile(rf"<(/?)({'|'.join(NAMES)})>")
_BLOCK = re.compile(
    r"<{7} SEARCH\n(?P<search>.*?)^={7}\n(?P<replace>.*?)^>{7} REPLACE[ \t]*\n?", re.DOTALL | re.MULTILINE
)
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_RANGE = re.compile(r"(\S+)(?:\s+(\d{1,7})\s*-\s*(\d{1,7}))?")
_BINARY = ("GIT binary patch", "Binary files ")
_GIT = ("diff --git", "old mode", "new mode", "new file mode", "deleted file mode", "rename from", "rename to",
        "copy from", "copy to")  # fmt: skip
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclasses.dataclass(frozen=True)
class Action:
    """One call, by the name of its tool, with its arguments."""

    kind: str
    arguments: Mapping[str, Any]


class Malformed(ValueError):
    """A turn or an edit that cannot be done; the text is for the policy."""


# --- turns ----------------------------------------------------------------------------------------------------------


def parse_tags(text: str) -> Action:
    """The one action of a turn in tags, up to its closing tag. Raises `Malformed`."""
    text = _THOUGHT.sub(lambda thought: " " * len(thought.group()), text)
    opened = _TAG.search(text)
    if opened is None:
        raise Malformed("no action")
    name = opened.group(2)
    end = text.find(f"</{name}>", opened.end())
    if opened.group(1) or end < 0:
        raise Malformed(f"</{name}> without <{name}>" if opened.group(1) else f"<{name}> is not closed")
    inner = text[opened.end() : end]
    return Action(name, _arguments(name, inner))


def _arguments(name: str, inner: str) -> dict[str, Any]:
    said = inner.strip()
    if name == "edit":
        path, _, block = inner.lstrip().partition("\n")
        found = list(_BLOCK.finditer(block))
        if len(found) != 1 or not path.strip():
            raise Malformed(
                "edit wants a path, then one block of <<<<<<< SEARCH, =======, >>>>>>> REPLACE, each a line"
            )
        if is_ambiguous(found[0]["replace"]):
            raise Malformed("the block has more than one line =======, so where it is parted cannot be told; use patch")
        return {"path": path.strip(), "search": found[0]["search"], "replace": found[0]["replace"]}
    if name == "read":
        match = _RANGE.fullmatch(said)
        if not match:
            raise Malformed("read wants a path, and perhaps lines as 10-40")
        lines = {"start": int(match[2]), "end": int(match[3])} if match[2] else {}
        return {"path": match[1], **lines}
    key = {
        "list": "path",
        "test": "path",
        "search": "text",
        "run": "command",
        "patch": "diff",
        "give_up": "reason",
    }.get(name)
    if name in ("search", "run", "patch", "give_up") and not said:
        raise Malformed(f"<{name}> is empty")
    text = inner.strip("\n") + "\n" if name == "patch" else said
    return {key: text} if key and said else {}


def parse_calls(text: str) -> Action:
    """The one action of a turn that is a JSON tool call. Raises `Malformed`."""
    at = text.find(tool_calls.CLOSE)
    calls = tool_calls.parse(text if at < 0 else text[: at + len(tool_calls.CLOSE)], TOOLS).calls
    if len(calls) != 1:
        raise Malformed(f"{len(calls)} calls in one turn" if calls else "no call")
    if isinstance(calls[0], tool_calls.BadCall):
        raise Malformed(calls[0].message.rstrip("."))
    return Action(calls[0].name, dict(calls[0].arguments))


def write_tags(kind: str, **arguments: Any) -> str:
    """An action as `parse_tags` reads it."""
    if kind == "edit":
        search, replace = (
            text if text.endswith("\n") or not text else text + "\n"
            for text in (arguments["search"], arguments["replace"])
        )
        return f"<edit> {arguments['path']}\n<<<<<<< SEARCH\n{search}=======\n{replace}>>>>>>> REPLACE\n</edit>"
    if kind == "read" and "start" in arguments:
        return f"<read> {arguments['path']} {arguments['start']}-{arguments['end']} </read>"
    inner = next(iter(arguments.values()), "")
    return f"<patch>\n{inner}</patch>" if kind == "patch" else f"<{kind}> {inner} </{kind}>"


def write_calls(kind: str, **arguments: Any) -> str:
    """An action as `parse_calls` reads it."""
    return tool_calls.write(kind, arguments)


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How a policy acts: how a turn is read and written, what ends it, what a malformed one is told, the tools."""

    parse: Callable[[str], Action]
    write: Callable[..., str]
    stop: tuple[str, ...]
    forms: str
    tools: tuple[Mapping[str, Any], ...]


PROTOCOLS: Mapping[str, Protocol] = MappingProxyType(
    {
        "tags": Protocol(parse_tags, write_tags, STOP, FORMS, ()),
        "json": Protocol(parse_calls, write_calls, (tool_calls.CLOSE,), f"one call of {', '.join(NAMES)}", TOOLS),
    }
)


def is_ambiguous(replace: str) -> bool:
    """Whether what follows the first separator of a SEARCH/REPLACE block has another."""
    return re.search(r"^={7}$", replace, re.MULTILINE) is not None


# --- edits ----------------------------------------------------------------------------------------------------------


def lines_of(text: str) -> list[str]:
    """Its lines with their ends: at newlines alone, as git and Python's parser have it."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def replace_once(text: str | None, path: str, search: str, replace: str) -> str:
    """`text` with the one place of `search` replaced. Raises `Malformed`."""
    if text is None:
        raise Malformed(f"there is no file {path}")
    if search == replace:
        raise Malformed("search and replace are the same")
    count, after = replace_first(text, search, replace) if search else (0, text)
    if count != 1:
        raise Malformed(
            f"the search text occurs {count} times in {path}, want once" if search else "the search text is empty"
        )
    return after


def replace_first(text: str, search: str, replace: str) -> tuple[int, str]:
    """How often `search` stands in `text`, and `text` with its first place replaced.

    One that stands nowhere is looked for once more by lines alone, whatever ends them: a block's lines end in newlines,
    and a file's may in carriage returns, or the last in nothing. The file's ends are kept.
    """
    count = text.count(search)
    if count:
        return count, text.replace(search, replace, 1)
    end = "" if text.endswith("\n") else "\r\n" if "\r\n" in text else "\n"
    lines = lines_of(text + end)
    plain = "".join(line.removesuffix("\r\n") + "\n" if line.endswith("\r\n") else line for line in lines)
    count, at = plain.count(search), plain.find(search)
    if not count:
        return 0, text
    first, past = (plain.count("\n", 0, place) for place in (at, at + len(search)))
    returns = [line.endswith("\r\n") for line in lines]
    start, stop = at + sum(returns[:first]), at + len(search) + sum(returns[:past])
    if returns[first]:
        replace = re.sub("(?<!\r)\n", "\r\n", replace)
    return count, ((text + end)[:start] + replace + (text + end)[stop:]).removesuffix(end)


def diff_of(path: str, before: str | None, after: str | None) -> str:
    """The unified diff of one file, as `apply_diff` reads it; None of one that is not there."""
    old, new = (lines_of(text or "") for text in (before, after))
    names = ("/dev/null" if before is None else f"a/{path}", "/dev/null" if after is None else f"b/{path}")
    lines = difflib.unified_diff(old, new, *names)
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


def apply_diff(diff: str, read: Callable[[str], str | None]) -> dict[str, str | None]:
    """The files that a unified diff changes, {path: text after, None of a deleted one}. Raises `Malformed`.

    A hunk goes where it says, or to the one other place where its old lines stand.
    """
    changed: dict[str, str | None] = {}
    for old, new, header, hunks in _sections(lines_of(diff)):
        path = old if new is None else new
        if "120000" in (header.get("new file mode"), header.get("new mode")):
            raise Malformed(f"{path}: links are refused")
        before = changed[old] if old in changed else read(old) if old is not None else ""
        if before is None:
            raise Malformed(f"there is no file {old}")
        if old is None and read(path) is not None:
            raise Malformed(f"{path} is there already")
        text = before
        if hunks:
            text = _patched(before, hunks, path)
        elif new is not None and old == new:
            raise Malformed(f"{path}: no hunk (@@ -1,3 +1,3 @@)")
        if old is not None and old != new and "copy from" not in header:
            changed[old] = None
        if new is not None:
            changed[new] = text
    if not changed:
        raise Malformed("no file header (--- a/path, +++ b/path)")
    return changed


def _sections(lines: list[str]):
    """(old path, new path, git's header lines, hunks) of each file; a path is None for /dev/null."""
    i, header = 0, {}
    while i < len(lines):
        line = lines[i]
        if line.startswith(_BINARY):
            raise Malformed(f"{line.strip()[:200]!r}: only texts can be patched")
        if line.startswith("diff --git "):
            yield from _without_hunks(header)
            header = {}
        name = next((name for name in _GIT if line.startswith(f"{name} ")), None)
        if name:
            header[name] = line[len(name) :].strip()
        if not (line.startswith("--- ") and i + 1 < len(lines) and lines[i + 1].startswith("+++ ")):
            i += 1
            continue
        old, new = (_header(lines[i + k][4:]) for k in (0, 1))
        if old is None and new is None:
            raise Malformed("a file header names no file")
        i, hunks = i + 2, []
        while i < len(lines) and (match := _HUNK.match(lines[i])):
            removed, added = (int(match[k]) if match[k] is not None else 1 for k in (2, 4))
            body, i = [], i + 1
            while i < len(lines) and (removed > 0 or added > 0):
                kind = lines[i][:1]
                if kind == "\\" and body:  # the line before it has no newline
                    body[-1] = body[-1].rstrip("\n")
                    i += 1
                    continue
                if kind not in (" ", "+", "-", "\n"):
                    raise Malformed(f"a line of a hunk begins with {kind!r}, want a blank, + or -")
                removed -= kind != "+"
                added -= kind != "-"
                body.append(lines[i] if kind != "\n" else " \n")
                i += 1
            if removed or added:
                raise Malformed("a hunk has not as many lines as its header says")
            if body and i < len(lines) and lines[i].startswith("\\"):
                body[-1] = body[-1].rstrip("\n")
                i += 1
            hunks.append((int(match[1]), body))
        yield old, new, header, hunks
        header = {}
    yield from _without_hunks(header)


def _without_hunks(header: Mapping[str, str]):
    """The section of a file of which git says all in its header lines: empty, or only moved."""
    names = header.get("diff --git")
    if names is None or {"old mode", "new mode"} <= set(header) and not {"rename from", "copy from"} & set(header):
        return
    for kind in ("rename", "copy"):
        if f"{kind} from" in header and f"{kind} to" in header:
            yield header[f"{kind} from"], header[f"{kind} to"], header, []
            return
    path = names[2 : (len(names) - 1) // 2]  # a/PATH b/PATH
    if names != f"a/{path} b/{path}" or not ("new file mode" in header or "deleted file mode" in header):
        raise Malformed(f"'diff --git {names}': no --- a/path, +++ b/path, and no file is made, deleted or moved")
    yield (None, path, header, []) if "new file mode" in header else (path, None, header, [])


def _header(text: str) -> str | None:
    path = text.split("\t")[0].strip()
    if path == "/dev/null":
        return None
    return str(pathlib.PurePosixPath(path[2:] if path.startswith(("a/", "b/")) else path))  # one file, one name


def _patched(text: str, hunks: list, path: str) -> str:
    lines, shift = lines_of(text), 0
    for number, (start, body) in enumerate(hunks, 1):
        old = [line[1:] for line in body if line[0] != "+"]
        new = [line[1:] for line in body if line[0] != "-"]
        bodies = [line.rstrip("\n") for line in old]
        at = max(0, start - 1 + shift) if old else min(start + shift, len(lines))
        have = [line.rstrip("\n") for line in lines]
        if have[at : at + len(old)] != bodies:
            places = [k for k in range(len(lines) - len(old) + 1) if have[k : k + len(old)] == bodies]
            if len(places) != 1:
                raise Malformed(
                    f"hunk {number} of {path}: its old lines stand {len(places)} times in the file, want once"
                )
            at = places[0]
        lines[at : at + len(old)] = new
        shift += len(new) - len(old)
    return "".join(lines)
