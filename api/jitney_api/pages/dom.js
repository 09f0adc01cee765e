// Nodes, and words for numbers. Text is always set as text: what a job is called or says never becomes markup.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

// Only what changed is written: whoever reads, selects or listens is not disturbed by the rest.
export function say(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

export function mark(node, name, value) {
  const wanted = String(value);
  if (node.getAttribute(name) !== wanted) node.setAttribute(name, wanted);
}

// `list` in step with `items`: a node for each key, made once, in order, and removed with its item.
export function keep(list, items, keyOf, make, update) {
  const known = new Map([...list.children].map((node) => [node.dataset.key, node]));
  let place = list.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let node = known.get(key);
    known.delete(key);
    if (!node) {
      node = make(item);
      node.dataset.key = key;
    }
    if (node === place) place = place.nextElementSibling;
    else list.insertBefore(node, place);
    update(node, item);
  }
  for (const node of known.values()) node.remove();
}

export const count = (number) => Math.round(number).toLocaleString("en");
export const few = (number) => (number < 100 ? number.toFixed(1) : count(number));
export const short = (job) => `…${job.slice(-6)}`;

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${value.toFixed(1)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`;
}

export const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });

// The same job has the same colour everywhere on the page; jobs that come one after the other have different ones.
const tints = new Map();
let numTints = 0;

export function tint(job) {
  if (!tints.has(job)) {
    if (tints.size >= 1000) tints.delete(tints.keys().next().value);
    tints.set(job, numTints++ % 8);
  }
  return `tint-${tints.get(job)}`;
}
