"""Answers: normalising and comparing them, reading them out of model text, and disarming world text.

The comparison is SQuAD's (lower case, no punctuation, no articles) with the places mended where that normaliser
*erases* the answer: a gold "A" does not become "", "1.5" is not "15", "-5" is not "5", "C++" is not "C", "10²" is not
"102", "x + 1" is not "x - 1" and "<5" is not ">5".
"""

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

_ARTICLES = frozenset(("a", "an", "the"))
_APOSTROPHES = str.maketrans(dict.fromkeys("\u00b4\u02b9\u02bb\u02bc\u2032", "'"))  # letters and accents to Unicode
_SIGNS = str.maketrans({"\u266f": "#", "\u266d": "b"})  # C♯, B♭
_MINUS = "-\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"  # hyphens and dashes that people type for a minus sign
_NAMED = re.compile(r"[^\W_]")  # a letter or a digit
_SHORT = re.compile(r"(?<!\w)\w{0,2}[^\W\d_]$")  # a grade, a blood group, an ion


def _compatible(text: str) -> str:
    """NFKC, except that a superscript or fraction after a digit stays apart from it ("10²" is "10 2", not "102")."""
    if text.isascii():
        return text.casefold()
    out: list[str] = []
    for char in unicodedata.normalize("NFC", text.translate(_APOSTROPHES).translate(_SIGNS)):
        kind = unicodedata.decomposition(char)
        if kind.startswith(("<super>", "<fraction>")) and out and out[-1][-1:].isdigit():
            out.append(" ")
        out.append(char)
    folded = unicodedata.normalize("NFKC", "".join(out)).casefold()
    return unicodedata.normalize("NFKC", folded)


def _digit(text: str, index: int) -> bool:
    return 0 <= index < len(text) and text[index].isdecimal()


def _kept_punctuation(text: str, i: int) -> str:
    """What the punctuation mark or symbol `text[i]` becomes: itself, a space, or nothing."""
    char, before, after = text[i], _digit(text, i - 1), _digit(text, i + 1)
    if char == "." and after:  # a decimal point; ".5" is written "0.5"
        return "." if before else ("" if text[i - 1 : i].isalnum() else "0.")
    if char in _MINUS and not text[i - 1 : i].isalnum():
        follows = text[i + 1 : i + 3]
        if follows[:1] and (follows[0].isdecimal() or re.match(r"[^\w\s]\d", follows) and follows[0] not in _MINUS):
            return "-"  # a sign: it begins a number, perhaps over a currency mark or a decimal point
    if char in _MINUS and after and re.search(r"\de$", text[max(i - 2, 0) : i]):
        return "-"  # 1e-5
    if char == "," and before and re.match(r"\d{3}(?!\d)", text[i + 1 :]):
        return ""  # thousands
    if char in "+#" and (text[i - 1 : i].isalnum() or text[i - 1 : i] == "+") and not after:
        if char == "#" or not text[i + 1 : i + 2].isalnum():
            return char  # C++, C#, A+
    if char in "-\u2212" and _SHORT.search(text[max(i - 4, 0) : i]) and not _NAMED.search(text, i + 1):
        return "-"  # A-, Cl-
    if _is_relation(char) and _relates(text, i):
        return f" {char} "  # x+1, <5, √2
    return " " if before and after else ""  # "5-10" and "12:30" keep their parts apart


def _is_relation(char: str) -> bool:
    """Whether a symbol says something by itself: what mathematics writes, but for arrows, marks of prose and products,
    which are written in many ways.
    """
    return (
        unicodedata.category(char) == "Sm" and char not in "|~\u2044\u00d7\u00f7" and not "\u2190" <= char <= "\u21ff"
    )


def _relates(text: str, i: int) -> bool:
    """Whether the symbol `text[i]` stands before something, and where it is of two sides behind something, too: "+5"
    and "= 5" are 5, and so is "-> 5"; ">5" is not.
    """
    if not _NAMED.search(text, i + 1) or text[i - 1 : i] in ("-", "="):  # the head of an arrow
        return False
    if text[i] == ">" and not text[i + 1 :].lstrip()[0].isalpha():  # else it is a mark of quotation, if it comes first
        return True
    return text[i] not in "+=>" or bool(_NAMED.search(text[:i]))


@functools.lru_cache(maxsize=8192)  # golds and passages come again and again
def _words(text: str) -> tuple[str, ...]:
    """Words of `text` after folding, punctuation treated, articles still there; () if only marks are in it."""
    text = _compatible(text)
    marked = ("P", "S")
    kept = [_kept_punctuation(text, i) if unicodedata.category(c)[0] in marked else c for i, c in enumerate(text)]
    return tuple("".join(c for c in kept if unicodedata.category(c[:1] or " ") != "Cf").split())


def normalize(text: str) -> str:
    """The form in which two answers are compared.

    NFKC and case folding; punctuation and symbols dropped, but kept where they carry a number's or a name's meaning
    (decimal point, sign, C++); between two digits a mark becomes a space; thousands commas dropped; a / an / the
    dropped where another word follows, so that "Vitamin A" and "A" survive; a relation or an operator between or before
    words (+, =, <, \u221a) is a word. Text that consists of marks alone is kept as it is. Never empty unless `text` is
    blank. After SQuAD's evaluation script (1606.05250) as used by Search-R1 (2503.09516).
    """
    words = _words(text)
    if not words:
        return " ".join(_compatible(text).split())
    then = [*words[1:], ""]
    return " ".join(w for w, after in zip(words, then, strict=True) if w not in _ARTICLES or not _NAMED.search(after))


