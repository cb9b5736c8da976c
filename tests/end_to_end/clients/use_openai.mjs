// openai for Node: chat, a stream, functions, structured output, embeddings, responses.
import assert from "node:assert/strict";

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI();
const messages = [
  { role: "developer", content: "Talk like a pirate." },
  { role: "user", content: "Are semicolons optional in JavaScript?" },
];
const completion = await client.chat.completions.create({ model: "assistant", messages });
console.log(completion.choices[0].message.content);

const stream = await client.chat.completions.create({ model: "assistant", messages, stream: true });
let streamed = "";
for await (const chunk of stream) streamed += chunk.choices[0]?.delta?.content ?? "";

const runner = client.chat.completions.runTools({
  model: "assistant",
  messages: [{ role: "user", content: "How is the weather this week?" }],
  tools: [
    {
      type: "function",
      function: {
        name: "getWeather",
        description: "Get the weather of a city",
        parse: JSON.parse,
        parameters: { type: "object", properties: { city: { type: "string" } } },
        function: ({ city }) => `sunny in ${city}`,
      },
    },
  ],
});
const told = await runner.finalContent();

const Event = z.object({ name: z.string(), participants: z.array(z.string()) });
const event = await client.chat.completions.parse({
  model: "assistant",
  messages: [{ role: "user", content: "Alice and Bob are going to a science fair." }],
  response_format: zodResponseFormat(Event, "event"),
});
const embedding = await client.embeddings.create({ model: "embedder", input: "a fox" });

const response = await client.responses.create({ model: "assistant", input: "What is a weir?" });
let inEvents = "";
const events = await client.responses.create({
  model: "assistant",
  input: "What is a weir?",
  stream: true,
});
for await (const event of events) {
  if (event.type === "response.output_text.delta") inEvents += event.delta;
}

assert.equal(completion.choices[0].message.content, "A weir is a low dam across a river.");
assert.equal(streamed, completion.choices[0].message.content);
assert.equal(response.output_text, streamed);
assert.equal(inEvents, streamed);
assert.equal(told, "It is sunny in Tokyo");
Event.parse(event.choices[0].message.parsed);
assert.equal(embedding.data[0].embedding.length, 2);
