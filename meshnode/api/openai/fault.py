"""Faults as OpenAI's API tells them: {"error": {"message", "type", "param", "code"}}, with a hint of ours."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from ...errors import MeshError

# (status, type) of our codes; those of codes that are not here follow their exit status
_OF_CODE = {
    "unknown_model": (404, "invalid_request_error", "model", "model_not_found"),
    "ambiguous_model": (400, "invalid_request_error", "model", "ambiguous_model"),
    "context_exceeded": (400, "invalid_request_error", None, "context_length_exceeded"),
    "no_chat_template": (400, "invalid_request_error", "messages", "no_chat_template"),
    "bad_bias": (400, "invalid_request_error", "logit_bias", "bad_bias"),
    "bad_grammar": (400, "invalid_request_error", "response_format", "bad_grammar"),
    "deadline": (504, "server_error", None, "deadline"),
    "internal": (500, "server_error", None, "internal"),
}
RETRY_S = 1  # what a client is told to wait when every session is taken
VOCABULARY = "outside the vocabulary"  # the engine's words for an id that the model lacks


class Fault(Exception):
    """What a client is told, with its HTTP status."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_value",
        status: int = 400,
        kind: str = "invalid_request_error",
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.kind = kind
        self.hint = hint

    def as_json(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error | ({"hint": self.hint} if self.hint else {})}

    def response(self) -> JSONResponse:
        headers = {"www-authenticate": "Bearer"} if self.status == 401 else {}
        if self.status == 503:
            headers["retry-after"] = str(RETRY_S)
        return JSONResponse(self.as_json(), self.status, headers)


def of(error: MeshError) -> Fault:
    """A MeshError in OpenAI's shape."""
    if VOCABULARY in error.message:
        return Fault("a token of the prompt is outside the vocabulary", param="prompt", code="bad_prompt")
    if error.code in _OF_CODE:
        status, kind, param, code = _OF_CODE[error.code]
        return Fault(error.message, param=param, code=code, status=status, kind=kind, hint=error.hint)
    if error.exit_status in (2, 3):
        param = "prompt" if error.code == "bad_prompt" else None
        return Fault(error.message, param=param, code=error.code, hint=error.hint)
    return Fault(error.message, code=error.code, status=503, kind="server_error", hint=error.hint)
