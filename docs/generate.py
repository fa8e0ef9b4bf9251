"""Generate the reference in docs/reference, and the tables of the guides, from the code.

`python -m docs.generate` writes the pages and the JSON Schemas. With `--check` it compares them
with the files, and fails if a file differs.
"""

import argparse
import sys
from pathlib import Path

from docs.generator import commands, datasets, flows, settings_files
from docs.generator.schemas import write_schema

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"


def generate_pages() -> dict[str, str]:
    """Return the text of each file with generated parts, by its path below docs."""
    settings, tables = settings_files.write_settings()
    linked = {model: f"{settings_files.PAGE}{place}" for model, place in tables.places.items()}
    linked |= {
        file.model: f"{settings_files.PAGE}#{settings_files.make_file_anchor(file)}"
        for file in settings_files.FILES
    }
    reference = {
        commands.PAGE: commands.write_commands(),
        settings_files.PAGE: settings,
        flows.PAGE: flows.write_flows(ROOT, linked),
        **{file.schema: write_schema(file.model) for file in settings_files.FILES},
    }
    guide = (DOCS / datasets.PAGE).read_text(encoding="utf-8")
    return {
        datasets.PAGE: datasets.fill_guide(guide),
        **{f"{REFERENCE.name}/{name}": text for name, text in reference.items()},
    }


def write_pages(folder: Path = DOCS) -> None:
    """Write the generated files."""
    for name, text in generate_pages().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def find_stale_pages(folder: Path = DOCS) -> list[str]:
    """Return the paths of generated files that are missing, or differ from the code."""
    return [
        name
        for name, text in generate_pages().items()
        if not (folder / name).is_file() or (folder / name).read_text(encoding="utf-8") != text
    ]


def main() -> int:
    """Write the generated files, or check them."""
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    if not parser.parse_args().check:
        write_pages()
        return 0
    stale = find_stale_pages()
    for name in stale:
        print(f"docs/{name} differs from the code: run make docs.")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
