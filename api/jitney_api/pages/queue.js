// A queue: its figures, what waits in it by band, and its workers.

import { count, h, keep, say, seconds } from "./dom.js";
import { Summary } from "./summary.js";
import { WorkerCard } from "./worker.js";

const BANDS = ["interactive", "standard", "bulk"];

export class QueueSection {
  constructor(name, points, openJob, mine) {
    this.summary = new Summary(points);
    this.about = h("p", { class: "faint" });
    this.bands = h("ul", { class: "bands", "aria-label": "waiting jobs by band" });
    this.workers = h("div", { class: "workers" });
    this.nobody = h("p", { class: "empty", hidden: true }, "No worker is alive. Jobs wait until one comes.");
    this.make = () => new WorkerCard(openJob, mine);
    const title = `queue-${name}`;
    this.node = h(
      "section",
      { class: "queue", "aria-labelledby": title },
      h("div", { class: "queue-head" }, h("h2", { id: title }, name), this.about),
      this.summary.node,
      this.bands,
      this.nobody,
      this.workers,
    );
  }

  show(queue, at) {
    say(this.about, queue.model);
    this.summary.show(queue, at);
    const most = Math.max(1, ...BANDS.map((band) => queue.waiting[band]));
    keep(this.bands, BANDS, (band) => band, (band) => this.band(band), (node, band) => {
      const number = queue.waiting[band];
      node.classList.toggle("none", number === 0);
      node.bar.style.width = `${(100 * number) / most}%`;
      const oldest = number ? `, the oldest for ${seconds(queue.oldest_s[band])}` : "";
      const back = queue.returned[band] ? `, ${count(queue.returned[band])} handed back` : "";
      say(node.told, `${count(number)} waiting${oldest}${back}`);
    });
    this.nobody.hidden = queue.workers.length > 0;
    keep(this.workers, queue.workers, (worker) => worker.id, () => {
      const card = this.make();
      card.node.card = card;
      return card.node;
    }, (node, worker) => node.card.show(worker));
  }

  band(band) {
    const [bar, told] = [h("i"), h("span", { class: "told" })];
    const node = h("li", {}, h("span", { class: "band" }, band), h("span", { class: "track", "aria-hidden": "true" }, bar), told);
    return Object.assign(node, { bar, told });
  }
}
