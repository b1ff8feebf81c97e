// The server's API as this page needs it. Addresses are relative, so that a proxy may put the page anywhere.

const KEY = "eagle3-serve-key";

export class Problem extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const keep = (key) => sessionStorage.setItem(KEY, key);

async function asked(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  throw new Problem(told?.error?.message ?? `the server answers ${answer.status}`, answer.status);
}

export async function model() {
  const answer = await asked("v1/models");
  return (await answer.json()).data[0];
}

// The chunks of a streamed chat completion. Throws a Problem for what the server refuses, or fails at on the way.
export async function* chat(body, signal) {
  const asks = { ...body, stream: true, return_speculation: true, stream_options: { include_usage: true } };
  const answer = await asked("v1/chat/completions", { method: "POST", body: JSON.stringify(asks), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Problem("the server ended the answer before its end");
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Problem(chunk.error.message);
      yield chunk;
    }
  }
}
