// Requests to the server. The API key is a variable of this module: it ends with the tab.

let key = null;

/** An answer that is not an image: `code` names a text of texts.js, `values` are its values. */
export class ApiError extends Error {
  constructor(code, values = {}, field = null) {
    super(code);
    this.code = code;
    this.values = values;
    this.field = field;
  }
}

export function setKey(value) {
  key = value;
}

async function request(path, options = {}) {
  const headers = { ...options.headers, ...(key === null ? {} : { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("unreachable");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw errorOf(response.status, body.error ?? {}, response.headers.get("Retry-After"));
}

function errorOf(status, { message = "", param = null }, retryAfter) {
  const values = { message: message || `HTTP ${status}`, seconds: retryAfter ?? "5" };
  const codes = { 401: "wrongKey", 422: "invalid", 429: "full", 503: "unavailable", 504: "timeout" };
  return new ApiError(codes[status] ?? "failed", values, param);
}

/** "ready", "loading", "draining" or "failed"; null if the server cannot be reached. Needs no key. */
export async function serverState() {
  return fetch("health", { cache: "no-store" })
    .then((response) => response.json())
    .then((health) => health.state, () => null);
}

/** The model that is served: sizes, ratios, defaults and bounds. */
export async function loadModel() {
  return (await (await request("v1/models")).json()).data[0];
}

/**
 * Draw one image.
 * @param settings of POST /v1/images/generations
 * @param report called with each progress event: {position, step, steps}
 * @param signal of an AbortController: the server stops at its next step
 * @returns {{blob: Blob, seconds: number, batch: number, seed: number}}
 */
export async function draw(settings, report, signal) {
  const body = JSON.stringify({ ...settings, stream: true });
  const headers = { "Content-Type": "application/json" };
  const response = await request("v1/images/generations", { method: "POST", body, headers, signal });
  for await (const event of events(response, signal)) {
    if (event.type === "image_generation.progress") report(event);
    if (event.type === "error") throw errorOf(event.error.code === "timeout" ? 504 : 500, event.error, null);
    if (event.type === "image_generation.completed") {
      const bytes = Uint8Array.from(atob(event.b64_json), (character) => character.charCodeAt(0));
      const blob = new Blob([bytes], { type: "image/png" });
      return { blob, seconds: event.seconds, batch: event.batch, seed: event.seed };
    }
  }
  throw new ApiError("interrupted");
}

// The server writes each event as one "data:" line. EventSource reads such streams too, but cannot send a POST.
async function* events(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").find((line) => line.startsWith("data: "));
        if (data) yield JSON.parse(data.slice(6));
      }
    }
  } catch (error) {
    if (signal.aborted || error instanceof SyntaxError) throw error;
    throw new ApiError("interrupted");
  } finally {
    reader.cancel().catch(() => {});
  }
}
