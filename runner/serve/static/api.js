// The server's API as this page needs it. Addresses are relative, so that a proxy may put the page anywhere.

const KEY = "eagle3-serve-key";

export class Problem extends Error {
  constructor(message, code, status) {
    super(message);
    this.code = code;
    this.status = status;
  }
}

export const keep = (key) => sessionStorage.setItem(KEY, key);
export const hasKey = () => Boolean(sessionStorage.getItem(KEY));

const lost = () => new Problem(`The connection to ${location.host} broke off: the server ended, or the network did.`);

async function asked(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  if (key && !/^[ -~]*$/.test(key)) throw new Problem("No server has such a key.", "invalid_api_key", 401);
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const answer = await fetch(path, { ...options, headers }).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Problem(`No answer from ${location.host}: the server is not running, or the network is down.`);
  });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  throw new Problem(told?.error?.message ?? `the server answers ${answer.status}`, told?.error?.code, answer.status);
}

export async function model() {
  const answer = await asked("v1/models");
  return (await answer.json()).data[0];
}

// Returns the number of requests that wait for a model. Throws a Problem if the server does not report it.
export async function waiting() {
  const text = await (await asked("metrics")).text();
  return Number(/^vllm:num_requests_waiting\S* (\S+)$/m.exec(text)?.[1] ?? 0);
}

// Yields the chunks of a streamed chat completion. Throws a Problem if the server refuses the request or fails later.
export async function* chat(body, signal) {
  const asks = { ...body, stream: true, return_speculation: true, stream_options: { include_usage: true } };
  const answer = await asked("v1/chat/completions", { method: "POST", body: JSON.stringify(asks), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : lost();
    });
    if (done) throw lost();
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Problem(chunk.error.message, chunk.error.code);
      yield chunk;
    }
  }
}
