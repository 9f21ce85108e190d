"""SWE-RL's reward without execution: how similar a patch is to the one that was merged (2502.18449, section 2.2).

    r = -1 for a malformed answer; else the mean, over the files that either patch changes, of
        SequenceMatcher(patch, gold).ratio(), a file that only one of them changes counting 0; 1 if neither changes any.

Weakness, the paper's own: a right patch in other words scores low.
"""

import difflib
import re
from collections.abc import Mapping

from envs.code.tools import is_ambiguous, lines_of, replace_first

_EDIT = re.compile(
    r"^###\s*(?P<path>\S+)\s*\n<{7} SEARCH\n(?P<search>.*?)^={7}\n(?P<replace>.*?)^>{7} REPLACE\s*$",
    re.DOTALL | re.MULTILINE,
)
_TAGS = ("<think>", "</think>", "<solution>", "</solution>")
FORM = """\
<think> your reasoning </think>
<solution>
### path/of/file.py
<<<<<<< SEARCH
lines as they are
=======
lines as they should be
>>>>>>> REPLACE
</solution>"""


class Malformed(ValueError):
    """An answer that is no patch; the text says what is wrong."""


def unified(before: str | None, after: str | None) -> str:
    """The hunks of a unified diff with three lines of context, without headers; "" of equal texts."""
    old, new = (lines_of(text or "") for text in (before, after))
    lines = list(difflib.unified_diff(old, new, n=3))[2:]
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)


def similarity(
    before: Mapping[str, str | None], predicted: Mapping[str, str | None], gold: Mapping[str, str | None]
) -> float:
    """Mean similarity in [0, 1] of two sets of changed files, {path: text after}; `before` has the texts before."""
    patches = [
        {path: diff for path, text in after.items() if (diff := unified(before.get(path), text))}
        for after in (predicted, gold)
    ]
    return patch_similarity(*patches)


def patch_similarity(predicted: Mapping[str, str], gold: Mapping[str, str]) -> float:
    """The same of diffs by path."""
    paths = predicted.keys() | gold.keys()
    if not paths:
        return 1.0
    ratios = (
        difflib.SequenceMatcher(None, predicted[path], gold[path], autojunk=False).ratio()
        if path in predicted and path in gold
        else 0.0
        for path in sorted(paths)
    )
    return sum(ratios) / len(paths)


def read_answer(text: str, files: Mapping[str, str]) -> dict[str, str]:
    """The changed files of an answer: one thought, one solution, at least one edit, each of a text that is there.

    Raises `Malformed`.
    """
    counts = [text.count(tag) for tag in _TAGS]
    if counts != [1] * 4 or sorted(map(text.index, _TAGS)) != [text.index(tag) for tag in _TAGS]:
        raise Malformed(f"want each of {' '.join(_TAGS)} once and in this order, got {counts} of them")
    thought, solution = (
        text.split("<think>")[1].split("</think>")[0],
        text.split("<solution>")[1].split("</solution>")[0],
    )
    if not thought.strip():
        raise Malformed("the thought is empty")
    edits = [(edit["path"], edit["search"], edit["replace"]) for edit in _EDIT.finditer(solution)]
    if not edits:
        raise Malformed("the solution has no SEARCH/REPLACE edit")
    changed: dict[str, str] = {}
    for path, search, replace in edits:
        now = changed.get(path, files.get(path))
        if now is None:
            raise Malformed(f"there is no file {path}")
        if search == replace:
            raise Malformed(f"an edit of {path} changes nothing")
        if is_ambiguous(replace):
            raise Malformed(f"an edit of {path} has more than one line =======: where it is parted cannot be told")
        count, after = replace_first(now, search, replace) if search.strip() else (0, now)
        if not count:
            raise Malformed(f"a SEARCH text does not occur in {path}")
        changed[path] = after
    return changed
