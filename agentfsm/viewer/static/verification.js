/** Whether the journals of the store are intact: a badge for each run and for the store, and what was not checked. */

import {counted, el, get, notice, runAddress, said, start, verdictBadge, words} from './common.js';
import {filterForm, question} from './run_filters.js';
import {runCells, table} from './tables.js';

function reasons(run) {
  const {seq, reason, open, claimed} = run.report;
  const lines = [...open.map(words), ...(claimed.length ? [`claimed, not verified: ${claimed.join(', ')}`] : [])];
  return [seq === null ? '' : [el('a', {href: runAddress(run.id, seq)}, `record ${seq}`), ': '], reason && said(reason),
    ...lines.map((line) => el('div', {}, said(line)))].flat();
}

await start(async (main) => {
  const form = filterForm('Runs to verify', 'Verify');
  const store = el('section', {'aria-label': 'The store'}), result = el('div', {'aria-live': 'polite'});
  const stop = el('button', {type: 'button', hidden: true}, 'Stop');
  main.append(store, el('h2', {}, 'The runs'), form, el('div', {className: 'bar'}, stop), result);
  let current = 0;

  async function verifyStore() {
    const {problems, unchecked} = await get('verification/store');
    store.replaceChildren(
      el('h2', {}, 'The store ', el('span', {className: `badge ${problems.length ? 'bad' : 'good'}`}, problems.length ? 'tampered' : 'good')),
      problems.length ? table('What is wrong with it', ['where', 'what'], problems.map((each) => [said(each.where), said(each.reason)]))
        : el('p', {}, 'Its tables, rows and triggers are as this library writes them.'),
      el('h3', {}, 'Not checked'), el('ul', {}, unchecked.map((line) => el('li', {}, line))));
  }

  async function verify(event) {
    event?.preventDefault();
    const asked = question(form), mine = ++current, all = [], counts = new Map();
    const progress = el('p', {role: 'status'}), list = el('div');
    result.replaceChildren(progress, list);
    stop.hidden = false;
    try {
      for (let after = '', more = true; more && mine === current;) {
        const found = await get('verification', {...asked, after});
        if (mine !== current) return;
        all.push(...found.runs);
        for (const run of found.runs) counts.set(run.report.verdict, (counts.get(run.report.verdict) ?? 0) + 1);
        after = found.next;
        more = Boolean(after);
        progress.textContent = `${counted(all.length, 'run')}: ${[...counts].map(([name, count]) => `${count} ${name}`).join('; ') || 'none is like that'}${more ? '; verifying\u2026' : ''}`;
        all.sort((a, b) => (b.report.code === 1) - (a.report.code === 1) || (b.report.code === 3) - (a.report.code === 3));
        list.replaceChildren(table('Those that are not good come first', ['verification', 'status', 'what was asked', 'started', 'records', 'why'],
          all.slice(0, 500).map((run) => [verdictBadge(run.report), ...runCells(run), String(run.report.records), reasons(run)])));
      }
    } catch (error) {
      notice(error.message, 'error');
    } finally {
      if (mine === current) stop.hidden = true;
    }
  }

  form.addEventListener('submit', verify);
  form.addEventListener('reset', () => setTimeout(verify));
  stop.addEventListener('click', () => { current += 1; stop.hidden = true; });
  await Promise.all([verifyStore(), verify()]);
});
