"""How large the engine is: its core, what a family adds, and every file."""

import ast
import inspect
import tokenize
from pathlib import Path

import pytest

import vlm_engine
from vlm_engine.models.loading import FAMILIES

ENGINE = Path(vlm_engine.__file__).parent
MOST_OF_A_FILE = 400
MOST_OF_A_FAMILY = 250
MOST_CODE_OF_THE_CORE = 3500
# With docstrings, comments and blank lines.
MOST_OF_THE_CORE = 4400

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

# What plans and executes steps is all but this, so that a new module counts until it is named here.
BESIDE_THE_CORE = {
    "text and forms": "answers detokenizer token_bytes grammar forms trial trial_process",
    "transport": "wire streams server client process async_engine gate_wire gate_server gate_client",
    "detectors' turns": "turn turn_queue",
    "settings and refusals": "__init__ config sampling_params limits checkpoint_peek errors",
    "the first steps": "warm_up calibration cost_cache",
    "numbers": "books metrics trace",
    "steps that failed": "health recovery probe",
    "only if asked for, or on CUDA": "speculation lookup varlen",
}


def num_lines(*paths: Path) -> int:
    """Lines of files, docstrings and blank ones too."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def code_lines(path: Path) -> set[int]:
    """Numbers of the lines on which a part of a statement stands: no docstring, comment or blank line."""
    with tokenize.open(path) as file:
        tokens = [token for token in tokenize.generate_tokens(file.readline) if token.type not in NO_CODE]
    code = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            code -= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return code


def test_code_is_what_is_no_comment_docstring_or_blank_line(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '"""Two\nlines."""\n\n# why\nA = (\n    1,\n)\n\n\ndef f():\n    "Doc."\n    return """x\n"""\n'
    )
    assert code_lines(tmp_path / "a.py") == {5, 6, 7, 10, 12, 13}


def test_the_core_stays_small() -> None:
    beside = {name for names in BESIDE_THE_CORE.values() for name in names.split()}
    modules = {path.stem: path for path in ENGINE.glob("*.py")}
    assert beside <= modules.keys(), "named here and not there any more"
    core = [path for name, path in modules.items() if name not in beside]
    assert sum(len(code_lines(path)) for path in core) <= MOST_CODE_OF_THE_CORE
    assert num_lines(*core) <= MOST_OF_THE_CORE


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_takes_few_lines(name: str) -> None:
    """Its prompts and its model; what several families share, as a tower, belongs to none."""
    family = FAMILIES[name]
    files = {Path(inspect.getfile(part)) for part in (family.prompts, family.model)}  # type: ignore[arg-type]
    assert num_lines(*files) <= MOST_OF_A_FAMILY


@pytest.mark.parametrize("package", ["vlm_engine", "vision", "queues", "appliance"])
def test_no_file_is_long(package: str) -> None:
    files = sorted((ENGINE.parent / package).rglob("*.py"))
    assert files
    assert {str(path): num_lines(path) for path in files if num_lines(path) > MOST_OF_A_FILE} == {}
