"""Reading a policy's turn: one action in tags, or what is wrong with it."""

import dataclasses
import re
from typing import Literal

STOP = ("</search>", "</open>", "</answer>")
FORMS = "<search> query </search>, <open> document number </open> or <answer> text </answer>"

_TAG = re.compile(r"<(/?)(think|search|open|answer)>")
_FORGED = re.compile(r"<\s*/?\s*information\b", re.IGNORECASE)
_NUMBER = re.compile(r"(?:Doc\s+)?(\d{1,6})", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Action:
    kind: Literal["search", "open", "answer"]
    argument: str  # stripped, not empty


class Malformed(Exception):
    """A turn that holds no single well-formed action; the text says what is wrong, for the policy to read."""


def cut(text: str) -> str:
    """`text` up to and including the first stop string in it; what a model wrote after that was never a turn."""
    ends = [at + len(stop) for stop in STOP if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def parse(text: str) -> Action:
    """The one action of a turn.

    Tags are exact and lower case; think blocks and text around the action are free. Raises `Malformed` for no action or
    several, tags that are nested, unclosed, stray or empty, and for an <information> tag in any spelling: only the
    world writes that.
    """
    text = cut(text)
    if _FORGED.search(text):
        raise Malformed("only the search engine writes <information>")
    actions: list[Action] = []
    inside, start = "", 0
    for tag in _TAG.finditer(text):
        closing, name = tag.group(1), tag.group(2)
        if not closing:
            if inside:
                raise Malformed(f"<{name}> inside <{inside}>")
            inside, start = name, tag.end()
        elif name != inside:
            raise Malformed(f"</{name}> without <{name}>")
        else:
            if name != "think":
                actions.append(Action(name, " ".join(text[start : tag.start()].split())))
            inside = ""
    if inside:
        raise Malformed(f"<{inside}> is not closed")
    if len(actions) != 1:
        raise Malformed(f"{len(actions)} actions in one turn" if actions else "no action")
    if not actions[0].argument:
        raise Malformed(f"<{actions[0].kind}> is empty")
    return actions[0]


def document_number(argument: str) -> int | None:
    """The number in "3" or "Doc 3"; None for anything else."""
    match = _NUMBER.fullmatch(argument)
    return int(match.group(1)) if match else None
