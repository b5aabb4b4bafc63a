"""The parts of the documentation that are made of the code: pages of Markdown.

The command's from its parser, the wire contract's from the comments of the protos, the Python
packages' as lists of names, which mkdocstrings fills from docstrings when the site is built.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2 as pb

from dualform.cli.main import make_parser

ROOT = Path(__file__).resolve().parents[1]
# What users import, and what for.
PACKAGES = {
    "dualform.client": "Asking: `Client` and what it returns, raises and takes.",
    "dualform.record": "Recording: what stands in a training loop.",
    "dualform.record.integrations.transformers": "Recording under transformers' Trainer.",
    "dualform.record.integrations.lightning": "Recording under Lightning.",
    "dualform.index": "Making an index of a recording.",
    "dualform.replay": "Answers from training twice.",
    "dualform.plot": "Figures.",
    "dualform.explore": "The page in the browser, as a program starts it.",
    "dualform.serve": "The server, as a program starts it.",
    "dualform.store": "What lies on disk, and the errors of files.",
}


def sdk_pages() -> dict[str, str]:
    """A page for each package of `PACKAGES`, by its file's name."""
    return {f"{name}.md": _sdk_page(name, about) for name, about in PACKAGES.items()}


def _sdk_page(name: str, about: str) -> str:
    members = public_names(name)
    lines = [f"# {name}", "", about, "", f"::: {name}", "    options:", "      members:"]
    return "\n".join([*lines, *(f"        - {member}" for member in members)]) + "\n"


def public_names(name: str) -> list[str]:
    """What a package exports, in the order in which `__all__` has it."""
    module = importlib.import_module(name)
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == name]
    return list(getattr(module, "__all__", [key for key in own if not key.startswith("_")]))


def cli_page() -> str:
    """Every subcommand with its usage and options."""
    lines = ["# Command line", "", "Every command, as `--help` of each tells it.", ""]
    lines += ["What they do, with examples: [the command](../cli.md).", ""]
    for parser in _commands(make_parser()):
        lines += [f"## {parser.prog}", ""]
        lines += [_text(parser.description), ""] if parser.description else []
        lines += ["```text", _usage(parser), "```", ""]
        rows = [_option(action) for action in parser._actions if _shown(action)]
        if rows:
            lines += ["| argument | |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _commands(below)


def _usage(parser: argparse.ArgumentParser) -> str:
    """As argparse writes it, for lines of 90 letters whatever the terminal has."""
    formatter = argparse.HelpFormatter(parser.prog, width=90)
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    return formatter.format_help().strip()


def _shown(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)


def _option(action: argparse.Action) -> str:
    if isinstance(action, argparse._SubParsersAction):
        told = "; ".join(
            f"`{choice.dest}` {choice.help or ''}".strip() for choice in action._choices_actions
        )
        return f"| `{action.metavar}` | {_text(told)} |"
    value = str(action.metavar or ("|".join(map(str, action.choices or [])) or action.dest.upper()))
    names = ", ".join(action.option_strings)
    words = names or value
    if names and action.nargs != 0:
        words = f"{names} {value}"
    said = action.help or ""
    if action.required and names:
        said += "; required"
    elif action.choices and action.default is not None:
        said += f"; default {action.default}"
    return f"| `{_code(words)}` | {_text(said.removeprefix('; '))} |"


def wire_page() -> str:
    """Services, messages and enums of the protos, with the comments that stand there."""
    lines = ["# Wire contract", ""]
    for file in _files():
        lines += [f"## {file.name}", "", _file_comment(file.name), ""]
        comments = _comments(file)
        for place, service in enumerate(file.service):
            lines += _section(service.name, comments, (6, place), "| call | takes | gives | |")
            for number, method in enumerate(service.method):
                gives = "stream of " if method.server_streaming else ""
                gives += _type(method.output_type)
                told = comments.get((6, place, 2, number), "")
                lines.append(f"| `{method.name}` | {_type(method.input_type)} | {gives} | {told} |")
        for place, message in enumerate(file.message_type):
            lines += _section(message.name, comments, (4, place), "| | field | type | |")
            for number, field in enumerate(message.field):
                told = comments.get((4, place, 2, number), "")
                kind = _kind(field, message)
                lines.append(f"| {field.number} | `{field.name}` | {kind} | {told} |")
            for number, choice in enumerate(message.oneof_decl):
                told = comments.get((4, place, 8, number), "")
                lines += ["", f"`{choice.name}`: {told}"] if told else []
            if not message.field:
                lines[-2:] = ["It has no fields."]
        for place, enum in enumerate(file.enum_type):
            lines += _section(enum.name, comments, (5, place), "| | value | |")
            for number, value in enumerate(enum.value):
                told = comments.get((5, place, 2, number), "")
                lines.append(f"| {value.number} | `{value.name}` | {told} |")
        lines.append("")
    return "\n".join(lines)


def _section(
    name: str, comments: dict[tuple[int, ...], str], path: tuple[int, ...], head: str
) -> list[str]:
    """A heading, what is said of it, and the head of a table."""
    said = [comments[path], ""] if comments.get(path) else []
    return ["", f"### {name}", "", *said, head, "|---" * (head.count("|") - 1) + "|"]


def _comments(file: pb.FileDescriptorProto) -> dict[tuple[int, ...], str]:
    """What stands above or beside each declaration, by its path in the descriptor."""
    return {
        tuple(at.path): _text(" ".join((at.leading_comments or at.trailing_comments).split()))
        for at in file.source_code_info.location
    }


def _files() -> Iterator[pb.FileDescriptorProto]:
    """The protos with their comments, as buf reads them."""
    buf = Path(sys.executable).with_name("buf")
    with tempfile.TemporaryDirectory() as name:
        image = Path(name) / "image.binpb"
        subprocess.run([str(buf), "build", "protos", "-o", str(image)], cwd=ROOT, check=True)
        files = pb.FileDescriptorSet.FromString(image.read_bytes()).file
    # The questions before the administrator's.
    yield from sorted(files, key=lambda file: "attribution" not in file.name)


def _file_comment(name: str) -> str:
    """What a proto begins with; it belongs to no declaration, so the image does not have it."""
    lines = (ROOT / "protos" / name).read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if not line.startswith("//"))
    return _text(
        " ".join(" ".join(line.removeprefix("//").strip() for line in lines[:first]).split())
    )


def _kind(field: pb.FieldDescriptorProto, message: pb.DescriptorProto) -> str:
    kind = field.Type.Name(field.type).removeprefix("TYPE_").lower()
    text = _type(field.type_name) if field.type_name else f"`{kind}`"
    for entry in message.nested_type:
        if entry.options.map_entry and field.type_name.endswith(f".{message.name}.{entry.name}"):
            key, value = (_kind(each, entry) for each in entry.field)
            return f"map of {key} to {value}"
    if field.label == pb.FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {text}"
    if field.proto3_optional:
        return f"optional {text}"
    if field.HasField("oneof_index"):
        return f"{text}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return text


def _type(full: str) -> str:
    name = full.rpartition(".")[2]
    return f"[{name}](#{name.lower()})"


def _text(said: str | None) -> str:
    """Prose for a cell of a table, in which nothing but code in backticks is markup."""
    parts = (said or "").replace("\n", " ").split("`")
    for place in range(0, len(parts), 2):
        for letter in "\\*_<[":
            parts[place] = parts[place].replace(letter, f"\\{letter}" if letter != "<" else "&lt;")
    return "`".join(part.replace("|", "\\|") for part in parts)


def _code(said: str) -> str:
    return said.replace("|", "\\|")
