"""The house is as it is drawn: imports, and the documents that list what there is."""

import re
import subprocess
import sys
from pathlib import Path

from meshnode import errors

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "meshnode"


def test_imports_point_one_way() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def test_architecture_lists_every_module() -> None:
    there = {f"{p.name}/" if p.is_dir() else p.name for p in PACKAGE.iterdir() if not p.name.startswith("_")}
    listed = re.findall(r"^\| `([a-z]+(?:/|\.py))` \|", (ROOT / "docs" / "architecture.md").read_text(), re.M)
    assert len(listed) == len(set(listed))
    assert set(listed) == there


def test_only_net_imports_libp2p() -> None:
    found = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.rglob("*.py")
        if re.search(r"^\s*(?:from|import) libp2p", path.read_text(), re.M)
    }
    assert found == {"net"}


def test_the_pure_floors_have_no_loop_and_no_clock() -> None:
    files = ("session.py", "keys.py", "config.py", "mesh.py", "ids.py", "errors.py")
    pure = ("artifact", "route", "ledger", "wire", *files)
    for name in pure:
        for path in [PACKAGE / name] if name.endswith(".py") else (PACKAGE / name).rglob("*.py"):
            text = path.read_text()
            assert not re.search(r"^\s*(?:from|import) (?:trio|libp2p|time|datetime)\b", text, re.M), path


def test_the_page_of_errors_is_current() -> None:
    assert (ROOT / "docs" / "errors.md").read_text() == errors.render_table()


def test_links_between_documents_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "protocol").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
