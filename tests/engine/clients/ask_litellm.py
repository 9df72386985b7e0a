"""LiteLLM's part of the conformance suite, run by its own environment: asks, and prints what it found as JSON."""

import asyncio
import json
import sys

import litellm

url, key, model = sys.argv[1:]
MESSAGES = [{"role": "user", "content": "hi"}]
ASKED = {
    "model": f"openai/{model}",
    "api_base": url,
    "api_key": key,
    "messages": MESSAGES,
    "max_tokens": 12,
    "temperature": 0,
    "num_retries": 0,
}
SCHEMA = {
    "type": "object",
    "properties": {"to": {"type": "string", "enum": ["north", "south"]}},
    "required": ["to"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "fly", "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"name": "flight", "schema": SCHEMA, "strict": True}}


async def streamed() -> tuple[str, int | None]:
    text, tokens = "", None
    stream = await litellm.acompletion(**ASKED, stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = getattr(chunk, "usage", None)
        tokens = usage.completion_tokens if usage else tokens
    return text, tokens


found: dict[str, object] = {"plain": litellm.completion(**ASKED).choices[0].message.content}
found["streamed"], found["streamed_tokens"] = asyncio.run(streamed())
long = {**ASKED, "max_tokens": 200}
found["structured"] = json.loads(litellm.completion(**long, response_format=FORM).choices[0].message.content)
called = litellm.completion(**long, tools=[TOOL], tool_choice="required")
found["tool"] = called.choices[0].message.tool_calls[0].function.name
try:
    litellm.completion(**{**ASKED, "temperature": 99})
except litellm.BadRequestError as error:
    found["refused"] = [error.status_code, True]
print(json.dumps(found))
