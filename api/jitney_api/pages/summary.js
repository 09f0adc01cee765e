// The figures of a queue, three of them with a curve of the last two minutes. A curve is one SVG path: a library that
// draws on a canvas would be larger than this page, and its words could be neither read aloud nor found.

import { count, few, h, mark, say, seconds, svg } from "./dom.js";

const [WIDTH, HEIGHT] = [240, 44];
const SPAN_S = 120;

class Curve {
  constructor() {
    this.area = svg("path", { class: "area" });
    this.line = svg("path", { class: "line" });
    this.node = svg(
      "svg",
      { class: "curve", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      this.area,
      this.line,
    );
  }

  // points: [at, value or null], oldest first. A null is a gap.
  show(points, now) {
    const top = Math.max(...points.map(([, value]) => value ?? 0), 1e-9) * 1.1;
    const x = (at) => (WIDTH * (1 - (now - at) / SPAN_S)).toFixed(1);
    const y = (value) => (HEIGHT - 1 - (HEIGHT - 3) * (value / top)).toFixed(1);
    let [line, area, from] = ["", "", null];
    let before = null;
    for (const [at, value] of points) {
      if (now - at > SPAN_S + 2) continue;
      if (value === null) {
        if (before) area += `L${before} ${HEIGHT}L${from} ${HEIGHT}Z`;
        before = null;
      } else {
        const first = before === null;
        line += `${first ? "M" : "L"}${x(at)} ${y(value)}`;
        area += `${first ? "M" : "L"}${x(at)} ${y(value)}`;
        if (first) from = x(at);
        before = x(at);
      }
    }
    if (before) area += `L${before} ${HEIGHT}L${from} ${HEIGHT}Z`;
    mark(this.line, "d", line);
    mark(this.area, "d", area);
  }
}

class Figure {
  constructor(title, about, hasCurve) {
    this.value = h("dd", { class: "value" }, "–");
    this.note = h("dd", { class: "note" });
    this.curve = hasCurve ? new Curve() : null;
    this.node = h("div", { class: hasCurve ? "figure wide" : "figure", title: about }, h("dt", {}, title), this.value, this.note);
    if (this.curve) this.node.append(h("dd", { class: "drawn" }, this.curve.node));
  }

  show(value, note = "") {
    say(this.value, value);
    say(this.note, note);
  }
}

export class Summary {
  constructor(points) {
    this.points = points;
    this.speed = new Figure("tokens per second", "Tokens said by all workers, over the last two seconds", true);
    this.first = new Figure("time to first token", "From the enqueueing to the first token; the last half minute", true);
    this.next = new Figure("time between tokens", "Of one sequence; the last half minute", true);
    this.running = new Figure("running", "Jobs that a worker holds");
    this.waiting = new Figure("waiting", "Jobs that wait to be claimed, for the first time or again");
    this.preempted = new Figure("preemptions", "Times that a sequence lost its blocks, since the workers began");
    this.taken = new Figure("takeovers", "Jobs that were taken over from a worker that died");
    this.node = h(
      "dl",
      { class: "figures" },
      ...[this.speed, this.first, this.next, this.running, this.waiting, this.preempted, this.taken].map((one) => one.node),
    );
  }

  show(queue, at) {
    const sum = (bands) => Object.values(bands).reduce((total, number) => total + number, 0);
    const [waiting, running] = [sum(queue.waiting) + sum(queue.returned), sum(queue.running)];
    this.points.push([at, queue.tokens_per_s, queue.ttft_s?.[0] ?? null, queue.itl_s?.[0] ?? null, waiting, running]);
    while (this.points.length && at - this.points[0][0] > SPAN_S + 5) this.points.shift();
    const highest = Math.max(...this.points.map((point) => point[1]));
    this.speed.show(few(queue.tokens_per_s), `at most ${few(highest)} in two minutes`);
    this.latency(this.first, queue.ttft_s);
    this.latency(this.next, queue.itl_s);
    [this.speed, this.first, this.next].forEach((figure, place) =>
      figure.curve.show(this.points.map((point) => [point[0], point[place + 1]]), at),
    );
    this.running.show(count(running));
    this.waiting.show(count(waiting), waiting ? `${seconds(queue.drain_s)} of work` : "");
    this.preempted.show(count(queue.num_preemptions));
    this.taken.show(count(queue.num_takeovers));
  }

  latency(figure, found) {
    if (found) figure.show(seconds(found[0]), `95 of 100 below ${seconds(found[1])}`);
    else figure.show("–", "nobody was served lately");
  }
}
