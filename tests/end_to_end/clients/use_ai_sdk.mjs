// AI SDK: a text, a stream, a tool in several steps, an object, embeddings; by chats and responses.
import assert from "node:assert/strict";

import { openai } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "providerName",
  apiKey: process.env.OPENAI_API_KEY,
  baseURL: process.env.OPENAI_BASE_URL,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
// The second one answers with responses.
const models = [provider("assistant"), openai("assistant")];

for (const model of models) {
  const { text, usage } = await generateText({
    model,
    prompt: "Write a vegetarian lasagna recipe for 4 people.",
  });
  console.log(text);

  let streamed = "";
  for await (const part of streamText({ model, prompt: "Invent a new holiday." }).textStream) {
    streamed += part;
  }

  const weather = tool({
    description: "Get the weather in a location",
    inputSchema: z.object({ location: z.string().describe("The location") }),
    execute: async ({ location }) => ({ location, temperature: 72 }),
  });
  const asked = {
    model,
    tools: { weather },
    stopWhen: stepCountIs(5),
    prompt: "What is the weather in San Francisco?",
  };
  const { text: told, steps } = await generateText(asked);
  const inPieces = streamText(asked);
  await inPieces.consumeStream();

  const { output } = await generateText({
    model,
    output: Output.object({ schema: z.object({ name: z.string(), steps: z.array(z.string()) }) }),
    prompt: "Generate a lasagna recipe.",
  });

  assert.equal(text, "A weir is a low dam across a river.");
  assert.ok(usage.outputTokens > 0);
  assert.equal(streamed, text);
  assert.equal(told, 'It is {"location":"Tokyo","temperature":72}');
  assert.equal(steps.length, 2);
  assert.equal(await inPieces.text, told);
  assert.equal(typeof output.name, "string");
}

const { embeddings } = await embedMany({
  model: provider.embeddingModel("embedder"),
  values: ["sunny day at the beach", "rainy afternoon in the city"],
});

assert.deepEqual(embeddings.map((one) => one.length), [2, 2]);
