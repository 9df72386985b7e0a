// The npm client's part of the conformance suite: asks as an application would, and prints what it found as JSON.
import OpenAI from "openai";

const [baseURL, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const asked = { model, messages: [{ role: "user", content: "hi" }], max_tokens: 12, temperature: 0 };
const found = {};

found.models = (await client.models.list()).data.map((each) => each.id);
found.plain = (await client.chat.completions.create(asked)).choices[0].message.content;

found.streamed = "";
const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  found.streamed += chunk.choices[0]?.delta?.content ?? "";
  if (chunk.usage) found.streamed_tokens = chunk.usage.completion_tokens;
}

const schema = {
  type: "object",
  properties: { to: { type: "string", enum: ["north", "south"] } },
  required: ["to"],
  additionalProperties: false,
};
const structured = await client.chat.completions.create({
  ...asked,
  max_tokens: 200,
  response_format: { type: "json_schema", json_schema: { name: "flight", schema, strict: true } },
});
found.structured = JSON.parse(structured.choices[0].message.content);

const tools = [{ type: "function", function: { name: "fly", parameters: schema } }];
const called = await client.chat.completions.create({ ...asked, max_tokens: 200, tools, tool_choice: "required" });
found.tool = called.choices[0].message.tool_calls[0].function.name;

try {
  await client.chat.completions.create({ ...asked, temperature: 99 });
} catch (error) {
  found.refused = [error.status, error instanceof OpenAI.BadRequestError];
}

const leaving = await client.chat.completions.create({ ...asked, max_tokens: 900, stream: true });
for await (const _ of leaving) break; // closes the connection
found.left = true;

console.log(JSON.stringify(found));
