// Ask one API in every way of the AI SDK, and print what came as one JSON object.
//     node answers.mjs BASE_URL MODEL

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamObject, streamText } from "ai";
import { z } from "zod";

const [baseURL, name] = process.argv.slice(2);
let jobId = null; // of the latest answer
const provider = createOpenAICompatible({
  name: "jitney",
  baseURL,
  fetch: async (...asked) => {
    const answer = await fetch(...asked);
    jobId = answer.headers.get("x-jitney-job-id");
    return answer;
  },
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider(name);
const question = {
  system: "Be brief.",
  prompt: "What is the capital of France?",
  temperature: 0,
  maxOutputTokens: 24,
  maxRetries: 0,
};
const boat = {
  schema: z.object({ name: z.string().max(12), kind: z.enum(["ship", "raft"]), oars: z.number().int().min(0).max(9) }),
  prompt: "Describe a boat.",
  temperature: 0.9,
  seed: 3,
  maxOutputTokens: 200,
  maxRetries: 0,
};

async function whole() {
  const { text, finishReason, usage } = await generateText({ model, ...question });
  return { text, finishReason, usage };
}

async function streamed() {
  const parts = [];
  const result = streamText({ model, ...question });
  for await (const part of result.textStream) parts.push(part);
  return { parts, text: await result.text, finishReason: await result.finishReason, usage: await result.usage };
}

async function object() {
  const { object, finishReason } = await generateObject({ model, ...boat });
  return { object, finishReason };
}

async function objectStreamed() {
  const partials = [];
  const result = streamObject({ model, ...boat });
  for await (const partial of result.partialObjectStream) partials.push(partial);
  return { partials, object: await result.object };
}

async function refusal(asked) {
  try {
    await generateText({ ...question, ...asked });
  } catch (error) {
    return { name: error.name, status: error.statusCode, message: error.message, isRetryable: error.isRetryable };
  }
  return null;
}

async function aborted() {
  const controller = new AbortController();
  const result = streamText({
    model,
    ...question,
    prompt: "Tell me a very long story.",
    maxOutputTokens: 4000,
    providerOptions: { jitney: { ignore_eos: true } },
    abortSignal: controller.signal,
  });
  const types = new Set();
  for await (const part of result.fullStream) {
    types.add(part.type);
    if (part.type === "text-delta") controller.abort();
  }
  return { jobId, types: [...types] };
}

console.log(
  JSON.stringify({
    whole: await whole(),
    streamed: await streamed(),
    object: await object(),
    objectStreamed: await objectStreamed(),
    unknownModel: await refusal({ model: provider("no-such-model") }),
    tooLong: await refusal({ model, prompt: "word ".repeat(9000) }),
    aborted: await aborted(),
  }),
);
