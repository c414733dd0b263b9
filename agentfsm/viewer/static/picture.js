/** The graph of a run with its path: drawn by the server, with one row highlighted, and rows that can be clicked. */

import {el, getText, markup} from './common.js';

/** Where a picture in a pane has so little width that one column of states is easier to read; as in the style sheet. */
const NARROW = matchMedia('(max-width: 48rem), (min-width: 64.01rem) and (max-width: 100rem)');
const PAUSE_MS = 250; // between two drawings of a run that goes on

/** The layout of a picture that fits the window. */
export const layout = () => (NARROW.matches ? 'vertical' : '');

/** Scroll so that a part of a picture is in sight, in the middle; the page stays where it is unless the picture fills its middle. */
export function reveal(box, part) {
  if (!part) return;
  const {top, bottom, left, right} = part.getBoundingClientRect(), frame = box.getBoundingClientRect();
  if (top < frame.top || bottom > frame.bottom) box.scrollTop += (top + bottom - frame.top - frame.bottom) / 2;
  if (left < frame.left || right > frame.right) box.scrollLeft += (left + right - frame.left - frame.right) / 2;
  const isWhole = box.scrollHeight <= box.clientHeight, middle = innerHeight / 2;
  if (isWhole && frame.top < middle && middle < frame.bottom && (top < 0 || bottom > innerHeight)) scrollBy(0, (top + bottom) / 2 - middle);
}

/** What shows the whole of a picture where it has a box that is lower. */
export function wholeButton(figure) {
  const button = el('button', {type: 'button', className: 'whole', 'aria-pressed': 'false', onclick: () => {
    button.setAttribute('aria-pressed', figure.classList.toggle('all'));
  }}, 'Show the whole picture');
  return button;
}

export class Picture {
  #lines = new Map(); // the elements of each row, by its id
  #now = '';
  #waiting = null;
  #drawing = false;
  #again = false;

  /** @param {string} run The run. @param {(id: string) => void} clicked Called with the id of a row. */
  constructor(run, clicked) {
    this.run = run;
    this.element = el('figure', {className: 'picture'});
    this.box = el('div', {className: 'scroll', role: 'region', 'aria-label': 'Picture of the run', tabIndex: 0});
    this.element.append(this.box, wholeButton(this.element), el('figcaption', {className: 'note'},
      'Rows that the run did not take are grey. Click a row to see only its moves.'));
    this.box.addEventListener('click', (event) => {
      const row = event.target.closest('g[data-edge]') ?? this.#rowAt(event);
      if (row) clicked(row.dataset.edge);
    });
    NARROW.addEventListener('change', () => this.draw());
  }

  /** The row between whose words somebody clicked. */
  #rowAt({target, clientY}) {
    const rows = target.closest('g[data-state]')?.querySelectorAll('g[data-edge]') ?? [];
    return [...rows].find((row) => {
      const {top, bottom} = row.getBoundingClientRect();
      return top <= clientY && clientY <= bottom;
    });
  }

  /** Draw it anew, at most a few times a second. */
  async draw() {
    if (this.#waiting || this.#drawing) {
      this.#again = true;
      return;
    }
    this.#drawing = true;
    try {
      const text = await getText('run/picture', {run: this.run, layout: layout()});
      this.#show(markup(text, 'image/svg+xml')[0]);
    } catch (error) {
      this.box.replaceChildren(el('p', {}, error.message));
    } finally {
      this.#drawing = false;
    }
    this.#waiting = setTimeout(() => {
      this.#waiting = null;
      if (this.#again) {
        this.#again = false;
        this.draw();
      }
    }, PAUSE_MS);
  }

  #show(svg) {
    this.#lines.clear();
    for (const each of svg.querySelectorAll('[data-edge]'))
      for (const id of each.dataset.edge.split(' ')) {
        if (!this.#lines.has(id)) this.#lines.set(id, []);
        this.#lines.get(id).push(each);
      }
    this.box.replaceChildren(svg);
    const now = this.#now;
    this.#now = '';
    this.highlight(now);
  }

  /** Highlight the row with an id; an empty text for none. */
  highlight(id) {
    if (id === this.#now) return;
    for (const each of this.#lines.get(this.#now) ?? []) each.classList.remove('now');
    const lines = this.#lines.get(id) ?? [];
    for (const each of lines) each.classList.add('now');
    reveal(this.box, lines.find((each) => each.tagName === 'g'));
    this.#now = id;
  }
}
