"""The house: where things stand, what may import what, and that nothing ships under a bare name."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CODE = ("pipeline", "kernels", "jobs", "conf")
MAY_IMPORT = {
    "kernels": {"kernels"},
    "pipeline": {"kernels", "pipeline"},
    "conf": set(),
    "jobs": {"kernels", "pipeline", "conf", "jobs"},
}
ONLY_IN = {
    "hydra": re.compile(r"jobs/.*"),
    "omegaconf": re.compile(r"jobs/.*"),
    "ray": re.compile(r"jobs/.*|pipeline/cluster/\w+\.py"),
    "cuda": re.compile(r"kernels/\w+/cutile\.py"),
}

ROOMS = (
    {"errors", "config", "rules", "records", "shards", "schemas", "arrays", "meter", "wording", "progress"},
    *({room} for room in ("storage", "console", "commit", "tokenize", "model", "engine", "read", "write", "keep", "plan")),
    *({room} for room in ("journey", "worker", "cluster", "output", "prepare", "run")),
)
"""Of pipeline/, as the README's tree has them: nothing knows what stands behind it."""


def sources() -> list[Path]:
    return sorted(path for folder in CODE for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, absolute, also those imported inside functions."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import; write longscan.…"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", sources(), ids=short)
def test_imports_go_one_way(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        top, _, rest = name.partition(".")
        assert top not in CODE, f"{short(path)} imports the bare name {name}"
        if top == "longscan":
            assert rest.split(".")[0] in MAY_IMPORT[room], f"{short(path)}: {room}/ may not import {name}"
        if top in ONLY_IN:
            assert ONLY_IN[top].fullmatch(short(path)), f"{short(path)} may not import {name}"


def test_rooms_know_only_those_before_them() -> None:
    place = {name: n for n, rooms in enumerate(ROOMS) for name in rooms}
    found = {path.stem for path in (ROOT / "pipeline").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert set(place) == found - {"__init__", "__pycache__"}
    for path in (ROOT / "pipeline").rglob("*.py"):
        room = path.relative_to(ROOT / "pipeline").with_suffix("").parts[0]
        for name in imports(path):
            parts = name.split(".")
            if parts[:2] == ["longscan", "pipeline"] and room != "__init__":
                assert place[parts[2]] <= place[room], f"{short(path)}: {room} may not know {name}"


def test_tests_import_no_bare_name() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        for name in imports(path):
            assert name.split(".")[0] not in CODE, f"{short(path)} imports the bare name {name}"


def test_kernels_is_no_package_of_its_own() -> None:
    """A top-level package `kernels` breaks `import transformers` wherever Hugging Face's package of that name is."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_every_folder_of_code_is_declared_and_typed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    declared: dict[str, str] = setuptools["package-dir"]
    code = {path.parent.relative_to(ROOT).as_posix() for path in sources()}
    data = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "conf").rglob("*.yaml")} | {"jobs/demo/model"}
    assert sorted(setuptools["packages"]) == sorted(declared)
    assert code | data == set(declared.values())
    for name, folder in declared.items():
        assert name == "longscan." + folder.replace("/", "."), name
        assert folder not in code or (ROOT / folder / "py.typed").exists(), f"{folder} has no py.typed"


def test_the_distribution_ships_longscan_alone() -> None:
    files = importlib.metadata.files("longscan") or []
    allowed = re.compile(r"longscan/|longscan-[\d.]+\.dist-info/|\.\./|__editable__|__pycache__/__editable__")
    assert files
    assert [str(file) for file in files if not allowed.match(str(file))] == []


def test_conf_holds_yaml_only() -> None:
    kinds = {path.suffix for path in (ROOT / "conf").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert kinds <= {".yaml", ".py", ".typed"}
    assert [short(path) for path in (ROOT / "conf").rglob("*.py")] == ["conf/__init__.py"]


def test_the_readme_has_a_line_for_every_module() -> None:
    tree = (ROOT / "README.md").read_text("utf-8").partition("\n## The house\n")[2].partition("\n### Words\n")[0]
    assert tree
    missing = [short(path) for path in sources() if path.name != "__init__.py" and not re.search(rf"\b{re.escape(path.stem)}\b", tree)]
    assert not missing, "the README's tree does not name them"


def test_operators_have_the_same_four_files() -> None:
    for operator in ("ssd", "conv1d", "norm", "pool", "logprob"):
        assert {"__init__.py", "reference.py", "cutile.py", "cases.py"} <= {path.name for path in (ROOT / "kernels" / operator).iterdir()}


def test_the_project_speaks_only_of_itself() -> None:
    """No path of anyone's machine in what is kept."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".yaml", ".toml", ".json", ""} and path.is_file() and path.stat().st_size < 1_000_000:
            assert not re.search(r"/(?:home|root|Users)/\w", path.read_text("utf-8", "replace")), name
