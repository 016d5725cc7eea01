"""The words: the glossary has the terms of the code, and the prose is short and plain."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_finepage.planning.policies import POLICIES
from tests.unit.test_floors import FILES, FLOORS, imported, unit_named, unit_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ds_finepage"
GLOSSARY = ROOT / "docs" / "glossary.md"

MOST_WORDS = 35
"""In one sentence of a document."""

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS_WITH_TERMS = ("graph", "planning", "execution", "runtime")
"""Their public classes and the members of their enums are terms of art, word by word."""

EVERYDAY = [
    "await",
    "binder",
    "builder",
    "change",
    "copies",
    "cpu",
    "error",
    "graph",
    "kind",
    "list",
    "maker",
    "meter",
    "need",
    "planner",
    "probe",
    "read",
    "ref",
    "runner",
    "running",
    "setting",
    "stats",
    "store",
    "taker",
]
"""Words that mean in this program what they mean in any other. They need no entry."""

RETIRED = (
    r"around bytes",
    r"bytes around",
    r"aside",
    r"standing",
    r"visitors?",
    r"neighbours?",
    r"anew",
    r"who(ever|soever)",
    r"but for",
    r"(in front )?of which",
    r"nobody",
    r"somebody",
    r"look(s|ed)? ahead",
)
"""Words that the glossary has replaced, and turns of phrase that make riddles."""


# --- the glossary --------------------------------------------------------------------------


def headwords() -> set[str]:
    """All words in the first column of the glossary's tables, in the singular."""
    rows = re.findall(r"^\| (.+?) \|", GLOSSARY.read_text(), re.M)
    return {singular(w) for row in rows for w in re.findall(r"[a-z0-9]+", row.lower())}


def singular(word: str) -> str:
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def is_new(word: str) -> bool:
    return singular(word) not in headwords() | {singular(w) for w in EVERYDAY}


def words_of_name(name: str) -> list[str]:
    """``MemGraphBuilder`` -> memgraph, builder."""
    name = name.replace("MemGraph", "Memgraph").replace("TaskGraph", "Taskgraph")
    return [w.lower() for w in re.findall(r"[A-Z0-9]+(?![a-z])|[A-Z][a-z0-9]+|[a-z0-9]+", name)]


