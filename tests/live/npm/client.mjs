// What OpenAI's own client for Node gets from a mesh: node client.mjs URL MODEL; prints one JSON document
import OpenAI from "openai";

const [, , base, model] = process.argv;
const client = new OpenAI({baseURL: `${base}/v1`, apiKey: "none", maxRetries: 0});
const messages = [{role: "user", content: "Count from one to five."}];
const said = {};

const chat = await client.chat.completions.create({model, messages, max_tokens: 16, temperature: 0});
said.chat = chat.choices[0].message.content;
said.usage = chat.usage;

said.streamed = "";
const stream = await client.chat.completions.create({
  model, messages, max_tokens: 16, temperature: 0, stream: true, stream_options: {include_usage: true},
});
for await (const part of stream) {
  said.streamed += part.choices[0]?.delta?.content ?? "";
  said.streamedUsage = part.usage ?? said.streamedUsage;
}

const cut = said.chat.slice(3, 6);
const stopped = await client.chat.completions.create({model, messages, max_tokens: 16, temperature: 0, stop: cut});
said.cut = cut;
said.stopped = stopped.choices[0];

const told = await client.chat.completions.create({
  model, messages, max_tokens: 3, temperature: 0, logprobs: true, top_logprobs: 2,
});
said.logprobs = told.choices[0].logprobs.content;

const schema = {
  type: "object",
  properties: {name: {type: "string", maxLength: 8}, age: {type: "integer", minimum: 0, maximum: 99}},
  required: ["name", "age"], additionalProperties: false,
};
const kept = await client.chat.completions.create({
  model, messages, max_tokens: 64, temperature: 0,
  response_format: {type: "json_schema", json_schema: {name: "person", strict: true, schema}},
});
said.kept = JSON.parse(kept.choices[0].message.content);

said.errors = [];
for (const change of [{model: "nobody"}, {temperature: 9}, {stop: [""]}, {messages: []}]) {
  try {
    await client.chat.completions.create({model, messages, max_tokens: 2, ...change});
  } catch (error) {
    said.errors.push([error.constructor.name, error.status, error.param, error.code]);
  }
}
said.models = (await client.models.list()).data.map((one) => one.id);
console.log(JSON.stringify(said));
