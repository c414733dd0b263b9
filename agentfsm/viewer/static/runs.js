/** The runs of the store: search, filters, pages, live. */

import {counted, duration, el, follow, get, money, notice, runAddress, said, start, statusBadge, time, whyAside, words} from './common.js';
import {filterForm, none, question} from './run_filters.js';

const COLUMNS = ['status', 'what was asked', 'started', 'took', 'cost', 'by', 'tags', 'waits for', 'run'];
function row(run) {
  const took = run.started === null ? '' : duration(Math.max(0, run.updated - run.started));
  const waits = run.waiting && [words(run.waiting.kind), run.waiting.tool && said(run.waiting.tool),
    run.waiting.roles.length && said(`by ${run.waiting.roles.join(' or ')}`),
    run.expires && ['until ', time(run.expires)]].filter(Boolean).flatMap((each) => [each, ' ']).flat();
  const cells = [
    statusBadge(run), el('a', {href: runAddress(run.id)}, run.prompt ? said(run.prompt) : '(redacted, or no text)'), time(run.started), took,
    money(run.cost), said(run.actor), run.tags.map((tag) => el('span', {className: 'tag'}, said(tag))), [...(waits ?? []), ...(whyAside(run, 'set aside: ') ?? [])],
    el('a', {href: runAddress(run.id)}, el('code', {className: 'id', title: run.id}, run.id)),
  ];
  return el('tr', {'data-run': run.id}, cells.map((cell, place) => el('td', {'data-label': COLUMNS[place]}, cell)));
}

await start(async (main) => {
  const form = filterForm();
  const body = el('tbody'), count = el('p', {className: 'note', role: 'status'}), live = el('span', {className: 'note live'});
  const newer = el('button', {type: 'button'}, 'Newest'), older = el('button', {type: 'button'}, 'Older');
  const table = el('table', {className: 'runs stacked'}, el('caption', {}, 'The runs of the store, the newest first. Times are UTC.'),
    el('thead', {}, el('tr', {}, COLUMNS.map((name) => el('th', {scope: 'col'}, name)))), body);
  main.append(form, el('div', {className: 'bar'}, count, live),
    el('div', {className: 'scroll', role: 'region', 'aria-label': 'Runs', tabIndex: 0}, table),
    el('nav', {className: 'bar', 'aria-label': 'Pages of runs'}, newer, older));

  let asked = {}, next = '', after = '', stop = () => {};
  const rows = new Map();

  function show(order, changed) {
    for (const run of changed) rows.set(run.id, row(run));
    const shown = order.map((id) => rows.get(id));
    const same = shown.length === body.rows.length && shown.every((each, place) => each === body.rows[place]);
    if (!same) {
      const focused = document.activeElement?.closest('tr')?.dataset.run, place = [...(document.activeElement?.closest('tr')?.querySelectorAll('a') ?? [])].indexOf(document.activeElement);
      body.replaceChildren(...shown);
      if (focused && order.includes(focused)) rows.get(focused).querySelectorAll('a')[Math.max(0, place)].focus({preventScroll: true});
    }
    if (!order.length) body.replaceChildren(el('tr', {}, el('td', {colSpan: COLUMNS.length}, none(asked))));
    older.disabled = !next;
    newer.disabled = !after;
  }

  async function load() {
    stop();
    rows.clear();
    const query = {...asked, after};
    const page = await get('runs', query);
    next = page.next;
    show(page.runs.map((run) => run.id), page.runs);
    performance.mark('runs-shown');
    live.textContent = after ? 'an older page: it does not change' : '';
    if (!after)
      stop = follow('runs/events', asked, (told) => {
        next = told.next;
        show(told.order, told.changed);
      }, (lost) => { live.textContent = lost ? 'the viewer cannot be reached; trying again' : 'live'; });
    get('runs/count', asked).then((found) => { count.textContent = counted(found.count, 'run'); })
      .catch((error) => notice(error.message, 'error'));
  }

  const search = (event) => {
    event?.preventDefault();
    asked = question(form);
    after = '';
    return load().catch((error) => notice(error.message, 'error'));
  };
  form.addEventListener('submit', search);
  form.addEventListener('reset', () => setTimeout(search));
  for (const name of ['status', 'ending']) form.elements[name].addEventListener('change', search);
  older.addEventListener('click', () => { after = next; load().catch((error) => notice(error.message, 'error')); });
  newer.addEventListener('click', () => { after = ''; load().catch((error) => notice(error.message, 'error')); });
  asked = question(form);
  await load();
});
