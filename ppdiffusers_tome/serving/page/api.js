// Requests to the server. The API key is a variable of this module: it ends with the tab.

import { eventReader } from "./events.js";

const SILENCE = 10_000; // ms without an event; the server sends one every five seconds
const PATIENCE = 4_000; // ms to wait for an answer of /health
const POLL = 2_000; // ms between two requests to a server that does not answer

let key = null;

/** An answer other than an image: `code` is the name of a text in texts.js, `values` are its values. */
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
  } catch {
    throw new ApiError("unreachable");
  }
  if (response.ok) return response;
  throw errorOf(response.status, bodyOf(await response.text()), response.headers.get("Retry-After"));
}

function errorOf(status, { message = "", param = null }, retryAfter) {
  const values = { message: message || `HTTP ${status}`, seconds: retryAfter ?? "5" };
  const codes = { 401: "wrongKey", 422: "invalid", 429: "full", 503: "unavailable", 504: "timeout" };
  return new ApiError(codes[status] ?? "failed", values, param);
}

/** "ready", "loading", "draining" or "failed"; null if the server does not answer. Needs no key. */
export async function serverState() {
  return fetch("health", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) })
    .then((response) => response.json())
    .then((health) => health.state, () => null);
}

export const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Ask for the server's state until `isReached` accepts it, or `isWanted` returns false. */
export async function untilState(isReached, isWanted = () => true) {
  while (isWanted() && !isReached(await serverState())) await pause(POLL);
}

/** The model that is served: sizes, ratios, defaults and bounds. */
export async function loadModel() {
  return (await (await request("v1/models")).json()).data[0];
}

/** How many tokens a prompt has: {tokens, max_tokens, cut}. */
export async function countTokens(prompt) {
  const headers = { "Content-Type": "application/json" };
  return (await request("v1/tokens", { method: "POST", body: JSON.stringify({ prompt }), headers })).json();
}

/**
 * Generate one image. This uses XMLHttpRequest: Chromium reports a finished fetch as aborted if its body was read as a
 * stream.
 * @param settings of POST /v1/images/generations
 * @param onProgress called with each progress event: {position, step, steps}
 * @param onSilence called with true when no event has come for ten seconds, and with false when one comes again
 * @param signal of an AbortController: the server stops at its next step
 * @returns {Promise<{blob: Blob, seconds: number, batch: number, seed: number, steps: number[]}>} with the
 *     seconds of each step
 */
export async function generate(settings, { onProgress, onSilence, signal }) {
  const request = new XMLHttpRequest();
  const read = eventReader();
  let image = null;
  let error = null;
  let silent = false;
  let isLost = false; // whether this connection is lost while the server answers others
  let timer = null;
  let hasBegun = false; // whether an answer has begun; after a network error, the status is 0
  const watch = async () => {
    onSilence((silent = true));
    await untilState((state) => state !== null, () => silent);
    if (!silent) return;
    timer = setTimeout(() => {
      isLost = true;
      request.abort();
    }, SILENCE);
  };
  const listen = () => {
    clearTimeout(timer);
    if (silent) onSilence((silent = false));
    timer = setTimeout(watch, SILENCE);
  };
  const take = () => {
    if (request.status !== 200) return;
    hasBegun = true;
    listen();
    for (const event of read(request.responseText)) {
      if (event.type === "image_generation.progress") onProgress(event);
      if (event.type === "error") error = errorOf(event.error.code === "timeout" ? 504 : 500, event.error, null);
      if (event.type === "image_generation.completed") image = imageOf(event);
    }
  };
  request.open("POST", "v1/images/generations");
  request.setRequestHeader("Content-Type", "application/json");
  if (key !== null) request.setRequestHeader("Authorization", `Bearer ${key}`);
  request.addEventListener("progress", take);
  const abort = () => request.abort();
  signal.addEventListener("abort", abort, { once: true });
  listen();
  request.send(JSON.stringify({ ...settings, stream: true }));
  await new Promise((resolve) => request.addEventListener("loadend", resolve));
  signal.removeEventListener("abort", abort);
  take();
  clearTimeout(timer);
  if (silent) onSilence((silent = false));
  if (signal.aborted) throw signal.reason;
  if (isLost) throw new ApiError("interrupted");
  if (request.status === 0) throw new ApiError(hasBegun ? "interrupted" : "unreachable");
  if (request.status !== 200) throw errorOf(request.status, bodyOf(request.responseText), request.getResponseHeader("Retry-After"));
  if (error) throw error;
  if (!image) throw new ApiError("interrupted");
  return image;
}

function bodyOf(text) {
  try {
    return JSON.parse(text).error ?? {};
  } catch {
    return {};
  }
}

function imageOf({ b64_json, seconds, batch, seed, step_seconds }) {
  const bytes = Uint8Array.from(atob(b64_json), (character) => character.charCodeAt(0));
  return { blob: new Blob([bytes], { type: "image/png" }), seconds, batch, seed, steps: step_seconds };
}
