/** A list of any length of which only the rows in sight exist; a list box with one stop for the Tab key. */

import {el} from './common.js';

const ROW_HEIGHT = 64; // pixels, as in the style sheet
const SPARE = 6; // rows kept above and below

export class VirtualList {
  #rows = new Map(); // by place
  #count = 0;
  #selected = -1;
  #inner = el('div', {className: 'rows', role: 'presentation'});

  /**
   * @param {string} label What it is a list of.
   * @param {(place: number) => Node[]} render The content of a row.
   * @param {(place: number) => void} chosen Called when somebody chooses a row.
   * @param {(first: number, last: number) => void} seen Called with the places in sight.
   */
  constructor(label, render, chosen, seen) {
    Object.assign(this, {render, chosen, seen});
    this.element = el('div', {className: 'virtual', role: 'listbox', tabIndex: 0, 'aria-label': label}, this.#inner);
    this.element.addEventListener('scroll', () => this.#draw(), {passive: true});
    this.element.addEventListener('keydown', (event) => this.#key(event));
    this.element.addEventListener('click', (event) => {
      const row = event.target.closest('[role=option]');
      if (row) this.chosen(Number(row.dataset.place));
    });
    new ResizeObserver(() => (this.#selected < 0 ? this.#draw() : this.select(this.#selected))).observe(this.element);
  }

  get count() { return this.#count; }

  set count(count) {
    this.#count = count;
    this.#inner.style.height = `${count * ROW_HEIGHT}px`;
    this.#draw();
  }

  /** Draw all rows in sight anew: their content is another. */
  renew() {
    for (const row of this.#rows.values()) row.remove();
    this.#rows.clear();
    this.#draw();
  }

  /** Mark a row, and bring it into sight; -1 for none. */
  select(place) {
    this.#mark(this.#selected, false);
    this.#selected = place;
    if (place < 0) {
      this.element.removeAttribute('aria-activedescendant');
      return;
    }
    const top = place * ROW_HEIGHT, {scrollTop, clientHeight} = this.element;
    if (top < scrollTop) this.element.scrollTop = top;
    else if (top + ROW_HEIGHT > scrollTop + clientHeight) this.element.scrollTop = top + ROW_HEIGHT - clientHeight;
    this.#draw();
    this.#mark(place, true);
    this.element.setAttribute('aria-activedescendant', `row-${place}`);
  }

  showEnd() { this.element.scrollTop = this.#count * ROW_HEIGHT; }

  #mark(place, on) {
    const row = this.#rows.get(place);
    row?.classList.toggle('now', on);
    row?.setAttribute('aria-selected', String(on));
  }

  #draw() {
    const {scrollTop, clientHeight} = this.element;
    const first = Math.max(0, Math.floor(scrollTop / ROW_HEIGHT) - SPARE);
    const last = Math.min(this.#count, Math.ceil((scrollTop + clientHeight) / ROW_HEIGHT) + SPARE);
    for (const [place, row] of this.#rows)
      if (place < first || place >= last) {
        row.remove();
        this.#rows.delete(place);
      }
    for (let place = first; place < last; place++) {
      if (this.#rows.has(place)) continue;
      const row = el('div', {
        className: 'row', id: `row-${place}`, role: 'option', 'data-place': place, 'aria-setsize': this.#count,
        'aria-posinset': place + 1, 'aria-selected': String(place === this.#selected),
      }, this.render(place));
      row.style.transform = `translateY(${place * ROW_HEIGHT}px)`;
      row.classList.toggle('now', place === this.#selected);
      this.#rows.set(place, row);
      this.#inner.append(row);
    }
    if (last > first) this.seen(first, last);
  }

  #key(event) {
    const page = Math.max(1, Math.floor(this.element.clientHeight / ROW_HEIGHT) - 1), end = this.#count - 1;
    const to = {
      ArrowDown: this.#selected + 1, ArrowUp: this.#selected - 1, PageDown: this.#selected + page,
      PageUp: this.#selected - page, Home: 0, End: end,
    }[event.key];
    if (to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    if (this.#count) this.chosen(Math.min(end, Math.max(0, to)));
  }
}