def public_classes(folder: Path) -> Iterator[ast.ClassDef]:
    for path in sorted(folder.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node


def terms_of(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (class or member, word) for all words in public names of classes and enum members."""
    for node in public_classes(folder):
        names = [node.name]
        if any(ast.unparse(base).endswith("Enum") for base in node.bases):
            members = [s.targets[0] for s in node.body if isinstance(s, ast.Assign)]
            names += [f"{node.name}.{m.id}" for m in members if isinstance(m, ast.Name)]
        for name in names:
            for word in words_of_name(name.rpartition(".")[2]):
                yield name, word


@pytest.mark.parametrize("folder", FOLDERS_WITH_TERMS)
def test_the_glossary_has_every_term_of_the_code(folder: str) -> None:
    missing = [f"{word} ({name})" for name, word in terms_of(PACKAGE / folder) if is_new(word)]
    assert missing == [], "give each word an entry in docs/glossary.md"


def test_the_glossary_has_every_policy() -> None:
    text = GLOSSARY.read_text()
    assert [name for name in POLICIES if f"`{name}`" not in text] == []


def test_no_entry_stands_twice() -> None:
    heads = re.findall(r"^\| (.+?) \|", GLOSSARY.read_text(), re.M)
    heads = [h for h in heads if h not in ("word", "---")]
    assert len(heads) == len(set(heads))


# --- pictures ------------------------------------------------------------------------------


def test_the_table_of_floors_is_true() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", (ROOT / "docs/pipeline.md").read_text(), re.M)
    found = {name: int(floor) for floor, names in rows for name in re.findall(r"`(.+?)`", names)}
    assert found == FLOORS


def measured_picture() -> str:
    """Draw which unit imports which, from the upper floor to the lower one."""
    lines = []
    for unit in sorted(FLOORS, key=lambda u: (-FLOORS[u], u)):
        trees = [ast.parse(path.read_text()) for path in FILES if unit_of(path) == unit]
        modules = [name.split(".") for tree in trees for name in imported(tree)]
        targets = {unit_named([*m[1:], ""]) for m in modules if m[0] == PACKAGE.name and m[1:]}
        shown = [t for t in FLOORS if t in targets - {unit, "graph"} and FLOORS[t]]
        if shown:
            lines.append(f"{FLOORS[unit]}  {unit:25} --> {', '.join(sorted(shown))}")
    return "\n".join(lines)


def test_the_picture_of_the_imports_is_measured() -> None:
    picture = measured_picture()
    assert f"```\n{picture}\n```" in (ROOT / "CONTRIBUTING.md").read_text(), picture


# --- sentences -----------------------------------------------------------------------------


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs, list items, headings and table cells of a Markdown text.

    Code blocks are left out. Code in a line and the address of a link count as no more than a word.
    """
    text = re.sub(r"^(```|~~~).*?^\1\s*$", "", text, flags=re.M | re.S)
    text = re.sub(r"(?<=\n\n)(?:(?: {4}|\t).*\n+)+", "\n", text)
    text = re.sub(r"`[^`\n]+`", "Code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n", text):
        for item in re.split(r"\n(?=\s*(?:[-*+]|\d+\.|#+|\|) ?)", block):
            if item.lstrip().startswith("|"):
                yield from item.strip().strip("|").split("|")
            else:
                yield re.sub(r"^\s*(?:[-*+]|\d+\.|#+) ", "", item)


def sentences(text: str) -> Iterator[str]:
    for paragraph in paragraphs(text):
        plain = " ".join(re.sub(r"[*_]{1,2}(?=\S)|(?<=\S)[*_]{1,2}", "", paragraph).split())
        yield from re.split(r"(?<=[.!?])[)\"”]?\s+(?=[A-Z`\"“(0-9])", plain)


def long_sentences(text: str) -> list[str]:
    found = []
    for sentence in sentences(text):
        words = [w for w in sentence.split() if re.search(r"\w", w)]
        if len(words) > MOST_WORDS:
            found.append(f"{len(words)} words: {sentence}")
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_sentences_are_short(path: Path) -> None:
    assert long_sentences(path.read_text()) == []


def test_how_sentences_are_found() -> None:
    long = "word " * 36
    assert long_sentences(f"{long.strip()}.") and not long_sentences(f"{long[5:].strip()}.")
    assert long_sentences(f"| a | {long} |") and long_sentences(f"- {long}\n- short")
    assert long_sentences(f"[{long}](x)") and long_sentences(f"Short. {long}")
    for text in (
        f"```\n{long}\n```",
        f"So:\n\n    {long}\n\nEnd.",
        f"`{long.strip()}` is code",
        "- " + "word " * 20 + "\n- " + "word " * 20,
        "word " * 20 + "ends. " + "Word " * 20,
        "| " + "word " * 20 + "| " + "word " * 20 + "|",
    ):
        assert long_sentences(text) == [], text


# --- retired words ---------------------------------------------------------------------------


def retired_in(text: str) -> list[str]:
    plain = " ".join(line.strip().lstrip("#").strip() for line in text.splitlines())
    return [m[0] for m in re.finditer(rf"\b({'|'.join(RETIRED)})\b", plain, re.I)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_documents_use_no_retired_word(path: Path) -> None:
    assert retired_in(re.sub(r"`[^`\n]+`", "", path.read_text())) == []


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_the_code_uses_no_retired_word(path: Path) -> None:
    text = path.read_text()
    assert retired_in(text) == []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented):
            doc = ast.get_docstring(node) or ""
            riddles = [s for s in sentences(doc) if re.match(r"(What|Whatever|Of) ", s)]
            assert riddles == [], "say who does what"


def test_a_new_class_brings_new_terms(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(
        "class SpillArena: ...\nclass _Hidden: ...\n"
        "class Tint(str, enum.Enum):\n    DEEP_RED = 'r'\n"
    )
    missing = {word for _, word in terms_of(tmp_path) if is_new(word)}
    assert missing == {"spill", "tint", "deep", "red"}


def test_how_retired_words_are_found() -> None:
    assert retired_in("all bytes but\n    for one") == ["but for"]
    assert retired_in("# plan it\n# anew") == ["anew"]
    assert retired_in("num_aside_runs, notwithstanding") == []
