// What OpenAI's client for JavaScript gets from a server, as JSON: node openai_client.js URL KEY IMAGE
const { createReadStream, readFileSync } = require("node:fs");
const OpenAI = require("openai");

const [baseURL, apiKey, path] = process.argv.slice(2);
const { images } = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const file = new File([readFileSync(path)], "red.png", { type: "image/png" });
const fields = { prompt: "fox", size: "64x48", seed: 3, steps: 4 };

async function errorOf(request) {
  const error = await request.then(() => null, (reason) => reason);
  return { type: error.constructor.name, status: error.status, param: error.param, message: error.message };
}

async function typesOf(request) {
  const types = [];
  for await (const event of await request) types.push(event.type);
  return types;
}

async function main() {
  const edit = { ...fields, strength: 0.5, tome_ratio: 0 };
  const results = {
    generated: await images.generate({ ...fields, n: 2, response_format: "b64_json" }),
    url: await images.generate({ ...fields, response_format: "url", style: "vivid" }),
    streamed: await typesOf(images.generate({ ...fields, stream: true })),
    edited: await images.edit({ ...edit, image: file }),
    editedFromTheDisk: await images.edit({ ...edit, image: createReadStream(path) }), // in chunks
    editedOne: await images.edit({ ...edit, image: [file], response_format: "url" }),
    editStreamed: await typesOf(images.edit({ ...edit, image: file, stream: true })),
    size: await errorOf(images.generate({ ...fields, size: "1024x1024" })),
    model: await errorOf(images.generate({ ...fields, model: "dall-e-3" })),
    mask: await errorOf(images.edit({ ...edit, image: file, mask: file })),
    two: await errorOf(images.edit({ ...edit, image: [file, file] })),
  };
  console.log(JSON.stringify(results));
}

main();