def _golds(golds: Sequence[str]) -> list[str]:
    if isinstance(golds, str) or not golds:
        raise ValueError(f"golds: got {golds!r}, want a non-empty sequence of strings; mend the task's answers")
    normal = [normalize(gold) for gold in golds]
    if not all(normal):
        raise ValueError(f"golds: got a blank answer in {list(golds)!r}; drop the task when its data set is built")
    return normal


def exact_match(prediction: str | None, golds: Sequence[str]) -> bool:
    """Whether the normalised prediction is one of the normalised golds. None (no answer) matches nothing.

    Raises ValueError when a gold is blank: an empty gold would match anything blank.
    """
    normal = _golds(golds)
    return prediction is not None and normalize(prediction) in normal


def f1(prediction: str | None, golds: Sequence[str]) -> float:
    """max over golds of F1 = 2·P·R / (P + R) over normalised words with multiplicity, in [0, 1]; EM <= F1 always.

    Raises ValueError when a gold is blank.
    """
    normal = _golds(golds)
    if prediction is None:
        return 0.0
    words = Counter(normalize(prediction).split())
    best = 0.0
    for gold in normal:
        wanted = Counter(gold.split())
        common = sum((words & wanted).values())
        if common:
            best = max(best, 2 * common / (sum(words.values()) + sum(wanted.values())))
    return best


def contains(text: str, golds: Sequence[str]) -> bool:
    """Whether a gold stands in `text` as whole words ("A" is not in "Lima"): Search-R1's retrieval hit, mended."""
    plain, normal = f" {' '.join(_words(text))} ", f" {normalize(text)} "
    wanted = _golds(golds)
    return any(f" {gold} " in normal or f" {gold} " in plain for gold in wanted)


_ANSWER_TAG = re.compile(r"<(/?)answer>")


def last_answer(text: str) -> str | None:
    """The stripped content of the last complete answer pair in *model* text, or None.

    Pinned: tags are exact (an upper-case tag is none); of several complete pairs the last counts, and if that one is
    empty or nested there is no answer; an unclosed tag is no pair. Give it only text that the model wrote: never the
    prompt, which may hold an example, nor tool output.
    """
    last: str | None = None
    depth, start, nested = 0, 0, False
    for tag in _ANSWER_TAG.finditer(text):
        if not tag.group(1):
            nested, start = (True, start) if depth else (False, tag.end())
            depth += 1
        elif depth:
            depth -= 1
            if depth == 0:
                last = None if nested else text[start : tag.start()].strip() or None
    return None if depth and nested else last


_THINK = re.compile(r"\s*<think>(?:(?!<think>).)*?</think>\s*(.*)", re.DOTALL)


def after_thinking(text: str) -> str | None:
    """What follows the one think block with which a turn begins, white space stripped; None if it does not begin so."""
    begun = _THINK.fullmatch(text)
    return None if begun is None else begun.group(1).rstrip()


_NAMES = (
    "think|thinking|search|information|answer|open|system|user|assistant|tool|tools|tool_call|tool_response|tool_calls|"
    "function|observation|s|unk|pad|bos|eos|mask|image|start_of_turn|end_of_turn|im_start|im_end|sys"
)
_BLANK = r"\s\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e"  # white space, and what shows nothing
_GAP = rf"[{_BLANK}\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]*"
_BAR = r"[|\u00a6\u01c0\u2016\u2223\u2502\u2503\u2551\u2758\u23d0\uff5c\uffe8]"
_SLASH = r"[/\\!?\uff0f\u2044\u2215]?"
# "<" and the two characters that compatibility normalisation turns into it
_OPENER = re.compile(rf"[<\uff1c\ufe64](?={_GAP}{_SLASH}{_GAP}(?:{_BAR}|(\w[\w\u00ad\u200b-\u200f\u2060-\ufeff-]*)))")
_ATTACHED = re.compile(rf"{_SLASH}[^\W\d]")
_BRACKETED = re.compile(
    r"\[(?=/?(?:INST|SYS|SYSTEM_PROMPT|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|AVAILABLE_TOOLS|IMG|THINK)\b)"
)
_NAME = re.compile(rf"(?:{_NAMES})")
_INVISIBLE = re.compile(_GAP[:-1])


def _disarm(match: re.Match) -> str:
    name = match.group(1)
    if name is None or _ATTACHED.match(match.string, match.end()):
        return "\u2039"  # a bar follows, or the bracket touches a name: it is a tag
    plain = _INVISIBLE.sub("", unicodedata.normalize("NFKC", name)).casefold()
    return "\u2039" if _NAME.fullmatch(plain) else match.group(0)


def escape_tags(text: str) -> str:
    """World text in which nothing can be read as a tag, a role or a special token; it stays readable and is idempotent.

    The opening bracket of anything that looks like one ("<answer>", "< / ANSWER x=1>", "＜search＞", "<|im_end|>",
    "<｜User｜>", "[INST]") becomes "‹" or "(". Brackets in prose ("3 < 4", "a < b") are left alone.
    """
    return _BRACKETED.sub("(", _OPENER.sub(_disarm, text))
