"""Asks every rpc with grpc-requests over TLS with a token; it knows the service by reflection.

python requests_client.py ADDRESS CA.pem TOKEN QUESTIONS.json ANSWERS.json

Runs in an environment of its own, without dualform; run.py says what is asked, and compares.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import grpc
import grpc_requests

SERVICE = "dualform.v1.AttributionService"
HEALTH = "grpc.health.v1.Health"


class Token(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[misc]
    grpc.StreamStreamClientInterceptor,  # type: ignore[misc]
):
    """Sends a word with every call, reflection's too, to which grpc-requests takes no metadata."""

    def __init__(self, word: str) -> None:
        self.word = word

    def _with(self, details: Any) -> Any:
        metadata = [*(details.metadata or ()), ("authorization", f"Bearer {self.word}")]
        return details._replace(metadata=metadata)

    def intercept_unary_unary(self, ask: Any, details: Any, request: Any) -> Any:
        return ask(self._with(details), request)

    intercept_unary_stream = intercept_unary_unary
    intercept_stream_stream = intercept_unary_unary


def main(address: str, authority: str, word: str, questions: str, answers: str) -> None:
    """Ask all of them, in order."""
    token = Token(word)
    client = grpc_requests.Client(
        address,
        ssl=True,
        credentials={"root_certificates": Path(authority).read_bytes()},
        interceptors=[token],
    )
    found: list[dict[str, Any]] = []
    for question in json.loads(Path(questions).read_text()):
        token.word = "wrong" if question["wrong_token"] else word
        service = HEALTH if question["method"] == "Check" else SERVICE
        try:
            response = client.request(service, question["method"], question["request"])
            found.append({"response": response if isinstance(response, dict) else list(response)})
        except grpc.RpcError as error:
            found.append({"code": error.code().value[0]})
    Path(answers).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
