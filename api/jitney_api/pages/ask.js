// The box that asks: its job joins the batch like any other, and the answer comes token by token.

import { h, say, seconds } from "./dom.js";
import { ask, follow } from "./stream.js";

export class AskBox {
  constructor(root, openJob) {
    this.form = root.querySelector("#ask");
    this.state = root.querySelector("#ask-state");
    this.answer = root.querySelector("#ask-answer");
    this.stop = root.querySelector("#ask-stop");
    this.queue = root.querySelector("#ask-queue");
    this.openJob = openJob;
    this.job = null;
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.stop.addEventListener("click", () => this.end());
  }

  know(queues) {
    const names = queues.map((queue) => queue.name);
    if (names.join() === [...this.queue.options].map((option) => option.value).join()) return;
    const chosen = this.queue.value;
    this.queue.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    if (names.includes(chosen)) this.queue.value = chosen;
  }

  async send() {
    await this.end();
    const value = (id) => this.form.querySelector(id).value;
    const prompt = value("#ask-prompt");
    const asked = this.form.querySelector("#ask-chat").checked ? { messages: [{ role: "user", content: prompt }] } : { prompt };
    const body = { model: this.queue.value, max_tokens: Number(value("#ask-tokens")) || 160, ...asked };
    const began = performance.now();
    const since = () => seconds((performance.now() - began) / 1000);
    this.answer.hidden = false;
    say(this.answer, "");
    say(this.state, "Sent; it waits for a seat.");
    this.stop.hidden = false;
    const abort = (this.abort = new AbortController());
    try {
      const { id } = await ask("POST", "v1/jobs", body, abort.signal);
      this.job = id;
      this.answer.dataset.job = id;
      let hasBegun = false;
      await follow(`v1/jobs/${encodeURIComponent(id)}/events`, (_, event) => {
        if (event === null || event.error) return event?.error && say(this.state, event.error.message);
        if (event.type === "tokens" && !(event.choice > 0)) {
          this.answer.append(event.text);
          if (!hasBegun) this.told("First token", since(), id);
          hasBegun = true;
        } else if (event.type === "finished") this.told(`Finished: ${event.usage?.completion_tokens ?? 0} tokens`, since(), id);
        else if (event.type !== "started" && event.type !== "tokens") this.told(event.type, since(), id);
      }, abort.signal);
    } catch (error) {
      if (error.name !== "AbortError") say(this.state, error.message);
    }
    if (this.abort === abort) {
      this.stop.hidden = true;
      this.abort = null;
    }
  }

  told(what, after, id) {
    this.state.replaceChildren(`${what} after ${after}. `, h("button", { type: "button", class: "link", onclick: () => this.openJob(id) }, "Its timeline"));
  }

  // What is still being said is ended: nobody reads on.
  async end() {
    const [abort, id] = [this.abort, this.job];
    if (!abort) return;
    this.abort = null;
    this.stop.hidden = true;
    abort.abort();
    if (id) await ask("DELETE", `v1/jobs/${encodeURIComponent(id)}`).catch(() => null);
    say(this.state, "Stopped.");
  }
}
