"""Site of the guide: pages, search and API, made by mkdocs."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from mpips import extras
from mpips.errors import UserError
from mpips.tools.guide.pages import FOLDER, SECTIONS, TOPICS, headline, page

# One page for the public names of each module. A function with the name of its module is listed.
API = {
    "mpips": ("mpips",),
    "mpips.torch": ("mpips.torch.run.run", "mpips.torch"),
    "mpips.jax": ("mpips.jax.run.run", "mpips.jax"),
    "mpips.lightning": ("mpips.lightning",),
}
SETTINGS = FOLDER / "mkdocs.json"  # URLs name files, so that browsers open the site from disk
QUIET = {"NO_MKDOCS_2_WARNING": "1"}  # suppresses a warning of mkdocs-material about MkDocs 2
# Links to files of the package, which are not in the site.
OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+[^)]*\)")


def build(folder: str) -> str:
    """Write the site into a folder; returns a message with its first page.

    Args:
        folder: Folder of the site, which is created, or whose content is replaced.

    Raises:
        UserError: If mkdocs is not installed, a page has a broken link, or `folder` has other
            files than a site.
    """
    target = Path(folder).resolve()
    if target.exists() and not (target.is_dir() and _replaceable(target)):
        raise UserError(f"--html {folder}", "a new folder, an empty one, or an older site")
    _mkdocs("build", "--strict", "--quiet", "--site-dir", str(target))
    return f"site in {target}: open {target / 'index.html'}\n"


def serve() -> str:
    """Serve the site on this host until Ctrl-C.

    Raises:
        UserError: As `build`.
    """
    try:
        _mkdocs("serve")
    except KeyboardInterrupt:
        return "ended\n"
    return ""


def _replaceable(target: Path) -> bool:
    return not any(target.iterdir()) or (target / "search" / "search_index.json").is_file()


def _mkdocs(*words: str) -> None:
    for module, package in (("material", "mkdocs-material"), ("mkdocstrings", "mkdocstrings")):
        extras.find(module, package, "docs", "makes the site")
    with TemporaryDirectory() as name:
        sources = Path(name)
        _write(sources)
        command = [sys.executable, "-m", "mkdocs", *words, "--config-file", SETTINGS.name]
        done = subprocess.run(command, cwd=sources, env={**os.environ, **QUIET}, check=False)
    if done.returncode:
        raise UserError("a site that mkdocs refused", "no warning", "see its lines above")


def _write(sources: Path) -> None:
    """Write the pages, pictures and settings that mkdocs reads."""
    pages = sources / "docs"
    pages.mkdir()
    for topic in TOPICS:
        (pages / f"{topic}.md").write_text(OUTSIDE.sub(r"\1", page(topic)))
    for picture in [*FOLDER.glob("*.svg"), *FOLDER.glob("*.png")]:
        shutil.copy(picture, pages)
    for module, parts in API.items():
        text = "\n".join([f"# {module}\n", *(f"::: {part}\n" for part in parts)])
        (pages / f"api-{module}.md").write_text(text)
    (pages / "index.md").write_text(_contents())
    (sources / SETTINGS.name).write_text(_settings())


def _contents() -> str:
    """Return the first page of the site, with links to all others by section."""
    lines = ["# mpips", "", "A parameter server as an MPI batch job.", ""]
    for section, topics in SECTIONS.items():
        lines += [f"## {section}", "", *(f"- [{headline(k)}]({k}.md)" for k in topics), ""]
    return "\n".join([*lines, "## API", "", *(f"- [{m}](api-{m}.md)" for m in API), ""])


def _short(topic: str) -> str:
    """Return the title of a page up to its colon or question mark."""
    return re.split(r":|(?<=\?)", headline(topic))[0]


def _settings() -> str:
    """Return the settings of mkdocs as JSON, with the pages by section."""
    nav = [{s: [{_short(k): f"{k}.md"} for k in topics]} for s, topics in SECTIONS.items()]
    pages = [{"Contents": "index.md"}, *nav, {"API": [{m: f"api-{m}.md"} for m in API]}]
    return json.dumps({**json.loads(SETTINGS.read_text()), "nav": pages})
