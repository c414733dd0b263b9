/** Tables of what the server has added up. */

import {el, runAddress, said, statusBadge, time} from './common.js';

/** A table that scrolls if it is wide; cells are texts, elements or lists of them. */
export const table = (caption, heads, rows) =>
  el('div', {className: 'scroll', role: 'region', 'aria-label': caption, tabIndex: 0}, stacked(
    el('table', {}, el('caption', {}, caption), el('thead', {}, el('tr', {}, heads.map((head) => el('th', {scope: 'col'}, head)))),
      el('tbody', {}, rows.map((cells) => el('tr', {}, cells.map((cell) => el('td', {}, cell))))))));

/** The same table, whose cells stand one below the other on a phone, each after the name of its column. */
export function stacked(made) {
  const heads = [...made.tHead.rows[0].cells].map((head) => head.textContent);
  made.classList.add('stacked');
  for (const row of made.tBodies[0].rows) [...row.cells].forEach((cell, place) => { cell.dataset.label = heads[place]; });
  return made;
}

/** A number with a bar beside it, which is as long as its share of the largest. */
export const bar = (value, most, text = value.toLocaleString('en')) =>
  el('span', {className: 'measure'}, el('meter', {min: 0, max: most || 1, value, 'aria-hidden': 'true'}), el('span', {}, text));

/** The first cells of a run in a table: how it stands, what was asked, when it started. */
export const runCells = (run) => [statusBadge(run), el('a', {href: runAddress(run.id)}, run.prompt ? said(run.prompt) : run.id), time(run.started)];
