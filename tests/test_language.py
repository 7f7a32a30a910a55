"""Language of guide and docstrings: short sentences, and no clause in place of a noun."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest

from tests.test_guide import PAGES, text
from tests.test_imports import sources

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef
WORDS_MOST = 35  # in a sentence
GRADE_MOST = 9  # of Flesch and Kincaid: years of school
CLAUSES_MOST = 2  # on a page
CLAUSES = re.compile(
    r"\b(what (is|are|was|it|they)|who(ever|soever)|those (that|who|which)|where (that|this) is"
    r"|that of those|(is|are) to be|(one|ones) of those|of what|goes on|by what)\b",
    re.IGNORECASE,
)


def prose(name: str) -> Iterator[str]:
    """Yield the sentences of a page, without tables, blocks, headings and links' targets."""
    page = re.sub(r"^```.*?^```$", "", text(name), flags=re.M | re.S)
    lines = [line for line in page.splitlines() if not line.startswith(("|", "#", "<", "!"))]
    page = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", "\n".join(lines))
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", page):
        words = re.sub(r"`[^`]*`", "code", paragraph.replace("**", ""))
        words = " ".join(re.sub(r"^\s*([-*]|\d+\.) ", "", words).split())
        for sentence in re.split(r"(?<=[.!?:;]) ", words):
            if sentence:
                yield sentence


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_plain(name: str) -> None:
    sentences = list(prose(name))
    assert sentences
    long = [sentence for sentence in sentences if len(sentence.split()) > WORDS_MOST]
    assert not long, f"sentences of more than {WORDS_MOST} words"
    clauses = [sentence for sentence in sentences if CLAUSES.search(sentence)]
    assert len(clauses) <= CLAUSES_MOST, "\n".join(clauses)


@pytest.mark.parametrize("name", PAGES)
def test_the_grade_of_a_page(name: str) -> None:
    textstat = pytest.importorskip("textstat")
    whole = " ".join(re.sub(r"[^.!?]$", r"\g<0>.", sentence) for sentence in prose(name))
    assert textstat.flesch_kincaid_grade(whole) <= GRADE_MOST


GENERATED = ("options", "summary", "errors", "environment")
WORDS_OF_GUIDE_MOST = 18_000


def test_the_guide_is_short() -> None:
    """Words of README and all pages, but for those that are made from the code."""
    assert {*GENERATED} < {*PAGES}
    words = sum(len(text(name).split()) for name in PAGES if name not in GENERATED)
    assert words <= WORDS_OF_GUIDE_MOST, f"{words} words"


CLAUSES_IN_1000 = 2  # words of a room's docstrings


def test_docstrings_are_plain() -> None:
    words, clauses = Counter[str](), defaultdict[str, list[str]](list)
    for name, tree in sources().items():
        for node in ast.walk(tree):
            if not isinstance(node, DOCUMENTED) or not (doc := ast.get_docstring(node)):
                continue
            room = name.partition(".")[0]
            words[room] += len(doc.split())
            sentences = re.split(r"(?<=[.!?:;]) ", " ".join(doc.split()))
            clauses[room] += filter(CLAUSES.search, sentences)
    assert len(words) > 20
    for room, found in clauses.items():
        assert len(found) <= max(1, CLAUSES_IN_1000 * words[room] / 1000), "\n".join(found)


MODULE_WORDS_MOST = 12  # in the first line of a module, a command as one
NO_NOUN = re.compile(r"(What|Where|Who|How|Which|Whether|When|Why)\b|\w+ (a|an|the|each|all)\b")


def test_modules_begin_with_a_noun_phrase() -> None:
    for name, tree in sources().items():
        line = (ast.get_docstring(tree) or "").partition("\n")[0]
        words = re.sub(r"``[^`]*``", "code", line).split()
        assert len(words) <= MODULE_WORDS_MOST, f"{name}: {line}"
        assert not NO_NOUN.match(line), f"{name}: {line}"
        assert line.endswith("."), f"{name}: {line}"
