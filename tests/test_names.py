"""Words that are no names here: the field has others, which the package uses everywhere."""

import subprocess

import pytest
from launch import ROOT

# Each word of a private vocabulary, and what the field calls it. Words within identifiers count.
WORDS = {
    "chief": "coordinator",
    "heir": "successor",
    "adopt(ion|er|ed|s)?": "take over, takeover",
    "bequest": "resending for a dead rank",
    "trustee": "resender",
    "journal(ed)?": "undo log",
    "granter": "dispatcher",
    "hand-?out": "sample allocator, assignment",
    "handed out": "assigned",
    "outbox": "push sender",
    "carriers?": "node aggregator",
    "quorum": "first-N aggregation",
    "afar": "remote",
    "spared": "survivable",
    "bury": "finish a worker",
    "stand_ins?": "fakes",
}
# Options, files and keys that users have are named as they were.
ALLOWED = ("tests/test_names.py",)
TEXTS = ("*.py", "*.md", "*.toml", "*.cfg", "*.sh", "*.sbatch", "*.html")


def found(pattern: str, *more: str) -> list[str]:
    """Return the lines of the repository's texts that match; words are split at ``_`` and case."""
    command = ["git", "grep", "-nP", *more, pattern, "--", *TEXTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1), done.stderr
    return [line for line in done.stdout.splitlines() if not line.startswith(ALLOWED)]


@pytest.fixture(autouse=True)
def in_a_clone() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a clone, whose files git knows")


@pytest.mark.parametrize("word", WORDS)
def test_a_word_that_is_no_name(word: str) -> None:
    lines = found(rf"(?i)(?<![a-z])({word})(?![a-z])")
    assert not lines, f"the field says: {WORDS[word]}"


def test_what_is_on_other_nodes_is_remote() -> None:
    """Far is a distance, and near too; shards, workers and reads are remote or local."""
    things = "shards?|workers?|servers?|reads?|rows?|push(es)?|pulls?|ones?|owners?|readers?"
    assert not found(rf"(?<!so )(?<!as )(?<!how )(?<!too )\b([Ff]ar|[Nn]ear) ({things})\b")
    assert not found(r"\b_?([Ff]ar|[Nn]ear)_?([A-Z]\w+|shards?|reads|rows)\b")


def test_the_check_bites() -> None:
    assert found("(?i)(?<![a-z])coordinator(?![a-z])")
