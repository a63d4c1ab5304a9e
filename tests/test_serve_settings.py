"""Where settings come from, which of them win, and what is said of one that is none."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import TypeAdapter, ValidationError

from laconic.commands.command_line import app
from laconic.errors import UsageError
from serve.settings.server_settings import MIB, Settings
from serve.settings.settings_file import load_settings

COMMAND = typer.main.get_command(app).commands["serve"].load()  # type: ignore[attr-defined]
DOCS = Path(__file__).parents[1] / "docs" / "serve.md"


def test_the_page_lists_every_setting_with_its_default_and_meaning() -> None:
    section = DOCS.read_text(encoding="utf-8").partition("\n## Settings\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \|([^|]*)\|", section, re.MULTILINE))
    assert sorted(rows) == sorted(Settings.model_fields)
    meanings = dict(re.findall(r"^\| `(\w+)` \|[^|]*\| (.*) \|$", section, re.MULTILINE))
    plain = {name: re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text) for name, text in meanings.items()}
    assert plain == {name: field.description for name, field in Settings.model_fields.items()}
    given = {name: default.strip(" `") for name, default in rows.items() if default.strip()}
    assert Settings.model_validate(given) == Settings()
    undocumented = [Settings.model_fields[name] for name in set(rows) - set(given)]
    assert all(field.default_factory or field.default in (None, ()) for field in undocumented)


def test_every_setting_is_an_option_whose_help_names_its_default() -> None:
    options = {parameter.name: getattr(parameter, "help", "") for parameter in COMMAND.params}
    secret = {"api_keys"}  # other users of the machine can read the command line
    assert set(Settings.model_fields) - set(options) == secret
    defaults = {name: re.search(r"default: (\d[^;,]*)\.$", text or "") for name, text in options.items()}
    given = {name: found[1] for name, found in defaults.items() if found}
    assert Settings.model_validate(given) == Settings()
    numbers = {name for name, field in Settings.model_fields.items() if type(field.default) in (int, float)}
    assert numbers <= set(given)


def test_an_option_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("max_body: 1 MiB\ndeadline: 5\nqueue_seconds: 0.5\nunproven: true\n")
    environment = {"LACONIC_SERVE_MAX_BODY": "2 MiB", "LACONIC_SERVE_DEADLINE": "6", "HOME": "/"}
    settings = load_settings({"max_body": "3 MiB", "threads": None}, environment, file)
    assert settings == Settings(max_body=3 * MIB, deadline=6, queue_seconds=0.5, unproven=True)
    assert load_settings({}, {}) == Settings()
    names = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP", "PORT_80_TCP_ADDR"]
    assert load_settings({}, {f"LACONIC_SERVE_{name}": "tcp://10.0.0.1:80" for name in names}) == Settings()
    with pytest.raises(UsageError, match="there is no settings file"):
        load_settings({}, {}, tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("options", "environment", "content", "message"),
    [
        ({}, {}, "max_bodi: 5", "server.yaml: unknown key 'max_bodi'. Did you mean 'max_body'?"),
        ({}, {"LACONIC_SERVE_DEADLIN": "5"}, "", "environment.*unknown key 'deadlin'. Did you mean 'deadline'?"),
        ({"deadline": -1}, {}, "", "the options: deadline: input should be greater than 0, got -1$"),
        ({"sha256": {"": "9f86"}}, {}, "", "the options: sha256: string should match pattern [^;]*, got '9f86'$"),
        ({}, {"LACONIC_SERVE_MAX_BODY": "much"}, "", "environment.*max_body: expected a size"),
        ({}, {"LACONIC_SERVE_DEADLINE": "inf"}, "", "deadline: .*finite"),
        ({}, {}, "- 5", "server.yaml is not a settings file: expected keys and values, got list"),
        ({}, {}, "{{{", "server.yaml is not valid YAML"),
    ],
)
def test_what_is_no_setting_is_refused_with_its_source(
    tmp_path: Path, options: dict[str, Any], environment: dict[str, str], content: str, message: str
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(content or "{}")
    with pytest.raises(UsageError, match=message):
        load_settings(options, environment, file)


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        Settings().deadline = 5  # type: ignore[misc]
    assert TypeAdapter(Settings).validate_json(Settings().model_dump_json()) == Settings()
