"""Run a language-model study: train, ask, train again; leave what was found, for people and JSON.

    python experiments/language_model.py experiments/aesop_lm.yaml --data DIR --out DIR

Writes NAME.md, NAME.json and NAME.html to --out, and prints the passages. The exit status is 2
where the study can't be read, or the second training was not the first one.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

from dualform.replay import ReplayError
from runner import lm_ask, lm_config, lm_report, lm_text
from runner.config import ConfigError


def main() -> int:
    arguments = _arguments()
    try:
        study = lm_config.load(arguments.study)
        name = arguments.variant or study.default
        if name not in study.variants:
            raise ConfigError(
                f"no variant {name!r} in {arguments.study}; there are {', '.join(study.variants)}"
            )
        variant = study.variants[name]
        text = lm_text.load(study.text, arguments.data, variant.tokens)
        answers, facts = lm_ask.run(study, variant, text)
    except (ConfigError, ReplayError, FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    command = "python experiments/language_model.py " + shlex.join(
        [f"experiments/{arguments.study.name}", "--data", "DIR", "--out", "DIR"]
        + (["--variant", name] if arguments.variant else [])
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = lm_report.data(study, name, answers, facts, command)
    for suffix, content in (
        ("md", lm_report.page(study, name, answers, facts, command)),
        ("json", json.dumps(found, indent=1, ensure_ascii=False) + "\n"),
        ("html", lm_report.web(study, answers)),
    ):
        (arguments.out / f"{study.name}.{suffix}").write_text(content, encoding="utf-8")
    print(lm_report.terminal(answers))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", type=Path, help="the study's YAML file")
    parser.add_argument(
        "--data", type=Path, required=True, help="folder that holds aesop/ and wikitext-2/"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for what was found")
    parser.add_argument("--variant", help="of the study; its default where none is named")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
