// Asking this server, with the key of this tab. EventSource could not send one, so streams are read with fetch.

const NAME = "jitney-api-key";

export const key = {
  get: () => sessionStorage.getItem(NAME) ?? "",
  set: (secret) => (secret ? sessionStorage.setItem(NAME, secret) : sessionStorage.removeItem(NAME)),
};

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function send(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  if (options.body) headers["content-type"] = "application/json";
  const answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  throw new Refused(answer.status, told?.error?.message ?? told?.reason ?? `the server answered ${answer.status}`);
}

export async function ask(method, path, body, signal) {
  const answer = await send(path, { method, signal, body: body && JSON.stringify(body) });
  return answer.json();
}

// Calls hear(name, data) for each event, until the stream ends or `signal` ends it.
export async function follow(path, hear, signal) {
  const answer = await send(path, { signal, headers: { accept: "text/event-stream" } });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      let [name, data] = ["message", ""];
      for (const line of frame.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) data += line.slice(6);
      }
      if (data) hear(name, data === "[DONE]" ? null : JSON.parse(data));
    }
  }
}
