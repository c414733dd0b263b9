/** Statistics of the newest runs: days, rows of each graph as a heat map, and the slowest and most expensive runs. */

import {counted, duration, el, get, getText, markup, money, notice, said, start, words} from './common.js';
import {filterForm, input, none, question} from './run_filters.js';
import {bar, runCells, table} from './tables.js';

const NARROW = matchMedia('(max-width: 48rem)');
const sum = (counts) => Object.values(counts).reduce((total, each) => total + each, 0);

const counts = (found) => Object.entries(found).map(([name, count]) => `${name === 'suspended' ? 'waiting' : words(name)} ${count}`).join(', ');

function days(found) {
  const most = (name) => Math.max(...found.map((day) => (typeof day[name] === 'object' ? sum(day[name] ?? {}) : day[name])));
  const limits = Object.fromEntries(['runs', 'failures', 'tokens', 'cost', 'seconds'].map((name) => [name, most(name)]));
  return table('Each day (UTC) on which runs started, the latest first', ['day', 'runs', 'how they stand', 'failures', 'which', 'tokens', 'cost', 'time'],
    found.map((day) => [day.day, bar(day.runs, limits.runs), counts(day.endings), bar(sum(day.failures), limits.failures), counts(day.failures),
      bar(day.tokens, limits.tokens), day.cost === null ? 'unpriced' : bar(day.cost, limits.cost, money(day.cost)), bar(day.seconds, limits.seconds, duration(day.seconds))]));
}

async function graphs(found, asked) {
  const sections = [];
  for (const graph of found) {
    const box = el('div', {className: 'scroll', role: 'region', 'aria-label': `Heat map of ${graph.name}`, tabIndex: 0});
    const query = {...asked, fingerprint: graph.fingerprint, layout: NARROW.matches ? 'vertical' : ''};
    getText('statistics/picture', query).then((text) => box.replaceChildren(...markup(text, 'image/svg+xml')))
      .catch((error) => box.replaceChildren(el('p', {}, error.message)));
    sections.push(el('section', {},
      el('h3', {}, said(graph.name), ` in ${counted(graph.runs, 'run')}`), el('figure', {className: 'picture'}, box),
      el('details', {}, el('summary', {}, 'The rows as a table'),
        table('How often each row was taken', ['row', 'moves', 'runs that took it'],
          graph.rows.map((row) => [el('code', {}, said(row.id)), bar(row.moves, graph.rows[0].moves), bar(row.runs, graph.runs)])))));
  }
  return sections;
}

await start(async (main) => {
  const form = filterForm('Runs to count', 'Count', [['most', 'Newest', Object.assign(input('number', '200'), {min: 1, max: 2000})]]);
  const result = el('div', {'aria-live': 'polite'});
  main.append(form, result);

  async function load() {
    const asked = question(form);
    result.setAttribute('aria-busy', 'true');
    try {
      const found = await get('statistics', asked);
      const of = found.read < found.count ? `the newest ${found.read.toLocaleString('en')} of ${counted(found.count, 'run')}` : counted(found.read, 'run');
      result.replaceChildren(
        el('p', {className: 'note', role: 'status'}, found.read ? `${found.read === 1 ? 'This is' : 'These are'} ${of}.` : none(asked)));
      if (!found.read) return;
      result.append(
        el('h2', {}, 'Day by day'), days(found.days),
        el('h2', {}, 'How often each row is taken'), ...(await graphs(found.graphs, asked)),
        el('h2', {}, 'The slowest runs'),
        table('From the first record to the newest, with the time in which they waited', ['status', 'what was asked', 'started', 'took'],
          found.slowest.map((run) => [...runCells(run), bar(run.took, found.slowest[0].took, duration(run.took))])),
        el('h2', {}, 'The most expensive runs'),
        found.dearest.length
          ? table('By the cost of their model calls', ['status', 'what was asked', 'started', 'cost'],
            found.dearest.map((run) => [...runCells(run), bar(run.cost, found.dearest[0].cost, money(run.cost))]))
          : el('p', {}, 'None of them has a known price above zero.'));
    } finally {
      result.removeAttribute('aria-busy');
    }
  }

  const count = (event) => {
    event?.preventDefault();
    return load().catch((error) => notice(error.message, 'error'));
  };
  form.addEventListener('submit', count);
  form.addEventListener('reset', () => setTimeout(count));
  await count();
});
