"""The HTTP API's description, as OpenAPI has it. A test asks what it describes, and more."""

from __future__ import annotations

from typing import Any

from ..requests import MAX_BIAS, MAX_LOGPROBS
from .asked import MAX_CHOICES, MAX_STOP, MAX_STOPS

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}


def _between(low: float, high: float, kind: str = "number") -> Schema:
    return {"type": kind, "minimum": low, "maximum": high}


def _list(items: Schema, most: int, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


_MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {
            "anyOf": [
                {"type": "string", "minLength": 1},
                _list(
                    {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string", "minLength": 1}},
                        "required": ["type", "text"],
                    },
                    64,
                    1,
                ),
            ]
        },
        "name": _TEXT,
    },
    "required": ["role", "content"],
    "additionalProperties": False,
}
_MESSAGES = _list(_MESSAGE, 1024, 1)
_FORMAT: Schema = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": _OBJECT},
    "required": ["type"],
}
_TOKEN_IDS = _list(_between(0, (1 << 31) - 1, "integer"), 1 << 16, 1)
_COMMON: dict[str, Schema] = {
    "model": {"type": "string", "minLength": 1, "maxLength": 200},
    "temperature": _between(0, 2),
    "top_p": _between(0, 1),
    "n": _between(1, MAX_CHOICES, "integer"),
    "stream": _FLAG,
    "stream_options": {"type": "object", "properties": {"include_usage": _FLAG}, "additionalProperties": False},
    "stop": {
        "anyOf": [
            {"type": "string", "minLength": 1, "maxLength": MAX_STOP},
            _list({"type": "string", "minLength": 1, "maxLength": MAX_STOP}, MAX_STOPS),
        ]
    },
    "max_tokens": _between(0, 1 << 20, "integer"),
    "presence_penalty": _between(-2, 2),
    "frequency_penalty": _between(-2, 2),
    "logit_bias": {"type": "object", "additionalProperties": _between(-MAX_BIAS, MAX_BIAS)},
    "seed": _between(-(1 << 63), (1 << 63) - 1, "integer"),
    "user": _TEXT,
    "response_format": _FORMAT,
    "top_k": _between(0, 1 << 20, "integer"),
    "min_p": _between(0, 1),
    "typical_p": _between(0, 1),
    "repeat_penalty": _between(0.01, 100),
    "repeat_last_n": _between(0, (1 << 32) - 1, "integer"),
    "grammar": _TEXT,
}
_CHAT = _COMMON | {
    "messages": _MESSAGES,
    "max_completion_tokens": _between(0, 1 << 20, "integer"),
    "logprobs": _FLAG,
    "top_logprobs": _between(0, MAX_LOGPROBS, "integer"),
}
_COMPLETION = _COMMON | {
    "prompt": {
        "anyOf": [{"type": "string", "minLength": 1}, _TOKEN_IDS, _list(_TEXT, MAX_CHOICES, 1), _list(_TOKEN_IDS, 4, 1)]
    },
    "logprobs": _between(0, MAX_LOGPROBS, "integer"),
    "echo": _FLAG,
    "best_of": _between(1, MAX_CHOICES, "integer"),
}
_ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
                "hint": _TEXT,
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_FAULTS = {"400": "a parameter is at fault", "401": "no key", "403": "a page of another site", "404": "no such model"}
_FAULTS |= {"408": "too slow", "413": "too long", "415": "no JSON", "503": "no route, or no session is free"}
_FAULTS |= {"504": "the mesh was too slow"}

_UNREADY = {"503": {"description": "it does not", "content": {"application/json": {"schema": _OBJECT}}}}


def openapi() -> dict[str, Any]:
    """The document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "meshnode",
            "version": "1",
            "description": "What of OpenAI's API a mesh answers, and what it tells of itself.",
        },
        "paths": {
            "/v1/chat/completions": {"post": _post("Answer a chat", _CHAT, ["model", "messages"], streams=True)},
            "/v1/completions": {"post": _post("Go on from a text", _COMPLETION, ["model", "prompt"], streams=True)},
            "/tokenize": {
                "post": _post(
                    "The ids of a text or a chat",
                    {"model": _COMMON["model"], "prompt": {"type": "string", "minLength": 1}, "messages": _MESSAGES},
                    ["model"],
                )
            },
            "/v1/models": {"get": _get("The models of the mesh")},
            "/v1/models/{model}": {
                "get": _get("One of them")
                | {"parameters": [{"name": "model", "in": "path", "required": True, "schema": _COMMON["model"]}]}
            },
            "/health": {
                "get": _get("Whether a whole route exists: 503 if not", more={"503": _json("it does not", _OBJECT)})
            },
            "/health/ready": {"get": _get("The same", more={"503": _json("it does not", _OBJECT)})},
            "/health/live": {"get": _get("Whether the node runs")},
            "/metrics": {"get": _get("Prometheus' text format", "text/plain")},
            "/mesh": {"get": _get("The mesh as this node sees it")},
            "/openapi.json": {"get": _get("This document")},
        },
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _json(what: str, schema: Schema, kind: str = "application/json") -> dict[str, Any]:
    return {"description": what, "content": {kind: {"schema": schema}}}


def _faults() -> dict[str, Any]:
    return {status: _json(what, _ERROR) for status, what in _FAULTS.items()}


def _get(what: str, kind: str = "application/json", more: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"summary": what, "responses": {"200": _json("ok", {}, kind)} | _faults() | (more or {})}


def _post(what: str, properties: dict[str, Schema], required: list[str], *, streams: bool = False) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    good = _json("ok", _OBJECT)
    if streams:
        good["content"]["text/event-stream"] = {"schema": _TEXT}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"summary": what, "requestBody": body, "responses": {"200": good} | _faults()}
